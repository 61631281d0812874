"""Sockets that must not be taken over."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from gpu_side.transport import live_socket
from gpu_side.transport.live_socket import refuse_live_socket
from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError


@pytest.mark.parametrize("scheme", ["ipc", "unix"])
def test_only_a_live_socket_is_refused(scheme: str, tmp_path: Path) -> None:
    endpoint = parse_endpoint(f"{scheme}://{tmp_path}/s", for_bind=True)
    refuse_live_socket(endpoint)
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(f"{tmp_path}/s")
        refuse_live_socket(endpoint)
        service.listen()
        with pytest.raises(EndpointError, match="got Address already in use"):
            refuse_live_socket(endpoint)
    refuse_live_socket(endpoint)


@pytest.mark.parametrize("scheme", ["ipc", "unix"])
def test_a_live_socket_that_is_no_stream_is_refused(scheme: str, tmp_path: Path) -> None:
    endpoint = parse_endpoint(f"{scheme}://{tmp_path}/s", for_bind=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"{tmp_path}/s")
        with pytest.raises(EndpointError, match=os.strerror(errno.EPROTOTYPE)):
            refuse_live_socket(endpoint)
    refuse_live_socket(endpoint)


def test_a_socket_that_we_may_not_connect_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(live_socket.socket, "socket", Forbidden)
    with pytest.raises(EndpointError, match=r"may be in use.*Permission denied"):
        refuse_live_socket(parse_endpoint(f"unix://{tmp_path}/s", for_bind=True))


@pytest.mark.parametrize("path", ["no/such/directory", "file/s"])
def test_where_there_is_no_socket_nobody_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refuse_live_socket(parse_endpoint(f"unix://{tmp_path}/{path}", for_bind=True))
