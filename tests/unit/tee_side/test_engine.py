"""When generation ends, which prompts are refused, and what a step may hold."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Lanes
from pathlib import Path

import pytest

from protocol import messages
from protocol.errors import DeadlineExceededError, LimitError, PromptError
from tee_side.engine.engine import Engine, EngineSettings, Sequence
from tee_side.engine.request import Request
from tee_side.engine.step import Part, PartResult, run_step
from tee_side.model.batch import Batch
from tee_side.model.kv_cache import kv_bytes
from tee_side.model.operators import MicroBatchOperators
from tee_side.policy.placement import Policy
from tee_side.words import OPERATORS, Phase
from tests.kit.model import LoopbackChannel, SavedModel, Tee, assemble, token_ids

Models = Callable[..., SavedModel]

PROMPT = token_ids(6)


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


@pytest.fixture(scope="module")
def tee(model: SavedModel) -> Tee:
    return assemble(model.directory)


def _run(tee: Tee, prompt: list[int], **settings: object) -> Sequence:
    engine = tee.engine()
    sequence = engine.add(prompt, **settings)  # type: ignore[arg-type]
    while engine.running:
        engine.step()
    return sequence


def _first_new_id(ids: list[int], start: int) -> int:
    """Position from `start` on of an id that has not been there before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


def test_generation_ends_at_max_new_tokens_with_reason_length(tee: Tee, model: SavedModel) -> None:
    sequence = _run(tee, PROMPT, max_new_tokens=7)
    assert sequence.token_ids == model.greedy(PROMPT, 7)
    assert sequence.finish_reason == "length"


def test_any_of_several_eos_ids_ends_generation_and_is_kept(tee: Tee, model: SavedModel) -> None:
    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    unused = next(i for i in range(320) if i not in ids)
    sequence = _run(
        tee, PROMPT, max_new_tokens=12, eos_token_ids=frozenset({unused, ids[place], 319})
    )
    assert sequence.token_ids == ids[: place + 1]
    assert sequence.finish_reason == "stop"


def test_eos_ids_of_the_model_count_when_none_are_given(tmp_path: Path, model: SavedModel) -> None:
    import json
    import shutil

    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    directory = tmp_path / "model"
    shutil.copytree(model.directory, directory)
    eos = {"eos_token_id": [319, ids[place]]}
    (directory / "generation_config.json").write_text(json.dumps(eos))
    sequence = _run(assemble(directory), PROMPT, max_new_tokens=12)
    assert sequence.token_ids == ids[: place + 1]
    assert sequence.finish_reason == "stop"


def test_eos_as_the_last_allowed_token_counts_as_stop(tee: Tee, model: SavedModel) -> None:
    ids = model.greedy(PROMPT, 12)
    place = _first_new_id(ids, 3)
    sequence = _run(tee, PROMPT, max_new_tokens=place + 1, eos_token_ids=frozenset({ids[place]}))
    assert (len(sequence.token_ids), sequence.finish_reason) == (place + 1, "stop")


def test_an_eos_id_in_the_prompt_does_not_end_generation(tee: Tee) -> None:
    sequence = _run(tee, PROMPT, max_new_tokens=1, eos_token_ids=frozenset(PROMPT[:-1]))
    assert len(sequence.token_ids) == 1


def test_generation_ends_with_reason_length_where_the_context_is_full(
    saved_model: Models,
) -> None:
    short = saved_model("llama", max_position_embeddings=32)
    prompt = token_ids(20)
    sequence = _run(assemble(short.directory), prompt, max_new_tokens=1000)
    assert sequence.token_ids == short.greedy(prompt, 12)
    assert sequence.finish_reason == "length"
    assert sequence.cache.capacity == 31


def test_the_longest_possible_prompt_still_gets_one_token(saved_model: Models) -> None:
    short = saved_model("llama", max_position_embeddings=32)
    prompt = token_ids(31)
    sequence = _run(assemble(short.directory), prompt, max_new_tokens=5)
    assert sequence.token_ids == short.greedy(prompt, 1)
    assert sequence.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "no tokens"),
        ([1] * 256, "256 tokens"),
        ([1] * 300, "300 tokens"),
        ([5, 320], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_anything_runs(
    tee: Tee, prompt: list[int], said: str
) -> None:
    engine = tee.engine()
    with pytest.raises(PromptError) as caught:
        engine.add(prompt, max_new_tokens=4)
    assert said in caught.value.got
    assert engine.running == ()


def test_a_refused_prompt_says_what_the_bounds_are(tee: Tee) -> None:
    with pytest.raises(PromptError, match=r"fewer than the context of 256"):
        tee.engine().add([1] * 256, max_new_tokens=1)
    with pytest.raises(PromptError, match=r"0 to 319"):
        tee.engine().add([320], max_new_tokens=1)


def test_token_ids_outside_the_vocabulary_are_not_quoted(tee: Tee) -> None:
    """Prompts are secret, and errors are logged."""
    with pytest.raises(PromptError) as caught:
        tee.engine().add([123456], max_new_tokens=1)
    assert "123456" not in str(caught.value)


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_a_request_for_no_new_tokens_is_refused(tee: Tee, max_new_tokens: int) -> None:
    with pytest.raises(PromptError):
        tee.engine().add(PROMPT, max_new_tokens=max_new_tokens)


def test_a_removed_sequence_is_not_run_any_more_and_others_go_on(
    tee: Tee, model: SavedModel
) -> None:
    engine = tee.engine()
    kept = engine.add(PROMPT, max_new_tokens=6)
    dropped = engine.add(PROMPT[::-1], max_new_tokens=6)
    engine.step()
    engine.remove(dropped)
    assert engine.running == (kept,)
    while engine.running:
        engine.step()
    assert len(dropped.token_ids) == 1
    assert kept.token_ids == model.greedy(PROMPT, 6)


def test_removing_a_sequence_twice_is_harmless(tee: Tee) -> None:
    engine = tee.engine()
    sequence = engine.add(PROMPT, max_new_tokens=2)
    engine.remove(sequence)
    engine.remove(sequence)
    assert engine.running == ()


# ---------------------------------------------------------------------------- memory for KV caches


def _limited(tee: Tee, tokens: int) -> Engine:
    """An engine with room for the KV caches of so many tokens."""
    limit = kv_bytes(tee.model.config, tokens, tee.model.dtype)
    return Engine(tee.model, tee.lanes, EngineSettings(max_kv_bytes=limit))


def test_a_request_that_does_not_fit_is_refused_before_anything_runs(tee: Tee) -> None:
    engine = _limited(tee, 20)
    engine.add(PROMPT, max_new_tokens=15)  # the last token needs no place: all 20 are taken
    with pytest.raises(LimitError) as caught:
        engine.add(PROMPT, max_new_tokens=1)
    assert len(engine.running) == 1
    per_token = 2 * 3 * 2 * 16 * 4
    assert caught.value.where == (
        f"KV memory, of which {20 * per_token / 2**20:.1f} MiB may be used (--max-kv-mib)"
    )
    assert caught.value.got == (
        f"a request that needs {6 * per_token / 2**20:.1f} MiB for 6 tokens"
    )
    assert caught.value.expected == "at most 0.0 MiB, which is what is left"
    assert caught.value.retryable


def test_one_that_never_fits_is_not_worth_retrying(tee: Tee) -> None:
    engine = _limited(tee, 20)
    engine.add(PROMPT, max_new_tokens=15).stop()
    with pytest.raises(LimitError) as caught:
        engine.add(PROMPT, max_new_tokens=16)
    assert not caught.value.retryable


@pytest.mark.parametrize("how", ["finished", "stopped", "removed"])
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
        first.stop()
    else:
        engine.remove(first)
    with pytest.raises(LimitError):
        engine.add(PROMPT, max_new_tokens=4)
    third = engine.add(PROMPT, max_new_tokens=3)
    while engine.running:
        engine.step()
    assert second.token_ids == model.greedy(PROMPT[::-1], 7)
    assert third.token_ids == model.greedy(PROMPT, 3)
    assert first.cache.nbytes == 0


def test_looking_at_what_runs_gives_nothing_back(tee: Tee) -> None:
    """The next step does, and the one that a sequence ends with."""
    engine = tee.engine()
    stopped, other = (engine.add(PROMPT, max_new_tokens=2) for _ in range(2))
    stopped.stop()
    assert engine.running == (other,)
    assert stopped.cache.nbytes == other.cache.nbytes > 0
    engine.step()
    assert stopped.cache.nbytes == 0
    engine.step()
    assert other.finish_reason == "length"
    assert other.cache.nbytes == 0


def test_all_that_end_in_one_step_give_their_memory_back(tee: Tee) -> None:
    engine = tee.engine()
    sequences = [engine.add(PROMPT, max_new_tokens=2) for _ in range(4)]
    while engine.running:
        engine.step()
    assert [sequence.cache.nbytes for sequence in sequences] == [0] * 4


def test_without_a_limit_it_is_what_the_machine_has(
    tee: Tee, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tee_side.engine.engine.available_kv_bytes", lambda: 12345)
    assert Engine(tee.model, tee.lanes).max_kv_bytes == 12345
    assert Engine(tee.model, tee.lanes, EngineSettings(max_kv_bytes=0)).max_kv_bytes == 0


def test_a_step_without_sequences_gives_nothing(tee: Tee) -> None:
    assert tee.engine().step() == []


def test_stop_ends_a_sequence_with_reason_stop(tee: Tee) -> None:
    engine = tee.engine()
    sequence = engine.add(PROMPT, max_new_tokens=50)
    engine.step()
    sequence.stop()
    assert engine.running == ()
    assert (sequence.finish_reason, len(sequence.token_ids)) == ("stop", 1)


def test_decode_goes_before_prefill_when_a_step_is_too_small_for_both(tee: Tee) -> None:
    engine = tee.engine(step_tokens=3)
    decoding = engine.add(PROMPT[:2], max_new_tokens=9)
    engine.step()
    waiting = engine.add(token_ids(20), max_new_tokens=1)
    for expected in range(2, 6):
        engine.step()
        assert len(decoding.token_ids) == expected
        assert waiting.cache.length == 2 * (expected - 1)


def test_no_more_sequences_run_than_have_a_row_in_each_step(tee: Tee) -> None:
    engine = tee.engine(step_tokens=2)
    with pytest.raises(PromptError, match="samples: got 3, expected 1 to 2"):
        engine.check(Request(prompt_ids=tuple(PROMPT[:2]), max_new_tokens=1, samples=3))
    for _ in range(3):
        request = Request(prompt_ids=tuple(PROMPT[:2]), max_new_tokens=9)
        engine.waiting.add("", request)
    assert len(engine.admit_waiting()) == 2
    for _ in range(4):
        engine.step()
    assert [len(sequence.token_ids) for sequence in engine.running] == [4, 2]
    assert (engine.admit_waiting(), len(engine.waiting)) == ([], 1)


def test_a_long_prefill_never_keeps_a_decoding_sequence_waiting(tee: Tee) -> None:
    engine = tee.engine(step_tokens=4)
    decoding = engine.add(PROMPT[:2], max_new_tokens=20)
    engine.step()
    long = engine.add(token_ids(40), max_new_tokens=2)
    # Also when the one that decodes was admitted later than the one that is prefilled.
    another = Request(prompt_ids=tuple(PROMPT[:1]), max_new_tokens=20, owner="another")
    (late,) = engine.admit(another)
    for _ in range(6):
        before = len(decoding.token_ids), len(late.token_ids)
        engine.step()
        after = len(decoding.token_ids), len(late.token_ids)
        assert after == (before[0] + 1, before[1] + 1)
    assert not long.token_ids
    assert long.cache.length > 0


# -------------------------------------------------------------------------------- phases

# Prefill and decode are placed differently, so each has a table of its own.
SPLIT = Policy.model_validate(
    {
        "name": "split",
        "summary": "a test",
        "operators": dict.fromkeys(OPERATORS, "tee")
        | {
            "o_proj": [
                {"place": "tee", "phase": "prefill"},
                {"place": "gpu", "phase": "decode", "mask": "none", "verify": "none"},
            ]
        },
    }
)


class _Steps:
    """Notes, for every step of an engine, the rows of each sequence in each of its parts."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.parts: list[list[tuple[Phase, dict[int, int]]]] = []
        self._by_cache: dict[int, int] = {}

        def noted(parts: Lanes[Part], lanes: Lanes[MicroBatchOperators]) -> list[PartResult]:
            self.parts.append([(part.phase, self._rows(part.batch)) for part in parts])
            return run_step(parts, lanes)

        monkeypatch.setattr("tee_side.engine.engine.run_step", noted)

    def _rows(self, batch: Batch) -> dict[int, int]:
        return {self._by_cache[id(chunk.cache)]: chunk.tokens for chunk in batch.chunks}

    def add(self, number: int, prompt: list[int], new_tokens: int) -> Sequence:
        sequence = self.engine.add(prompt, max_new_tokens=new_tokens, eos_token_ids=frozenset())
        self._by_cache[id(sequence.cache)] = number
        return sequence


def test_rows_of_both_phases_share_a_step_each_on_its_own_table(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _Steps(assemble(model.directory, SPLIT).engine(step_tokens=4), monkeypatch)
    sequences = [steps.add(number, token_ids(3 + 4 * number, number), 5) for number in range(3)]
    lengths = {number: len(s.prompt_ids) for number, s in enumerate(sequences)}
    late = False
    while steps.engine.running:
        before = {number: s.cache.length for number, s in enumerate(sequences)}
        steps.engine.step()
        for phase, rows in steps.parts[-1]:
            for number, count in rows.items():
                prefill = before[number] < lengths[number]
                assert phase == ("prefill" if prefill else "decode")
                assert prefill or count == 1
        assert sum(sum(rows.values()) for _, rows in steps.parts[-1]) <= 4
        if len(steps.parts) == 6 and not late:
            late = True
            sequences.append(steps.add(3, token_ids(9, 3), 5))
            lengths[3] = 9
    assert late
    phases = {tuple(phase for phase, _ in parts) for parts in steps.parts}
    assert phases == {("prefill",), ("decode", "prefill"), ("decode",)}
    for number, sequence in enumerate(sequences):
        assert sequence.token_ids == model.greedy(token_ids(lengths[number], number), 5)


def test_without_phases_a_step_is_one_part(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _Steps(assemble(model.directory, "attention-in-tee").engine(4), monkeypatch)
    first = steps.add(0, token_ids(3), 5)
    steps.engine.step()
    steps.add(1, token_ids(9), 5)
    steps.engine.step()
    assert len(first.token_ids) == 2
    assert [rows for _, rows in steps.parts[-1]] == [{0: 1, 1: 3}]


def test_neither_phase_starves_the_other_while_requests_keep_coming(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new prompt before every step: those that decode go on at each, and prompts beside them."""
    steps = _Steps(assemble(model.directory, SPLIT).engine(step_tokens=16), monkeypatch)
    sequences: list[Sequence] = []
    for number in range(24):
        sequences.append(steps.add(number, token_ids(4, number), 8))
        steps.engine.step()
        assert [len(s.token_ids) for s in sequences] == [
            min(8, number - at + 1) for at in range(number + 1)
        ]
    assert [phase for phase, _ in steps.parts[-1]] == ["decode", "prefill"]


def test_a_step_that_fails_counts_for_neither_phase(model: SavedModel) -> None:
    class Down(LoopbackChannel):
        def submit(
            self,
            request: messages.Request,
            timeout_s: float | None = None,
            *,
            send_within_s: float | None = None,
        ) -> int:
            raise DeadlineExceededError("it", got="nothing", expected="a connection")

    down = Down(model.directory)
    engine = assemble(model.directory, SPLIT, channel=down).engine(step_tokens=2)
    decoding = engine.add(token_ids(2), max_new_tokens=3, eos_token_ids=frozenset())
    engine.step()
    waiting = engine.add(token_ids(6), max_new_tokens=1)
    for _ in range(3):
        with pytest.raises(DeadlineExceededError):
            engine.step()
    assert (len(decoding.token_ids), waiting.cache.length) == (1, 0)


def test_the_phase_of_a_sequence_is_decode_once_its_prompt_has_run(tee: Tee) -> None:
    engine = tee.engine(step_tokens=4)
    sequence = engine.add(PROMPT, max_new_tokens=3)
    seen = []
    while engine.running:
        seen.append(sequence.phase)
        engine.step()
    assert seen == ["prefill", "prefill", "decode", "decode"]
