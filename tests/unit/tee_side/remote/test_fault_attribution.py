"""Results that are refused: which services are asked no more, and for how long others are."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product, repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from protocol import native
from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    MaskError,
    ModelError,
    ReplyError,
    TsqpError,
    VerificationError,
)
from protocol.integer import ring_product
from protocol.messages import Request, RingLinearRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.prepared import Exchange, PreparedRequest
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import Policy, load_policy
from tee_side.protect import masking
from tee_side.protect.masks.mask import Mask, Pad
from tee_side.protect.randomness import Randomness
from tee_side.protect.recomputation import Claim, rows_of_part
from tee_side.protect.sites import IntegerSites, Weights
from tee_side.protect.verification import ExactCheck, LinearCheck
from tee_side.remote import fault_attribution
from tee_side.remote.call import run
from tee_side.remote.fault_attribution import Refused, find_liars, refuse
from tee_side.words import Operator, Site
from tests.kit.fakes import World
from tests.kit.lie import Change, Lying
from tests.kit.model import CLEAR, Models, SavedModel, policy_of
from tests.kit.rows import each_row
from tsqp.lab.research.row_masks import RowMix

compiled_only = pytest.mark.skipif(native.library is None, reason="no compiled kernels")


@pytest.fixture(scope="module")
def model(saved_model: Models) -> SavedModel:
    return saved_model("llama")


def _verified(operator: Operator, mask: Mask | None = None, **settings: Any) -> Policy:
    placed = CLEAR | {"mask": mask or "none", "verify": "freivalds"}
    arithmetic = mask.arithmetic if mask else "float"
    return policy_of({operator: placed}, arithmetic=arithmetic, **settings)


class Slow(Lying):
    """Takes ten seconds a reply, of a clock that the test has, and stands for many services."""

    def __init__(
        self, model: SavedModel, clock: SimpleNamespace, change: Change, **more: Any
    ) -> None:
        super().__init__(model.directory, change, others=True, **more)
        self._clock = clock
        self.given: list[float | None] = []

    def submit(self, request: Request, timeout_s: float | None = None, **_: Any) -> int:
        self.given.append(timeout_s)
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        self._clock.now += 10.0
        return super().wait(request_id)

    def answer(self, request: Request) -> Any:
        self.told, self.distrusted = [*getattr(self, "told", []), *self.distrusted], []
        return super().answer(request)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only clock that a deadline is counted by."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    for module in ("call", "fault_attribution"):
        monkeypatch.setattr(f"tee_side.remote.{module}.time", found)
    return found


def _call(
    model: SavedModel,
    policy: Policy,
    channels: Sequence[Any],
    operator: Any = "o_proj",
    timeout_s: float | None = None,
) -> torch.Tensor:
    tee = model.tee(policy, channels=list(channels))
    lane, *_ = tee.assembly.lanes(lambda _layer: list(channels), timeout_s=timeout_s or math.inf)
    size = 96 if operator == "o_proj" else 48
    found = getattr(lane.tables["decode", "dealers"], operator)
    return run((found if operator == "lm_head" else found[1])(torch.ones(3, size)))


@each_row(
    ("operator", "change", "at", "timeout_s", "given", "raised"),
    [
        # However many liars there are; the first has the channel's own, which costs nothing to say.
        ("o_proj", lambda y: y[:-1], None, 25.0, [None, 15.0, 5.0], ReplyError),
        ("o_proj", lambda y: -y, None, 25.0, [None, 15.0, 5.0], VerificationError),
        ("lm_head", lambda y: -y, None, 25.0, [None, 15.0, 5.0], VerificationError),
        # Also where all is well: it is the operator that has it, and not each request.
        ("qkv_proj", lambda y: y, -1, 25.0, [None, 15.0, 5.0], None),
        ("qkv_proj", lambda y: y[:2], 0, 45.0, [None, 35.0, 25.0, 15.0], None),
        # A service that got a request without any time would be taken for lost, and is not.
        ("qkv_proj", lambda y: y, -1, 20.0, [None, 10.0], DeadlineExceededError),
        # Without a limit each has the channel's own.
        ("o_proj", lambda y: y[:2], 0, None, [None, None], None),
        ("qkv_proj", lambda y: y, -1, None, [None, None, None], None),
    ],
)
def test_all_requests_of_an_operator_share_one_deadline(
    model: SavedModel,
    clock: SimpleNamespace,
    operator: Operator,
    change: Change,
    at: int | None,
    timeout_s: float | None,
    given: list[float | None],
    raised: type[TsqpError] | None,
) -> None:
    channel = Slow(model, clock, change, at=at)
    policy = _verified(operator, one_rpc_per_module=operator == "qkv_proj")
    if raised is None:
        _call(model, policy, [channel], operator, timeout_s)
    else:
        with pytest.raises(raised) as caught:
            _call(model, policy, [channel], operator, timeout_s)
    assert channel.given == given
    if raised in (ReplyError, VerificationError):
        # Each is barred before there is no time for another.
        told = [*channel.told, *channel.distrusted]
        assert len(told) == 3
        assert caught.value is told[-1][1]


class Lending(Lying):
    def wait(self, request_id: int) -> Exchange:
        return replace(super().wait(request_id), lent=True)


@compiled_only
@pytest.mark.parametrize("looks", [1, 2])
def test_a_service_that_puts_right_what_was_refused_is_asked_no_more(
    model: SavedModel, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """It writes where a reply is read: behind the first look, or behind that at the copy."""
    channel, seen = Lending(model.directory, lambda y: y + 1), list[torch.Tensor]()
    decode = masking.compiled.decode

    def looked(y_TO: torch.Tensor, *others: Any) -> torch.Tensor | None:
        found = decode(y_TO, *others)
        seen.append(y_TO)
        if len(seen) == looks:
            seen[0].sub_(1)
        return found

    monkeypatch.setattr(masking.compiled, "decode", looked)
    with pytest.raises(VerificationError, match="at loopback: got a wrong result"):
        _call(model, load_policy("shielded"), [channel])
    assert (len(seen), len(channel.distrusted)) == (2, 1)


@each_row(
    ("lent", "barred"),
    [((True, False), ["a"]), ((False, True), ["b"]), ((True, True), ["a", "b"])],
)
def test_of_what_was_put_right_nobody_is_suspected_who_could_not_change_it(
    model: SavedModel, lent: Sequence[bool], barred: list[str]
) -> None:
    """A service cannot lay on a dealer what it has written over, nor a dealer on a service."""
    request, output, _ = _claim(model)
    prepared = PreparedRequest(request, tuple(output.shape), "int32")
    sent, told = to_torch(request.elements), list[str]()  # type: ignore[union-attr]
    channels = [Mock(distrust=lambda exchange, _: told.append(exchange.endpoint)) for _ in "ab"]
    exchanges = [
        Exchange(endpoint=name, output=output, lent=one)
        for name, one in zip("ab", lent, strict=True)
    ]
    check, until = _check(model, held=False), fault_attribution.time.monotonic() + 60.0
    named = {"mask": "", "in_the_clear": False, "check": check, "until": until, "changed": True}
    refuse(Refused("gate_up_proj", 1, channels, **named), [prepared], [sent, sent], exchanges)
    assert told == barred


OVERFLOW = ActivationRangeError("input", got="a row that is not finite", expected="numbers")
DISK = ModelError("model.safetensors", got="other bytes", expected="those of the manifest")
LATE = DeadlineExceededError("finding out", got="the end", expected="time")
BOTH = "o_proj in layer 1 at tcp://a:1 or tcp://b:1"


@each_row(
    ("mask", "found", "raised", "where", "barred", "logged"),
    [
        # A liar that can also spoil the disk must not get away, and the run must not go on.
        (Pad(pads="dealt"), DISK, VerificationError, BOTH, 2, True),
        # To find out takes reading a weight: that is not begun after the deadline.
        (Pad(pads="dealt"), LATE, VerificationError, BOTH, 2, True),
        (RowMix(), LATE, VerificationError, "o_proj in layer 1 at tcp://a:1", 1, True),
        # In the clear the only answer is the lie, and nothing is read for it.
        (None, DISK, VerificationError, "o_proj in layer 1 at tcp://a:1", 1, False),
        # Of several in the clear, each within its own room: they are off together.
        (None, [], VerificationError, "qkv_proj in layer 1 at tcp://a:1", 3, False),
        # Under a mask answers that are right are the mask's fault.
        (RowMix(), [], MaskError, "mask row-mix: o_proj in layer 1", 0, False),
        # What our own mask sent, and no service can compute with, is no lie of one.
        (RowMix(), OVERFLOW, ActivationRangeError, "input", 0, False),
    ],
)
def test_what_cannot_be_found_out_spares_no_liar_and_what_is_ours_bars_no_service(
    model: SavedModel,
    mask: Mask | None,
    found: TsqpError | list[int],
    raised: type[TsqpError],
    where: str,
    barred: int,
    logged: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.clear()
    told: list[TsqpError] = []

    def distrust(_: Exchange, error: TsqpError) -> None:
        told.append(error)
        if len(told) == barred:
            raise error

    channels = [Lying(model.directory, lambda y: -y, at=None) for _ in range(2)]
    for channel, name in zip(channels, ("tcp://a:1", "tcp://b:1"), strict=True):
        channel.endpoint = name
        channel.distrust = distrust  # type: ignore[method-assign]
    alone = where.startswith("qkv_proj")
    operator: Operator = "qkv_proj" if alone else "o_proj"
    policy = _verified(operator, mask, one_rpc_per_module=alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_attribution, "find_liars", Mock(side_effect=repeat(found)))
        with pytest.raises(raised) as caught:
            _call(model, policy, channels, operator)
    assert caught.value.where == where
    assert len(told) == barred
    assert [one.getMessage() for one in caplog.records] == ["liar_unknown"] * logged
    for record in caplog.records:
        fields = {"operator": "o_proj", "layer": 1, "detail": str(found)}
        assert record.fields == fields  # type: ignore[attr-defined]


GATE_UP: Site = (1, "gate_up_proj")
MODULES: Any = ("gate_proj", "up_proj")


def _check(model: SavedModel, *, held: bool) -> LinearCheck:
    config, checkpoint = read_config(model.directory), Checkpoint(model.directory)
    integers = IntegerSites(config, checkpoint, {}, torch.float32)
    found = integers.weights(GATE_UP)
    if held:
        integers.held[GATE_UP] = found
    weights = Weights(config, checkpoint, torch.float32, integers)
    return LinearCheck(ExactCheck.draw(found.weight, Randomness()), weights, GATE_UP)


def _claim(model: SavedModel, names: tuple[Any, ...] = MODULES, seed: int = 1) -> Claim:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (5, 48), dtype=torch.int32, generator=generator)
    request = RingLinearRequest(layer_idx=1, module_names=names, elements=from_torch(x))
    integers = _check(model, held=True).weights.integers
    assert integers is not None
    weight = integers.held[GATE_UP]
    parts = [weight.weight[weight.rows[module]] for module in names]
    return Claim(request, ring_product(x, torch.cat(parts)))


@pytest.mark.parametrize(
    ("left_s", "said"), [(60.0, " in the columns of rank 3 of 4, counted from 0"), (-1.0, "")]
)
def test_the_rank_that_computed_wrongly_is_named(
    model: SavedModel, world: World, left_s: float, said: str
) -> None:
    world.add("a", ranks=4)
    request, output, _ = _claim(model)
    output[2, 190] += 3
    prepared = PreparedRequest(request, tuple(output.shape), "int32")
    exchange, sent = Exchange(endpoint="a", output=output), to_torch(request.elements)  # type: ignore[union-attr]
    until, check = fault_attribution.time.monotonic() + left_s, _check(model, held=False)
    channels = [world.replicas("a")]
    refused = Refused("gate_up_proj", 1, channels, "", in_the_clear=True, check=check, until=until)
    with pytest.raises(VerificationError) as caught:
        refuse(refused, [prepared], [sent], [exchange])
    assert caught.value.got == f"a wrong result{said}"


@each_row(("held", "multiplications"), product((True, False), (1, 5 * 48 * 7, 2**31)))
def test_every_element_counts_however_the_weight_is_cut(
    model: SavedModel, held: bool, multiplications: int
) -> None:
    check = _check(model, held=held)
    answers = [_claim(model, names, seed) for seed, names in enumerate((MODULES, MODULES[1:]))]
    request, output, _ = _claim(model)
    # 96 columns each of gate and up, in three parts: 0-31, 32-63 and 64-95 of either.
    parts = [Claim(request, output, (part, 3)) for part in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_attribution, "_MULTIPLICATIONS", multiplications)
        assert find_liars([*answers, *parts], check, lambda: False) == []
        for liar, (_, of_liar, _) in enumerate(answers):
            for column in (0, 6, 7, 95, 96, 97, 191)[: 7 - 3 * liar]:
                of_liar[4, column] += 1
                assert find_liars(answers, check, lambda: False) == [liar]
                of_liar[4, column] -= 1
        for column, liar in ((0, 0), (31, 0), (32, 1), (95, 2), (96, 0), (160, 2), (191, 2)):
            output[4, column] += 1
            assert find_liars(parts, check, lambda: False) == [liar]
            output[4, column] -= 1
        shares = [_claim(model, seed=seed) for seed in (5, 6)]
        for liars in ([1], [0, 1]):
            shares[liars[0]].output[4, 6] += 1
            assert find_liars(shares, check, lambda: False) == liars


def test_a_part_of_a_weight_has_its_rows_of_every_block() -> None:
    weight = torch.arange(8)[:, None]
    blocks = [(slice(0, 3), weight[:3]), (slice(3, 8), weight[3:])]
    checkpoint: Any = SimpleNamespace(blocks=lambda _name, _shape: blocks)
    for count in (1, 2, 8):
        parts = [rows_of_part(checkpoint, "w", (8, 1), (part, count)) for part in range(count)]
        assert torch.equal(torch.cat([rows for part in parts for _, rows in part]), weight)


def test_finding_out_ends_at_the_next_block_once_the_time_is_up(model: SavedModel) -> None:
    """No weight is read after that, and none is multiplied: large ones take seconds."""
    check, claim = _check(model, held=False), _claim(model)
    blocks, read = Checkpoint.blocks, list[Any]()
    for looks in range(3):
        read.clear()
        said = iter([False] * looks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fault_attribution, "_MULTIPLICATIONS", 1)
            patch.setattr(Checkpoint, "blocks", lambda *a: read.append(a) or blocks(*a))
            with pytest.raises(DeadlineExceededError, match="finding out which service computed"):
                find_liars([claim], check, lambda said=said: next(said, True))
        assert next(said, None) is None
        assert len(read) == (looks > 0)
