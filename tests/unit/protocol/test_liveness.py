"""Signs of life: what a client asks, who answers, and what a service makes of who asks too much."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch

from protocol import stream
from protocol.encoding import Form, encode_reply, open_request
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ServiceError
from protocol.liveness import ASK_AFTER_S, QUESTION, Door, Pulse
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream import StreamChannel
from protocol.stream_listener import StreamListener
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch
from tests.unit.protocol.streams import LARGE, accepted, raw_socket, request_bytes, tensor_reply

# ------------------------------------------------------------------------------- the client's end


@pytest.fixture
def pair() -> Iterator[tuple[Pulse, socket.socket]]:
    """Return a pulse that has asked once, and the service's end, which never blocks."""
    ours, theirs = socket.socketpair()
    pulse = Pulse(ours)
    with theirs:
        theirs.setblocking(False)
        yield pulse, theirs
    pulse.close()


def test_who_never_answers_is_given_up_in_time(pair: tuple[Pulse, socket.socket]) -> None:
    pulse, _ = pair
    assert [pulse.beats(ASK_AFTER_S) for _ in range(3)] == [True, True, False]


def test_short_waits_add_up(pair: tuple[Pulse, socket.socket]) -> None:
    pulse, _ = pair
    assert [pulse.beats(ASK_AFTER_S / 4) for _ in range(12)] == [True] * 11 + [False]


def test_it_asks_again_when_it_was_answered_and_not_before(
    pair: tuple[Pulse, socket.socket],
) -> None:
    pulse, service = pair
    for _ in range(5):
        # One question at a time, however long it waits.
        assert service.recv(10) == QUESTION
        assert pulse.beats(ASK_AFTER_S)
        with pytest.raises(BlockingIOError):
            service.recv(10)
        service.send(QUESTION)
        assert pulse.beats(ASK_AFTER_S)


def test_it_does_not_ask_before_a_wait_is_long(pair: tuple[Pulse, socket.socket]) -> None:
    pulse, service = pair
    service.send(service.recv(10))
    assert pulse.beats(ASK_AFTER_S / 2)
    with pytest.raises(BlockingIOError):
        service.recv(10)
    assert pulse.beats(ASK_AFTER_S / 2)
    assert service.recv(10) == QUESTION


def test_an_answer_that_came_while_nobody_looked_counts(pair: tuple[Pulse, socket.socket]) -> None:
    """A client that was stopped itself finds it when it goes on."""
    pulse, service = pair
    service.send(service.recv(10))
    assert pulse.beats(100 * ASK_AFTER_S)
    assert service.recv(10) == QUESTION
    assert pulse.beats(2 * ASK_AFTER_S)
    assert not pulse.beats(ASK_AFTER_S)


def test_an_answer_to_a_question_before_does_not_count(pair: tuple[Pulse, socket.socket]) -> None:
    pulse, service = pair
    service.send(QUESTION)
    assert pulse.beats(ASK_AFTER_S)
    assert [pulse.beats(ASK_AFTER_S) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("answered", [True, False])
def test_a_closed_connection_is_no_sign_of_life(
    pair: tuple[Pulse, socket.socket], answered: bool
) -> None:
    pulse, service = pair
    if answered:
        service.send(service.recv(10))
        assert pulse.beats(0.01)
    service.close()
    # At once, whenever the next question were due.
    assert not pulse.beats(0.01)


def test_a_connection_that_is_lost_at_once_is_an_os_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError):
        Pulse(ours)


def test_who_answers_more_than_it_was_asked_costs_nothing(
    pair: tuple[Pulse, socket.socket],
) -> None:
    pulse, service = pair
    with suppress(BlockingIOError):
        while True:
            service.send(bytes(4096))
    assert pulse.beats(ASK_AFTER_S)


# ------------------------------------------------------------------------------ the service's end


@pytest.fixture
def listening(endpoint: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(endpoint.removeprefix("unix://"))
        made.listen(100)
        made.setblocking(False)
        yield made


@pytest.fixture
def door(listening: socket.socket) -> Iterator[Door]:
    made = Door(listening, max_clients=2)
    yield made
    made.stop()
    made.close()


def _arrivals(door: Door) -> list[socket.socket]:
    """Wait until somebody comes."""
    assert select.select([door.bell], [], [], 10)[0]
    return door.arrivals()


def _beats(raw: socket.socket) -> bool:
    raw.sendall(QUESTION)
    return raw.recv(10) == QUESTION


@pytest.mark.usefixtures("door")
def test_questions_are_answered_while_nobody_attends(endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        assert [_beats(raw) for _ in range(20)] == [True] * 20


def test_a_message_is_handed_out_untouched_and_rings(door: Door, endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        raw.sendall(b"\x02\0")
        (arrived,) = _arrivals(door)
        with arrived:
            assert arrived.recv(10) == b"\x02\0"
            # It rings once, and attends no more to what was handed out.
            assert not select.select([door.bell], [], [], 0)[0]
            assert door.arrivals() == []
            raw.sendall(QUESTION)
            assert door._epoll.poll(0) == []
            assert arrived.recv(10) == QUESTION


@pytest.mark.parametrize("sent", [bytes(2), bytes(64), b"\0x", bytes(5000)], ids=len)
def test_who_asks_for_more_than_one_sign_is_dropped(
    door: Door, endpoint: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_socket(endpoint) as raw, raw_socket(endpoint) as other:
        assert _beats(raw)
        raw.sendall(sent)
        try:
            assert raw.recv(10_000) == b""
        except ConnectionResetError:
            assert len(sent) > 4096
        assert _beats(other)
    assert [record.getMessage() for record in caplog.records] == ["dropped"]
    assert door.arrivals() == []


def test_anything_but_a_question_is_dropped(door: Door, endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        assert _beats(raw)
        raw.sendall(b"\x01")
        assert raw.recv(10) == b""
    assert door.arrivals() == []


def test_who_asks_is_no_client(door: Door, endpoint: str) -> None:
    """Two clients may come, however many ask."""
    with ExitStack() as stack:
        asking = [stack.enter_context(raw_socket(endpoint)) for _ in range(4)]
        assert all(map(_beats, asking))
        for n in range(2):
            stack.enter_context(raw_socket(endpoint)).sendall(bytes([n + 1]))
            (arrived,) = _arrivals(door)
            assert stack.enter_context(arrived).recv(1) == bytes([n + 1])


@pytest.mark.usefixtures("door")
def test_those_who_ask_are_bounded_too(endpoint: str) -> None:
    with ExitStack() as stack:
        asking = [stack.enter_context(raw_socket(endpoint)) for _ in range(5)]
        for raw in asking:
            raw.sendall(QUESTION)
        assert [raw.recv(10) for raw in asking[:4]] == [QUESTION] * 4
        with pytest.raises(ConnectionResetError):
            asking[4].recv(10)
        # One that leaves makes room.
        asking[0].close()
        asking[1].sendall(b"x")
        assert asking[1].recv(10) == b""
        again = stack.enter_context(raw_socket(endpoint))
        assert _beats(again)


def test_others_wait_until_a_client_has_left(door: Door, endpoint: str) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(raw_socket(endpoint)) for _ in range(3)]
        for raw in waiting:
            raw.sendall(b"\x01")
        arrived = _arrivals(door)
        while len(arrived) < 2:
            arrived += _arrivals(door)
        for connection in arrived:
            stack.enter_context(connection)
        assert not select.select([door.bell], [], [], 0.02)[0]
        door.left()
        for connection in _arrivals(door):
            stack.enter_context(connection)


def test_a_client_that_says_nothing_and_goes_makes_room(door: Door, endpoint: str) -> None:
    for _ in range(5):
        with raw_socket(endpoint), raw_socket(endpoint):
            pass
    with raw_socket(endpoint) as raw:
        raw.sendall(b"\x01")
        (arrived,) = _arrivals(door)
        arrived.close()


def test_who_says_nothing_makes_room_for_who_does(
    door: Door, endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("protocol.liveness.SILENT_S", 0.0)
    with raw_socket(endpoint) as speaking:
        speaking.sendall(b"\x01")
        (arrived,) = _arrivals(door)
        # It takes the last place, and goes again; whoever has spoken stays.
        with arrived, raw_socket(endpoint) as silent:
            assert silent.recv(10) == b""
            assert arrived.recv(10) == b"\x01"
            arrived.setblocking(False)
            with pytest.raises(BlockingIOError):
                arrived.recv(10)
            assert (door._clients, door._accepting) == (1, True)
    assert "silent" in str([vars(record)["fields"] for record in caplog.records])


def test_who_says_nothing_stays_where_there_is_room(
    door: Door, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.liveness.SILENT_S", 0.0)
    with raw_socket(endpoint) as asking:
        assert _beats(asking)
        with raw_socket(endpoint) as silent:
            assert [_beats(asking) for _ in range(20)] == [True] * 20
            silent.sendall(b"\x01")
            (arrived,) = _arrivals(door)
            arrived.close()


def test_who_has_just_come_may_be_silent_for_a_while(
    door: Door, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its thread, and with a clock of ours."""
    door.stop()
    now = 1000.0
    monkeypatch.setattr("protocol.liveness.time.monotonic", lambda: now)
    with raw_socket(endpoint), raw_socket(endpoint):
        door._accept()
        now = 1001.5
        assert door._left_s() is None
        door._accept()
        assert not door._accepting
        # It sleeps no longer than until the first of them has to go.
        assert door._left_s() == 0.5
        door._make_room()
        assert len(door._silent) == door._clients == 2
        now = 1002.0
        door._make_room()
        assert len(door._silent) == door._clients == 1
        # There is room again, and so the other one stays.
        assert door._accepting
        assert door._left_s() is None
        now = 2000.0
        door._make_room()
        assert len(door._silent) == 1


def test_what_cannot_be_watched_is_turned_away(
    door: Door, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, epoll: select.epoll) -> None:
            self._epoll = epoll

        def __getattr__(self, name: str) -> object:
            return getattr(self._epoll, name)

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("protocol.liveness._ACCEPT_AGAIN_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(door, "_epoll", Full(door._epoll))
        with raw_socket(endpoint) as unlucky:
            assert unlucky.recv(10) == b""
    with raw_socket(endpoint) as raw:
        assert _beats(raw)


def test_stopping_keeps_connections_and_closing_ends_them(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = Door(listening, max_clients=10)
    address = listening.getsockname()
    with raw_socket(address) as asking, raw_socket(address) as silent:
        assert _beats(asking)
        with raw_socket(address) as client:
            client.sendall(b"\x01")
            assert select.select([door.bell], [], [], 10)[0]
            door.stop()
            asking.setblocking(False)
            with pytest.raises(BlockingIOError):
                asking.recv(10)
            # Whoever is still being served leaves after that.
            door.left()
            door.close()
            with pytest.raises(ConnectionResetError):
                client.recv(10)
            assert asking.recv(10) == silent.recv(10) == b""
    # Its files may be somebody else's by now.
    touched: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_write", lambda file, _: touched.append(file))
        patched.setattr(os, "close", touched.append)
        door.stop()
        door.close()
    assert not {door.bell, door._wakeup} & set(touched)


# --------------------------------------------------------------------------------------- together

HALF = b"".join(to_pieces([bytes(2**20)])[0])[:150_000]


@pytest.mark.parametrize("known", [True, False])
def test_a_service_that_is_busy_is_not_taken_for_dead(
    listener: StreamListener, endpoint: str, known: bool
) -> None:
    """Nobody attends to the listener; a deadline ends it, of one that came before, and of another.

    Long enough for a service that gives no signs of life to be given up.
    """
    with StreamChannel(endpoint, timeout_s=2.5) as channel:
        if known:
            _one_round_trip(listener, channel)
        with pytest.raises(DeadlineExceededError):
            channel.call(InitRequest())
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
    monkeypatch.setattr(stream, "SOCKET_BUFFER_BYTES", 4096)
    request = LMHeadRequest(hidden_states=from_torch(torch.zeros(LARGE)))
    with StreamChannel(f"unix://{listening.getsockname()}", timeout_s=3600) as channel:
        request_id = channel.submit(request)
        if not waiting:
            # More than it queues: it waits for room on this connection, and on others after it.
            monkeypatch.setattr(stream, "QUEUED_REQUESTS", 1)
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

    asked: list[float] = []
    monkeypatch.setattr(Pulse, "beats", lambda _, waited_s: not asked.append(waited_s))
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
    return sum(thread.name == "stream-door" for thread in threading.enumerate())


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


def test_questions_are_not_logged(
    listener: StreamListener, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), StreamChannel(endpoint) as channel:
        _one_round_trip(listener, channel)
    assert caplog.records == []
