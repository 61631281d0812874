"""Into how many micro-batches a step is cut does not change what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError, PadsExhaustedError, ReplyError
from protocol.messages import Request, Response, TensorReply
from protocol.tensors import from_torch, to_torch
from tee_side.engine.engine import Engine
from tee_side.engine.sampling import SamplingSettings
from tee_side.engine.step import MIN_MICRO_BATCH_ROWS
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Factors
from tee_side.protect.pads.source import PadLane, WhenOut
from tests.equivalence.tolerances import (
    FLOAT32_STEPS,
    INTEGER_LOGITS,
    INTEGER_STEPS,
    Tolerance,
    masked_logits,
)
from tests.kit.model import LoopbackChannel, SavedModel, Tee, token_ids
from tests.pairwise import covering

Models = Callable[..., SavedModel]

# A sliding window smaller than a part; a RoPE whose frequencies change with the length.
DYNAMIC = {
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sliding window": ("mistral", {"sliding_window": 5}),
    "dynamic RoPE": ("llama", DYNAMIC),
    "norms of q and k": ("qwen3", {}),
}


def _model(models: Models, variant: str) -> SavedModel:
    kind, settings = VARIANTS[variant]
    return models(kind, **settings)


def _steps(policy: Policy) -> Tolerance:
    """Return what other parts of a prompt may change: other shapes, so other orders of sums."""
    return INTEGER_STEPS if policy.arithmetic == "int8" else FLOAT32_STEPS


def _run(
    engine: Engine, requests: Sequence[tuple[list[int], int]]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Generate for all at once; return tokens and logits of each."""
    sequences = [
        engine.add(prompt, max_new_tokens=new, eos_token_ids=frozenset())
        for prompt, new in requests
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in sequences]
    while engine.running:
        for sampled in engine.step():
            seen[sequences.index(sampled.sequence)].append(sampled.logits_V)
    return [s.token_ids for s in sequences], [torch.stack(logits) for logits in seen]


# Every two of a policy, a number of micro-batches and one of tokens a step.
_ALL = list(product(builtin_policies(), [3, 2, 4], [9, 24, 512]))
PAIRS = [_ALL[position] for position in covering(_ALL)]

# ----------------------------------------------------------------------- a prompt in parts


@pytest.mark.each_value
@pytest.mark.parametrize("micro_batches", [3, 2, 5])
@pytest.mark.parametrize("name", builtin_policies())
def test_a_long_prompt_runs_as_a_wavefront(
    saved_model: Models, name: str, micro_batches: int
) -> None:
    """Each part a little behind the one whose keys it looks at."""
    policy, model, ids = load_policy(name), saved_model("llama"), token_ids(41)
    whole = model.tee(policy).logits(ids)
    cut = model.tee(policy, micro_batches=micro_batches)
    tolerance = _steps(policy)
    if policy.arithmetic == "float" and policy.masks:
        tolerance = masked_logits(name)
    tolerance.check(cut.logits(ids), whole)
    # And behind what is in the cache already.
    tolerance.check(cut.logits(ids, chunk=23), whole)


@pytest.mark.pairwise
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["tsqp", "attention-in-tee", "tee-only", "shielded-prefill"])
def test_every_kind_of_attention_runs_as_a_wavefront(
    saved_model: Models, name: str, variant: str, micro_batches: int
) -> None:
    policy, model, ids = load_policy(name), _model(saved_model, variant), token_ids(50)
    tee = model.tee(policy, micro_batches=micro_batches)
    logits = tee.logits(ids)
    _steps(policy).check(logits, model.tee(policy).logits(ids))
    if policy.arithmetic == "float":
        torch.testing.assert_close(logits, model.logits(ids), rtol=0, atol=1e-4)
    # Beyond the 64 positions after which dynamic RoPE changes.
    prompt, new_tokens = token_ids(61, seed=1), 6
    assert tee.greedy(prompt, new_tokens) == model.tee(policy).greedy(prompt, new_tokens)


# ----------------------------------------------------------------- several sequences at once


@pytest.mark.each_value
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("name", builtin_policies())
def test_sequences_that_decode_are_kept_whole(
    saved_model: Models, name: str, micro_batches: int
) -> None:
    """No sum is over other numbers or in another order: integers are the same to the last bit."""
    policy, model = load_policy(name), saved_model("llama")
    prompts = [(token_ids(1, seed=seed), 5) for seed in range(12)]
    expected_tokens, expected = _run(model.tee(policy).engine(), prompts)
    tokens, found = _run(model.tee(policy, micro_batches=micro_batches).engine(), prompts)
    assert tokens == expected_tokens
    integers = policy.arithmetic == "int8"
    tolerance = INTEGER_LOGITS if integers else FLOAT32_STEPS
    if policy.masks and not integers:
        tolerance = masked_logits(name)
    for one, other in zip(found, expected, strict=True):
        tolerance.check(one, other)


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "micro_batches", "step_tokens"), PAIRS)
def test_prompts_beside_sequences_that_decode(
    saved_model: Models, name: str, micro_batches: int, step_tokens: int
) -> None:
    """A part may hold the end of one prompt and the beginning of the next, or tokens beside it.

    Parts then wait for different numbers of replies where attention is asked for: a later one must
    not get ahead of keys that it looks at.
    """
    policy, model = load_policy(name), saved_model("llama")
    late = [token_ids(22, seed=7), token_ids(11, seed=8)]
    runs = []
    for parts in (1, micro_batches):
        engine = model.tee(policy, micro_batches=parts).engine(step_tokens)
        sequences = [
            engine.add(token_ids(length, seed=length), max_new_tokens=11, eos_token_ids=frozenset())
            for length in (5, 2, 3)
        ]
        for _ in range(3):
            engine.step()
        for prompt in late:
            sequences.append(engine.add(prompt, max_new_tokens=5, eos_token_ids=frozenset()))
            engine.step()
        while engine.running:
            engine.step()
        runs.append([sequence.token_ids for sequence in sequences])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_of_a_step_in_parts_is_that_of_transformers(
    saved_model: Models, variant: str
) -> None:
    model = _model(saved_model, variant)
    requests = [(token_ids(length, seed=length), 6) for length in (19, 4, 23, 1)]
    for name in ("tsqp", "attention-in-tee"):
        tokens, _ = _run(model.tee(name, micro_batches=3).engine(), requests)
        assert tokens == [model.greedy(prompt, new) for prompt, new in requests]


def test_sampled_tokens_do_not_depend_on_parts(saved_model: Models) -> None:
    model, runs = saved_model("llama"), []
    for parts in (1, 3):
        engine = model.tee("two-server", micro_batches=parts).engine()
        sampling = SamplingSettings(temperature=1.0, seed=3)
        sequences = [
            engine.add([seed], max_new_tokens=8, sampling=sampling, eos_token_ids=frozenset())
            for seed in range(12)
        ]
        while engine.running:
            engine.step()
        runs.append([sequence.token_ids for sequence in sequences])
    assert runs[0] == runs[1]


# -------------------------------------------------------------------------- what overlaps


class Recording(LoopbackChannel):
    """Notes the rows of every request when it is sent and when its reply is waited for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.events: list[tuple[str, int]] = []
        self._rows: dict[int, int] = {}

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        request_id = super().submit(request, timeout_s)
        held = getattr(request, "elements", None) or getattr(request, "hidden_states", None)
        rows = getattr(request, "rows", 0)  # of a seed
        self._rows[request_id] = held.shape[0] if held is not None else rows
        self.events.append(("submit", self._rows[request_id]))
        return request_id

    def wait(self, request_id: int) -> Exchange:
        self.events.append(("wait", self._rows[request_id]))
        return super().wait(request_id)


@pytest.mark.parametrize("name", ["attention-in-tee", "quantized-clear", "shielded-prefill"])
def test_while_one_part_is_computed_a_request_of_the_other_is_under_way(
    saved_model: Models, name: str
) -> None:
    model, rpcs = saved_model("llama"), 4 * 3
    channel = Recording(model.directory)
    # Parts of four and of five rows.
    model.tee(name, channels=[channel], micro_batches=2).logits(token_ids(9))
    first, second = 4, 5
    assert channel.events[:8] == [
        ("submit", first),
        ("wait", first),
        ("submit", first),
        ("submit", second),
        ("wait", first),
        ("submit", first),
        ("wait", second),
        ("submit", second),
    ]
    out: list[int] = []
    alone = []
    waits = 0
    for what, rows in channel.events:
        if what == "submit":
            out.append(rows)
            assert len(out) == len(set(out))
            continue
        assert out[0] == rows
        if len(out) == 1:
            alone.append(waits)
        waits += 1
        out.remove(rows)
    # Whenever a reply is waited for the other part's request is out, but for the first, where the
    # second part has not begun, and the last two, where the first has ended.
    assert alone == [0, waits - 2, waits - 1]
    rpcs += name == "shielded-prefill"  # whose LM head leaves
    assert channel.events.count(("submit", first)) == rpcs
    assert channel.events.count(("submit", second)) == rpcs


def test_both_services_work_for_both_parts(saved_model: Models) -> None:
    model = saved_model("llama")
    channels: list[LoopbackChannel] = [Recording(model.directory) for _ in range(2)]
    model.tee("two-server", channels=channels, micro_batches=2).logits(token_ids(9))
    one, two = (c.events for c in channels if isinstance(c, Recording))
    assert one == two
    assert one[:4] == [("submit", 4), ("wait", 4), ("submit", 4), ("submit", 5)]


def test_one_part_waits_before_it_goes_on(saved_model: Models) -> None:
    """Guards the tests above."""
    model = saved_model("llama")
    channel = Recording(model.directory)
    model.tee("attention-in-tee", channels=[channel]).logits(token_ids(9))
    assert channel.events == [("submit", 9), ("wait", 9)] * 12


# --------------------------------------------------------------------------------- pads


def _noting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Note for every row that gets a pad: whose lane, the pad's index, the operator's site."""
    used: list[tuple[int, int, int]] = []
    draw = PadLane.draw

    def drawn(lane: PadLane, site: int, rows: int) -> Factors | None:
        factors = draw(lane, site, rows)
        if factors is not None:
            assert lane._indices is not None
            used.extend((id(lane), index, site) for index in lane._indices[:rows])
        return factors

    monkeypatch.setattr(PadLane, "draw", drawn)
    return used


@pytest.mark.parametrize("name", ["shielded", "shielded-prefill"])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_no_two_parts_get_the_same_pad(
    saved_model: Models, name: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = _noting(monkeypatch)
    tee = saved_model("llama").tee(name, micro_batches=micro_batches)
    requests = [(token_ids(1 + seed % 3, seed), 7) for seed in range(15)]
    _run(tee.engine(), requests)
    assert len({lane for lane, _, _ in used}) == micro_batches
    pads = [(index, site) for _, index, site in used]
    assert len(pads) == len(set(pads)) > 500


def _stock(tee: Tee, tokens: int) -> None:
    """Make pads for so many tokens."""
    (pads,) = tee.assembly.pads.values()
    assert pads._maker is not None
    pads._maker.fill(pads._store, tokens)


# Of nine sequences, a token each.
ONE_EACH = [(token_ids(1, seed=s), 4) for s in range(9)]


@pytest.fixture(scope="module")
def in_the_clear(saved_model: Models) -> tuple[list[list[int]], list[torch.Tensor]]:
    return _run(saved_model("llama").tee("quantized-clear").engine(), ONE_EACH)


@pytest.mark.each_value
@pytest.mark.parametrize("tokens", range(0, 40, 3))
@pytest.mark.parametrize("when_out", ["wait", "tee"])
def test_pads_that_end_in_the_middle_of_a_step_change_no_bit(
    saved_model: Models,
    in_the_clear: tuple[list[list[int]], list[torch.Tensor]],
    when_out: WhenOut,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One part has pads and another has none: it is computed in the TEE, or waited for."""
    used = _noting(monkeypatch)
    model, (expected_tokens, expected) = saved_model("llama"), in_the_clear
    tee = model.tee("shielded-prefill", micro_batches=2, when_out=when_out)
    (pads,) = tee.assembly.pads.values()
    if tokens:
        _stock(tee, tokens)
    found_tokens, found = _run(tee.engine(), ONE_EACH)
    assert found_tokens == expected_tokens
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    drawn = [(index, site) for _, index, site in used]
    assert len(drawn) == len(set(drawn))
    if when_out == "tee":
        # Parts of four and five rows, four times: what is left when neither fits stays.
        assert pads._store.available < 4 or len(drawn) == 13 * 36
        assert len(drawn) == 13 * (tokens - pads._store.available)
        assert (pads.in_tee > 0) == (tokens < 36)
    else:
        assert (len(drawn), pads.in_tee) == (13 * 36, 0)


@pytest.mark.parametrize("tokens", [0, 9, 28, 29])
def test_a_prompt_without_pads_for_all_of_its_rows_is_computed_here_to_the_same_bits(
    saved_model: Models, tokens: int
) -> None:
    model, ids = saved_model("llama"), token_ids(29)
    _, expected = _run(model.tee("quantized-clear").engine(), [(ids, 1)])
    tee = model.tee("shielded-prefill", micro_batches=2, when_out="tee")
    (pads,) = tee.assembly.pads.values()
    if tokens:
        _stock(tee, tokens)
    _, found = _run(tee.engine(), [(ids, 1)])
    assert torch.equal(found[0], expected[0])
    assert (pads.in_tee, pads._store.available) == ((0, 0) if tokens == 29 else (1, tokens))
    assert bool(tee.channels[0].requests) == (tokens == 29)


def test_pads_that_are_out_end_the_step_before_anything_is_sent(saved_model: Models) -> None:
    """Though one of its parts would have had enough."""
    model, ids = saved_model("llama"), token_ids(9)
    tee = model.tee("shielded-prefill", micro_batches=2, when_out="fail")
    engine = tee.engine()
    sequence = engine.add(ids, max_new_tokens=3, eos_token_ids=frozenset())
    _stock(tee, 6)
    with pytest.raises(PadsExhaustedError):
        engine.step()
    assert tee.channels[0].requests == []
    assert (sequence.cache.length, sequence.token_ids) == (0, [])
    _stock(tee, 30)
    while engine.running:
        engine.step()
    assert sequence.token_ids == model.tee("quantized-clear", micro_batches=2).greedy(ids, 3)


# --------------------------------------------------------------------------------- failures


class Failing(LoopbackChannel):
    """Loses one request, or its reply."""

    fail_at: int | None = None
    lost = ""

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        if self.lost == "request":
            self._lose(len(self.requests))
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        exchange = super().wait(request_id)
        if self.lost == "reply":
            self._lose(request_id - 1)
        return exchange

    def _lose(self, number: int) -> None:
        if number == self.fail_at:
            self.fail_at = None
            raise DeadlineExceededError("loopback", got="no reply", expected="one")


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("name", ["tsqp", "attention-in-tee", "shielded-prefill", "two-server"])
def test_a_step_in_parts_that_failed_at_any_rpc_can_be_repeated(
    saved_model: Models, name: str, lost: str
) -> None:
    """A wavefront that stopped anywhere: some layers hold rows of both parts, some of one."""
    policy, model = load_policy(name), saved_model("llama", num_hidden_layers=2)
    channels: list[LoopbackChannel] = [Failing(model.directory) for _ in range(policy.services)]
    tee = model.tee(policy, channels=channels, micro_batches=3)
    failing = channels[-1]
    assert isinstance(failing, Failing)
    failing.lost = lost

    def run(*, fails: bool) -> list[list[int]]:
        """Fail each step at its first RPC, then at its fourth, and so on to its end."""
        engine = tee.engine()
        sequences = [
            engine.add(token_ids(n, seed=n), max_new_tokens=3, eos_token_ids=frozenset())
            for n in (13, 3)
        ]
        fail_at = 0
        while engine.running:
            before = [(list(s.token_ids), s.cache.length) for s in sequences]
            begun = len(failing.requests)
            failing.fail_at = begun + fail_at if fails else None
            try:
                engine.step()
            except DeadlineExceededError:
                fail_at += 3
                assert [(list(s.token_ids), s.cache.length) for s in sequences] == before
                assert not any(channel.pending for channel in channels)
                continue
            assert not fails or 0 <= fail_at - (len(failing.requests) - begun) < 3
            fail_at = 0
        return [s.token_ids for s in sequences]

    assert run(fails=True) == run(fails=False)


class Spoiling(LoopbackChannel):
    """Answers one request with what is no number."""

    spoil_at: int | None = None

    def answer(self, request: Request) -> Response:
        reply = super().answer(request)
        if len(self.requests) - 1 != self.spoil_at or not isinstance(reply, TensorReply):
            return reply
        return TensorReply(output=from_torch(torch.full_like(to_torch(reply.output), torch.nan)))


@pytest.mark.parametrize("name", ["tsqp", "attention-in-tee"])
def test_what_a_spoiled_step_left_in_the_cache_is_not_looked_at(
    saved_model: Models, name: str
) -> None:
    """Its rows stand where a repeated step's will, and must not pass for them."""
    model = saved_model("llama", num_hidden_layers=2)

    def run(spoil_at: int | None) -> tuple[list[list[int]], int, bool]:
        channel = Spoiling(model.directory)
        engine = model.tee(name, channels=[channel], micro_batches=2).engine()
        sequences = [
            engine.add(token_ids(n, seed=n), max_new_tokens=2, eos_token_ids=frozenset())
            for n in (1, 13)
        ]
        channel.spoil_at = spoil_at
        spoiled = False
        try:
            engine.step()
        except ReplyError:
            spoiled = True
        rpcs = len(channel.requests)
        while engine.running:
            engine.step()
        return [sequence.token_ids for sequence in sequences], rpcs, spoiled

    expected, rpcs, _ = run(None)
    spoiled = 0
    for spoil_at in range(rpcs):
        tokens, _, failed = run(spoil_at)
        assert tokens == expected, f"after a spoiled RPC {spoil_at}"
        spoiled += failed
    # All but what the last layer computes for rows whose logits nobody wants.
    assert rpcs - 8 <= spoiled <= rpcs


def test_parts_are_not_smaller_than_is_worth_it() -> None:
    """What the numbers of rows above were chosen for."""
    assert MIN_MICRO_BATCH_ROWS == 4
