"""The service names its connections: whatever a client says, as whichever client it comes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from gpu_side.access import ServiceKeys
from gpu_side.transport.zap import ZapHandler
from gpu_side.transport.zmq_doorway import Doorway
from gpu_side.transport.zmq_handshake import Handshake
from gpu_side.transport.zmq_listener import ZmqListener
from gpu_side.transport.zmq_names import as_property, bind_within_process
from protocol.errors import EndpointError, ProtocolError
from tests.kit.wire import take
from tests.unit.protocol.test_zmq_channel import GREETING

SERVICE, SECRET = zmq.curve_keypair()
CLIENT, CLIENT_SECRET = zmq.curve_keypair()
KEYS = ServiceKeys(SECRET, frozenset({CLIENT}))

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
                client.curve_publickey, client.curve_secretkey = CLIENT, CLIENT_SECRET
                client.curve_serverkey = SERVICE
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
    named = b"\x05READY" + KIND + _property(b"X-App", b"1") + as_property(OURS)
    expected = GREETING + b"\x06" + len(named).to_bytes(8) + named + b"\0\x01mmore"
    for own in (b"", _property(b"Identity", b"me"), _property(b"IDENTITY", b"")):
        ready = b"\x05READY" + KIND + own + _property(b"X-App", b"1")
        for frame in (_command(ready), b"\x06" + len(ready).to_bytes(8) + ready):
            said = GREETING + frame + b"\0\x01mmore"
            for step in (1, 7, 64, len(said)):
                handshake, passed = Handshake(OURS), b""
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
        GREETING + _command(ready + evil + _property(b"X", b"", len(as_property(OURS)))),
        GREETING + _command(ready + evil + b"\x20X"),
        GREETING + _command(ready + evil + b"\x01X\0\0"),
        GREETING + b"\x06" + (2**40).to_bytes(8),
    ):
        with pytest.raises(ProtocolError, match="ZeroMQ's handshake: got"):
            Handshake(OURS).take(memoryview(said))


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
    client_after.send(b"x")
    take(listener)


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
        endpoint = bind_within_process(inner)
        command = [sys.executable, "-c", OTHER_PROCESS, endpoint]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert told.stdout.strip() in ("DISCONNECTED", "HANDSHAKE_FAILED_NO_DETAIL")
        ours.connect(endpoint)
        ours.send(b"x")
        assert inner.poll(30_000)
