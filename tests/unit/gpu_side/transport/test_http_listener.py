"""The service's end of HTTP: tokens, limits, bad bodies and slow clients."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.transport import http_gateway, http_listener
from gpu_side.transport.bind import open_listener
from gpu_side.transport.http_gateway import Gateway
from gpu_side.transport.http_keys import HttpKeys, digest_of, read_tokens
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import Incoming
from protocol.encoding import encode_request
from protocol.errors import EndpointError, ErrorCode, KeyFileError, SettingsError
from protocol.http_access import HttpAccess
from protocol.http_channel import HttpChannel
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch
from tests.e2e.tls_ending_proxy import _contexts
from tests.kit.rows import each_row

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent, Scope

LONG_MS = 20_000
FRIEND, OTHER, STRANGER = (f"tsqp-{letter * 43}" for letter in "fos")
LARGE = LMHeadRequest(hidden_states=from_torch(torch.zeros(2**20)))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).hexdigest().encode()


def _body(request: InitRequest | LMHeadRequest | None = None) -> bytes:
    pieces, _ = to_pieces(encode_request(request or InitRequest(), 1, 1000))
    return b"".join(map(bytes, pieces))


@contextmanager
def _listening(
    *tokens: str, max_message_bytes: int = 2**26, pem: Path | None = None
) -> Iterator[tuple[HttpListener, tuple[str, int]]]:
    keys = HttpKeys(frozenset(map(_digest, tokens)) if tokens else None, pem, pem)
    listener = HttpListener("http://127.0.0.1:*", max_message_bytes=max_message_bytes, keys=keys)
    try:
        host, _, port = listener.endpoint.partition("://")[2].partition(":")
        yield listener, (host, int(port))
    finally:
        listener.close()


def _post(address: tuple[str, int], body: bytes, token: str = "", **more: str) -> int:
    """Send a request that gets no reply of the loop, and return its status."""
    connection = http.client.HTTPConnection(*address, timeout=20)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request("POST", more.get("path", "/v1/rpc"), body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _next(listener: HttpListener) -> Incoming:
    assert listener.wait(timeout_ms=LONG_MS), "no request came"
    incoming = listener.receive()
    assert incoming is not None
    return incoming


def _answer(listener: HttpListener, incoming: Incoming, code: ErrorCode) -> bool:
    opened = open_request(incoming.frames, 2**30)
    frames = encode_reply(Form.FRAMED, opened.request_id, opened.method, code)
    return listener.send(incoming.route, frames)


# ---------------------------------------------------------------------------------------- tokens


def test_tokens_decide_who_is_let_in_and_who_is_who() -> None:
    with _listening(FRIEND, OTHER) as (listener, address):
        for token in ("", STRANGER, FRIEND[:-1], "f"):
            assert _post(address, _body(), token) == 401
        assert not listener.wait(timeout_ms=0)
        assert listener.clients_refused == 4
        clients = []
        for token in (FRIEND, FRIEND, OTHER):
            with HttpChannel(listener.endpoint, access=HttpAccess(token)) as channel:
                channel.submit(InitRequest())
                clients.append(_next(listener))
        first, second, third = clients
        # All channels of one token are one client, whose turn comes once.
        assert first.client == second.client == _digest(FRIEND)
        assert first.route != second.route
        assert third.client == _digest(OTHER)
        assert listener.is_allowed(first.key)
        assert not listener.is_allowed(_digest(STRANGER))
        assert not listener.is_allowed(b"")


def test_a_token_that_is_revoked_gets_no_reply_and_is_not_let_in_again() -> None:
    with (
        _listening(FRIEND, OTHER) as (listener, _),
        HttpChannel(listener.endpoint, access=HttpAccess(FRIEND)) as revoked,
        HttpChannel(listener.endpoint, access=HttpAccess(OTHER)) as stays,
    ):
        waits = [revoked.submit(InitRequest()), stays.submit(InitRequest())]
        asked = [_next(listener), _next(listener)]
        listener.allow(frozenset({_digest(OTHER)}))
        with pytest.raises(EndpointError, match="a lost connection while Init"):
            revoked.wait(waits[0])
        for incoming in asked:
            answered = _answer(listener, incoming, ErrorCode.INTERNAL)
            assert answered == listener.is_allowed(incoming.key)
        assert stays.arrived(waits[1], time.monotonic() + 20)
        with pytest.raises(EndpointError, match="got HTTP status 401"):
            revoked.call(InitRequest())


def test_without_tokens_there_is_no_list() -> None:
    with _listening() as (listener, _):
        assert listener.is_allowed(b"")
        with pytest.raises(RuntimeError):
            listener.allow(frozenset())


def test_without_tokens_a_channel_is_one_client_however_it_connects() -> None:
    with (
        _listening() as (listener, _),
        HttpChannel(listener.endpoint) as one,
        HttpChannel(listener.endpoint) as other,
    ):
        for channel in (one, one, other):
            channel.submit(InitRequest())
        names = [_next(listener).client for _ in range(3)]
        assert len(set(names)) == 2
        assert {len(name) for name in names} == {16}


@each_row(
    "header", [b"", b"Bearer", FRIEND.encode(), b"Basic " + FRIEND.encode(), b"Bearer \xff\x00"]
)
def test_what_shows_no_token_of_ours(header: bytes) -> None:
    allowed = frozenset({_digest(FRIEND), _digest(OTHER)})
    assert digest_of(header, allowed) is None
    assert digest_of(b"bearer  " + FRIEND.encode() + b" ", allowed) == _digest(FRIEND)


def test_a_list_of_tokens_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(
        f"# ours\n{_digest(FRIEND).decode()}    # a runner\n\n{_digest(OTHER).decode()}\n"
    )
    assert read_tokens(path) == {_digest(FRIEND), _digest(OTHER)}
    path.chmod(0o666)
    with pytest.raises(KeyFileError, match="mode 0666"):
        read_tokens(path)


@each_row(
    ("text", "match"),
    [
        ("", "got no digest"),
        ("# nothing\n", "got no digest"),
        (f"{'0' * 64}\n{FRIEND}\n", "line 2: got 48 characters that are no digest"),
        ("A" * 64, "line 1"),
        ("0" * 63, "line 1: got 63"),
        (f"{'0' * 64} {'1' * 64}", "line 1"),
    ],
)
def test_a_list_that_is_none(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=match) as info:
        read_tokens(path)
    assert FRIEND not in str(info.value)


# ------------------------------------------------------------------------------------ bad bodies


@each_row(
    "body",
    [
        b"",
        b"x",
        bytes(64),
        b"\xff" * 64,
        b"\x01\0\0\0" + b"\xff" * 64,
        _body()[:-1],
        _body() + b"x",
        b"\x41\0\0\0" + bytes(8 * 65),
        json.dumps({"method": "Init"}).encode(),
    ],
)
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with _listening() as (listener, address):
        assert _post(address, body) in (400, 413)
        assert listener.clients_refused == 1
        assert not listener.wait(timeout_ms=0)
        with HttpChannel(listener.endpoint) as channel:
            channel.submit(InitRequest())
            _next(listener)


@each_row(
    ("method", "path", "status"),
    [
        ("GET", "/v1/rpc", 405),
        ("POST", "/", 404),
        ("POST", "/health", 404),
        ("PUT", "/v1/rpc", 405),
    ],
)
def test_there_is_nothing_else(method: str, path: str, status: int) -> None:
    with _listening(FRIEND) as (_, address):
        connection = http.client.HTTPConnection(*address, timeout=20)
        connection.request(method, path, _body())
        assert connection.getresponse().status == status
        connection.close()


def test_health_says_whether_messages_are_taken_without_a_token() -> None:
    with _listening(FRIEND) as (listener, address):
        for status in (503, 200):
            connection = http.client.HTTPConnection(*address, timeout=20)
            connection.request("GET", "/health")
            assert connection.getresponse().status == status
            connection.close()
            listener.wait(timeout_ms=0)


# ---------------------------------------------------------------------------------------- limits


@each_row("said", ["Content-Length: 99999999999999999999", "Content-Length: 100000", "chunked"])
def test_a_body_is_bounded_whatever_is_said_of_it(said: str) -> None:
    with _listening(max_message_bytes=1000) as (listener, address):
        with socket.create_connection(address, timeout=20) as raw:
            chunked = said == "chunked"
            header = "Transfer-Encoding: chunked" if chunked else said
            raw.sendall(f"POST /v1/rpc HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            try:
                # Without an end, and more than it may be.
                raw.sendall(16 * (b"1000\r\n" + bytes(4096) + b"\r\n") if chunked else b"")
                status = raw.recv(100)
            except (ConnectionResetError, BrokenPipeError):
                status = b"HTTP/1.1 413"
        assert status.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
        assert not listener.wait(timeout_ms=0)


def test_a_body_of_two_lengths_is_refused() -> None:
    """One length would be accounted for, and the other read."""
    with (
        _listening() as (listener, address),
        socket.create_connection(address, timeout=20) as raw,
    ):
        lengths = b"Content-Length: 1\r\nTransfer-Encoding: chunked"
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_body()), _body())
        raw.sendall(b"POST /v1/rpc HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n%b" % (lengths, chunks))
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert not listener.wait(timeout_ms=0)


def test_a_body_is_no_longer_than_is_said_whatever_server_reads_it() -> None:
    said: list[ASGISendEvent] = []
    events: list[ASGIReceiveEvent] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": _body(), "more_body": False},
    ]

    async def receive() -> ASGIReceiveEvent:
        return events.pop()

    async def send(event: ASGISendEvent) -> None:
        said.append(event)

    headers = [(b"content-length", b"%d" % (len(_body()) - 1))]
    scope = {"type": "http", "path": "/v1/rpc", "method": "POST", "headers": headers}
    arrived: list[Incoming] = []
    gateway = Gateway(arrived.append, lambda _: None, 2**26, None)
    asyncio.run(gateway(cast("Scope", {**scope, "client": None}), receive, send))
    assert said[0]["type"] == "http.response.start"
    assert said[0]["status"] == 413
    assert not arrived


def test_a_slow_body_times_out_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        _listening() as (listener, address),
        socket.create_connection(address, timeout=20) as slow,
        HttpChannel(listener.endpoint) as channel,
    ):
        slow.sendall(b"POST /v1/rpc HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx")
        channel.submit(InitRequest())
        _next(listener)
        # The time is set again with each piece.
        monkeypatch.setattr(http_gateway, "BODY_S", 0.2)
        slow.sendall(b"x")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_silent_connection_is_cut(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "IDLE_S", 0.1)
    monkeypatch.setattr(http_listener, "SILENT_S", 0.1 if scheme == "https" else 60)
    pem = _pem(tmp_path) if scheme == "https" else None
    with _listening(pem=pem) as (_, address):
        silent = [socket.create_connection(address, timeout=20) for _ in range(2)]
        # The beginning of a message of TLS, or of headers.
        silent[1].sendall(b"\x16\x03\x01" if pem else b"POST /v1/rpc HTTP/1.1\r\nX-Slow: ")
        for connection in silent:
            assert _is_cut(connection)
            connection.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_connections_are_bounded_and_those_that_are_there_served(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before TLS has begun."""
    monkeypatch.setattr(http_listener, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(http_listener, "SILENT_S", 60)
    pem = _pem(tmp_path) if scheme == "https" else None
    with _listening(pem=pem) as (listener, address):
        served = http.client.HTTPConnection(*address, timeout=20)
        if pem:
            trusting = ssl.create_default_context(cafile=str(pem))
            served = http.client.HTTPSConnection(*address, timeout=20, context=trusting)
        for _ in range(2):
            served.request("GET", "/health")
            assert served.getresponse().read().endswith(b"ready\n")
            silent = [socket.create_connection(address, timeout=20) for _ in range(3)]
            assert _is_cut(silent[2])
            assert listener._socket.is_full
            for connection in silent:
                connection.close()
            until = time.monotonic() + 20
            while listener._socket.is_full:
                assert time.monotonic() < until
                listener.wait(timeout_ms=10)
        served.close()


def test_headers_are_bounded() -> None:
    with _listening() as (_, address), socket.create_connection(address, timeout=20) as raw:
        raw.sendall(b"POST /v1/rpc HTTP/1.1\r\n")
        answered = b""
        try:
            for _ in range(2**10):
                raw.sendall(b"x: " + b"y" * 1000 + b"\r\n")
            answered = raw.recv(100)
        except (ConnectionResetError, BrokenPipeError):
            answered = b"HTTP/1.1 400"
        assert answered == b"" or answered.startswith(b"HTTP/1.1 4")


def test_requests_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gateway, "MAX_REQUESTS", 2)
    with _listening() as (listener, address), HttpChannel(listener.endpoint) as channel:
        first = channel.submit(InitRequest())
        channel.submit(InitRequest())
        asked = [_next(listener), _next(listener)]
        assert _post(address, _body()) == 503
        for incoming in asked:
            assert _answer(listener, incoming, ErrorCode.INTERNAL)
        assert channel.arrived(first, time.monotonic() + 20)


def test_one_client_leaves_requests_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gateway, "MAX_CLIENT_REQUESTS", 1)
    with (
        _listening(FRIEND, OTHER) as (listener, address),
        HttpChannel(listener.endpoint, access=HttpAccess(FRIEND)) as first,
        HttpChannel(listener.endpoint, access=HttpAccess(OTHER)) as second,
    ):
        waits = first.submit(InitRequest())
        asked = _next(listener)
        # On whatever connection.
        assert _post(address, _body(), FRIEND) == 503
        second.submit(InitRequest())
        assert _next(listener).key == _digest(OTHER)
        assert _answer(listener, asked, ErrorCode.INTERNAL)
        assert first.arrived(waits, time.monotonic() + 20)
        first.submit(InitRequest())
        assert _next(listener).key == _digest(FRIEND)


def test_large_bodies_wait_for_room_and_come_in_turn() -> None:
    """Four that need more than all may hold, handed out one by one."""
    with _listening(max_message_bytes=5 * 2**20) as (listener, _):
        channels = [HttpChannel(listener.endpoint, timeout_s=60) for _ in range(4)]
        gateway, most = listener._gateway, 0
        for channel in channels:
            channel.submit(LARGE)
        until = time.monotonic() + 20
        while gateway._underway.total() < 4 and time.monotonic() < until:
            most = max(most, gateway._held.total())
        assert 2**22 < max(most, gateway._held.total()) <= 2 * gateway._longest
        for _ in channels:
            incoming = _next(listener)
            assert sum(map(len, incoming.frames)) > 2**22
            assert _answer(listener, incoming, ErrorCode.INTERNAL)
        for channel in channels:
            channel.close()
        until = time.monotonic() + 20
        while gateway._held.total() and time.monotonic() < until:
            assert not listener.wait(timeout_ms=100)
        assert gateway._held.total() == 0


def test_a_client_that_does_not_read_gets_no_more_than_a_message() -> None:
    with _listening(FRIEND, max_message_bytes=2**20) as (listener, address):
        request = (
            f"POST /v1/rpc HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {FRIEND}\r\n"
            f"Content-Length: {len(_body())}\r\n\r\n"
        ).encode() + _body()
        lazy = [socket.create_connection(address, timeout=20) for _ in range(4)]
        for raw in lazy:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.sendall(request)
        sent = [listener.send(_next(listener).route, [b"h", bytes(2**24)]) for _ in lazy]
        assert sent[0]
        assert not all(sent)
        for raw in lazy:
            raw.close()
        # What was not read is forgotten with its connection.
        until = time.monotonic() + 20
        while listener._gateway._unread and time.monotonic() < until:
            listener.wait(timeout_ms=10)
        assert not listener._gateway._unread


def test_a_client_that_reads_no_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_gateway, "BODY_S", 0.2)
    with _listening() as (listener, address):
        listener._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with (
            _that_reads_nothing(address) as raw,
            pytest.raises((ConnectionResetError, BrokenPipeError)),
        ):
            _ask_on(raw)


def _that_reads_nothing(address: tuple[str, int]) -> socket.socket:
    """Connect, with room for little that was sent and not read."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(20)
    raw.connect(address)
    return raw


def _ask_on(connection: socket.socket) -> None:
    while True:
        connection.sendall(1000 * b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_client_that_reads_no_reply_is_cut_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_gateway, "BODY_S", 0.2)
    monkeypatch.setattr(http_gateway, "LEAST_BYTES_PER_S", 2**30)
    with _listening() as (listener, address), _that_reads_nothing(address) as raw:
        head = b"POST /v1/rpc HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        raw.sendall(head % len(_body()) + _body())
        assert listener.send(_next(listener).route, [b"h", bytes(2**25)])
        _wait_until_none_is_open(listener)


def _wait_until_none_is_open(listener: HttpListener) -> None:
    until = time.monotonic() + 20
    while listener._connections:
        assert time.monotonic() < until
        listener.wait(timeout_ms=10)


def test_a_connection_that_does_not_come_to_its_close_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with bytes that are not read, also in the middle of a request."""
    monkeypatch.setattr(http_listener, "IDLE_S", 0.1)
    monkeypatch.setattr("asyncio.selector_events._SelectorTransport.close", _close_later)
    with (
        _listening() as (listener, address),
        socket.create_connection(address, timeout=20) as raw,
    ):
        chunks = b"Transfer-Encoding: chunked\r\n\r\nno length"
        raw.sendall(b"POST /v1/rpc HTTP/1.1\r\nHost: x\r\n%b\r\n" % chunks)
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
        _wait_until_none_is_open(listener)


def _close_later(transport: Any) -> None:
    transport._closing = True


def test_what_a_client_gave_up_is_not_handed_out() -> None:
    with _listening() as (listener, _), HttpChannel(listener.endpoint) as channel:
        given_up = channel.submit(InitRequest())
        assert listener.wait(timeout_ms=LONG_MS)
        channel.abandon(given_up)
        until = time.monotonic() + 20
        while listener._gateway.waiting and time.monotonic() < until:
            select.select([], [], [], 0.001)
        channel.submit(InitRequest())
        found = None
        while found is None:
            assert listener.wait(timeout_ms=LONG_MS)
            found = listener.receive()
        assert open_request(found.frames, 2**30).request_id == given_up + 1
        assert not listener.wait(timeout_ms=0)


# ----------------------------------------------------------------------------------- the address


def test_a_taken_address_is_refused() -> None:
    with _listening() as (listener, _), pytest.raises(EndpointError, match="already in use"):
        HttpListener(listener.endpoint)


@each_row("url", ["http://127.0.0.1:1/path", "http://127.0.0.1", "tcp://127.0.0.1:1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(EndpointError, match="no HOST:PORT alone"):
        HttpListener(url)


def _pem(folder: Path) -> Path:
    _contexts(folder)
    (folder / "proxy.pem").chmod(0o600)
    return folder / "proxy.pem"


def test_https_needs_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="got no certificate"):
        open_listener("https://127.0.0.1:*")
    pem = _pem(tmp_path)
    pem.chmod(0o640)
    with pytest.raises(KeyFileError, match="mode 0640"):
        HttpKeys.read(None, pem, pem)
    pem.chmod(0o600)
    for one in ((pem, None), (None, pem)):
        with pytest.raises(SettingsError, match="expected --http-cert and --http-key"):
            HttpKeys.read(None, *one)
    listener = open_listener("https://127.0.0.1:*", http=HttpKeys.read(None, pem, pem))
    access = HttpAccess(ca=pem.read_text())
    with HttpChannel(listener.endpoint, access=access) as channel:
        assert listener.endpoint.startswith("https://127.0.0.1:")
        channel.submit(InitRequest())
        _next(listener)
    listener.close()


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    pem = tmp_path / "key.pem"
    pem.write_text("no key")
    pem.chmod(0o600)
    with pytest.raises(SettingsError, match="--http-cert and --http-key: got"):
        HttpKeys.read(None, pem, pem)


def test_a_thread_that_fails_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: HttpListener) -> None:
        raise OSError("injected")

    monkeypatch.setattr(HttpListener, "_serve", fail)
    with _listening() as (listener, _):
        with pytest.raises(EndpointError, match="no thread that lets clients in"):
            listener.wait(timeout_ms=LONG_MS)
        assert not listener.send((b"", b"1"), [b"x"])
