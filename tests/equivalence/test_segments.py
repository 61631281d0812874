"""Whole layers at a service that keeps the KV cache: transformers' numbers, whatever gets lost."""

import math
from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from protocol.errors import (
    ErrorCode,
    LimitError,
    MaskError,
    ProtocolError,
    ReplyError,
    ServiceError,
    SessionLostError,
    TsqpError,
)
from protocol.messages import Request, Response, SegmentRequest, TensorReply
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.request import Request as Wanted
from tee_side.engine.request import SamplingSettings
from tee_side.engine.step import Sequence
from tee_side.model.batch import Batch, KVCache, Take
from tee_side.model.segment import SegmentCall, Sessions
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect.masks.mask import MaskKey
from tee_side.remote.call import CallSettings
from tests.equivalence.test_architectures import VARIANTS
from tests.equivalence.tolerances import BFLOAT16_LOGITS, FLOAT32_LOGITS, POLICY_LOGITS
from tests.kit.model import (
    CLEAR,
    LoopbackChannel,
    Models,
    SavedModel,
    Tee,
    finish,
    policy_of,
    token_ids,
)
from tests.kit.rows import each_row

SEGMENTS = ("clear-segment", "stip-segment", "cloak-segment")
INNER = ("qkv_proj", "attn_scores", "attn_values", "o_proj", "gate_up_proj", "down_proj")


# The second of three layers stays; the others are a segment each.
PARTIAL = policy_of(
    {
        "segment": [CLEAR | {"layers": 0}, CLEAR | {"layers": 2}],
        **{inner: {"place": "tee", "layers": 1} for inner in INNER},
    }
)


@each_row("key", [None, MaskKey("", "", {}), MaskKey("", "", {}, Mock())])
def test_no_segment_under_a_mask_crosses_without_its_key(
    saved_model: Models, key: MaskKey | None
) -> None:
    """Nor one that ends in logits, where the key cannot bring them back."""
    config = read_config(saved_model("llama").directory)
    (segment,) = load_policy("stip-segment").segments(config.num_hidden_layers)
    assert segment.head
    settings = CallSettings(lambda _: [Mock()], math.inf, None)
    with pytest.raises(MaskError, match="segment: got no key of its own"):
        SegmentCall(config, settings, Sessions(), key, segment)


def generated(engine: Engine, prompt: list[int], tokens: int, **more: Any) -> list[Sequence]:
    sequences = engine.admit(
        Wanted(prompt_ids=tuple(prompt), max_new_tokens=tokens, stop_ids=frozenset(), **more)
    )
    finish(engine)
    return sequences


def parts_of(request: Request) -> torch.Tensor:
    """Return the parts of a request: session (2), start, rows, length, parent (2)."""
    assert isinstance(request, SegmentRequest)
    return torch.frombuffer(bytearray(request.parts.data), dtype=torch.int64).view(-1, 7)


class Forgetful(LoopbackChannel):
    """A service that loses all sessions before some of its requests, counted from 0."""

    def __init__(self, model: SavedModel, *before: int) -> None:
        super().__init__(model.directory)
        self.before = before

    def answer(self, request: Request) -> Response:
        if len(self.requests) - 1 in self.before:
            self._handler.sessions.forget_revoked(lambda _client: False)
        return super().answer(request)


@each_row(
    ("kind", "overrides", "name"),
    [
        (kind, overrides, name)
        for (_, kind, overrides), name in zip(VARIANTS, cycle(SEGMENTS), strict=False)
    ],
    slow=[(*variant[1:], name) for variant, name in product(VARIANTS, SEGMENTS)],
)
def test_logits_equal_transformers_at_every_position(
    saved_model: Models, kind: str, overrides: dict[str, Any], name: str
) -> None:
    model, ids = saved_model(kind, **overrides), token_ids(16)
    expected, tee = model.logits(ids), model.tee(name)
    POLICY_LOGITS[name].check(tee.logits(ids), expected)
    # A prompt in chunks, and then, beyond each window that there is, one token a step.
    cache = tee.cache(len(ids))
    found = [tee.step_logits(cache, ids[at : at + 5]) for at in range(0, 10, 5)]
    found += [tee.step_logits(cache, [one], "decode") for one in ids[10:]]
    POLICY_LOGITS[name].check(torch.cat(found), expected)


def test_layers_between_segments_keep_their_keys_in_the_tee(saved_model: Models) -> None:
    model, ids = saved_model("qwen3"), token_ids(30)
    tee = model.tee(PARTIAL)
    FLOAT32_LOGITS.check(tee.logits(ids, chunk=7), model.logits(ids))
    for policy in (PARTIAL, "clear-segment"):
        found = model.tee(policy, dtype="bfloat16").logits(ids)
        BFLOAT16_LOGITS.check(found.float(), model.logits(ids))
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
    # One request a step of six tokens.
    assert [len(service.requests) for service in services] == [4, 4]


@each_row(
    ("before", "policy"),
    [((1,), PARTIAL), ((2, 3), "clear-segment"), ((9, 12, 15), PARTIAL)],
    slow=product([(1,), (2, 3), (4,), (9, 12, 15)], [PARTIAL, "clear-segment"]),
)
def test_lost_sessions_are_computed_again_to_the_same_tokens(
    saved_model: Models, before: tuple[int, ...], policy: Policy | str
) -> None:
    """In the middle of a prompt, right behind it, and in the middle of an answer."""
    model, prompts = saved_model("llama"), [token_ids(25, seed=seed) for seed in range(2)]
    service = Forgetful(model, *before)
    engine = model.tee(policy, channels=[service]).engine(step_tokens=16)
    sequences = [engine.add(p, max_new_tokens=12, eos_token_ids=frozenset()) for p in prompts]
    finish(engine)
    assert [s.token_ids for s in sequences] == [model.greedy(prompt, 12) for prompt in prompts]
    assert all(one < len(service.requests) for one in before)


@each_row("before", [(), (6,)], slow=[(3,)])
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
    assert engine.counts.prefix_hits == alone.counts.prefix_hits
    parents = [parts_of(request)[:, 5:] for request in service.requests]
    assert torch.cat(parents).any(), "nothing began with another session's tokens"


def test_ended_sequences_are_forgotten_at_the_service(saved_model: Models) -> None:
    """Its keys and values are made of the prompt."""
    model = saved_model("llama")
    service = LoopbackChannel(model.directory)
    engine = model.tee("clear-segment", channels=[service]).engine()
    for seed in range(3):
        generated(engine, token_ids(8, seed=seed), 3)
    assert service._handler.sessions.totals.sessions == 1


def test_a_reused_prefix_that_was_lost_is_not_tried_again(saved_model: Models) -> None:
    model, ids = saved_model("llama"), token_ids(40)
    tee = model.tee("clear-segment", channels=[Forgetful(model, 3)])
    engine = Engine(tee.model, tee.lanes, EngineSettings(prefix_reuse=True))
    # The second one's first request finds nothing at the service; the third goes on from it.
    prompts = (ids, [*ids[:30], *token_ids(10, seed=1)], ids)
    found = [generated(engine, prompt, 3)[0].reused_tokens for prompt in prompts]
    assert found == [0, 0, 30]


class Amnesia(LoopbackChannel):
    """A service that remembers nothing, and takes what begins anew only `now_and_then`."""

    def __init__(self, directory: Path, *, now_and_then: bool) -> None:
        super().__init__(directory)
        self.now_and_then = now_and_then

    def answer(self, request: Request) -> Response:
        if parts_of(request)[:, 2].any() or not self.now_and_then:
            code = ErrorCode.UNKNOWN_SESSION
            raise ProtocolError("a test", got="a session", expected="none", code=code)
        return super().answer(request)


def refusing(engine: Engine) -> list[tuple[Sequence, TsqpError]]:
    refused: list[tuple[Sequence, TsqpError]] = []

    def refuse(sequence: Sequence, error: TsqpError) -> None:
        refused.append((sequence, error))
        engine.remove(sequence)

    engine.refuse = refuse
    return refused


def _step_to_the_end(engine: Engine) -> None:
    while engine.running:
        engine.step()


@each_row(("now_and_then", "micro_batches"), [(True, 2), (False, 1)])
def test_a_service_that_loses_everything_ends_the_run(
    saved_model: Models, now_and_then: bool, micro_batches: int
) -> None:
    """Also where no token has come yet, and with a first chunk that is cut in two."""
    model = saved_model("llama")
    # The short one has a token between two losses, each time, where all of it is one request.
    for tokens in (20, 6):
        service = Amnesia(model.directory, now_and_then=now_and_then)
        tee = model.tee("clear-segment", channels=[service], micro_batches=micro_batches)
        engine = tee.engine(step_tokens=8)
        sequence = engine.add(token_ids(tokens), max_new_tokens=40, eos_token_ids=frozenset())
        with pytest.raises(SessionLostError):
            _step_to_the_end(engine)
        # A server goes on with others, once it has been told.
        refused = refusing(engine)
        finish(engine)
        assert [one for one, _ in refused] == [sequence]


def test_a_row_that_is_sent_again_has_the_same_noise(saved_model: Models) -> None:
    """What a service loses on purpose gives it no second copy of a row to average."""
    model, prompt = saved_model("llama"), token_ids(20)
    noisy = {"place": "gpu", "mask": {"name": "cloak-segment", "sigma": 1e-3}, "verify": "none"}
    policy = policy_of({"segment": [noisy]})
    assert policy.feature_mask is not None
    served = SavedModel(model.provisioned(policy.feature_mask)[0], model.reference)
    service = Forgetful(served, 4, 9)
    engine = model.tee(policy, channels=[service]).engine()
    (sequence,) = generated(engine, prompt, 12)
    (other,) = generated(engine, prompt, 1)
    rows: dict[int, list[torch.Tensor]] = {}
    for request in service.requests:
        assert isinstance(request, SegmentRequest)
        parts = parts_of(request)
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


def test_a_service_without_memory_for_all_keeps_those_that_came_first(saved_model: Models) -> None:
    """A request that is too large for it is no lack of memory."""
    model, prompts = saved_model("llama"), [token_ids(9, seed=seed) for seed in range(3)]

    class Small(LoopbackChannel):
        def answer(self, request: Request) -> Response:
            if parts_of(request)[:, 3].count_nonzero() > 2:
                raise ProtocolError("a test", got="three", expected="two", code=code)
            return super().answer(request)

    for code in (ErrorCode.SESSIONS_FULL, ErrorCode.LIMIT_EXCEEDED):
        service = Small(model.directory)
        engine = model.tee("clear-segment", channels=[service]).engine()
        sequences = [engine.add(p, max_new_tokens=6, eos_token_ids=frozenset()) for p in prompts]
        refused = refusing(engine)
        if code is ErrorCode.LIMIT_EXCEEDED:
            with pytest.raises(ServiceError) as caught:
                engine.step()
            assert (caught.value.code, caught.value.retryable, refused) == (code, False, [])
            continue
        finish(engine)
        ((third, error),) = refused
        assert third is sequences[2]
        assert isinstance(error, LimitError)
        assert [s.token_ids for s in sequences[:2]] == [model.greedy(p, 6) for p in prompts[:2]]


@each_row("shape", [(1, 3), (2, 320)])
def test_a_reply_of_another_form_is_refused(saved_model: Models, shape: tuple[int, int]) -> None:
    class Other(LoopbackChannel):
        def answer(self, request: Request) -> Response:
            return TensorReply(output=from_torch(torch.zeros(shape)))

    model = saved_model("llama")
    engine = model.tee("clear-segment", channels=[Other(model.directory)]).engine()
    engine.add(token_ids(5), max_new_tokens=3)
    with pytest.raises(ReplyError, match="segment reply from loopback"):
        engine.step()
