"""What every channel keeps of its requests: ids, one connection, the size of replies, waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ProtocolError
from protocol.messages import LMHeadRequest, TensorReply
from protocol.pending import PendingChannel, Received
from protocol.tensors import Buffer, from_torch
from tests.kit.rows import each_row
from tests.kit.wire import ScriptedChannel

LOST = "a lost connection while LMHead"


def _ask(elements: int = 4) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(torch.ones(elements)))


def _reply(request_id: int, elements: int = 4) -> list[Buffer]:
    output = TensorReply(output=from_torch(torch.zeros(elements)))
    return encode_reply(Form.FRAMED, request_id, "LMHead", output)


def _only_connection() -> ScriptedChannel:
    channel = ScriptedChannel()
    channel.use_one_connection()
    return channel


# ----------------------------------------------------------------------------------------- ids


def test_ids_begin_anywhere_and_go_on_from_there() -> None:
    firsts = set()
    for _ in range(64):
        channel = ScriptedChannel()
        ids = [channel.submit(_ask()) for _ in range(3)]
        assert ids == [open_request(list(frames), 2**20).request_id for frames in channel.sent]
        assert ids == [ids[0], ids[0] + 1, ids[0] + 2]
        assert 0 < ids[0] <= 2**62
        firsts.add(ids[0])
    assert len(firsts) == 64
    # All of the 62 bits are drawn.
    assert max(firsts) > 2**60


@each_row("id_of", [lambda n: n - 1, lambda n: n + 1, lambda _: ScriptedChannel().submit(_ask())])
def test_a_reply_to_what_was_never_sent_fits_nothing(id_of: Callable[[int], int]) -> None:
    """Such as one that was recorded in another session."""
    channel = ScriptedChannel()
    request_id = channel.submit(_ask())
    channel.script.append((_reply(id_of(request_id)), 1))
    with pytest.raises(ProtocolError, match=r"request id .* the id of a request that was sent"):
        channel.wait(request_id)


def test_the_first_of_two_replies_to_a_request_counts() -> None:
    channel = ScriptedChannel()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    error = encode_reply(Form.FRAMED, first, "LMHead", ErrorCode.INTERNAL)
    channel.script.extend([(_reply(first), 1), (error, 1), (_reply(second), 1)])
    channel.wait(second)
    assert isinstance(channel.wait(first).response, TensorReply)


# ------------------------------------------------------------------------------ sizes and times


def test_a_reply_larger_than_any_that_can_be_asked_for_is_refused() -> None:
    channel = ScriptedChannel()
    channel.limit_replies(500)
    first, second = channel.submit(_ask()), channel.submit(_ask())
    channel.script.extend([(_reply(first, 80), 1), (_reply(second, 120), 1)])
    channel.wait(first)
    with pytest.raises(ProtocolError, match=r"got 5\d\d bytes, expected at most 500") as caught:
        channel.wait(second)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    channel.limit_replies(10_000)  # it can only be lowered
    channel.script.append((_reply(channel.submit(_ask()), 120), 1))
    with pytest.raises(ProtocolError, match="at most 500"):
        channel.wait(channel._last_id)


def test_deadlines_do_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(10**9, -86_400)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
    channel = ScriptedChannel()
    request_id = channel.submit(_ask(), 3600)
    assert not channel.arrived(request_id)
    channel.script.append((_reply(request_id), 1))
    channel.wait(request_id)


# ---------------------------------------------------------------------------------- one connection


def test_with_one_connection_nothing_is_sent_over_another() -> None:
    channel = _only_connection()
    first = channel.submit(_ask())
    channel.script.append("lost")
    with pytest.raises(EndpointError, match=LOST):
        channel.wait(first)
    with pytest.raises(EndpointError, match="a lost connection before LMHead could be sent"):
        channel.submit(_ask())
    assert len(channel.sent) == 1


@each_row(
    ("noted", "after_ms", "taken"),
    # A connection cannot be replaced in less than 50 ms; over the same one any time will do.
    [(["unseen"], 49, True), (["unseen"], 51, False), ([], 10_000, True)],
)
def test_a_late_reply_that_may_have_come_over_another_connection_is_not_taken(
    noted: list[str], after_ms: int, taken: bool
) -> None:
    """ZeroMQ connects again by itself, and hands what is queued to whoever is there then."""
    channel = _only_connection()
    request_id = channel.submit(_ask())
    channel.script.extend([*noted, (_reply(request_id), after_ms)])
    if taken:
        channel.wait(request_id)
        return
    with pytest.raises(EndpointError, match=LOST):
        channel.wait(request_id)


@each_row("noted", ["unseen", "lost"])
def test_of_several_in_flight_none_is_answered_over_another_connection(noted: str) -> None:
    """Whichever of them is waited for, and whether the loss was noted before."""
    channel = _only_connection()
    early, waited_for, other = (channel.submit(_ask()) for _ in range(3))
    channel.script.extend([(_reply(early), 40), noted, (_reply(other), 60)])
    channel.script.append((_reply(waited_for), 60))
    asked = ((channel.wait, waited_for), (channel.arrived, other), (channel.wait, other))
    for ask, request_id in asked:
        with pytest.raises(EndpointError, match=LOST):
            ask(request_id)
    channel.wait(early)


def test_a_transport_that_makes_no_connection_by_itself_keeps_what_had_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = _only_connection()
    monkeypatch.setattr(ScriptedChannel, "_was_replaced", PendingChannel._was_replaced)
    first, second = channel.submit(_ask()), channel.submit(_ask())
    channel.script.extend(["lost", (_reply(second), 5000), (_reply(first), 5000)])
    for request_id in (first, second):
        channel.wait(request_id)


# -------------------------------------------------------------------------------------- waiting


def test_whether_a_reply_has_come_can_be_asked_without_waiting_for_it() -> None:
    channel = ScriptedChannel()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    assert not channel.arrived(first)
    channel.script.extend([(_reply(second), 1), (_reply(first), 1)])
    assert not channel.arrived(first)  # one message a look
    assert channel.arrived(second)
    assert channel.arrived(first, time.monotonic() + 60)
    channel.close()
    for request_id in (first, second):
        channel.wait(request_id)


def test_after_a_loss_what_came_before_it_is_looked_through_to_the_end() -> None:
    """Also by who only asks, and does not wait."""
    channel = ScriptedChannel()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    channel.script.extend(["lost", (_reply(first), 1), (_reply(second), 1)])
    assert [channel.arrived(second) for _ in range(3)] == [False, False, True]
    for request_id in (first, second):
        channel.wait(request_id)
    third = channel.submit(_ask())
    channel.script.append("lost")
    assert not channel.arrived(third)
    for ask in (channel.arrived, channel.arrived, channel.wait):
        with pytest.raises(EndpointError):
            ask(third)
    with pytest.raises(KeyError):
        channel.wait(third)


class FloodedChannel(ScriptedChannel):
    """Its peer goes on sending a reply that no request waits for, also after a loss."""

    taken = 0
    stale: list[Buffer] | None = None

    def _receive(self, deadline: float) -> Received | None:
        received = super()._receive(deadline)
        self.taken += received is not None
        assert self.taken < 100, "the deadline holds"
        if self.stale is not None and not self.script:
            self.script.append((self.stale, 1))
        return received


@each_row(
    ("script", "error", "said"),
    [
        (["lost"], EndpointError, "a lost connection"),
        ([], DeadlineExceededError, "no reply"),
    ],
)
def test_stale_replies_hold_no_caller_past_the_deadline(
    script: list[str], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    channel = FloodedChannel()
    given_up, request_id = channel.submit(_ask()), channel.submit(_ask(), 10)
    channel.abandon(given_up)
    channel.stale = _reply(given_up)
    channel.script.extend(script)
    with pytest.raises(error, match=said):
        channel.wait(request_id)
    # About two looks a second: it did not give up sooner either.
    assert 10 < channel.taken < 30
