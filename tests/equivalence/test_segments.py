"""Whole layers at a service that keeps the KV cache: transformers' numbers, whatever gets lost."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import (
    ErrorCode,
    LimitError,
    ProtocolError,
    ReplyError,
    ServiceError,
    SessionLostError,
    TsqpError,
)
from protocol.messages import Request, Response, SegmentRequest, TensorReply
from protocol.tensors import from_torch, to_torch
from tee_side.engine.drafts import Drafts
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import PromptRead
from tee_side.engine.request import Request as Wanted
from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.sequence import Sequence
from tee_side.model.batch import Batch, Take
from tee_side.model.kv_cache import KVCache
from tee_side.model.segment import Sessions
from tee_side.policy.placement import Policy
from tests.equivalence.test_architectures import VARIANTS
from tests.equivalence.tolerances import BFLOAT16_LOGITS, FLOAT32_LOGITS, POLICY_LOGITS
from tests.kit.model import ARCHITECTURES, LoopbackChannel, SavedModel, Tee, token_ids

Models = Callable[..., SavedModel]

SEGMENTS = ("clear-segment", "stip-segment", "cloak-segment")
CLEAR = {"place": "gpu", "mask": "none", "verify": "none"}
INNER = ("qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj", "down_proj")


def cut_policy(*segments: dict[str, Any], **alone: Any) -> Policy:
    """Return a policy with segments; `alone`: where the operators beside them are."""
    operators = {"embedding": "tee", "lm_head": "tee", "segment": list(segments)}
    operators |= dict.fromkeys(INNER, alone) if alone else {}
    return Policy.model_validate({"name": "n", "summary": "s", "operators": operators})


# The second of three layers stays; the others are a segment each.
PARTIAL = cut_policy(CLEAR | {"layers": 0}, CLEAR | {"layers": 2}, place="tee", layers=1)


def generated(engine: Engine, prompt: list[int], tokens: int, **more: Any) -> list[Sequence]:
    """Generate for one request to its end, and return its samples."""
    sequences = engine.admit(
        Wanted(prompt_ids=tuple(prompt), max_new_tokens=tokens, stop_ids=frozenset(), **more)
    )
    while engine.running:
        engine.step()
    return sequences


class Forgetful(LoopbackChannel):
    """A service that loses all sessions before some of its requests, counted from 0."""

    def __init__(self, model: SavedModel, *before: int) -> None:
        super().__init__(model.directory)
        self.before = before

    def answer(self, request: Request) -> Response:
        """Forget, and answer."""
        if len(self.requests) - 1 in self.before:
            assert self._handler.sessions is not None
            self._handler.sessions.close()
        return super().answer(request)


@pytest.mark.parametrize(
    ("kind", "overrides", "name"),
    [
        # In the clear all of them; of the two masks, in turn, the one or the other.
        pytest.param(
            kind,
            what,
            name,
            id=f"{variant}-{name}",
            marks=[pytest.mark.slow] * (masked > 0 and masked - 1 != turn % 2),
        )
        for turn, (variant, kind, what) in enumerate(VARIANTS)
        for masked, name in enumerate(SEGMENTS)
    ],
)
def test_logits_equal_transformers_at_every_position(
    saved_model: Models, kind: str, overrides: dict[str, Any], name: str
) -> None:
    model, ids = saved_model(kind, **overrides), token_ids(24)
    expected, tee = model.logits(ids), model.tee(name)
    POLICY_LOGITS[name].check(tee.logits(ids), expected)
    # A prompt in chunks, and then, beyond each window that there is, one token a step.
    cache = tee.cache(len(ids))
    found = [tee.step_logits(cache, ids[at : at + 5]) for at in range(0, 15, 5)]
    found += [tee.step_logits(cache, [one], "decode") for one in ids[15:]]
    POLICY_LOGITS[name].check(torch.cat(found), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_sequences_of_a_batch_have_the_tokens_that_each_has_alone(
    saved_model: Models, kind: str, name: str
) -> None:
    """Prompts of several chunks beside decoded tokens; one request a step, whatever is in it."""
    model = saved_model(kind, **({"sliding_window": 7} if kind == "mistral" else {}))
    tee, prompts = model.tee(name), [token_ids(9 + 14 * seed, seed=seed) for seed in range(3)]
    engine = tee.engine(step_tokens=12)
    sequences = [engine.add(p, max_new_tokens=20, eos_token_ids=frozenset()) for p in prompts]
    while engine.running:
        engine.step()
    assert [s.token_ids for s in sequences] == [model.greedy(prompt, 20) for prompt in prompts]
    assert len(tee.channels[0].requests) == engine.counts.steps


@pytest.mark.parametrize("policy", [PARTIAL, "clear-segment"])
def test_bfloat16_is_as_close_as_that_of_one_operator_at_a_time(
    saved_model: Models, policy: Policy | str
) -> None:
    model, ids = saved_model("llama"), token_ids(24)
    found = model.tee(policy, dtype="bfloat16").logits(ids)
    BFLOAT16_LOGITS.check(found.float(), model.logits(ids))


def test_layers_between_segments_keep_their_keys_in_the_tee(saved_model: Models) -> None:
    model, ids = saved_model("qwen3"), token_ids(30)
    tee = model.tee(PARTIAL)
    FLOAT32_LOGITS.check(tee.logits(ids, chunk=7), model.logits(ids))
    engine = tee.engine()
    (sequence,) = generated(engine, ids, 12)
    assert sequence.token_ids == model.greedy(ids, 12)
    whole = model.tee("tee-only").engine().add(ids, max_new_tokens=12)
    alone = engine.add(ids, max_new_tokens=12)
    assert 3 * alone.cache.nbytes == whole.cache.nbytes


def test_a_segment_is_cut_where_another_service_has_the_next_layer(saved_model: Models) -> None:
    model, ids = saved_model("llama"), token_ids(20)
    services = [LoopbackChannel(model.directory) for _ in range(2)]
    tee = model.tee("clear-segment", channels=services[:1])
    lanes = tee.assembly.lanes(lambda layer: services[layer > 0 :][:1])
    cut = Tee(tee.model, lanes, services, tee.assembly)
    FLOAT32_LOGITS.check(cut.logits(ids, chunk=6), model.logits(ids))
    asked = [
        {(one.first_layer, one.last_layer, one.lm_head) for one in service.requests}  # type: ignore[union-attr]
        for service in services
    ]
    assert asked == [{(0, 0, False)}, {(1, 2, True)}]


# ------------------------------------------------------------------------------ what gets lost


@pytest.mark.parametrize("policy", [PARTIAL, "clear-segment"])
@pytest.mark.parametrize("before", [(1,), (2, 3), (4,), (9, 12, 15)])
def test_lost_sessions_are_computed_again_to_the_same_tokens(
    saved_model: Models, before: tuple[int, ...], policy: Policy | str
) -> None:
    """In the middle of a prompt, right behind it, and in the middle of an answer."""
    model, prompts = saved_model("llama"), [token_ids(25, seed=seed) for seed in range(2)]
    service = Forgetful(model, *before)
    engine = model.tee(policy, channels=[service]).engine(step_tokens=16)
    sequences = [engine.add(p, max_new_tokens=12, eos_token_ids=frozenset()) for p in prompts]
    while engine.running:
        engine.step()
    assert [s.token_ids for s in sequences] == [model.greedy(prompt, 12) for prompt in prompts]
    assert all(one < len(service.requests) for one in before)


@pytest.mark.parametrize("wanted", [{"prompt_logprobs": 2}, {"pooling": "mean"}])
def test_a_prompt_whose_keys_were_lost_is_read_once(
    saved_model: Models, wanted: dict[str, Any]
) -> None:
    model, ids = saved_model("llama"), token_ids(25)

    def read(policy: str, *channels: LoopbackChannel) -> PromptRead:
        tee = model.tee(policy, channels=list(channels) or None)
        (sequence,) = generated(tee.engine(step_tokens=8), ids, 3, **wanted)
        assert sequence.reader is not None
        return sequence.reader.result()

    expected, found = read("tee-only"), read("clear-segment", Forgetful(model, 2, 4))
    assert [one.token_id for one in found.logprobs] == [one.token_id for one in expected.logprobs]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    if expected.pooled_D is not None:
        assert found.pooled_D is not None
        torch.testing.assert_close(found.pooled_D, expected.pooled_D, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [(), (3,), (6,)])
def test_guesses_reused_prefixes_and_samples(saved_model: Models, before: tuple[int, ...]) -> None:
    model, prompt = saved_model("llama"), token_ids(20) * 2
    settings = EngineSettings(speculative_tokens=3, prefix_reuse=True)

    def run(policy: str, channels: list[LoopbackChannel] | None) -> tuple[Engine, list[list[int]]]:
        tee = model.tee(policy, channels=channels)
        engine = Engine(tee.model, tee.lanes, settings)
        first = generated(engine, prompt, 12)
        again = generated(engine, [*prompt, *first[0].token_ids[:4]], 12)
        sampling = SamplingSettings(seed=3, temperature=1.0)
        several = generated(engine, prompt, 10, sampling=sampling, samples=3)
        return engine, [one.token_ids for one in (*first, *again, *several)]

    service = Forgetful(model, *before)
    engine, found = run("clear-segment", [service])
    alone, expected = run("tee-only", None)
    assert found == expected
    assert engine.prefixes.hits == alone.prefixes.hits
    parents = [
        torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)[:, 5:]
        for request in service.requests
        if isinstance(request, SegmentRequest)
    ]
    assert torch.cat(parents).any(), "nothing began with another session's tokens"


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("policy", [PARTIAL, "clear-segment"])
@pytest.mark.parametrize("before", [(), (4, 7)])
def test_guesses_that_are_right_and_wrong(
    saved_model: Models,
    before: tuple[int, ...],
    policy: Policy | str,
    micro_batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each guess is a part of the same request, which follows the one before it."""
    model, prompts = saved_model("llama"), [token_ids(20, seed=seed) for seed in range(3)]
    known = [[*prompt, *model.greedy(prompt, 30)] for prompt in prompts]

    def propose(drafts: Drafts, most: int) -> list[int]:
        text = [*drafts._ids, *drafts._unread]
        (whole,) = (one for one in known if one[: len(text)] == text)
        guess = whole[len(text) : len(text) + min(most, 3)]
        return [*guess[:-1], 0]

    monkeypatch.setattr(Drafts, "propose", propose)
    tee = model.tee(policy, channels=[Forgetful(model, *before)], micro_batches=micro_batches)
    engine = Engine(tee.model, tee.lanes, EngineSettings(speculative_tokens=3))
    sequences = [engine.add(p, max_new_tokens=20, eos_token_ids=frozenset()) for p in prompts]
    while engine.running:
        engine.step()
    assert [s.token_ids for s in sequences] == [one[20:40] for one in known]
    assert engine.counts.drafted > engine.counts.accepted > 20


def test_ended_sequences_are_forgotten_at_the_service(saved_model: Models) -> None:
    model = saved_model("llama")
    service = LoopbackChannel(model.directory)
    engine = model.tee("clear-segment", channels=[service]).engine()
    for seed in range(5):
        generated(engine, token_ids(8, seed=seed), 3)
    assert service._handler.sessions is not None
    assert service._handler.sessions.totals.sessions == 1


class Amnesia(LoopbackChannel):
    """A service that remembers nothing, and takes what begins anew only `now_and_then`."""

    def __init__(self, directory: Path, *, now_and_then: bool) -> None:
        super().__init__(directory)
        self.now_and_then = now_and_then

    def answer(self, request: Request) -> Response:
        """Refuse whatever is not a beginning, or all of it."""
        assert isinstance(request, SegmentRequest)
        starts = torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)[
            :, 2
        ]
        if starts.any() or not self.now_and_then:
            code = ErrorCode.UNKNOWN_SESSION
            raise ProtocolError("a test", got="a session", expected="none", code=code)
        return super().answer(request)


def steps_to_the_end(engine: Engine) -> int:
    """Run an engine; more steps than a service that loses everything can cause are a failure."""
    for steps in range(200):
        if not engine.running:
            return steps
        engine.step()
    raise AssertionError("an engine that does not end")


@pytest.mark.parametrize("now_and_then", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_service_that_loses_everything_ends_the_run(
    saved_model: Models, micro_batches: int, now_and_then: bool
) -> None:
    """Also where no token has come yet, and with a first chunk that is cut in two."""
    model = saved_model("llama")

    def engine_of(tokens: int) -> tuple[Engine, Sequence]:
        service = Amnesia(model.directory, now_and_then=now_and_then)
        tee = model.tee("clear-segment", channels=[service], micro_batches=micro_batches)
        engine = tee.engine(step_tokens=8)
        return engine, engine.add(token_ids(tokens), max_new_tokens=40, eos_token_ids=frozenset())

    # The short one has a token between two losses, each time, where all of it is one request.
    for tokens in (20, 6):
        engine, _ = engine_of(tokens)
        with pytest.raises(SessionLostError):
            steps_to_the_end(engine)
    # And the server goes on with others, once it has been told.
    engine, sequence = engine_of(20)
    refused: list[Sequence] = []

    def refuse(one: Sequence, _error: TsqpError) -> None:
        refused.append(one)
        engine.remove(one)

    engine.refuse = refuse
    steps_to_the_end(engine)
    assert refused == [sequence]


class Cramped(LoopbackChannel):
    """A service that keeps the sessions of the last request only, however many those were."""

    def answer(self, request: Request) -> Response:
        """Forget the others, and answer."""
        assert isinstance(request, SegmentRequest)
        parts = torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)
        held, sessions = {tuple(row) for row in parts[:, :2].tolist()}, self._handler.sessions
        assert sessions is not None
        for name in list(sessions._held):
            if struct.unpack("<2q", name.session) not in held:
                sessions._forget(name)
        return super().answer(request)


def test_sequences_that_push_each_other_out_become_fewer(saved_model: Models) -> None:
    """Two micro-batches, each of which the service has room for: the last come last."""
    model, prompts = saved_model("llama"), [token_ids(9, seed=seed) for seed in range(8)]
    service = Cramped(model.directory)
    tee = model.tee("clear-segment", channels=[service], micro_batches=2)
    engine, refused = tee.engine(), list[Sequence]()

    def refuse(one: Sequence, _error: TsqpError) -> None:
        refused.append(one)
        engine.remove(one)

    engine.refuse = refuse
    sequences = [engine.add(p, max_new_tokens=40, eos_token_ids=frozenset()) for p in prompts]
    steps_to_the_end(engine)
    left = [one for one in sequences if one not in refused]
    assert 0 < len(left) < len(sequences)
    assert left == sequences[: len(left)]
    for sequence, prompt in zip(left, prompts, strict=False):
        assert sequence.token_ids == model.greedy(prompt, 40)


def test_a_row_that_is_sent_again_has_the_same_noise(saved_model: Models) -> None:
    """What a service loses on purpose gives it no second copy of a row to average."""
    model, prompt = saved_model("llama"), token_ids(20)
    noisy = {"place": "gpu", "mask": {"name": "cloak-segment", "sigma": 1e-3}, "verify": "none"}
    policy = cut_policy(noisy)
    assert policy.feature_mask is not None
    served = SavedModel(model.provisioned(policy.feature_mask)[0], model.reference)
    service = Forgetful(served, 4, 9)
    engine = model.tee(policy, channels=[service]).engine()
    (sequence,) = generated(engine, prompt, 12)
    (other,) = generated(engine, prompt, 1)
    rows: dict[int, list[torch.Tensor]] = {}
    for request in service.requests:
        assert isinstance(request, SegmentRequest)
        parts = torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)
        start = parts[parts[:, 3] > 0][0, 2]
        for position, row_D in enumerate(to_torch(request.hidden_states), int(start)):
            rows.setdefault(position, []).append(row_D.clone())
    assert len(sequence.token_ids) == 12
    assert len(other.token_ids) == 1
    first, second, third, _ = rows[7]
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    apart = torch.stack([rows[position][0] - rows[position][-1] for position in range(20)])
    assert apart.std().item() == pytest.approx(2**0.5 * 1e-3, rel=0.15)


def test_noise_depends_on_the_row_too(saved_model: Models) -> None:
    """A wrong guess stands where another token will; their difference must not be in the clear."""
    config = saved_model("llama").tee("tee-only").model.config
    cache = KVCache(config, 8, torch.float32, range(config.num_hidden_layers))
    h_TD = torch.randn(3, config.hidden_size)
    batch = Batch.of([Take(cache, (1, 2, 3), 0)])
    sessions = Sessions()

    def drawn(rows_TD: torch.Tensor) -> list[bytes]:
        return [bytes(one.bytes(16)) for one in sessions.noise(rows_TD, batch)]

    first = drawn(h_TD)
    cache.lose()
    assert drawn(h_TD) == first
    assert not set(drawn(h_TD.flip(0))) & {first[0], first[2]}
    assert drawn(h_TD.flip(0))[1] == first[1]
    assert not set(drawn(h_TD[:1].expand(3, -1).contiguous())) & set(first[1:])


def test_a_reused_prefix_that_was_lost_is_not_tried_again(saved_model: Models) -> None:
    model, prompt = saved_model("llama"), token_ids(40)
    service = Forgetful(model, 3)
    tee = model.tee("clear-segment", channels=[service])
    engine = Engine(tee.model, tee.lanes, EngineSettings(prefix_reuse=True))
    generated(engine, prompt, 3)
    (again,) = generated(engine, prompt, 3)  # its first request finds nothing there
    assert again.reused_tokens == 0
    hits = engine.prefixes.hits
    (third,) = generated(engine, prompt, 3)
    assert third.reused_tokens == 39
    assert engine.prefixes.hits == hits + 39
    assert [again.token_ids, third.token_ids] == [model.greedy(prompt, 3)] * 2


class Small(LoopbackChannel):
    """A service with memory for two sequences."""

    code = ErrorCode.SESSIONS_FULL

    def answer(self, request: Request) -> Response:
        """Refuse a third."""
        assert isinstance(request, SegmentRequest)
        parts = torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)
        if parts[:, 3].count_nonzero() > 2:
            raise ProtocolError("a test", got="three", expected="two", code=self.code)
        return super().answer(request)


def test_a_service_without_memory_for_all_keeps_those_that_came_first(
    saved_model: Models,
) -> None:
    model, prompts = saved_model("llama"), [token_ids(9, seed=seed) for seed in range(3)]
    engine = model.tee("clear-segment", channels=[Small(model.directory)]).engine()
    sequences = [engine.add(p, max_new_tokens=6, eos_token_ids=frozenset()) for p in prompts]
    refused: list[Sequence] = []

    def refuse(sequence: Sequence, error: TsqpError) -> None:
        assert isinstance(error, LimitError)
        refused.append(sequence)
        engine.remove(sequence)

    engine.refuse = refuse
    while engine.running:
        engine.step()
    assert refused == sequences[2:]
    assert [s.token_ids for s in sequences[:2]] == [model.greedy(p, 6) for p in prompts[:2]]


def test_a_request_that_is_too_large_is_no_lack_of_memory(saved_model: Models) -> None:
    model, service = saved_model("llama"), Small(saved_model("llama").directory)
    service.code = ErrorCode.LIMIT_EXCEEDED
    engine = model.tee("clear-segment", channels=[service]).engine()
    for seed in range(3):
        engine.add(token_ids(9, seed=seed), max_new_tokens=2, eos_token_ids=frozenset())
    refused: list[Sequence] = []
    engine.refuse = lambda sequence, _: refused.append(sequence)
    with pytest.raises(ServiceError) as caught:
        engine.step()
    assert (caught.value.code, caught.value.retryable) == (service.code, False)
    assert refused == []


@pytest.mark.parametrize("shape", [(1, 3), (2, 320)])
def test_a_reply_of_another_form_is_refused(saved_model: Models, shape: tuple[int, int]) -> None:
    class Other(LoopbackChannel):
        def answer(self, request: Request) -> Response:
            return TensorReply(output=from_torch(torch.zeros(shape)))

    model = saved_model("llama")
    engine = model.tee("clear-segment", channels=[Other(model.directory)]).engine()
    engine.add(token_ids(5), max_new_tokens=3)
    with pytest.raises(ReplyError, match="Segment reply from loopback"):
        engine.step()


# ------------------------------------------------------------------------------ the window


def test_a_window_is_that_of_a_model_that_has_one(saved_model: Models) -> None:
    """The same weights with a sliding window of 7, which transformers computes."""
    plain, ids = saved_model("mistral", sliding_window=None), token_ids(40)
    windowed = cut_policy(CLEAR | {"window": {"recent": 7}})
    expected = saved_model("mistral", sliding_window=7).logits(ids)
    FLOAT32_LOGITS.check(plain.tee(windowed).logits(ids, chunk=9), expected)
    wide = cut_policy(CLEAR | {"window": {"sinks": 2, "recent": 38}})
    FLOAT32_LOGITS.check(plain.tee(wide).logits(ids, chunk=9), plain.logits(ids))
    sinks = cut_policy(CLEAR | {"window": {"sinks": 2, "recent": 7}})
    found = plain.tee(sinks).logits(ids, chunk=9)
    FLOAT32_LOGITS.check(found[:9], plain.logits(ids)[:9])
    assert (found - expected)[9:].abs().amax(dim=-1).min() > 1e-3
