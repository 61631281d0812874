"""The listening end of a stream where it differs from ZeroMQ: its file, and its address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gpu_side.transport.stream_listener import StreamListener
from protocol.errors import EndpointError
from tests.kit.wire import (
    raw_socket,
    request_of,
)

# ------------------------------------------------------------------------------ the socket's file


def test_the_file_goes_with_the_listener(endpoint: str, tmp_path: Path) -> None:
    StreamListener(endpoint).close()
    assert not (tmp_path / "s").exists()


def test_a_successors_file_stays(endpoint: str, tmp_path: Path) -> None:
    first = StreamListener(endpoint)
    (tmp_path / "s").unlink()
    second = StreamListener(endpoint)
    first.close()
    assert (tmp_path / "s").exists()
    raw_socket(endpoint).close()
    second.close()


def test_it_tells_that_a_client_has_gone(listener: StreamListener, endpoint: str) -> None:
    gone: list[bytes] = []
    listener.on_gone = gone.append
    with raw_socket(endpoint) as client, raw_socket(endpoint) as other:
        [name], [another] = (request_of(listener, one) for one in (client, other))
        assert gone == []
        client.sendall(b"\xff" * 64)
        assert not listener.wait(timeout_ms=100)
        assert gone == [name]
    assert not listener.wait(timeout_ms=100)
    assert gone == [name, another]
    # A request of its that waited has left something since, perhaps.
    assert not listener.send((name,), [b"reply"])
    assert gone[2:] == [name]


def test_a_live_socket_is_not_taken_over(listener: StreamListener, endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got Address already in use"):
        StreamListener(endpoint)
    raw_socket(endpoint).close()


def test_a_live_socket_with_a_full_backlog_is_not_taken_over(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(endpoint.removeprefix("unix://"))
        busy.listen(0)
        with raw_socket(endpoint), pytest.raises(EndpointError, match="got Address already in use"):
            StreamListener(endpoint)


def test_the_file_of_a_dead_service_is_replaced(endpoint: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(endpoint.removeprefix("unix://"))
    listener = StreamListener(endpoint)
    raw_socket(endpoint).close()
    listener.close()


def test_a_file_that_is_no_socket_stays(endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(EndpointError, match="got Address already in use"):
        StreamListener(endpoint)
    assert (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize("endpoint", ["unix:///no/such/directory/s", "vsock://77:5"])
def test_an_address_that_is_not_ours_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="expected an address to bind"):
        StreamListener(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "ipc:///tmp/s"])
def test_what_is_no_stream_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError, match="got no stream"):
        StreamListener(endpoint)
