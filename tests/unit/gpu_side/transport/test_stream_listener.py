"""The listening end of a stream: its address, and clients that are slow, greedy or too many."""

import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport import stream_client, stream_listener
from gpu_side.transport.listener import refuse_live_socket
from gpu_side.transport.stream_client import Acceptor
from gpu_side.transport.stream_listener import QUEUED_REPLIES, StreamListener
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError
from protocol.liveness import PROBE
from protocol.stream_wire import to_pieces
from tests.kit.rows import each_row
from tests.kit.wire import (
    LARGE,
    look_until_refused,
    raw_socket,
    request_bytes,
    request_of,
    slow_reader,
    take,
    tensor_reply,
    wait_and_take,
    without_descriptors,
)

HUGE = tensor_reply(1, torch.zeros(16 * LARGE))
HUGE_BYTES = to_pieces(HUGE)[1]


@each_row("kind", ["alive", "busy", "datagram", "text", "bound", "dead"])
def test_only_the_file_of_a_dead_service_is_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    endpoint = parse_endpoint(f"unix://{path}", for_bind=True)
    with (
        socket.socket(socket.AF_UNIX) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
        socket.socket(socket.AF_UNIX) as waiting,
    ):
        if kind == "text":
            path.write_text("precious")
        else:
            (datagram if kind == "datagram" else other).bind(str(path))
        if kind in ("alive", "busy"):
            other.listen(0)
        if kind == "busy":
            waiting.connect(str(path))  # its backlog is full
        if kind == "dead":
            other.close()
        if kind in ("bound", "dead"):
            refuse_live_socket(endpoint)
            listener = StreamListener(endpoint.text)
            raw_socket(endpoint.text).close()
            listener.close()
            assert not path.exists()
            return
        said = os.strerror(errno.EPROTOTYPE) if kind == "datagram" else "Address already in use"
        with pytest.raises(EndpointError, match=said):
            StreamListener(endpoint.text)
        if kind == "text":
            assert path.read_text() == "precious"
            return
        ipc = parse_endpoint(f"ipc://{path}", for_bind=True)
        with pytest.raises(EndpointError, match=said):
            refuse_live_socket(ipc)
        assert path.is_socket()


def test_a_successors_file_stays(endpoint: str, tmp_path: Path) -> None:
    first = StreamListener(endpoint)
    (tmp_path / "s").unlink()
    with closing(StreamListener(endpoint)):
        first.close()
        raw_socket(endpoint).close()


def test_it_tells_that_a_client_has_gone(listener: StreamListener, endpoint: str) -> None:
    gone: list[bytes] = []
    listener.on_gone = gone.append
    with raw_socket(endpoint) as client, raw_socket(endpoint) as other:
        [name], [another] = (request_of(listener, one) for one in (client, other))
        assert gone == []
        client.sendall(b"\xff" * 64)
        look_until_refused(listener, 1)
        assert client.recv(100) == b""
        assert gone == [name]
    assert not listener.wait(timeout_ms=100)
    assert gone == [name, another]
    # A request of its that waited has left something since, perhaps.
    assert not listener.send((name,), [b"reply"])
    assert gone[2:] == [name]


def test_replies_that_are_not_read_are_bounded_in_number(
    listener: StreamListener, endpoint: str
) -> None:
    frames = tensor_reply(1, torch.zeros(LARGE))
    with raw_socket(endpoint) as lazy:
        route, taken = request_of(listener, lazy), 0
        while listener.send(route, frames):
            taken += 1
        assert QUEUED_REPLIES <= taken < QUEUED_REPLIES + 10
        # What was taken comes as soon as it is read.
        left = taken * to_pieces(frames)[1]
        while left:
            listener.wait(timeout_ms=0)
            left -= len(lazy.recv(min(left, 2**20)))
        assert listener.send(route, frames)


def test_replies_that_are_not_read_are_bounded_in_bytes(
    listener: StreamListener, endpoint: str
) -> None:
    frames = tensor_reply(1, torch.zeros(LARGE))
    listener._max_message_bytes = 2 * to_pieces(frames)[1]
    with raw_socket(endpoint) as lazy:
        route, taken = request_of(listener, lazy), 0
        while listener.send(route, frames):
            taken += 1
        # Some of the first are in the kernel.
        assert 3 <= taken < QUEUED_REPLIES


def test_a_client_that_reads_a_little_at_a_time_does_not_hold_the_service(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read it all takes two seconds at this pace."""
    monkeypatch.setattr(stream_listener, "CLOSING_S", 0.05)
    listener = StreamListener(endpoint)
    with raw_socket(endpoint) as raw:
        route = request_of(listener, raw)
        reader, received = slow_reader(raw)
        reader.start()
        assert listener.send(route, HUGE)
        listener.close()
        assert len(received) < HUGE_BYTES // 2
        raw.shutdown(socket.SHUT_RDWR)
        reader.join()


def test_patience_is_short_and_one_for_all_connections(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "_PATIENCE_SHARE", 0.0)
    monkeypatch.setattr(stream_listener, "_PATIENCE_S", 1000.0)
    monkeypatch.setattr(stream_listener, "patience_s", lambda size: 1000.0)
    listener._patience_s = 1000.0
    with raw_socket(endpoint) as lazy:
        # It would take a quarter of an hour if it waited for as long as it may.
        assert listener.send(request_of(listener, lazy), HUGE)
        assert 0 < listener._patience_s < 1000.0
    monkeypatch.setattr(stream_listener, "_PAUSE_S", 1.0)
    monkeypatch.setattr(listener, "_patience_s", 0.01)
    for _ in range(2):
        with raw_socket(endpoint) as lazy:
            assert listener.send(request_of(listener, lazy), HUGE)
    assert listener._patience_s <= 0
    with raw_socket(endpoint) as again:
        route = request_of(listener, again)
        never = Mock(side_effect=AssertionError("a client is waited for"))
        monkeypatch.setattr(listener, "_epoll", Mock(wraps=listener._epoll, poll=never))
        assert listener.send(route, HUGE)


@pytest.mark.parametrize("received", [True, False])
def test_no_client_is_waited_for_while_another_wants_something(
    listener: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch, received: bool
) -> None:
    """Otherwise this would not end in the time that a test has."""
    monkeypatch.setattr(stream_listener, "patience_s", lambda _: 3600.0)
    monkeypatch.setattr(stream_listener, "_PAUSE_S", 3600.0)
    monkeypatch.setattr(stream_listener, "_PATIENCE_S", 3600.0)
    monkeypatch.setattr(listener, "_patience_s", 3600.0)
    with raw_socket(endpoint) as lazy, raw_socket(endpoint) as other:
        route = request_of(listener, lazy)
        request_of(listener, other)
        other.sendall(request_bytes())
        if received:
            assert listener.wait(timeout_ms=10_000)
        assert listener.send(route, HUGE)
        incoming = take(listener)
        assert incoming.route != route


def test_requests_are_taken_from_clients_in_turn(listener: StreamListener, endpoint: str) -> None:
    with raw_socket(endpoint) as greedy, raw_socket(endpoint) as modest:
        for raw in (greedy, modest):
            request_of(listener, raw)
        greedy.sendall(b"".join(request_bytes(n) for n in range(1, 1001)))
        modest.sendall(request_bytes(5000) + request_bytes(5001))
        assert listener.wait(timeout_ms=10_000)
        ids = []
        while (incoming := listener.receive()) is not None:
            ids.append(open_request(incoming.frames, 1000).request_id)
            if len(ids) == 100:
                # Also who comes while there is plenty to do.
                modest.sendall(request_bytes(5002))
        assert {5000, 5001} < set(ids[:4])
        assert 5002 in ids[100:120]
        assert [n for n in ids if n <= 1000] == list(range(1, 1001))


def test_a_client_whose_requests_wait_is_not_read_from(
    listener: StreamListener, endpoint: str
) -> None:
    burst = request_bytes() * 1000
    with raw_socket(endpoint) as greedy:
        greedy.sendall(request_bytes())
        while not listener._turns:  # accepted, so that the flood is read as far as it is
            listener.wait(timeout_ms=1)
        greedy.setblocking(False)

        def flood() -> None:
            for _ in range(1000):
                greedy.send(burst)
                listener.wait(timeout_ms=0)

        with pytest.raises(BlockingIOError):
            flood()
        # As many as may wait, and what else the last read brought: far from megabytes.
        assert len(listener._turns[0].reader.messages) < 10_000


def test_a_client_with_many_bytes_that_wait_is_not_read_from(
    listener: StreamListener, endpoint: str
) -> None:
    size = stream_client.QUEUED_BYTES // 3 + 1
    message = struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(size)
    with raw_socket(endpoint) as greedy, raw_socket(endpoint) as modest:
        sender = threading.Thread(target=lambda: greedy.sendall(message * 6))
        sender.start()
        while not listener._turns or len(listener._turns[0].reader.messages) < 3:
            listener.wait(timeout_ms=1)
        for _ in range(100):
            listener.wait(timeout_ms=0)
        # A third of it each: the third reaches the limit, and nothing is read behind it.
        assert len(listener._turns[0].reader.messages) == 3
        assert listener._turns[0].reader.large is None
        assert sender.is_alive()
        modest.sendall(request_bytes(5000))
        while len(listener._turns) < 2:
            listener.wait(timeout_ms=1)
        sizes = []
        while len(sizes) < 7:
            if (incoming := wait_and_take(listener)) is not None:
                sizes.append(incoming.frames[0].nbytes)
        sender.join()
        assert sizes.count(size) == 6
        # Others are read meanwhile: they come among those that waited.
        assert max(n for n, other in enumerate(sizes) if other != size) <= 3


def test_a_client_for_which_there_is_no_memory_is_turned_away(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpu_side.transport.listener._ACCEPT_AGAIN_S", 0.0)
    # It has left: there is room for another one.
    monkeypatch.setattr(listener._acceptor, "_max_clients", 1)
    with raw_socket(endpoint) as unlucky, monkeypatch.context() as patched:
        patched.setattr(stream_listener, "Client", Mock(side_effect=MemoryError))
        unlucky.sendall(request_bytes())
        look_until_refused(listener, 1)
        with pytest.raises(ConnectionResetError):
            unlucky.recv(100)
    assert {vars(record)["fields"]["clients"] for record in caplog.records} == {0, 1}
    with raw_socket(endpoint) as raw:
        request_of(listener, raw)


def test_where_no_client_is_let_in_any_more_the_listener_says_so(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also to who waits without an end; what had come by then was handed out."""

    with raw_socket(endpoint) as client, raw_socket(endpoint) as probing:
        request_of(listener, client)
        monkeypatch.setattr(
            listener._acceptor, "_classify", Mock(side_effect=RuntimeError("a bug"))
        )
        probing.sendall(PROBE)
        with pytest.raises(EndpointError, match="got no thread that lets clients in"):
            listener.wait()
    assert caplog.messages == ["acceptor_failed"]


ALMOST = 2**20


def _announced(size: int, come: int) -> bytes:
    """Return a message of one frame of which only so much comes."""
    return struct.pack("<IQ", 1, size).ljust(64, b"\0") + bytes(come)


@pytest.fixture
def small(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamListener]:
    """Return a listener for messages of a mebibyte, of which it takes two at a time.

    A client may sit on one for as long as it likes, unless a test says otherwise.
    """
    monkeypatch.setattr(stream_listener, "ALWAYS_BYTES", 0)
    monkeypatch.setattr(stream_listener, "_LOOK_FOR_STALLED_S", 0.01)
    monkeypatch.setattr(stream_client, "STALLED_S", 3600.0)
    made = StreamListener(endpoint, max_message_bytes=ALMOST)
    yield made
    made.close()


def _sit(listener: StreamListener, endpoint: str) -> socket.socket:
    """Send all but the last byte of the largest message, and let it be received."""
    raw = raw_socket(endpoint)
    before = listener._large_bytes
    sender = threading.Thread(target=raw.sendall, args=(_announced(ALMOST, ALMOST - 1),))
    sender.start()
    while listener._large_bytes == before or sender.is_alive():
        listener.wait(timeout_ms=1)
    sender.join()
    return raw


def test_large_messages_of_all_clients_are_bounded_together(
    small: StreamListener, endpoint: str
) -> None:
    taken: list[int] = []
    limit = stream_listener.RECEIVED_MESSAGES * ALMOST
    with _sit(small, endpoint) as first, _sit(small, endpoint), ExitStack() as stack:
        assert small._large_bytes == limit
        # Others stay in the kernel, and small messages come through.
        late = [stack.enter_context(raw_socket(endpoint)) for _ in range(5)]
        # There would be room for the last, but it overtakes nobody.
        sizes = [ALMOST // 2, ALMOST // 4, ALMOST, ALMOST, ALMOST // 8]
        for raw, size in zip(late, sizes, strict=True):
            raw.sendall(_announced(size, 0))
        while len(small._wanting_room) < 5:
            assert not small.wait(timeout_ms=1)
        assert small._large_bytes == limit
        assert sum(client.reader.large is not None for client in small._clients.values()) == 2
        request_of(small, stack.enter_context(raw_socket(endpoint)))
        # What is complete counts until it is handed out; who came first gets its room.
        first.sendall(b"x")
        assert small.wait(timeout_ms=10_000)
        assert small._large_bytes == limit
        incoming = small.receive()
        assert incoming is not None
        assert incoming.frames[0].nbytes == ALMOST
        assert not small.wait(timeout_ms=0)
        assert list(small._wanting_room) == list(small._clients)[4:7]
        senders = [
            threading.Thread(target=raw.sendall, args=(bytes(size),))
            for raw, size in zip(late[:2], sizes, strict=False)
        ]
        for sender in senders:
            sender.start()
        while len(taken) < 2:
            incoming = wait_and_take(small)
            taken += [incoming.frames[0].nbytes] if incoming else []
            assert small._large_bytes <= limit
        assert sorted(taken) == sorted(sizes[:2])
        for sender in senders:
            sender.join()
    # Whoever goes gives back what it had, also while it waits.
    while small._clients:
        small.wait(timeout_ms=1)
    assert (small._large_bytes, small._wanting_room) == (0, {})


def test_who_sits_on_a_large_message_makes_room(
    small: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(_sit(small, endpoint)) for _ in range(2))
        # One that waits for room is never meant, nor one that idles between two messages.
        idle, late = (stack.enter_context(raw_socket(endpoint)) for _ in range(2))
        request_of(small, idle)
        late.sendall(_announced(ALMOST, 1000))
        while not small._wanting_room:
            small.wait(timeout_ms=1)
        sender = threading.Thread(target=late.sendall, args=(bytes(ALMOST - 1000),))
        sender.start()
        monkeypatch.setattr(stream_client, "STALLED_S", 0.0)
        # The first has sat longest, and one is enough; it is noticed in waits without an end, too.
        while (incoming := small.receive()) is None:
            assert small.wait()
        monkeypatch.undo()
        sender.join()
        assert incoming.frames[0].nbytes == ALMOST
        assert first.recv(10) == b""
        assert small.clients_refused == 1
        request_of(small, idle)
        second.sendall(b"x")
        assert small.wait(timeout_ms=10_000)
    fields = [vars(record)["fields"] for record in caplog.records]
    assert ["and no more for" in field["detail"] for field in fields] == [True]


def test_who_goes_on_with_its_message_has_not_stalled(
    small: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gpu_side.transport.stream_listener.time.monotonic", lambda: now)
    monkeypatch.setattr(stream_client, "STALLED_S", 2.0)
    with raw_socket(endpoint) as raw:
        raw.sendall(_announced(ALMOST, 200_000))
        while not small._clients:
            small._has_come(1)
        (client,) = small._clients.values()
        while client.reader.unfinished_bytes < 200_064:
            small._has_come(1)

        def send(count: int) -> None:
            raw.sendall(bytes(count))
            expected = client.reader.unfinished_bytes + count
            while client.reader.unfinished_bytes < expected:
                small._has_come(1)

        assert [client.has_stalled(at) for at in (1000.0, 1001.9, 1002.0)] == [False, False, True]
        now = 1001.0
        # A byte now and then is not enough.
        send(1)
        assert client.has_stalled(1002.0)
        send(stream_client.STALLED_BYTES)
        assert not client.has_stalled(1002.9)
        assert client.has_stalled(1003.0)


@pytest.fixture
def acceptor(listening: socket.socket) -> Iterator[Acceptor]:
    made = Acceptor(listening, max_clients=2)
    yield made
    made.stop()
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def _arrivals(acceptor: Acceptor) -> list[socket.socket]:
    assert select.select([acceptor.ready_fd], [], [], 10)[0]
    return acceptor.arrivals()


def _is_answered(raw: socket.socket) -> bool:
    raw.sendall(PROBE)
    return raw.recv(10) == PROBE


@each_row("sent", [bytes(2), bytes(64), b"\0x", b"\x01", bytes(5000)], ids=repr)
def test_who_asks_for_more_than_one_sign_at_a_time_is_dropped(
    acceptor: Acceptor, endpoint: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Probes are answered while the service attends to nothing else."""
    caplog.clear()
    with raw_socket(endpoint) as raw, raw_socket(endpoint) as other:
        assert all(_is_answered(raw) for _ in range(20))
        raw.sendall(sent)
        try:
            assert raw.recv(10_000) == b""
        except ConnectionResetError:
            assert len(sent) > 4096
        assert _is_answered(other)
    assert caplog.messages == ["dropped"]
    assert acceptor.arrivals() == []


def test_who_asks_is_no_client_and_others_wait_until_a_client_has_left(
    acceptor: Acceptor, endpoint: str, stack: ExitStack
) -> None:
    """Two clients may come, however many ask, and however many have gone without a word."""
    for _ in range(5):
        with raw_socket(endpoint), raw_socket(endpoint):
            pass
    probing = [stack.enter_context(raw_socket(endpoint)) for _ in range(4)]
    assert all(map(_is_answered, probing))
    for _ in range(3):
        stack.enter_context(raw_socket(endpoint)).sendall(b"\x01")
    arrived = _arrivals(acceptor)
    while len(arrived) < 2:
        arrived += _arrivals(acceptor)
    # Its thread has looked a few times since: it would have let in the third by now.
    assert [_is_answered(probing[0]) for _ in range(5)] == [True] * 5
    assert acceptor.arrivals() == []
    acceptor.client_closed()
    for connection in (*arrived, *_arrivals(acceptor)):
        stack.enter_context(connection)


@pytest.mark.usefixtures("acceptor")
def test_of_too_many_who_probe_the_one_that_was_idle_longest_goes(
    endpoint: str, caplog: pytest.LogCaptureFixture, stack: ExitStack
) -> None:
    probing = [stack.enter_context(raw_socket(endpoint)) for _ in range(4)]
    assert all(map(_is_answered, probing))
    # The second is now the one that has not probed for longest, and the third after it.
    assert _is_answered(probing[0])
    for idle in probing[1:3]:
        another = stack.enter_context(raw_socket(endpoint))
        assert _is_answered(another)
        assert idle.recv(10) == b""
        assert _is_answered(another)
    assert _is_answered(probing[0])
    assert _is_answered(probing[3])
    assert [vars(record)["fields"]["reason"] for record in caplog.records] == ["idle_probe"] * 2
    # One that leaves makes room.
    probing[0].sendall(b"x")
    assert probing[0].recv(10) == b""
    assert _is_answered(stack.enter_context(raw_socket(endpoint)))
    assert _is_answered(probing[3])


def test_who_says_nothing_makes_room_for_who_does(
    acceptor: Acceptor,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpu_side.transport.stream_client.SILENT_S", 0.0)
    # Not where there is room.
    with raw_socket(endpoint) as probing, ExitStack() as stack:
        assert _is_answered(probing)
        silent = stack.enter_context(raw_socket(endpoint))
        assert all(_is_answered(probing) for _ in range(20))
        silent.sendall(b"\x01")
        (arrived,) = _arrivals(acceptor)
        # It takes the last place, and goes again; whoever has spoken stays.
        with arrived, raw_socket(endpoint) as last:
            assert last.recv(10) == b""
            assert arrived.recv(10) == b"\x01"
            arrived.setblocking(False)
            with pytest.raises(BlockingIOError):
                arrived.recv(10)
            assert (acceptor._clients, acceptor.accepting) == (1, True)
    assert "silent" in str([vars(record)["fields"] for record in caplog.records])


def test_who_has_just_come_may_be_unclassified_for_a_while(
    acceptor: Acceptor, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its thread, and with a clock of ours."""
    acceptor.stop()
    now = 1000.0
    monkeypatch.setattr("gpu_side.transport.listener.time.monotonic", lambda: now)
    with raw_socket(endpoint), raw_socket(endpoint):
        acceptor._accept()
        now = 1001.5
        assert acceptor._left_s() is None
        acceptor._accept()
        assert not acceptor.accepting
        # It sleeps no longer than until the first of them has to go.
        assert acceptor._left_s() == 0.5
        # From then on there is room again, and so the other one stays.
        for at, left in ((1001.5, 2), (1002.0, 1), (2000.0, 1)):
            now = at
            acceptor._make_room()
            assert len(acceptor._unclassified) == acceptor._clients == left
        assert acceptor.accepting
        assert acceptor._left_s() is None


def test_what_cannot_be_watched_is_turned_away(
    acceptor: Acceptor, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    epoll = Mock(wraps=acceptor._epoll, register=full)
    monkeypatch.setattr("gpu_side.transport.listener._ACCEPT_AGAIN_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(acceptor, "_epoll", epoll)
        with raw_socket(endpoint) as unlucky:
            assert unlucky.recv(10) == b""
    with raw_socket(endpoint) as raw:
        assert _is_answered(raw)


def test_without_file_descriptors_clients_wait(
    acceptor: Acceptor,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpu_side.transport.listener._ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(acceptor, "_listening", without_descriptors(acceptor._listening, 3))
    with raw_socket(endpoint) as raw:
        assert _is_answered(raw)
    assert caplog.messages.count("no_more_clients") == 3
