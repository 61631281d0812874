"""Signs of life: what a client asks, who answers, and what a service makes of who asks too much."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.transport.stream_listener import StreamListener
from protocol import stream, stream_wire
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ServiceError
from protocol.liveness import PROBE, PROBE_AFTER_S, LivenessProbe
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch
from tests.kit.wire import LARGE, accepted, raw_socket, request_bytes, tensor_reply

# ------------------------------------------------------------------------------- the client's end


@pytest.fixture
def pair() -> Iterator[tuple[LivenessProbe, socket.socket]]:
    """Return a probe that has asked once, and the service's end, which never blocks."""
    ours, theirs = socket.socketpair()
    probe = LivenessProbe(ours)
    with theirs:
        theirs.setblocking(False)
        yield probe, theirs
    probe.close()


def test_who_never_answers_is_given_up_in_time(pair: tuple[LivenessProbe, socket.socket]) -> None:
    probe, _ = pair
    assert [probe.is_alive(PROBE_AFTER_S) for _ in range(3)] == [True, True, False]


def test_who_stops_just_after_an_answer_is_noticed_within_the_promised_two_seconds(
    pair: tuple[LivenessProbe, socket.socket],
) -> None:
    """In time that was waited, by the channel's slices; the rest is for a busy machine."""
    probe, service = pair
    service.send(service.recv(10))
    waited_s = PROBE_AFTER_S
    while probe.is_alive(PROBE_AFTER_S):
        waited_s += PROBE_AFTER_S
    assert waited_s <= 2.0 - 0.7


def test_short_waits_add_up(pair: tuple[LivenessProbe, socket.socket]) -> None:
    probe, _ = pair
    assert [probe.is_alive(PROBE_AFTER_S / 4) for _ in range(12)] == [True] * 11 + [False]


def test_it_asks_again_when_it_was_answered_and_not_before(
    pair: tuple[LivenessProbe, socket.socket],
) -> None:
    probe, service = pair
    for _ in range(5):
        # One question at a time, however long it waits.
        assert service.recv(10) == PROBE
        assert probe.is_alive(PROBE_AFTER_S)
        with pytest.raises(BlockingIOError):
            service.recv(10)
        service.send(PROBE)
        assert probe.is_alive(PROBE_AFTER_S)


def test_it_does_not_ask_before_a_wait_is_long(pair: tuple[LivenessProbe, socket.socket]) -> None:
    probe, service = pair
    service.send(service.recv(10))
    assert probe.is_alive(PROBE_AFTER_S / 2)
    with pytest.raises(BlockingIOError):
        service.recv(10)
    assert probe.is_alive(PROBE_AFTER_S / 2)
    assert service.recv(10) == PROBE


def test_an_answer_that_came_while_nobody_looked_counts(
    pair: tuple[LivenessProbe, socket.socket],
) -> None:
    """A client that was stopped itself finds it when it goes on."""
    probe, service = pair
    service.send(service.recv(10))
    assert probe.is_alive(100 * PROBE_AFTER_S)
    assert service.recv(10) == PROBE
    assert probe.is_alive(2 * PROBE_AFTER_S)
    assert not probe.is_alive(PROBE_AFTER_S)


def test_an_answer_to_a_probe_before_does_not_count(
    pair: tuple[LivenessProbe, socket.socket],
) -> None:
    probe, service = pair
    service.send(PROBE)
    assert probe.is_alive(PROBE_AFTER_S)
    assert [probe.is_alive(PROBE_AFTER_S) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("answered", [True, False])
def test_a_closed_connection_is_no_sign_of_life(
    pair: tuple[LivenessProbe, socket.socket], answered: bool
) -> None:
    probe, service = pair
    if answered:
        service.send(service.recv(10))
        assert probe.is_alive(0.01)
    service.close()
    # At once, whenever the next question were due.
    assert not probe.is_alive(0.01)


def test_a_connection_that_is_lost_at_once_is_an_os_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        LivenessProbe(ours)


def test_who_answers_more_than_it_was_asked_costs_nothing(
    pair: tuple[LivenessProbe, socket.socket],
) -> None:
    probe, service = pair
    with suppress(BlockingIOError):
        while True:
            service.send(bytes(4096))
    assert probe.is_alive(PROBE_AFTER_S)


# --------------------------------------------------------------------------------------- together

HALF = b"".join(to_pieces([bytes(2**20)])[0])[:150_000]


@pytest.mark.parametrize("known", [True, False])
def test_a_service_that_is_busy_is_not_taken_for_dead(
    listener: StreamListener, endpoint: str, known: bool
) -> None:
    """Nobody attends to the listener; a deadline ends it, of one that came before, and of another.

    Long enough for a service that gives no signs of life to be given up.
    """
    with StreamChannel(endpoint, timeout_s=60) as channel:
        if known:
            _one_round_trip(listener, channel)
        with pytest.raises(DeadlineExceededError):
            channel.call(InitRequest(), 2.5)
        # And is of use afterwards.
        late = channel.submit(InitRequest())
        received = []
        while late not in received:
            assert listener.wait(timeout_ms=10_000)
            while (incoming := listener.receive()) is not None:
                received.append(open_request(incoming.frames, 1000).request_id)


def _one_round_trip(listener: StreamListener, channel: StreamChannel) -> None:
    request_id = channel.submit(InitRequest())
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    refusal = encode_reply(Form.FRAMED, request_id, "Init", ErrorCode.INTERNAL)
    assert listener.send(incoming.route, refusal)
    with pytest.raises(ServiceError):
        channel.wait(request_id)


def test_a_service_that_never_lets_in_is_noticed_long_before_the_deadline(
    listening: socket.socket,
) -> None:
    with StreamChannel(f"unix://{listening.getsockname()}", timeout_s=3600) as channel:
        ids = [channel.submit(InitRequest()) for _ in range(2)]
        for request_id in ids:
            with pytest.raises(EndpointError, match="a lost connection while Init") as info:
                channel.wait(request_id)
            assert info.value.retryable


@pytest.mark.parametrize("sent", [b"", b"\x01\0", HALF], ids=["nothing", "two", "half"])
def test_a_service_that_stops_at_any_point_is_noticed(
    listening: socket.socket, sent: bytes
) -> None:
    """Before its reply, in its first bytes, or in the middle of a large one."""
    listening.setblocking(True)
    with StreamChannel(f"unix://{listening.getsockname()}", timeout_s=3600) as channel:
        request_id = channel.submit(InitRequest())
        with accepted(listening) as served:
            served.sendall(sent)
            with pytest.raises(EndpointError, match="a lost connection while Init"):
                channel.wait(request_id)


@pytest.mark.parametrize("waiting", [True, False])
def test_a_service_that_stops_while_a_request_is_sent_is_noticed(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    monkeypatch.setattr(stream_wire, "SOCKET_BUFFER_BYTES", 4096)
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))
    with StreamChannel(f"unix://{listening.getsockname()}", timeout_s=3600) as channel:
        request_id = channel.submit(request)
        if not waiting:
            # More than it queues: it waits for room on this connection, and on others after it.
            monkeypatch.setattr(stream, "QUEUED_REQUESTS", 1)
            monkeypatch.setattr(stream, "RECONNECT_S", 3600.0)
            channel._was_connected = True
            channel.submit(request)
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.wait(request_id)


def test_replies_that_come_at_once_ask_nothing(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = socket.socketpair()

    def serve() -> None:
        while listener.wait(wakeup=reader):
            while (incoming := listener.receive()) is not None:
                opened = open_request(incoming.frames, 2**30)
                listener.send(incoming.route, tensor_reply(opened.request_id, torch.zeros(LARGE)))

    # Longer than this machine ever stops, so that only what is asked without a wait counts.
    monkeypatch.setattr(stream, "PROBE_AFTER_S", 60.0)
    asked: list[float] = []
    monkeypatch.setattr(LivenessProbe, "is_alive", lambda _, waited_s: not asked.append(waited_s))
    thread = threading.Thread(target=serve)
    thread.start()
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(10)))
    with reader, writer, StreamChannel(endpoint, timeout_s=60) as channel:
        for _ in range(20):
            channel.call(request)
        writer.send(b"x")
        thread.join()
    assert asked == []


def _threads() -> int:
    return sum(thread.name == "stream-acceptor" for thread in threading.enumerate())


def test_closing_leaves_no_threads_and_no_files(endpoint: str) -> None:
    before, files = _threads(), sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        listener = StreamListener(endpoint)
        assert _threads() == before + 1
        with ExitStack() as stack:
            channels = [stack.enter_context(StreamChannel(endpoint)) for _ in range(10)]
            for channel in channels:
                _one_round_trip(listener, channel)
            # Some are closed before the service, some after it; one comes back in between.
            for channel in channels[:5]:
                channel.close()
            _one_round_trip(listener, channels[0])
            stack.enter_context(raw_socket(endpoint)).sendall(request_bytes()[:10])
            stack.enter_context(raw_socket(endpoint))
            listener.close()
        assert _threads() == before
        assert sorted(os.listdir("/proc/self/fd")) == files


def test_a_lost_connection_leaves_no_files(listening: socket.socket) -> None:
    with StreamChannel(f"unix://{listening.getsockname()}", timeout_s=3600) as channel:
        files = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(EndpointError):
            channel.call(InitRequest())
        assert sorted(os.listdir("/proc/self/fd")) == files


def test_a_service_without_room_for_messages_is_tried_again(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second connection may fail where the first did not."""
    real, calls = stream._connected, []

    def connected(address: stream.StreamAddress, timeout_s: float) -> socket.socket:
        calls.append(address)
        if len(calls) == 2:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return real(address, timeout_s)

    monkeypatch.setattr(stream, "_connected", connected)
    with StreamChannel(endpoint, timeout_s=60) as channel:
        _one_round_trip(listener, channel)
    assert len(calls) == 4


def test_probes_are_not_logged(
    listener: StreamListener, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), StreamChannel(endpoint) as channel:
        _one_round_trip(listener, channel)
    assert caplog.records == []
