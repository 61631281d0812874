"""When generation ends, what is read, which requests are refused, what each takes of memory."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import LimitError, PromptError
from tee_side.engine import reading
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.prefix_pool import PrefixPool
from tee_side.engine.request import PromptRead, Request, SamplingSettings
from tee_side.model.batch import KVCache, kv_bytes
from tests.kit.model import Models, SavedModel, Tee, assemble, finish, token_ids
from tests.kit.rows import each_row

PROMPT = token_ids(6)


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


@pytest.fixture(scope="module")
def tee(model: SavedModel) -> Tee:
    return assemble(model.directory)


def test_generation_ends_at_its_length_or_a_token_that_ends_it(
    tee: Tee, model: SavedModel, tmp_path: Path
) -> None:
    ids = model.greedy(PROMPT, 12)
    place = next(at for at in range(3, 12) if ids[at] not in ids[:at])
    unused = next(token_id for token_id in range(320) if token_id not in ids)
    # The model's own count where none are given.
    shutil.copytree(model.directory, tmp_path / "model")
    eos = {"eos_token_id": [319, ids[place]]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(eos))
    own = assemble(tmp_path / "model")
    ended, ends = (ids[: place + 1], "stop"), frozenset({unused, ids[place], 319})
    in_prompt, other = frozenset(PROMPT) - {ids[0]}, frozenset({unused})
    for name, asked, most, given, expected in (
        ("length", tee, 7, None, (ids[:7], "length")),
        ("any of several", tee, 12, ends, ended),
        ("the last one that is allowed", tee, place + 1, ends, ended),
        ("in the prompt", tee, 1, in_prompt, (ids[:1], "length")),
        ("the model's own", own, 12, None, ended),
        ("others than the model's own", own, 12, other, (ids, "length")),
    ):
        engine = asked.engine()
        sequence = engine.add(PROMPT, max_new_tokens=most, eos_token_ids=given)
        finish(engine)
        assert (sequence.token_ids, sequence.finish_reason) == expected, name


@each_row(("prompt", "new"), [(20, 12), (31, 1)])
def test_generation_ends_where_the_context_is_full(
    saved_model: Models, prompt: int, new: int
) -> None:
    short = saved_model("llama", max_position_embeddings=32)
    engine = assemble(short.directory).engine()
    sequence = engine.add(token_ids(prompt), max_new_tokens=1000)
    # The last token is never fed back, so it needs no place.
    assert sequence.cache.capacity == 31
    finish(engine)
    assert sequence.token_ids == short.greedy(token_ids(prompt), new)
    assert sequence.finish_reason == "length"


@each_row(
    ("changed", "said"),
    [
        ({"prompt_ids": ()}, "no tokens"),
        ({"prompt_ids": (1,) * 256}, "256 tokens, expected fewer than the context of 256"),
        ({"prompt_ids": (1,) * 257, "max_new_tokens": 0, "pooling": "last"}, "257 tokens"),
        ({"prompt_ids": (5, 320)}, "an id outside the vocabulary, expected 0 to 319"),
        ({"prompt_ids": (-1,)}, "outside the vocabulary"),
        # Prompts are secret, and errors are logged.
        ({"prompt_ids": (123456,)}, "outside the vocabulary"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": -3, "pooling": "last"}, "at least 1"),
        ({"samples": 0}, "samples: got 0, expected 1 to 64"),
        ({"samples": 65}, "samples: got 65, expected 1 to 64"),
        ({"prompt_logprobs": 1, "pooling": "mean"}, "got both"),
        ({"stop": ("x",)}, "stop strings: got no tokenizer"),
        ({"sampling": SamplingSettings(logit_bias={320: 1.0})}, "logit_bias"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_anything_runs(
    tee: Tee, changed: dict[str, Any], said: str
) -> None:
    engine = tee.engine()
    request = replace(Request(prompt_ids=tuple(PROMPT), max_new_tokens=4), **changed)
    for refuse in (engine.check, engine.admit):
        with pytest.raises(PromptError) as caught:
            refuse(request)
        assert said in str(caught.value)
        assert "123456" not in str(caught.value)
    assert engine.running == ()


def _limited(tee: Tee, tokens: int) -> Engine:
    limit = kv_bytes(tee.model.config, tokens, tee.model.dtype)
    return Engine(tee.model, tee.lanes, EngineSettings(max_kv_bytes=limit))


def test_a_request_that_does_not_fit_is_refused_before_anything_runs(tee: Tee) -> None:
    engine = _limited(tee, 20)
    engine.add(PROMPT, max_new_tokens=15)  # the last token needs no place: all 20 are taken
    with pytest.raises(LimitError) as caught:
        engine.add(PROMPT, max_new_tokens=1)
    assert len(engine.running) == 1
    per_token = 2 * 3 * 2 * 16 * 4
    assert str(caught.value) == (
        f"KV memory, of which {20 * per_token / 2**20:.1f} MiB may be used (--max-kv-mib): got"
        f" a request that needs {6 * per_token / 2**20:.1f} MiB for 6 tokens,"
        " expected at most 0.0 MiB, which is what is left"
    )
    assert caught.value.retryable
    # One that never fits is not worth retrying; all samples count.
    for never in ({"max_new_tokens": 16}, {"max_new_tokens": 2, "samples": 3}):
        with pytest.raises(LimitError) as caught:
            _limited(tee, 20).admit(Request(prompt_ids=tuple(PROMPT), **never))
        assert not caught.value.retryable


@each_row("how", ["finished", "stopped", "removed", "broken off"])
def test_memory_comes_back_when_a_sequence_ends(tee: Tee, model: SavedModel, how: str) -> None:
    engine = _limited(tee, 20)
    first = engine.add(PROMPT, max_new_tokens=3)
    second = engine.add(PROMPT[::-1], max_new_tokens=7)
    with pytest.raises(LimitError):
        engine.add(PROMPT, max_new_tokens=7)
    if how == "finished":
        while not first.finish_reason:
            engine.step()
    elif how == "stopped":
        first.finish_reason = "stop"
    elif how == "broken off":
        with closing(engine.run([first])) as steps:
            next(steps)
    else:
        engine.remove(first)
    with pytest.raises(LimitError):
        engine.add(PROMPT, max_new_tokens=4)
    third = engine.add(PROMPT, max_new_tokens=3)
    finish(engine)
    assert second.token_ids == model.greedy(PROMPT[::-1], 7)
    assert third.token_ids == model.greedy(PROMPT, 3)
    assert first.cache.nbytes == 0


def test_caches_of_samples_are_let_go_where_the_machine_has_no_room_for_all(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KVCache] = []

    def make(*what: Any) -> KVCache:
        if len(made) == 2:
            raise LimitError("KV memory", got="much", expected="less")
        made.append(KVCache(*what))
        return made[-1]

    monkeypatch.setattr("tee_side.engine.engine.KVCache", make)
    engine = tee.engine()
    with pytest.raises(LimitError):
        engine.admit(Request(prompt_ids=tuple(PROMPT), max_new_tokens=2, samples=3))
    assert [cache.nbytes for cache in made] == [0, 0]
    assert engine.running == ()


def test_no_more_sequences_run_than_have_a_row_in_each_step(tee: Tee) -> None:
    engine = tee.engine(step_tokens=2)
    with pytest.raises(PromptError, match="samples: got 3, expected 1 to 2"):
        engine.check(Request(prompt_ids=tuple(PROMPT[:2]), max_new_tokens=1, samples=3))


def test_a_kept_prefix_is_its_owners_and_salts_alone(tee: Tee) -> None:
    engine = Engine(tee.model, tee.lanes, EngineSettings(prefix_reuse=True))
    reused = {}
    for owner, salt in (("me", "a"), ("me", ""), ("you", "a"), ("me", "a")):
        request = Request(prompt_ids=tuple(token_ids(20)), max_new_tokens=2, owner=owner, salt=salt)
        (sequence,) = engine.admit(request)
        finish(engine)
        reused[owner, salt, len(reused)] = sequence.reused_tokens
    assert list(reused.values()) == [0, 0, 0, 19]


def test_room_for_what_runs_is_made_by_the_least_recently_used(tee: Tee) -> None:
    pool, caches, config = PrefixPool(), list[KVCache](), tee.model.config
    texts = [[number, *range(100, 119)] for number in range(4)]
    for ids in texts:
        caches.append(KVCache(config, 60, torch.float32))
        caches[-1].commit(20)
        pool.keep(("me", ""), [*ids, 7], caches[-1])  # the last token is never in a cache
    pool.fill(("me", ""), [*texts[0], 9], KVCache(config, 60, torch.float32))  # now the most recent
    for needed, kept in (
        (0, "1111"),
        (kv_bytes(config, 20, torch.float32) + 1, "1001"),
        (1, "1000"),
    ):
        pool.make_room(needed)
        assert "".join(str(int(cache.nbytes > 0)) for cache in caches) == kept
    pool.make_room(2**62)
    assert pool.nbytes == sum(cache.nbytes for cache in caches) == 0


READ = token_ids(25)


@pytest.fixture(autouse=True)
def _three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM head is asked for so many rows of a prompt at a time."""
    monkeypatch.setattr(reading, "_HEAD_ROWS", 8)


def _read(tee: Tee, step_tokens: int = 512, prompt: Any = READ, **wanted: Any) -> PromptRead:
    engine = Engine(tee.model, tee.lanes, EngineSettings(step_tokens=step_tokens))
    (sequence,) = engine.admit(Request(prompt_ids=tuple(prompt), max_new_tokens=0, **wanted))
    finish(engine)
    assert sequence.reader is not None
    return sequence.reader.result()


def test_what_is_read_is_the_references(saved_model: Models) -> None:
    model = saved_model("llama")
    tee, expected = model.tee("tee-only"), model.logits(READ).log_softmax(-1)
    found = _read(tee, 7, prompt_logprobs=3).logprobs
    assert [one.token_id for one in found] == READ[1:]
    for row, one in enumerate(found):
        assert one.logprob == pytest.approx(float(expected[row, one.token_id]), abs=1e-4)
        top = expected[row].topk(3)
        assert [token_id for token_id, _ in one.top] == top.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert _read(tee, prompt=[5], prompt_logprobs=2).logprobs == ()
    with torch.inference_mode():
        hidden_TD = model.reference.model(torch.tensor([READ])).last_hidden_state[0]
    for pooling, expected_D in (("mean", hidden_TD.mean(0)), ("last", hidden_TD[-1])):
        found_D = _read(tee, 16, pooling=pooling).pooled_D
        assert found_D is not None
        torch.testing.assert_close(found_D.float(), expected_D, rtol=0, atol=1e-4)


def test_how_many_rows_are_read_does_not_leave_the_tee(saved_model: Models) -> None:
    """The LM head under pads is computed here: its rows, and their number, are the prompt's."""
    tee = saved_model("llama").tee("shielded-prefill")
    asked = []
    for wanted in ({"pooling": "last"}, {"prompt_logprobs": 1}):
        before = len(tee.channels[0].requests)
        _read(tee, 16, **wanted)
        asked.append(len(tee.channels[0].requests) - before)
    assert asked[0] == asked[1] > 0
