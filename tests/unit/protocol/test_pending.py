"""What every channel keeps of its requests: ids, one connection, the size of replies, waiting."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from protocol.encoding import Reply
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ProtocolError
from protocol.messages import LMHeadRequest, TensorReply
from protocol.pending import OversizedRequestError, Pending, PendingChannel, Received
from protocol.prepared import PreparedRequest
from protocol.tensors import Buffer, from_torch

MILLISECOND_NS = 1_000_000


class ScriptedChannel(PendingChannel):
    """A transport that does what a test says. `script`: what `_receive` comes to, step by step.

    Frames are a message that arrives so many ms after the last request; "lost" is a connection that
    is lost, "unseen" one that is, and is noticed only by looking.
    """

    def __init__(self, max_message_bytes: int = 10_000) -> None:
        super().__init__("scripted", timeout_s=5.0, max_message_bytes=max_message_bytes)
        self.sent: list[int] = []
        self.script: deque[tuple[list[Buffer], int] | str] = deque()
        self.unseen = False
        self.sent_ns = 10**12

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._refuse_second_connection(method)
        opened = open_request([bytes(frame) for frame in frames], 2**20)
        self.sent.append(opened.request_id)
        self.patience_s = timeout_s
        return self.sent_ns

    def _receive(self, deadline: float) -> Received | None:
        if not self.script:
            return None
        step = self.script.popleft()
        if isinstance(step, str):
            self._connection += step == "lost"
            self.unseen |= step == "unseen"
            return self._receive(deadline) if step == "unseen" else None
        frames, after_ms = step
        views = [memoryview(bytearray(frame)) for frame in frames]
        return views, self.sent_ns + after_ms * MILLISECOND_NS

    def _was_replaced(self, connection: int) -> bool:
        self._connection += self.unseen
        self.unseen = False
        return self._connection != connection

    def close(self) -> None:
        pass


class Expecting(ScriptedChannel):
    """Waits for the replies to requests of one kind with these ids."""

    def __init__(self, prepared: PreparedRequest, ids: Iterable[int]) -> None:
        super().__init__()
        for request_id in ids:
            self._pending[request_id] = Pending(
                method=prepared.method, prepared=prepared, deadline=0.0, timeout_s=0.0, connection=0
            )

    def expected(self, frames: Sequence[memoryview]) -> Reply | None:
        """Return the reply if it is taken without being decoded."""
        return self._expected_reply(frames)


def _ask(elements: int = 4) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(torch.ones(elements)))


def _reply(request_id: int, elements: int = 4) -> list[Buffer]:
    output = TensorReply(output=from_torch(torch.zeros(elements)))
    return encode_reply(Form.FRAMED, request_id, "LMHead", output)


# ----------------------------------------------------------------------------------------- ids


def test_ids_begin_anywhere_and_go_on_from_there() -> None:
    firsts = set()
    for _ in range(64):
        channel = ScriptedChannel()
        ids = [channel.submit(_ask()) for _ in range(3)]
        assert ids == [ids[0], ids[0] + 1, ids[0] + 2] == channel.sent
        assert 0 < ids[0] <= 2**62
        firsts.add(ids[0])
    assert len(firsts) == 64
    # All of the 62 bits are drawn.
    assert max(firsts) > 2**60


def test_a_reply_that_was_recorded_in_another_session_fits_nothing() -> None:
    recorded = ScriptedChannel()
    old = _reply(recorded.submit(_ask()))
    channel = ScriptedChannel()
    request_id = channel.submit(_ask())
    channel.script.append((old, 1))
    with pytest.raises(ProtocolError, match="expected the id of a request that was sent"):
        channel.wait(request_id)


@pytest.mark.parametrize("offset", [0, 2])
def test_ids_before_the_first_and_after_the_last_were_never_sent(offset: int) -> None:
    channel = ScriptedChannel()
    request_id = channel.submit(_ask())
    channel.script.append((_reply(request_id - 1 + offset), 1))
    with pytest.raises(ProtocolError, match="got request id"):
        channel.wait(request_id)


# -------------------------------------------------------------------------------- size of replies


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


def test_a_request_of_our_own_that_is_too_large_is_another_error() -> None:
    channel = ScriptedChannel(max_message_bytes=500)
    with pytest.raises(OversizedRequestError, match="at most 500"):
        channel.submit(_ask(200))
    assert channel.sent == []


# ---------------------------------------------------------------------------------- one connection


def test_with_one_connection_nothing_is_sent_over_another() -> None:
    channel = ScriptedChannel()
    channel.use_one_connection()
    first = channel.submit(_ask())
    channel.script.append("lost")
    with pytest.raises(EndpointError, match="a lost connection while LMHead"):
        channel.wait(first)
    with pytest.raises(EndpointError, match="a lost connection before LMHead could be sent"):
        channel.submit(_ask())
    assert channel.sent == [first]


def test_a_late_reply_that_may_have_come_over_another_connection_is_not_taken() -> None:
    """ZeroMQ connects again by itself, and hands what is queued to whoever is there then."""
    for after_ms, taken in ((49, True), (51, False)):
        channel = ScriptedChannel()
        channel.use_one_connection()
        request_id = channel.submit(_ask())
        channel.script.extend(["unseen", (_reply(request_id), after_ms)])
        if taken:  # a connection cannot be replaced that fast
            channel.wait(request_id)
            continue
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.wait(request_id)


@pytest.mark.parametrize("noted", ["unseen", "lost"])
def test_of_several_in_flight_none_is_answered_over_another_connection(noted: str) -> None:
    """Whichever of them is waited for, and whether the loss was noted before."""
    channel = ScriptedChannel()
    channel.use_one_connection()
    early, waited_for, other = (channel.submit(_ask()) for _ in range(3))
    channel.script.extend([(_reply(early), 40), noted, (_reply(other), 60)])
    channel.script.append((_reply(waited_for), 60))
    with pytest.raises(EndpointError, match="a lost connection while LMHead"):
        channel.wait(waited_for)
    with pytest.raises(EndpointError, match="a lost connection while LMHead"):
        channel.arrived(other)
    with pytest.raises(EndpointError, match="a lost connection while LMHead"):
        channel.wait(other)
    channel.wait(early)


def test_a_transport_that_makes_no_connection_by_itself_keeps_what_had_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = ScriptedChannel()
    monkeypatch.setattr(ScriptedChannel, "_was_replaced", PendingChannel._was_replaced)
    channel.use_one_connection()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    channel.script.extend(["lost", (_reply(second), 5000), (_reply(first), 5000)])
    for request_id in (first, second):
        channel.wait(request_id)


def test_a_late_reply_over_the_same_connection_is_taken() -> None:
    channel = ScriptedChannel()
    channel.use_one_connection()
    request_id = channel.submit(_ask())
    channel.script.append((_reply(request_id), 10_000))
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
    assert channel.arrived(first)
    channel.close()
    for request_id in (first, second):
        channel.wait(request_id)


def test_asking_notices_a_loss_and_leaves_it_to_waiting() -> None:
    channel = ScriptedChannel()
    request_id = channel.submit(_ask())
    channel.script.append("lost")
    assert not channel.arrived(request_id)
    for _ in range(2):
        with pytest.raises(EndpointError):
            channel.arrived(request_id)
    with pytest.raises(EndpointError):
        channel.wait(request_id)
    with pytest.raises(KeyError):
        channel.wait(request_id)


class FloodedChannel(ScriptedChannel):
    """Its connection is lost, and its peer goes on sending a reply that nobody waits for."""

    def _receive(self, deadline: float) -> Received | None:
        received = super()._receive(deadline)
        self.taken += received is not None
        assert self.taken < 100, "the deadline holds"
        if self.stale is not None and not self.script:
            self.script.append((self.stale, 1))
        return received

    taken = 0
    stale: list[Buffer] | None = None


@pytest.mark.parametrize("lost", [True, False])
def test_stale_replies_do_not_hold_anybody_past_the_deadline(
    lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    channel = FloodedChannel()
    given_up, request_id = channel.submit(_ask()), channel.submit(_ask(), 10)
    channel.abandon(given_up)
    channel.stale = _reply(given_up)
    if lost:
        channel.script.append("lost")
    error, message = (EndpointError, "a lost connection") if lost else (None, "no reply")
    with pytest.raises(error or DeadlineExceededError, match=message):
        channel.wait(request_id)
    # About two looks a second: it did not give up sooner either.
    assert 10 < channel.taken < 30


def test_after_a_loss_what_came_before_it_is_looked_through_to_the_end() -> None:
    """Also by who only asks, and does not wait."""
    channel = ScriptedChannel()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    channel.script.extend(["lost", (_reply(first), 1), (_reply(second), 1)])
    assert [channel.arrived(second) for _ in range(3)] == [False, False, True]
    for request_id in (first, second):
        channel.wait(request_id)


def test_sending_may_be_given_less_time_than_the_whole() -> None:
    channel = ScriptedChannel()
    for given, expected in ((None, 5.0), (0.25, 0.25), (9.0, 5.0)):
        channel.submit(_ask(), send_within_s=given)
        assert channel.patience_s == expected


def test_deadlines_do_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(10**9, -86_400)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 10**9)
    channel = ScriptedChannel()
    request_id = channel.submit(_ask(), 3600)
    assert not channel.arrived(request_id)
    channel.script.append((_reply(request_id), 1))
    channel.wait(request_id)


def test_the_first_of_two_replies_to_a_request_counts() -> None:
    channel = ScriptedChannel()
    first, second = channel.submit(_ask()), channel.submit(_ask())
    error = encode_reply(Form.FRAMED, first, "LMHead", ErrorCode.INTERNAL)
    channel.script.extend([(_reply(first), 1), (error, 1), (_reply(second), 1)])
    channel.wait(second)
    assert isinstance(channel.wait(first).response, TensorReply)
