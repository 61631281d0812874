"""The listening end of a stream: room for large messages, and who keeps others out of it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpu_side.transport import stream_client, stream_listener
from gpu_side.transport.stream_listener import StreamListener
from tests.kit.wire import (
    raw_socket,
    request_of,
    wait_and_take,
)

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
        for raw in late:
            raw.sendall(_announced(ALMOST // 2, 0))
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
            threading.Thread(target=raw.sendall, args=(bytes(ALMOST // 2),)) for raw in late[:2]
        ]
        for sender in senders:
            sender.start()
        while len(taken) < 2:
            incoming = wait_and_take(small)
            taken += [incoming.frames[0].nbytes] if incoming else []
            assert small._large_bytes <= limit
        assert taken == [ALMOST // 2] * 2
        for sender in senders:
            sender.join()
    # Whoever goes gives back what it had, also while it waits.
    while small._clients:
        small.wait(timeout_ms=1)
    assert (small._large_bytes, small._wanting_room) == (0, {})


def test_where_there_is_no_room_each_client_has_a_little(
    small: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_listener, "ALWAYS_BYTES", 300_000)
    with _sit(small, endpoint), _sit(small, endpoint), ExitStack() as stack:
        large, modest, greedy = (stack.enter_context(raw_socket(endpoint)) for _ in range(3))
        large.sendall(_announced(300_001, 1000))
        while not small._wanting_room:
            small.wait(timeout_ms=1)
        # It overtakes who needs more.
        sender = threading.Thread(target=modest.sendall, args=(_announced(300_000, 300_000),))
        sender.start()
        assert small.wait(timeout_ms=10_000)
        sender.join()
        # But what nobody has taken counts: each has it once.
        modest.sendall(_announced(200_000, 1000))
        greedy.sendall(_announced(200_000, 1000))
        while len(small._clients) < 5 or small._large_bytes < 2 * ALMOST + 500_000:
            small.wait(timeout_ms=1)
        while len(small._wanting_room) < 2:
            small.wait(timeout_ms=1)
        assert small._large_bytes == 2 * ALMOST + 500_000
        incoming = small.receive()
        assert incoming is not None
        assert incoming.frames[0].nbytes == 300_000
        small.wait(timeout_ms=0)
        assert small._large_bytes == 2 * ALMOST + 400_000
        (waiting,) = small._wanting_room.values()
        assert waiting.reader.wants_room == 300_001


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


def test_who_never_ends_its_first_message_makes_room_for_who_does(
    listener: StreamListener,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener._acceptor, "_max_clients", 3)
    monkeypatch.setattr(stream_listener, "_LOOK_FOR_STALLED_S", 0.01)
    monkeypatch.setattr(stream_client, "STALLED_S", 3600.0)
    with raw_socket(endpoint) as honest, ExitStack() as stack:
        request_of(listener, honest)
        sitting = []
        for count in (1, 2):
            sitting.append(stack.enter_context(raw_socket(endpoint)))
            sitting[-1].sendall(b"\x01")
            while len(listener._clients) < count + 1:
                assert not listener.wait(timeout_ms=1)
        monkeypatch.setattr(stream_client, "STALLED_S", 0.0)
        late = stack.enter_context(raw_socket(endpoint))
        request_of(listener, late)
        assert sitting[0].recv(10) == b""
        # Who has ended its message may be silent for as long as it likes.
        request_of(listener, honest)
    assert {vars(record)["fields"].get("code") for record in caplog.records} >= {"LIMIT_EXCEEDED"}


def test_who_goes_on_with_its_message_has_not_stalled(
    small: StreamListener, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("gpu_side.transport.stream_listener.time.monotonic", lambda: now)
    monkeypatch.setattr(stream_client, "STALLED_S", 2.0)
    with raw_socket(endpoint) as raw:
        raw.sendall(_announced(ALMOST, 200_000))
        while not small._clients:
            small._look(1)
        (client,) = small._clients.values()
        while client.reader.unfinished_bytes < 200_064:
            small._look(1)

        def send(count: int) -> None:
            raw.sendall(bytes(count))
            expected = client.reader.unfinished_bytes + count
            while client.reader.unfinished_bytes < expected:
                small._look(1)

        assert [client.has_stalled(at) for at in (1000.0, 1001.9, 1002.0)] == [False, False, True]
        now = 1001.0
        # A byte now and then is not enough.
        send(1)
        assert client.has_stalled(1002.0)
        send(stream_client.STALLED_BYTES)
        assert not client.has_stalled(1002.9)
        assert client.has_stalled(1003.0)
