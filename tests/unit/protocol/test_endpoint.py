"""Endpoints: which are refused, and which are for binding only."""

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import socket_path
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.endpoint import UNIX_PATH_MAX_BYTES, parse_endpoint
from protocol.errors import EndpointError
from protocol.http_channel import HttpChannel
from protocol.stream import StreamChannel
from protocol.zmq_channel import ZmqChannel
from tests.kit.rows import each_row

ANY = 2**32 - 1
LONG = "x" * 200
MALFORMED = [
    *("", "tcp", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555"),
    *("tcp://127.0.0.1:70000", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:5555/path"),
    *("tcp://127.0.0.1:5555?x=1", "tcp://127.0.0.1:5555#x", "tcp://user@127.0.0.1:5555"),
    *("tcp://[::1:5555", "tcp://127.0.0.1:55\n55", "tcp://a b:5555", "TCP://127.0.0.1:5555"),
    *("http://", "http://user:password@host:1", "http://host:1?x=1", "http://host:1#x"),
    *("http://host:70000", "https://host/a=b", "https://host\r\n:1", "inproc://x"),
    *("ipc://", "unix://", "unix:///tmp/a\0b", "unix:/tmp/s", f"ipc://{LONG}", f"unix://{LONG}"),
    *("vsock://3", "vsock://:5", "vsock://-1:5", "vsock://4294967296:5", "vsock://4294967295:5"),
    *("vsock://3:4294967295", "vsock://host:5", "ivshmem:///m", "ivshmem://,2:5"),
    *("ivshmem://m,2:5", "ivshmem:///m,s", "ivshmem:///m,unix:///s", f"ivshmem:///m,/{LONG}"),
    *("ivshmem:///m,4294967296:5", "ivshmem:///m\0,2:5", "ivshmem:///m,/s\0"),
]
# They have neither owner nor mode: whoever binds the name first is the service.
ABSTRACT = ["unix://@", "ipc://@", "unix://@name", "unix://\0name", "ipc://@name", "ipc://\0n"]
TO_BIND = {
    "tcp://127.0.0.1:0": None,
    "tcp://127.0.0.1:*": None,
    "tcp://*:5555": None,
    "vsock://any:5": (ANY, 5),
    "vsock://3:*": (3, ANY),
    "vsock://any:*": (ANY, ANY),
    "ivshmem:///m,any:5": (ANY, 5),
    "ivshmem:///m,3:*": (3, ANY),
}


def _refusal(endpoint: str, for_bind: bool = False) -> str:
    with pytest.raises(EndpointError) as info:
        parse_endpoint(endpoint, for_bind=for_bind)
    assert info.value.retryable
    return str(info.value)


@each_row("endpoint", [*MALFORMED, *ABSTRACT])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    for for_bind in (False, True):
        said = _refusal(endpoint, for_bind)
        if endpoint in ABSTRACT:
            assert "got an abstract socket" in said
        elif LONG not in endpoint:
            assert "vsock://CID:PORT" in said


@each_row("endpoint", list(TO_BIND))
def test_a_wildcard_is_for_binding_only(endpoint: str) -> None:
    assert parse_endpoint(endpoint, for_bind=True).address == TO_BIND[endpoint]
    _refusal(endpoint)


@each_row(
    ("opens", "endpoint", "said"),
    [
        (StreamChannel, "tcp://127.0.0.1:1", "no stream"),
        (StreamListener, "tcp://127.0.0.1:1", "no stream"),
        (ZmqChannel, "unix:///nobody", "a stream"),
        (ZmqListener, "unix:///nobody", "a stream"),
        (HttpChannel, "tcp://127.0.0.1:1", "no URL"),
        (HttpListener, "http://127.0.0.1:1/path", "no HOST:PORT alone"),
    ],
)
def test_an_endpoint_of_no_use_to_a_class_is_refused(opens: Any, endpoint: str, said: str) -> None:
    with pytest.raises(EndpointError, match=f"{endpoint}: got {said}, expected"):
        opens(endpoint)


@each_row(("scheme", "limit"), [("ipc", zmq.IPC_PATH_MAX_LEN), ("unix", UNIX_PATH_MAX_BYTES)])
def test_a_path_is_as_long_as_can_be_bound(scheme: str, limit: int, tmp_path: Path) -> None:
    longest = f"{tmp_path}/".ljust(limit, "x")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(socket_path(parse_endpoint(f"{scheme}://{longest}")) or "")
    Path(longest).unlink()
    assert f"{limit + 1} bytes, expected at most {limit}" in _refusal(f"{scheme}://{longest}x")
    # Bytes of the file system, not characters.
    _refusal(f"{scheme}://" + "é" * (limit - 5))
