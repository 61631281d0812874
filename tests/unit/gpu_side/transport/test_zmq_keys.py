"""Tests of keys on ZeroMQ's connections: who is let in, who is cut off, and what each is told."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zmq
from zmq.utils import z85

from gpu_side.access import ServiceKeys
from gpu_side.encoding import open_request
from gpu_side.transport import zmq_listener
from gpu_side.transport.zap import DOMAIN, ZapHandler
from gpu_side.transport.zmq_listener import ZmqListener
from gpu_side.transport.zmq_names import Names
from protocol.curve import ClientKeys
from protocol.errors import EndpointError, SettingsError
from protocol.messages import LMHeadRequest
from protocol.tensors import from_torch
from protocol.zmq_channel import ZmqChannel
from tests.kit.wire import tensor_reply

# Of heartbeats, which are not the subject here: a busy machine must not end a connection.
CALM_S = 60.0
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(4)))

SERVICE_PUBLIC, SERVICE_SECRET = zmq.curve_keypair()
FRIEND, FRIEND_SECRET = zmq.curve_keypair()
OTHER, OTHER_SECRET = zmq.curve_keypair()
STRANGER, STRANGER_SECRET = zmq.curve_keypair()
KEYS = ServiceKeys(SERVICE_SECRET, frozenset({FRIEND, OTHER}))


class Service:
    """A listener, and a thread that answers whatever it hands out."""

    def __init__(self, endpoint: str, keys: ServiceKeys | None = KEYS) -> None:
        self.listener = ZmqListener(endpoint, keys=keys, heartbeat_timeout_s=CALM_S)
        self.endpoint = self.listener.endpoint
        # Of the requests that were handed out.
        self.clients: list[bytes] = []
        self.failure: EndpointError | None = None
        self._reader, self._writer = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while self.listener.wait(wakeup=self._reader):
                while (incoming := self.listener.receive()) is not None:
                    self.clients.append(incoming.client)
                    number = open_request(incoming.frames, 2**30).request_id
                    self.listener.send(incoming.route, tensor_reply(number, torch.ones(2)))
        except EndpointError as error:
            self.failure = error

    def close(self) -> None:
        self._writer.send(b"x")
        self._thread.join()
        self._reader.close()
        self._writer.close()
        self.listener.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def service(endpoint: str) -> Iterator[Service]:
    with closing(Service(endpoint)) as made:
        yield made


def _channel(
    endpoint: str,
    secret: bytes | None = FRIEND_SECRET,
    service: bytes = SERVICE_PUBLIC,
) -> ZmqChannel:
    keys = None if secret is None else ClientKeys(secret, service)
    return ZmqChannel(endpoint, timeout_s=3600.0, keys=keys, heartbeat_timeout_s=CALM_S)


@pytest.mark.parametrize(
    ("keys", "secret", "expected", "said"),
    [
        (KEYS, None, SERVICE_PUBLIC, r"got a handshake that failed.*--identity"),
        (KEYS, FRIEND_SECRET, STRANGER, r"got a handshake that failed.*the key of --service-k"),
        # Which of two messages it is depends on who closes the connection first.
        (
            None,
            FRIEND_SECRET,
            SERVICE_PUBLIC,
            r"got a (service without keys|handshake that failed).*of --service-key",
        ),
    ],
    ids=["client without keys", "another service's key", "service without keys"],
)
def test_without_the_right_keys_on_both_ends_nothing_is_asked(
    endpoint: str, keys: ServiceKeys | None, secret: bytes | None, expected: bytes, said: str
) -> None:
    with closing(Service(endpoint, keys)) as service:
        with (
            _channel(service.endpoint, secret, expected) as channel,
            pytest.raises(EndpointError, match=said),
        ):
            channel.call(REQUEST)
        assert service.clients == []


def test_where_the_zap_handler_has_died_nobody_gets_in_and_the_listener_says_so(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _channel(service.endpoint) as inside:
        inside.call(REQUEST)
        monkeypatch.setattr("protocol.zmq_sockets.HANDSHAKE_TIMEOUT_MS", 200)
        with monkeypatch.context() as patch:
            patch.setattr(ZapHandler, "_answer", lambda *_: 1 // 0)
            with _channel(service.endpoint) as channel, pytest.raises(EndpointError):
                channel.call(REQUEST)
        # It stays dead, for strangers and friends.
        for secret in (FRIEND_SECRET, STRANGER_SECRET):
            with _channel(service.endpoint, secret) as channel, pytest.raises(EndpointError):
                channel.call(REQUEST)
    service._thread.join(30)
    assert "no thread that lets clients in" in str(service.failure)
    assert len(service.clients) == 1
    assert "zap_handler_failed" in caplog.messages


def test_a_zeromq_that_would_let_in_strangers_is_refused(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_listener, "ZAP_ENFORCE_DOMAIN", 9999)
    with pytest.raises(SettingsError, match="without ZMQ_ZAP_ENFORCE_DOMAIN"):
        ZmqListener(endpoint, keys=KEYS)
    ZmqListener(endpoint).close()


def test_a_revoked_key_loses_its_connection_and_cannot_come_back(service: Service) -> None:
    with _channel(service.endpoint) as friend:
        friend.call(REQUEST)
        service.listener.allow(frozenset({OTHER}))
        allowed = [service.listener.is_allowed(key) for key in (FRIEND, OTHER, b"")]
        assert allowed == [False, True, False]
        with pytest.raises(EndpointError):
            friend.call(REQUEST)
        with pytest.raises(EndpointError, match="got a refusal of our key"):
            friend.call(REQUEST)
    assert len(service.clients) == 1


def test_a_message_of_a_revoked_key_is_not_taken_even_before_the_cut(service: Service) -> None:
    with _channel(service.endpoint) as friend, _channel(service.endpoint, OTHER_SECRET) as other:
        friend.call(REQUEST)
        handler = service.listener._zap_handler
        assert handler is not None
        assert handler.replace_list(frozenset({OTHER}))  # and nobody cuts anything
        late = friend.submit(REQUEST)
        for _ in range(20):
            other.call(REQUEST)
        assert len(service.clients) == 21
        assert not friend._lost
        friend.abandon(late)


def test_a_cut_after_which_the_address_cannot_be_bound_ends_the_service(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = ZmqListener(endpoint, keys=KEYS)
    assert listener._zap_handler is not None
    listener._zap_handler._answer(_asked())
    monkeypatch.setattr(zmq_listener, "_REBIND_S", 0.01)
    listener.allow(frozenset({OTHER}))
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "bind", Mock(side_effect=zmq.ZMQError(errno.EADDRINUSE)))
        with pytest.raises(EndpointError, match="the address that was ours a moment ago") as info:
            listener.receive()
    assert info.value.got == "Address already in use"
    listener.close()


@pytest.fixture
def handler() -> Iterator[ZapHandler]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as watched:
        made = ZapHandler(context, watched, frozenset({FRIEND}), Names())
        yield made
    context.term()
    made.join()


def _asked(**changed: Any) -> list[bytes]:
    fields = {
        "version": b"1.0",
        "request_id": b"7",
        "domain": DOMAIN,
        "address": b"127.0.0.1",
        "identity": b"",
        "mechanism": b"CURVE",
        "key": z85.decode(FRIEND),
    }
    return list({**fields, **changed}.values())


def test_it_says_yes_to_a_friend_by_name_and_names_the_connection(
    handler: ZapHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    read, draw = ZapHandler._let_handshake_be_read, Names.draw
    monkeypatch.setattr(
        ZapHandler, "_let_handshake_be_read", lambda of: (read(of), steps.append("read"))
    )
    monkeypatch.setattr(Names, "draw", lambda of: steps.append("named") or draw(of))
    answer = handler._answer(_asked())
    assert answer[:-1] == [b"1.0", b"7", b"200", b"OK", FRIEND]
    assert answer[-1].startswith(b"\x08Identity\0\0\0\x18")
    # Before ours, or the client's own name would be the last that is read, and count.
    assert steps == ["read", "named"]
    assert handler.refused == 0


@pytest.mark.parametrize(
    "request_frames",
    [
        _asked(key=z85.decode(STRANGER)),
        _asked(key=b""),
        _asked(key=FRIEND),
        _asked(domain=b""),
        _asked(domain=b"*"),
        _asked(version=b"2.0"),
        _asked(mechanism=b"NULL"),
        _asked(mechanism=b"PLAIN"),
        _asked()[:-1],
        [*_asked(), b""],
        [],
        [b"1.0"],
    ],
)
def test_it_says_no_to_everybody_else(handler: ZapHandler, request_frames: list[bytes]) -> None:
    version, request_id = (*request_frames, b"", b"")[:2]
    answer = handler._answer(request_frames)
    assert answer == [version, request_id, b"400", b"refused", b"", b""]
    assert handler.refused == 1
