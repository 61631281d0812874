"""Who is let in on a stream, and what a service makes of who probes too much or says nothing."""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from gpu_side.transport.acceptor import Acceptor
from protocol.liveness import PROBE
from tests.kit.rows import each_row
from tests.kit.wire import raw_socket


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
    assert not select.select([acceptor.ready_fd], [], [], 0)[0]
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
    monkeypatch.setattr("gpu_side.transport.acceptor.SILENT_S", 0.0)
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
    monkeypatch.setattr("gpu_side.transport.acceptor.time.monotonic", lambda: now)
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
    monkeypatch.setattr("gpu_side.transport.acceptor._ACCEPT_AGAIN_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(acceptor, "_epoll", epoll)
        with raw_socket(endpoint) as unlucky:
            assert unlucky.recv(10) == b""
    with raw_socket(endpoint) as raw:
        assert _is_answered(raw)
