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
from protocol.errors import SettingsError
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
