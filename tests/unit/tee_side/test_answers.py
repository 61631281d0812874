"""Results that are refused: who is asked again, for how long, and who is asked no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import (
    ActivationRangeError,
    DeadlineExceededError,
    MaskError,
    ModelError,
    ReplyError,
    TsqpError,
    VerificationError,
)
from protocol.messages import Request
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.shares import Shares
from tee_side.protect.sites import FloatSites
from tee_side.remote.overlap import run
from tee_side.words import Operator
from tests.kit.fakes import (
    ARGUMENTS,
    Change,
    ChangingChannel,
    Models,
    OneSite,
    remote_under,
)
from tests.kit.model import LoopbackChannel
from tsqp.lab.research.row_mix import RowMix


class Refuses:
    """A `ResultCheck` to which no result is right.

    `disk`: the error that looking for liars meets; `found`: whom it finds.
    """

    def __init__(self, disk: TsqpError | None = None, found: Sequence[int] = (0,)) -> None:
        self._disk = disk
        self._found = list(found)

    def holds(self, *_: Any) -> bool:
        return False

    def find(self, is_over: Callable[[], bool]) -> list[int]:
        """Stands for `find_liars`."""
        if self._disk is not None:
            raise self._disk
        if is_over():
            raise DeadlineExceededError("finding out", got="the end", expected="time")
        return self._found


@pytest.fixture(autouse=True)
def liars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no result is right, let its check say who computed wrongly."""

    def find(_answers: Sequence[Any], check: Refuses, is_over: Callable[[], bool]) -> list[int]:
        return check.find(is_over)

    monkeypatch.setattr("tee_side.remote.fault_attribution.find_liars", find)


class Slow(ChangingChannel):
    """Takes ten seconds a reply, of a clock that the test has, and stands for many services."""

    def __init__(self, directory: Path, change: Change, clock: SimpleNamespace) -> None:
        super().__init__(directory, change)
        self._clock = clock
        self.given: list[float | None] = []
        self.distrusted: list[TsqpError] = []

    def submit(self, request: Request, timeout_s: float | None = None, **_: Any) -> int:
        """Note how long it may take."""
        self.given.append(timeout_s)
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        """Let time pass."""
        self._clock.now += 10.0
        return super().wait(request_id)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """There is always somebody else."""
        self.distrusted.append(error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The only clock that a deadline is counted by."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr("tee_side.remote.call.time", found)
    monkeypatch.setattr("tee_side.remote.fault_attribution.time", found)
    return found


@pytest.mark.parametrize("operator", ["o_proj", "lm_head"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [(lambda y: y[:-1], ReplyError), (lambda y: y, VerificationError)],
    ids=["wrong form", "wrong result"],
)
def test_liars_share_one_deadline(
    saved_model: Models,
    clock: SimpleNamespace,
    operator: Operator,
    change: Change,
    expected: type[TsqpError],
) -> None:
    """However many there are; the first has the channel's own, which costs nothing to say."""
    model = saved_model("llama")
    channel = Slow(model.directory, change, clock)
    settings: dict[str, Any] = {"check": Refuses(), "timeout_s": 25.0}
    remote = remote_under(model, [channel], None, **settings)
    with pytest.raises(expected) as caught:
        run(getattr(remote, operator)(*ARGUMENTS[operator][0]))
    assert channel.given == [None, 15.0, 5.0]
    # Whoever was the last is barred before there is no time for another.
    assert len(channel.distrusted) == 3
    assert caught.value is channel.distrusted[-1]


def test_a_deadline_begins_anew_with_each_operator(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    remote = remote_under(model, [channel], None, timeout_s=25.0)
    for _ in range(4):
        run(remote.o_proj(0, torch.ones(3, 96)))
    assert channel.given == [None] * 4


def test_modules_that_travel_alone_share_a_deadline(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    """Also where all is well: it is the operator that has it, and not each request."""
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    remote = remote_under(model, [channel], None, one_rpc_per_module=True, timeout_s=25.0)
    run(remote.linear(0, "qkv_proj", torch.ones(3, 48)))
    assert channel.given == [None, 15.0, 5.0]


def test_nothing_is_asked_for_without_any_time(saved_model: Models, clock: SimpleNamespace) -> None:
    """Whoever got it would be taken for lost, and is not."""
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    remote = remote_under(model, [channel], None, one_rpc_per_module=True, timeout_s=20.0)
    with pytest.raises(DeadlineExceededError, match="qkv_proj: got the end of its time"):
        run(remote.linear(0, "qkv_proj", torch.ones(3, 48)))
    assert channel.given == [None, 10.0]


def test_modules_that_travel_alone_share_what_is_left_of_a_deadline(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    rows = iter([2])
    channel = Slow(model.directory, lambda y: y[: next(rows, 3)], clock)
    remote = remote_under(model, [channel], None, one_rpc_per_module=True, timeout_s=45.0)
    run(remote.linear(0, "qkv_proj", torch.ones(3, 48)))
    assert channel.given == [None, 35.0, 25.0, 15.0]


def test_without_a_limit_each_has_the_channels_own_deadline(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    rows = iter([2, 2, 2])
    channel = Slow(model.directory, lambda y: y[: next(rows, 3)], clock)
    run(remote_under(model, [channel], None).linear(0, "o_proj", torch.ones(3, 96)))
    assert channel.given == [None] * 4


def test_where_weights_cannot_be_read_again_everybody_is_barred(
    saved_model: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A liar that can also spoil the disk must not get away, and the run must not go on."""
    model = saved_model("llama")

    class Last(LoopbackChannel):
        distrusted: TsqpError | None = None

        def distrust(self, exchange: Exchange, error: TsqpError) -> None:
            self.distrusted = error
            raise error

    channels = [Last(model.directory), Last(model.directory)]
    disk = ModelError("model.safetensors", got="other bytes", expected="those of the manifest")
    remote = remote_under(
        model, list(channels), Shares(), sites=OneSite(torch.int32), check=Refuses(disk)
    )
    with pytest.raises(VerificationError, match="o_proj in layer 1 at loopback"):
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert [type(channel.distrusted) for channel in channels] == [VerificationError] * 2
    (record,) = [one for one in caplog.records if one.getMessage() == "liar_unknown"]
    assert record.fields == {  # type: ignore[attr-defined]
        "operator": "o_proj",
        "layer": 1,
        "detail": str(disk),
    }


def test_in_the_clear_the_only_answer_is_the_lie_and_nothing_is_read_for_it(
    saved_model: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was unmasked that could be wrong."""
    model = saved_model("llama")
    unread = ModelError("model.safetensors", got="a read", expected="none")
    remote = remote_under(
        model, [LoopbackChannel(model.directory)], None, check=Refuses(unread), timeout_s=60.0
    )
    with pytest.raises(VerificationError, match="o_proj in layer 1 at loopback"):
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert not caplog.records


def test_in_the_clear_several_answers_that_are_off_only_together_are_a_lie(
    saved_model: Models, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Each within its own room, all together beyond that of the result: nobody else can be it."""
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    settings: dict[str, Any] = {"check": Refuses(found=()), "one_rpc_per_module": True}
    remote = remote_under(model, [channel], None, timeout_s=31.0, **settings)
    with pytest.raises(DeadlineExceededError):  # while it is asked again
        run(remote.linear(1, "qkv_proj", torch.ones(1, 48)))
    assert [str(error) for error in channel.distrusted] == [
        "qkv_proj in layer 1 at loopback: got a wrong result,"
        " expected what the weights of the TEE's own model give"
    ] * 3
    assert not caplog.records


def test_under_a_mask_answers_that_are_right_are_the_masks_fault(
    saved_model: Models, clock: SimpleNamespace
) -> None:
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    remote = remote_under(
        model, [channel], RowMix(), sites=FloatSites({}), check=Refuses(found=()), timeout_s=30.0
    )
    with pytest.raises(MaskError, match="mask row-mix: o_proj in layer 1: got a wrong result"):
        run(remote.linear(1, "o_proj", torch.ones(3, 96)))
    assert not channel.distrusted


def test_what_our_own_mask_sent_and_nobody_can_compute_with_is_nobodys_lie(
    saved_model: Models, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Every honest service would be barred for it, one after another."""
    model = saved_model("llama")
    channel = Slow(model.directory, lambda y: y, clock)
    overflow = ActivationRangeError("input", got="a row that is not finite", expected="numbers")
    remote = remote_under(
        model, [channel], RowMix(), sites=FloatSites({}), check=Refuses(overflow), timeout_s=30.0
    )
    with pytest.raises(ActivationRangeError) as caught:
        run(remote.linear(1, "o_proj", torch.ones(3, 96)))
    assert caught.value is overflow
    assert not channel.distrusted
    assert not caplog.records


@pytest.mark.parametrize("mask", [Shares(), RowMix()], ids=["two shares", "one answer"])
def test_where_no_time_is_left_everybody_who_answered_is_named_and_barred(
    saved_model: Models, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture, mask: Mask
) -> None:
    """To find out who lied takes reading a weight: that is not begun after the deadline."""
    model = saved_model("llama")
    channels = [Slow(model.directory, lambda y: y, clock) for _ in range(mask.services)]
    names = ["tcp://a:1", "tcp://b:1"][: mask.services]
    for channel, name in zip(channels, names, strict=True):
        channel.endpoint = name
    dtype = torch.int32 if mask.arithmetic == "int8" else torch.float32
    remote = remote_under(
        model,
        list(channels),
        mask,
        sites=OneSite(dtype),
        check=Refuses(),
        timeout_s=10.0 * mask.services,
    )
    with pytest.raises(VerificationError) as caught:
        run(remote.linear(1, "o_proj", torch.ones(1, 96)))
    assert caught.value.where == f"o_proj in layer 1 at {' or '.join(names)}"
    assert [len(channel.distrusted) for channel in channels] == [1] * mask.services
    assert [one.getMessage() for one in caplog.records] == ["liar_unknown"]
