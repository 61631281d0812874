"""Signs of life on a stream: what a client asks, when, and what it makes of silence."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from protocol import liveness, stream
from protocol.errors import EndpointError
from protocol.liveness import PROBE, PROBE_AFTER_S, LivenessProbe
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch
from tests.kit.rows import each_row
from tests.kit.wire import LARGE, accepted

Probe = tuple[LivenessProbe, socket.socket]


@pytest.fixture
def pair() -> Iterator[Probe]:
    """Return a probe that has asked once, and the service's end, which never blocks."""
    ours, theirs = socket.socketpair()
    probe = LivenessProbe(ours)
    with theirs:
        theirs.setblocking(False)
        yield probe, theirs
    probe.close()


def _asked(service: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return service.recv(10)
    return b""


def _waits(probe: LivenessProbe, waited_s: float) -> int:
    """Return how often a probe says that the service lives, of waits in vain for so long."""
    count = 0
    while probe.is_alive(waited_s):
        count += 1
        assert count < 100, "for ever"
    return count


@each_row("answer_to", [0, 1])
def test_a_service_that_stops_just_after_an_answer_is_noticed_in_time(answer_to: int) -> None:
    """Within the promised two seconds; of waits, by the channel's slices. It answers no others."""
    ours, theirs = socket.socketpair()
    with theirs:
        probe = LivenessProbe(ours)
        if answer_to:
            theirs.send(theirs.recv(10))
        else:
            theirs.send(PROBE)  # to one that was never asked
            assert probe.is_alive(PROBE_AFTER_S)
        waited_s = PROBE_AFTER_S * (1 + _waits(probe, PROBE_AFTER_S))
        assert 3 * PROBE_AFTER_S <= waited_s <= 2.0 - 0.7
        probe.close()


def test_it_asks_again_after_a_wait_where_it_was_answered_and_not_before(pair: Probe) -> None:
    probe, service = pair
    for _ in range(5):
        # One question at a time, however long it waits.
        assert _asked(service) == PROBE
        assert probe.is_alive(PROBE_AFTER_S)
        assert _asked(service) == b""
        service.send(PROBE)
        assert probe.is_alive(PROBE_AFTER_S)
    service.send(_asked(service))
    assert probe.is_alive(PROBE_AFTER_S / 2)
    assert _asked(service) == b""
    # A client that was stopped itself finds the answer when it goes on.
    assert probe.is_alive(100 * PROBE_AFTER_S)
    assert _asked(service) == PROBE
    assert _waits(probe, PROBE_AFTER_S) == 2


def test_a_closed_connection_is_no_sign_of_life(pair: Probe) -> None:
    probe, service = pair
    service.send(_asked(service))
    assert probe.is_alive(0.01)
    service.close()
    # At once, whenever the next question were due.
    assert not probe.is_alive(0.01)
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        LivenessProbe(ours)


HALF = b"".join(to_pieces([bytes(2**20)])[0])[:150_000]
LARGE_REQUEST = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))
QUICK_S = 0.03


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a silent service up ten times as soon."""
    for module in (liveness, stream):
        monkeypatch.setattr(module, "PROBE_AFTER_S", QUICK_S)
    monkeypatch.setattr(liveness, "_ANSWER_WITHIN_S", 3 * QUICK_S)


@pytest.mark.usefixtures("quick_probes")
def test_a_service_that_never_lets_in_is_noticed_and_leaves_nothing(
    listening: socket.socket, endpoint: str
) -> None:
    with StreamChannel(endpoint, timeout_s=3600) as channel:
        files = sorted(os.listdir("/proc/self/fd"))
        ids = [channel.submit(InitRequest()) for _ in range(2)]
        for request_id in ids:
            with pytest.raises(EndpointError, match="a lost connection while Init") as info:
                channel.wait(request_id)
            assert info.value.retryable
        assert sorted(os.listdir("/proc/self/fd")) == files


@pytest.mark.usefixtures("quick_probes")
@each_row("sent", [b"", b"\x01\0", HALF], ids=["nothing", "two bytes", "half"])
def test_a_service_that_stops_at_any_point_is_noticed(
    listening: socket.socket, endpoint: str, sent: bytes
) -> None:
    """Before its reply, in its first bytes, or in the middle of a large one."""
    listening.setblocking(True)
    with StreamChannel(endpoint, timeout_s=3600) as channel:
        request_id = channel.submit(InitRequest())
        with accepted(listening) as served:
            served.sendall(sent)
            with pytest.raises(EndpointError, match="a lost connection while Init"):
                channel.wait(request_id)


@pytest.mark.usefixtures("quick_probes", "small_buffers", "listening")
@pytest.mark.parametrize("waiting", [True, False])
def test_a_service_that_stops_while_a_request_is_sent_is_noticed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    with StreamChannel(endpoint, timeout_s=3600) as channel:
        request_id = channel.submit(LARGE_REQUEST)
        if not waiting:
            # More than it queues: it waits for room on this connection, and on others after it.
            monkeypatch.setattr(stream, "QUEUED_REQUESTS", 1)
            monkeypatch.setattr(stream, "RECONNECT_S", 3600.0)
            channel._was_connected = True
            channel.submit(LARGE_REQUEST)
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.wait(request_id)
