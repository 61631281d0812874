"""Tests of keys on ZeroMQ's connections: who is let in, who is cut off, and what each is told."""

import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zmq
from zmq.utils import z85

from gpu_side.access import ServiceKeys
from gpu_side.encoding import open_request
from gpu_side.transport import zmq_admission, zmq_listener
from gpu_side.transport.zmq_admission import Doorway, Names, ZapHandler
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.curve import ClientKeys
from protocol.errors import EndpointError, ProtocolError, SettingsError
from protocol.messages import LMHeadRequest
from protocol.tensors import from_torch
from protocol.zmq_channel import ZmqChannel
from tests.kit.wire import take, tensor_reply, without_descriptors
from tests.unit.protocol.test_zmq_channel import GREETING

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
    endpoint: str, secret: bytes | None = FRIEND_SECRET, service: bytes = SERVICE_PUBLIC
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
        monkeypatch.setattr("protocol.zmq_channel.HANDSHAKE_TIMEOUT_MS", 200)
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


def test_more_keys_on_the_list_disturb_no_connection(service: Service) -> None:
    with _channel(service.endpoint) as friend:
        friend.call(REQUEST)
        service.listener.allow(KEYS.allowed | {STRANGER})
        with _channel(service.endpoint, STRANGER_SECRET) as stranger:
            stranger.call(REQUEST)
        friend.call(REQUEST)
        friend._note_events()
        assert friend._connection == 0


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
    made.thread.join()


def _asked(**changed: Any) -> list[bytes]:
    fields = {
        "version": b"1.0",
        "request_id": b"7",
        "domain": zmq_admission.DOMAIN,
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


Connect = Callable[..., "zmq.Socket[bytes]"]


@pytest.fixture(params=["tcp", "ipc", "tcp with keys", "ipc with keys"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ZmqListener]:
    endpoint = "tcp://127.0.0.1:*" if "tcp" in request.param else f"ipc://{tmp_path}/s"
    keys = KEYS if "keys" in request.param else None
    made = ZmqListener(endpoint, keys=keys, heartbeat_timeout_s=0)
    yield made
    made.close()


@pytest.fixture
def connect(listener: ZmqListener) -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:

        def connected(name: bytes = b"", kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
            client = stack.enter_context(context.socket(kind))
            client.setsockopt(zmq.LINGER, 0)
            if name:
                client.setsockopt(zmq.ROUTING_ID, name)
            if listener._zap_handler is not None:
                client.curve_publickey, client.curve_secretkey = FRIEND, FRIEND_SECRET
                client.curve_serverkey = SERVICE_PUBLIC
            client.connect(listener.endpoint)
            return client

        yield connected
    context.term()


def test_no_client_chooses_its_name_and_each_gets_its_own_reply(
    listener: ZmqListener, connect: Connect
) -> None:
    # Without care one in seven was quicker than we are: so many.
    names = [b"", b"me", b"\0\x6b\x8b\x45\x67", b"x" * 255] * 25
    kinds = (zmq.DEALER, zmq.REQ)
    clients = [connect(name, kinds[n % 8 // 4]) for n, name in enumerate(names)]
    for n, client in enumerate(clients):
        client.send(b"%d" % n)
    requests = [take(listener) for _ in clients]
    assert len({one.client if not one.key else one.route[0] for one in requests}) == len(clients)
    secrets = {one.route[0][:-8] for one in requests}
    assert len(secrets) == 1
    assert sorted(int(one.peer, 16) for one in requests) == list(range(1, len(clients) + 1))
    for one in requests:
        assert listener.send(one.route, [bytes(one.frames[0]), b"to you"])
    for n, client in enumerate(clients):
        assert client.poll(30_000)
        assert client.recv_multipart() == [b"%d" % n, b"to you"]


@pytest.mark.parametrize("listener", ["tcp with keys"], indirect=True)
def test_a_message_under_a_name_that_is_not_ours_is_not_taken(
    listener: ZmqListener,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a ZeroMQ that took no name from the ZAP handler."""
    answer = ZapHandler._answer
    with monkeypatch.context() as patch:
        patch.setattr(ZapHandler, "_answer", lambda *given: [*answer(*given)[:-1], b""])
        stranger = connect(b"me")
        stranger.send(b"x")
        until = time.monotonic() + 30
        while not caplog.records:
            assert time.monotonic() < until
            assert not listener.wait(timeout_ms=10)
    assert vars(caplog.records[0])["fields"] == {"reason": "routing_id_not_ours"}
    client = connect()
    client.send(b"y")
    assert bytes(take(listener).frames[0]) == b"y"


def _property(name: bytes, value: bytes, size: int | None = None) -> bytes:
    said = len(value) if size is None else size
    return bytes([len(name)]) + name + said.to_bytes(4) + value


OURS = b"the name that we give"
KIND = _property(b"Socket-Type", b"DEALER")


def _command(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body)]) + body


def test_what_a_client_says_is_passed_on_with_our_name() -> None:
    named = b"\x05READY" + KIND + _property(b"X-App", b"1") + zmq_admission.as_property(OURS)
    expected = GREETING + b"\x06" + len(named).to_bytes(8) + named + b"\0\x01mmore"
    for own in (b"", _property(b"Identity", b"me"), _property(b"IDENTITY", b"")):
        ready = b"\x05READY" + KIND + own + _property(b"X-App", b"1")
        for frame in (_command(ready), b"\x06" + len(ready).to_bytes(8) + ready):
            said = GREETING + frame + b"\0\x01mmore"
            for step in (1, 7, 64, len(said)):
                handshake, passed = zmq_admission.Handshake(OURS), b""
                for at in range(0, len(said), step):
                    piece = said[at : at + step]
                    passed += piece if handshake.done else handshake.take(memoryview(piece))
                    # The service's greeting is the answer to it, byte by byte.
                    assert len(passed) >= min(64, at + step)
                assert passed == expected


def test_what_would_name_a_client_otherwise_is_refused() -> None:
    ready = b"\x05READY" + KIND
    evil = _property(b"Identity", b"evil")
    for said in (
        b"\x01\0",  # ZMTP 1.0
        b"\x05\0name",
        b"\xff" + bytes(8) + b"\x00",
        GREETING[:10] + b"\x01",  # ZMTP 2.0
        GREETING[:10] + b"\0",
        GREETING + b"\0\x04name",  # a message
        GREETING + b"\x05" + _command(ready)[1:],
        GREETING + _command(b"\x05ERROR" + evil),
        GREETING + _command(b"\x05READ" + evil),
        # A property that would swallow the one that we add.
        GREETING
        + _command(ready + evil + _property(b"X", b"", len(zmq_admission.as_property(OURS)))),
        GREETING + _command(ready + evil + b"\x20X"),
        GREETING + _command(ready + evil + b"\x01X\0\0"),
        GREETING + b"\x06" + (2**40).to_bytes(8),
    ):
        with pytest.raises(ProtocolError, match="ZeroMQ's handshake: got"):
            zmq_admission.Handshake(OURS).take(memoryview(said))


@pytest.mark.parametrize("listener", ["tcp"], indirect=True)
def test_what_is_no_handshake_is_cut_off_and_counted(
    listener: ZmqListener, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    host, _, port = listener.endpoint.removeprefix("tcp://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(GREETING + b"\0\x04name")
        with suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    assert listener.clients_refused == 1
    assert vars(caplog.records[0])["fields"]["reason"] == "no_zmtp_3"
    client_after = connect()
    # Of a message of too many frames the rest is no message either.
    client_after.send_multipart([b"x"] * 99)
    client_after.send(b"y")
    assert len(take(listener).frames) < 99
    assert take(listener).frames == [b"y"]


def test_of_replies_that_are_not_read_no_more_is_kept_than_of_clients_that_stay() -> None:
    unread = zmq_listener.Unread()
    for number in range(1000):
        unread.add(b"%d" % number, [(Mock(done=number != 5), 10)])
    assert len(unread._held) < 200
    assert [unread.bytes_of(b"%d" % number) for number in (5, 999)] == [10, 0]


@pytest.mark.parametrize("listener", ["ipc"], indirect=True)
def test_a_doorway_that_has_failed_ends_the_service(
    listener: ZmqListener,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Doorway, "_accept", lambda _: 1 // 0)
    connect().send(b"x")
    with pytest.raises(EndpointError, match="no thread that lets clients in"):
        listener.wait(timeout_ms=30_000)
    assert "doorway_failed" in caplog.messages


@pytest.mark.parametrize("listener", ["ipc"], indirect=True)
def test_without_file_descriptors_clients_wait_at_the_doorway(
    listener: ZmqListener,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    doorway = listener._doorway
    assert doorway is not None
    monkeypatch.setattr("gpu_side.transport.listener._ACCEPT_AGAIN_S", 0.01)
    monkeypatch.setattr(doorway, "_listening", without_descriptors(doorway._listening, 3))
    connect().send(b"x")
    take(listener)
    assert caplog.messages.count("no_more_clients") == 3


OTHER_PROCESS = """
import sys, zmq
from zmq.utils.monitor import parse_monitor_message
context = zmq.Context()
with context, context.socket(zmq.DEALER) as client:
    client.linger = 0
    events = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
                                       | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    client.connect(sys.argv[1])
    print(parse_monitor_message(events.recv_multipart())["event"].name)
    client.disable_monitor()
"""


def test_no_other_process_comes_in_past_the_doorway() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.ROUTER) as inner, context.socket(zmq.DEALER) as ours:
        endpoint = zmq_admission.bind_within_process(inner)
        command = [sys.executable, "-c", OTHER_PROCESS, endpoint]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert told.stdout.strip() in ("DISCONNECTED", "HANDSHAKE_FAILED_NO_DETAIL")
        ours.connect(endpoint)
        ours.send(b"x")
        assert inner.poll(30_000)
