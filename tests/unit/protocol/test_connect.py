"""Tests of picking a transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol import connect
from protocol.connect import open_channel, open_listener
from protocol.errors import EndpointError
from protocol.link import Link, ModelledLink
from protocol.stream import StreamChannel
from protocol.stream_listener import StreamListener
from protocol.zmq_channel import ZmqChannel, ZmqListener


@pytest.mark.parametrize(
    ("endpoint", "channel_class", "listener_class"),
    [
        ("tcp://127.0.0.1:*", ZmqChannel, ZmqListener),
        ("ipc://{}/s", ZmqChannel, ZmqListener),
        ("unix://{}/s", StreamChannel, StreamListener),
    ],
)
def test_the_scheme_picks_the_transport(
    endpoint: str, channel_class: type, listener_class: type, tmp_path: Path
) -> None:
    listener = open_listener(endpoint.format(tmp_path))
    channel = open_channel(listener.endpoint)
    assert type(listener) is listener_class
    assert type(channel) is channel_class
    channel.close()
    modelled = open_channel(listener.endpoint, link=Link(gbps=1.0, rtt_us=5.0))
    assert isinstance(modelled, ModelledLink)
    assert modelled.link == Link(1.0, 5.0)
    assert modelled.endpoint == listener.endpoint
    modelled.close()
    listener.close()


@pytest.mark.parametrize("scheme", ["ipc", "unix"])
def test_settings_reach_the_transport(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    for name in ("ZmqChannel", "ZmqListener", "StreamChannel", "StreamListener"):
        monkeypatch.setattr(connect, name, lambda endpoint, **settings: given.append(settings))
    open_channel(f"{scheme}://{tmp_path}/s", timeout_s=7.0, max_message_bytes=8, spin_us=9.0)
    open_listener(f"{scheme}://{tmp_path}/s", max_message_bytes=8, spin_us=9.0)
    assert given == [
        {"timeout_s": 7.0, "max_message_bytes": 8, "spin_us": 9.0},
        {"max_message_bytes": 8, "spin_us": 9.0},
    ]


@pytest.mark.parametrize("endpoint", ["", "udp://127.0.0.1:1", "vsock://host:1"])
def test_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        open_channel(endpoint)
    with pytest.raises(EndpointError):
        open_listener(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "vsock://any:5"])
def test_wildcard_is_for_binding_only(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        open_channel(endpoint)
