"""Tests of picking a transport, at either end."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_side.access import ServiceKeys
from gpu_side.transport.bind import open_listener
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.connect import open_channel
from protocol.curve import ClientKeys
from protocol.errors import EndpointError, SettingsError
from protocol.http_channel import HttpChannel
from protocol.ivshmem import IvshmemChannel
from protocol.shared_memory import SMALLEST
from protocol.shm import ShmChannel
from protocol.stream import StreamChannel
from protocol.zmq_channel import ZmqChannel


@pytest.mark.parametrize(
    ("endpoint", "channel_class", "listener_class"),
    [
        ("tcp://127.0.0.1:*", ZmqChannel, ZmqListener),
        ("ipc://{}/s", ZmqChannel, ZmqListener),
        ("unix://{}/s", StreamChannel, StreamListener),
        ("http://127.0.0.1:*", HttpChannel, HttpListener),
        ("shm://{}/s", ShmChannel, StreamListener),
        ("ivshmem://{0}/memory,{0}/s", IvshmemChannel, StreamListener),
    ],
)
def test_the_scheme_picks_the_transport(
    endpoint: str, channel_class: type, listener_class: type, tmp_path: Path
) -> None:
    (tmp_path / "memory").write_bytes(bytes(SMALLEST))
    listener = open_listener(endpoint.format(tmp_path))
    channel = open_channel(listener.endpoint)
    assert type(listener) is listener_class
    assert type(channel) is channel_class
    channel.close()
    listener.close()


def test_keys_are_refused_where_nothing_would_use_them(tmp_path: Path) -> None:
    endpoint = f"unix://{tmp_path}/s"
    with pytest.raises(SettingsError, match=r"got a plain stream, .* expected tcp"):
        open_channel(endpoint, keys=ClientKeys(b"s", b"p"))
    with pytest.raises(SettingsError, match=r"got a plain stream, .* expected tcp"):
        open_listener(endpoint, keys=ServiceKeys(b"s", frozenset()))


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "udp://127.0.0.1:1", "vsock://host:1", "unix://@name", "ipc://@name", "ivshmem:///m"),
        *("http://", "http://u:p@h:1", "http://h:1?q", "http://h:1#f", "http://h:70000"),
        *("http://h:1/a=0-7", "http://h/a b", "https://h\r\n:1", "ftp://h:1", "HTTP://h:1"),
    ],
)
def test_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        open_channel(endpoint)
    with pytest.raises(EndpointError):
        open_listener(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:*",
        "http://127.0.0.1:*",
        "https://*:1",
        "vsock://any:5",
        "ivshmem:///m,any:5",
    ],
)
def test_wildcard_is_for_binding_only(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        open_channel(endpoint)
