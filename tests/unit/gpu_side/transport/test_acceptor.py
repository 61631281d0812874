"""Who is let in on a stream, and what a service makes of who probes too much."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpu_side.log_limit import LIMITS, limited
from gpu_side.transport.acceptor import Acceptor
from protocol.liveness import PROBE
from tests.kit.wire import raw_socket


@pytest.fixture
def acceptor(listening: socket.socket) -> Iterator[Acceptor]:
    made = Acceptor(listening, max_clients=2)
    yield made
    made.stop()
    made.close()


def _arrivals(acceptor: Acceptor) -> list[socket.socket]:
    """Wait until somebody comes."""
    assert select.select([acceptor.ready_fd], [], [], 10)[0]
    return acceptor.arrivals()


def _is_answered(raw: socket.socket) -> bool:
    raw.sendall(PROBE)
    return raw.recv(10) == PROBE


@pytest.mark.usefixtures("acceptor")
def test_probes_are_answered_while_nobody_attends(endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        assert [_is_answered(raw) for _ in range(20)] == [True] * 20


def test_a_message_is_handed_out_untouched_and_rings(acceptor: Acceptor, endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        raw.sendall(b"\x02\0")
        (arrived,) = _arrivals(acceptor)
        with arrived:
            assert arrived.recv(10) == b"\x02\0"
            # It rings once, and attends no more to what was handed out.
            assert not select.select([acceptor.ready_fd], [], [], 0)[0]
            assert acceptor.arrivals() == []
            raw.sendall(PROBE)
            assert acceptor._epoll.poll(0) == []
            assert arrived.recv(10) == PROBE


@pytest.mark.parametrize("sent", [bytes(2), bytes(64), b"\0x", bytes(5000)], ids=len)
def test_who_asks_for_more_than_one_sign_is_dropped(
    acceptor: Acceptor, endpoint: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_socket(endpoint) as raw, raw_socket(endpoint) as other:
        assert _is_answered(raw)
        raw.sendall(sent)
        try:
            assert raw.recv(10_000) == b""
        except ConnectionResetError:
            assert len(sent) > 4096
        assert _is_answered(other)
    assert [record.getMessage() for record in caplog.records] == ["dropped"]
    assert acceptor.arrivals() == []


def test_anything_but_a_probe_is_dropped(acceptor: Acceptor, endpoint: str) -> None:
    with raw_socket(endpoint) as raw:
        assert _is_answered(raw)
        raw.sendall(b"\x01")
        assert raw.recv(10) == b""
    assert acceptor.arrivals() == []


def test_who_asks_is_no_client(acceptor: Acceptor, endpoint: str) -> None:
    """Two clients may come, however many ask."""
    with ExitStack() as stack:
        probing = [stack.enter_context(raw_socket(endpoint)) for _ in range(4)]
        assert all(map(_is_answered, probing))
        for n in range(2):
            stack.enter_context(raw_socket(endpoint)).sendall(bytes([n + 1]))
            (arrived,) = _arrivals(acceptor)
            assert stack.enter_context(arrived).recv(1) == bytes([n + 1])


@pytest.mark.usefixtures("acceptor")
def test_of_too_many_who_probe_the_one_that_was_idle_longest_goes(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
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
        # One that leaves makes room.
        probing[0].sendall(b"x")
        assert probing[0].recv(10) == b""
        assert _is_answered(stack.enter_context(raw_socket(endpoint)))
        assert _is_answered(probing[3])
    details = [vars(record)["fields"]["detail"] for record in caplog.records]
    assert [detail for detail in details if "idle longest of 4" in detail] == details[:2]


def test_others_wait_until_a_client_has_left(acceptor: Acceptor, endpoint: str) -> None:
    with ExitStack() as stack:
        probing = stack.enter_context(raw_socket(endpoint))
        assert _is_answered(probing)
        waiting = [stack.enter_context(raw_socket(endpoint)) for _ in range(3)]
        for raw in waiting:
            raw.sendall(b"\x01")
        arrived = _arrivals(acceptor)
        while len(arrived) < 2:
            arrived += _arrivals(acceptor)
        for connection in arrived:
            stack.enter_context(connection)
        # Its thread has looked a few times since: it would have let in the third by now.
        assert [_is_answered(probing) for _ in range(5)] == [True] * 5
        assert not select.select([acceptor.ready_fd], [], [], 0)[0]
        acceptor.client_closed()
        for connection in _arrivals(acceptor):
            stack.enter_context(connection)


def test_a_client_that_says_nothing_and_goes_makes_room(acceptor: Acceptor, endpoint: str) -> None:
    for _ in range(5):
        with raw_socket(endpoint), raw_socket(endpoint):
            pass
    with raw_socket(endpoint) as raw:
        raw.sendall(b"\x01")
        (arrived,) = _arrivals(acceptor)
        arrived.close()


def test_who_says_nothing_makes_room_for_who_does(
    acceptor: Acceptor,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpu_side.transport.acceptor.SILENT_S", 0.0)
    with raw_socket(endpoint) as speaking:
        speaking.sendall(b"\x01")
        (arrived,) = _arrivals(acceptor)
        # It takes the last place, and goes again; whoever has spoken stays.
        with arrived, raw_socket(endpoint) as silent:
            assert silent.recv(10) == b""
            assert arrived.recv(10) == b"\x01"
            arrived.setblocking(False)
            with pytest.raises(BlockingIOError):
                arrived.recv(10)
            assert (acceptor._clients, acceptor.accepting) == (1, True)
    assert "silent" in str([vars(record)["fields"] for record in caplog.records])


def test_who_says_nothing_stays_where_there_is_room(
    acceptor: Acceptor, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_side.transport.acceptor.SILENT_S", 0.0)
    with raw_socket(endpoint) as probing:
        assert _is_answered(probing)
        with raw_socket(endpoint) as silent:
            assert [_is_answered(probing) for _ in range(20)] == [True] * 20
            silent.sendall(b"\x01")
            (arrived,) = _arrivals(acceptor)
            arrived.close()


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
        acceptor._make_room()
        assert len(acceptor._unclassified) == acceptor._clients == 2
        now = 1002.0
        acceptor._make_room()
        assert len(acceptor._unclassified) == acceptor._clients == 1
        # There is room again, and so the other one stays.
        assert acceptor.accepting
        assert acceptor._left_s() is None
        now = 2000.0
        acceptor._make_room()
        assert len(acceptor._unclassified) == 1


def test_what_cannot_be_watched_is_turned_away(
    acceptor: Acceptor, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, epoll: select.epoll) -> None:
            self._epoll = epoll

        def __getattr__(self, name: str) -> object:
            return getattr(self._epoll, name)

        def register(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpu_side.transport.acceptor._ACCEPT_AGAIN_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(acceptor, "_epoll", Full(acceptor._epoll))
        with raw_socket(endpoint) as unlucky:
            assert unlucky.recv(10) == b""
    with raw_socket(endpoint) as raw:
        assert _is_answered(raw)


def test_few_lines_say_that_there_is_no_room(
    acceptor: Acceptor, caplog: pytest.LogCaptureFixture
) -> None:
    with limited(logging.getLogger("gpu_service")):
        for _ in range(20):
            acceptor.pause_accepting()
    lines, _ = LIMITS["no_more_clients"]
    assert caplog.messages == ["no_more_clients"] * lines


def test_stopping_is_no_failure(acceptor: Acceptor) -> None:
    assert not acceptor.failed
    acceptor.stop()
    assert not acceptor.failed
    assert not select.select([acceptor.ready_fd], [], [], 0)[0]


def test_stopping_keeps_connections_and_closing_ends_them(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceptor = Acceptor(listening, max_clients=10)
    address = listening.getsockname()
    with raw_socket(address) as probing, raw_socket(address) as silent:
        assert _is_answered(probing)
        with raw_socket(address) as client:
            client.sendall(b"\x01")
            assert select.select([acceptor.ready_fd], [], [], 10)[0]
            acceptor.stop()
            probing.setblocking(False)
            with pytest.raises(BlockingIOError):
                probing.recv(10)
            # Whoever is still being served leaves after that.
            acceptor.client_closed()
            acceptor.close()
            with pytest.raises(ConnectionResetError):
                client.recv(10)
            assert probing.recv(10) == silent.recv(10) == b""
    # Its files may be somebody else's by now.
    touched: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_write", lambda file, _: touched.append(file))
        patched.setattr(os, "close", touched.append)
        acceptor.stop()
        acceptor.close()
    assert not {acceptor.ready_fd, acceptor._wakeup} & set(touched)


def test_should_it_fail_it_says_so_and_everybody_notices(
    acceptor: Acceptor,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("a bug")

    with raw_socket(endpoint) as probing, raw_socket(endpoint) as silent:
        assert _is_answered(probing)
        with raw_socket(endpoint) as client:
            client.sendall(b"\x01")
            (arrived,) = _arrivals(acceptor)
            monkeypatch.setattr(acceptor, "_answer", fail)
            probing.sendall(PROBE)
            with pytest.raises(ConnectionResetError):  # what it sent was not read
                probing.recv(10)
            assert silent.recv(10) == b""
            # Nobody waits for ever to be let in; who is in is still served.
            acceptor._thread.join()
            with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
                late.connect(endpoint.removeprefix("unix://"))
            with arrived:
                assert arrived.recv(10) == b"\x01"
                acceptor.client_closed()
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "acceptor_failed"
    assert record.exc_info is not None
    assert acceptor.failed
    # Whoever waits for arrivals is woken.
    assert select.select([acceptor.ready_fd], [], [], 0)[0]
