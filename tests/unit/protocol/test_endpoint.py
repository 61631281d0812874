"""Tests of the grammar of endpoints."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from protocol.endpoint import (
    UNIX_PATH_MAX_BYTES,
    parse_endpoint,
)
from protocol.errors import EndpointError
from tests.kit.rows import each_row

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
    "HTTP://127.0.0.1:5555",
    "http://",
    "http://user:password@host:1",
    "http://host:1?x=1",
    "http://host:1#x",
    "http://host:70000",
    "https://host/a b",
    "https://host/a=b",
    "https://host\r\n:1",
    "httpss://host",
    "inproc://x",
    "udp://127.0.0.1:5555",
    "pgm://127.0.0.1:5555",
    "ipc://",
    "ipc://@",
    "unix://",
    "unix://@",
    "unix://" + "x" * 200,
    "unix:///tmp/a\0b",
    "unix:/tmp/s",
    "vsock://",
    "vsock://3",
    "vsock://3:",
    "vsock://:5",
    "vsock://-1:5",
    "vsock://3:-1",
    "vsock://4294967296:5",
    "vsock://3:4294967296",
    "vsock://4294967295:5",
    "vsock://3:4294967295",
    "vsock://host:5",
    "vsock://3:5/",
    "ivshmem://",
    "ivshmem:///m",
    "ivshmem:///m,",
    "ivshmem://,2:5",
    "ivshmem://m,2:5",
    "ivshmem:///m,s",
    "ivshmem:///m,unix:///s",
    "ivshmem:///m,3",
    "ivshmem:///m,host:5",
    "ivshmem:///m,4294967296:5",
    "ivshmem:///m\0,2:5",
    "ivshmem:///m,/s\0",
    "ivshmem:///m,/" + "x" * 200,
    "ipc://" + "x" * 200,
]


@each_row("endpoint", MALFORMED)
@pytest.mark.parametrize("for_bind", [False, True])
def test_malformed_endpoint_is_refused(endpoint: str, for_bind: bool) -> None:
    with pytest.raises(EndpointError) as info:
        parse_endpoint(endpoint, for_bind=for_bind)
    assert info.value.retryable


@pytest.mark.parametrize("endpoint", ["unix://@name", "unix://\0name", "ipc://@name", "ipc://\0n"])
@pytest.mark.parametrize("for_bind", [False, True])
def test_an_abstract_socket_is_refused(endpoint: str, for_bind: bool) -> None:
    """It has neither owner nor mode: whoever binds the name first is the service."""
    with pytest.raises(EndpointError, match=r"got an abstract socket, .* expected a path"):
        parse_endpoint(endpoint, for_bind=for_bind)


def test_refusal_names_every_spelling() -> None:
    with pytest.raises(EndpointError, match=r"tcp://.*ipc://.*unix://.*vsock://CID:PORT.*http\("):
        parse_endpoint("ftp://here")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:*",
        "tcp://*:5555",
        "vsock://any:5",
        "vsock://3:*",
        "vsock://any:*",
        "ivshmem:///m,any:5",
        "ivshmem:///m,3:*",
    ],
)
def test_wildcard_is_for_binding_only(endpoint: str) -> None:
    parse_endpoint(endpoint, for_bind=True)
    with pytest.raises(EndpointError):
        parse_endpoint(endpoint)


MEMORY = {"ivshmem:///m,2:5000": "/m", "ivshmem:///dev/shm/a,b,/run/s": "/dev/shm/a,b"}


@each_row(
    ("endpoint", "scheme", "address", "path"),
    [
        ("tcp://127.0.0.1:5555", "tcp", None, None),
        ("tcp://host:1", "tcp", None, None),
        ("tcp://[::1]:5555", "tcp", None, None),
        ("tcp://[fe80::1%eth0]:5555", "tcp", None, None),
        ("http://127.0.0.1:5555", "http", None, None),
        ("https://gpu.example", "https", None, None),
        ("https://[::1]:1/of/a-model/v2.1/", "https", None, None),
        ("ipc:///run/s", "ipc", None, "/run/s"),
        ("unix:///run/s", "unix", "/run/s", "/run/s"),
        ("unix://s", "unix", "s", "s"),
        ("vsock://2:5000", "vsock", (2, 5000), None),
        ("vsock://0:4294967294", "vsock", (0, 4294967294), None),
        ("shm:///run/s", "shm", "/run/s", "/run/s"),
        ("ivshmem:///m,2:5000", "ivshmem", (2, 5000), None),
        ("ivshmem:///dev/shm/a,b,/run/s", "ivshmem", "/run/s", "/run/s"),
    ],
)
def test_good_endpoint_is_read(
    endpoint: str, scheme: str, address: object, path: str | None
) -> None:
    for for_bind in (False, True):
        parsed = parse_endpoint(endpoint, for_bind=for_bind)
        assert (parsed.text, parsed.scheme, parsed.address) == (endpoint, scheme, address)
        assert parsed.socket_path == path
        assert parsed.is_zmq == (scheme in ("tcp", "ipc"))
        assert parsed.is_http == (scheme in ("http", "https"))
        assert parsed.is_stream == (not parsed.is_zmq and not parsed.is_http)
        assert parsed.memory == MEMORY.get(endpoint, "")


def test_any_is_the_largest_number() -> None:
    assert parse_endpoint("vsock://any:*", for_bind=True).address == (2**32 - 1, 2**32 - 1)
    assert parse_endpoint("vsock://any:7", for_bind=True).address == (2**32 - 1, 7)


@pytest.mark.parametrize(
    ("scheme", "limit"), [("ipc", zmq.IPC_PATH_MAX_LEN), ("unix", UNIX_PATH_MAX_BYTES)]
)
def test_too_long_path_names_the_limit(scheme: str, limit: int) -> None:
    parse_endpoint(f"{scheme}://" + "x" * limit)
    with pytest.raises(EndpointError, match=f"{limit + 1} bytes, expected at most {limit}$"):
        parse_endpoint(f"{scheme}://" + "x" * (limit + 1))
    # Bytes of the file system, not characters.
    with pytest.raises(EndpointError):
        parse_endpoint(f"{scheme}://" + "é" * (limit - 5))


def test_the_longest_unix_path_can_be_bound(tmp_path: Path) -> None:
    path = f"{tmp_path}/".ljust(UNIX_PATH_MAX_BYTES, "x")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(parse_endpoint(f"unix://{path}").address))
