"""Tests of endpoints: malformed, taken, and the service's end of a connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from protocol.errors import EndpointError
from protocol.messages import InitRequest
from protocol.zmq_channel import ZmqChannel, ZmqListener, check_endpoint

MALFORMED = [
    "",
    "tcp",
    "tcp://",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:",
    "tcp://:5555",
    "tcp://127.0.0.1:70000",
    "tcp://127.0.0.1:-1",
    "tcp://127.0.0.1:http",
    "tcp://127.0.0.1:5555/",
    "tcp://127.0.0.1:5555/path",
    "tcp://127.0.0.1:5555?x=1",
    "tcp://127.0.0.1:5555#x",
    "tcp://user@127.0.0.1:5555",
    "tcp://[::1:5555",
    "tcp://127.0.0.1:55\n55",
    "tcp://a b:5555",
    "TCP://127.0.0.1:5555",
    "127.0.0.1:5555",
    "http://127.0.0.1:5555",
    "inproc://x",
    "udp://127.0.0.1:5555",
    "pgm://127.0.0.1:5555",
    "ipc://",
    "ipc://" + "x" * 200,
]


@contextmanager
def _listening(endpoint: str) -> Iterator[ZmqListener]:
    listener = ZmqListener(endpoint)
    try:
        yield listener
    finally:
        listener.close()


@pytest.mark.parametrize("endpoint", MALFORMED)
def test_malformed_endpoint_is_refused(endpoint: str) -> None:
    for for_bind in (False, True):
        with pytest.raises(EndpointError):
            check_endpoint(endpoint, for_bind=for_bind)
    with pytest.raises(EndpointError):
        ZmqChannel(endpoint).close()
    with pytest.raises(EndpointError):
        ZmqListener(endpoint).close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:5555"])
def test_wildcard_is_for_binding_only(endpoint: str) -> None:
    check_endpoint(endpoint, for_bind=True)
    with pytest.raises(EndpointError):
        ZmqChannel(endpoint).close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://host:1", "tcp://[::1]:5555"])
def test_good_endpoint_is_accepted(endpoint: str) -> None:
    check_endpoint(endpoint)
    check_endpoint(endpoint, for_bind=True)


def test_too_long_ipc_path_names_the_limit() -> None:
    with pytest.raises(EndpointError, match=f"expected at most {zmq.IPC_PATH_MAX_LEN}"):
        check_endpoint("ipc:///" + "x" * zmq.IPC_PATH_MAX_LEN)
    check_endpoint("ipc:///" + "x" * (zmq.IPC_PATH_MAX_LEN - 1))


def test_wildcard_port_becomes_a_real_one() -> None:
    with _listening("tcp://127.0.0.1:*") as listener:
        assert int(listener.endpoint.rpartition(":")[2]) > 0
        check_endpoint(listener.endpoint)


def test_taken_tcp_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(EndpointError, match="got Address already in use") as info:
            ZmqListener(endpoint)
        assert info.value.where == endpoint
        assert info.value.retryable


def test_live_ipc_socket_is_not_taken_over(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    wakeup, writer = socket.socketpair()
    with wakeup, writer, _listening(endpoint) as first:
        with pytest.raises(EndpointError, match="got Address already in use"):
            ZmqListener(endpoint)
        with ZmqChannel(endpoint) as channel:
            channel.submit(InitRequest())
            assert first.wait(wakeup=wakeup, timeout_ms=10_000)


def test_stale_ipc_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with _listening(f"ipc://{path}") as listener:
        assert listener.endpoint == f"ipc://{path}"


@pytest.mark.parametrize("endpoint", ["ipc:///no/such/directory/s", "tcp://192.0.2.1:5555"])
def test_address_that_is_not_ours_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="expected an address to bind"):
        ZmqListener(endpoint)


def test_wakeup_ends_waiting_and_no_message_is_none() -> None:
    reader, writer = socket.socketpair()
    with reader, writer, _listening("tcp://127.0.0.1:*") as listener:
        assert listener.receive() is None
        assert not listener.wait(wakeup=reader, timeout_ms=0)
        writer.send(b"x")
        assert not listener.wait(wakeup=reader)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_reply_finds_its_way_to_both_kinds_of_client(kind: int) -> None:
    reader, writer = socket.socketpair()
    context = zmq.Context()
    with reader, writer, _listening("tcp://127.0.0.1:*") as listener:
        with context.socket(kind) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(listener.endpoint)
            client.send_multipart([b"a", b"b"])
            assert listener.wait(wakeup=reader, timeout_ms=10_000)
            incoming = listener.receive()
            assert incoming is not None
            assert [bytes(frame) for frame in incoming.frames] == [b"a", b"b"]
            assert len(incoming.route) == (2 if kind == zmq.REQ else 1)
            assert listener.send(incoming.route, [b"c", memoryview(b"d")])
            assert client.poll(10_000)
            assert client.recv_multipart() == [b"c", b"d"]
        assert not listener.send((b"nobody",), [b"x"])
    context.term()
