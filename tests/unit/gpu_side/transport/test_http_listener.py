"""The service's end of HTTP: tokens, limits, bad bodies and slow clients."""

import asyncio
import hashlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from gpu_side.access import HttpKeys, read_tokens
from gpu_side.encoding import encode_reply, open_request
from gpu_side.service import open_listener
from gpu_side.transport import http_gateway, http_listener
from gpu_side.transport.http_gateway import Gateway
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import Incoming
from protocol.curve import HttpAccess
from protocol.encoding import encode_request
from protocol.errors import EndpointError, ErrorCode, KeyFileError, SettingsError
from protocol.http_channel import HttpChannel
from protocol.messages import InitRequest, LMHeadRequest
from protocol.stream_wire import to_pieces
from protocol.tensors import from_torch
from tests.kit.http_proxy import certificate
from tests.kit.rows import each_row
from tests.kit.service import until
from tests.kit.wire import take

LONG_MS = 20_000
FRIEND, OTHER, STRANGER = (f"tsqp-{letter * 43}" for letter in "fos")
LARGE = LMHeadRequest(hidden_states=from_torch(torch.zeros(2**20)))
BODY = b"".join(map(bytes, to_pieces(encode_request(InitRequest(), 1, 1000))[0]))
RESET = (ConnectionResetError, BrokenPipeError)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).hexdigest().encode()


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


def _connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=20)


def _asks(body: bytes = BODY, *headers: str, line: str = "POST /v1/rpc") -> bytes:
    """Return a request; one of chunks where no header says how long it is."""
    said = [f"Content-Length: {len(body)}"] if not headers or "Auth" in headers[0] else []
    return "\r\n".join([f"{line} HTTP/1.1", "Host: x", *headers, *said, "", ""]).encode() + body


def _status(address: tuple[str, int], request: bytes) -> int:
    """Send a request that gets no reply of the loop; return its status, 400 where it was cut."""
    with _connect(address) as raw, suppress(*RESET):
        raw.sendall(request)
        if answered := raw.recv(100):
            return int(answered.split()[1])
    return 400


def _answer(listener: HttpListener, incoming: Incoming) -> bool:
    opened = open_request(incoming.frames, 2**30)
    frames = encode_reply("framed", opened.request_id, opened.method, ErrorCode.INTERNAL)
    return listener.send(incoming.route, frames)


def _until(listener: HttpListener, holds: Callable[[], object]) -> None:
    until(lambda: holds() or listener.wait(timeout_ms=10) or holds())


def test_tokens_decide_who_is_let_in_and_who_is_who() -> None:
    with _listening(FRIEND, OTHER) as (listener, address):
        # Health is told without a token: whether messages are taken.
        for status in (503, 200):
            assert _status(address, _asks(b"", line="GET /health")) == status
            listener.wait(timeout_ms=0)
        for said in ("Bearer", f"Bearer {STRANGER}", f"Bearer {FRIEND[:-1]}", f"Basic {FRIEND}"):
            assert _status(address, _asks(BODY, f"Authorization: {said}")) == 401
        assert not listener.wait(timeout_ms=0)
        assert listener.clients_refused == 4
        clients = []
        for token in (FRIEND, FRIEND, OTHER):
            with HttpChannel(listener.endpoint, access=HttpAccess(token)) as channel:
                channel.submit(InitRequest())
                clients.append(take(listener))
        first, second, third = clients
        # All channels of one token are one client, whose turn comes once.
        assert first.client == second.client == _digest(FRIEND)
        assert first.route != second.route
        assert third.client == _digest(OTHER)
        allowed = {key: listener.is_allowed(key) for key in (first.key, _digest(STRANGER), b"")}
        assert list(allowed.values()) == [True, False, False]


def test_a_token_that_is_revoked_gets_no_reply_and_is_not_let_in_again() -> None:
    with (
        _listening(FRIEND, OTHER) as (listener, _),
        HttpChannel(listener.endpoint, access=HttpAccess(FRIEND)) as revoked,
        HttpChannel(listener.endpoint, access=HttpAccess(OTHER)) as stays,
    ):
        waits = [revoked.submit(InitRequest()), stays.submit(InitRequest())]
        asked = [take(listener), take(listener)]
        revoked.submit(InitRequest())
        assert listener.wait(timeout_ms=LONG_MS)
        listener.allow(frozenset({_digest(OTHER)}))
        with pytest.raises(EndpointError, match="a lost connection while Init"):
            revoked.wait(waits[0])
        assert listener.receive() is None
        for incoming in asked:
            assert _answer(listener, incoming) == listener.is_allowed(incoming.key)
        until(lambda: stays.arrived(waits[1]))
        with pytest.raises(EndpointError, match="got HTTP status 401"):
            revoked.call(InitRequest())


@each_row(
    ("text", "match"),
    [
        (f"# ours\n{_digest(FRIEND).decode()}    # a runner\n\n{_digest(OTHER).decode()}\n", None),
        ("", "got no digest"),
        ("# nothing\n", "got no digest"),
        (f"{'0' * 64}\n{FRIEND}\n", "line 2: got 48 characters that are no digest"),
        ("A" * 64, "line 1"),
        ("0" * 63, "line 1: got 63"),
        (f"{'0' * 64} {'1' * 64}", "line 1"),
    ],
)
def test_a_list_of_tokens(text: str, match: str | None, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o644)
    if match is None:
        assert read_tokens(path) == {_digest(FRIEND), _digest(OTHER)}
        path.chmod(0o666)
    with pytest.raises(KeyFileError, match=match or "mode 0666") as info:
        read_tokens(path)
    assert FRIEND not in str(info.value)


CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


REFUSED: list[tuple[bytes, tuple[int, ...]]] = [
    *(
        (_asks(body), (400, 413))
        for body in (
            *(b"", b"x", bytes(64), b"\xff" * 64, b"\x01\0\0\0" + b"\xff" * 64),
            *(BODY[:-1], BODY + b"x", b"\x41\0\0\0" + bytes(8 * 65)),
            json.dumps({"method": "Init"}).encode(),
        )
    ),
    *((_asks(line=f"{method} /v1/rpc"), (405,)) for method in ("GET", "PUT")),
    *((_asks(line=f"POST {path}"), (404,)) for path in ("/", "/health")),
    # A body is bounded whatever is said of it, also one without an end.
    (_asks(b"", "Content-Length: 99999999999999999999"), (413,)),
    (_asks(b"", "Content-Length: 100000"), (413,)),
    (_asks(16 * (b"1000\r\n" + bytes(4096) + b"\r\n"), CHUNKED), (400, 413)),
    # Of two lengths one would be accounted for, and the other read.
    (_asks(CHUNKS, "Content-Length: 1", CHUNKED), (400,)),
    # So are headers.
    (_asks(b"", *[f"x: {'y' * 1000}"] * 2**10), (400, 431)),
]


def test_a_request_that_is_none_is_refused() -> None:
    with _listening(max_message_bytes=1000) as (listener, address):
        for request, statuses in REFUSED:
            assert _status(address, request) in statuses, request[:100]
            assert not listener.wait(timeout_ms=0)
        with HttpChannel(listener.endpoint) as channel:
            channel.submit(InitRequest())
            take(listener)


def test_a_body_is_no_longer_than_is_said_whatever_server_reads_it() -> None:
    said: list[Any] = []
    events: list[Any] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": BODY, "more_body": False},
    ]

    async def receive() -> Any:
        return events.pop()

    async def send(event: Any) -> None:
        said.append(event)

    headers = [(b"content-length", b"%d" % (len(BODY) - 1))]
    scope = {"type": "http", "path": "/v1/rpc", "method": "POST", "headers": headers}
    arrived: list[Incoming] = []
    gateway = Gateway(arrived.append, lambda _: None, 2**26, None)
    asyncio.run(gateway(cast("Any", {**scope, "client": None}), receive, send))
    assert (said[0]["type"], said[0]["status"]) == ("http.response.start", 413)
    assert not arrived


def test_a_slow_body_times_out_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        _listening() as (listener, address),
        _connect(address) as slow,
        HttpChannel(listener.endpoint) as channel,
    ):
        slow.sendall(_asks(b"x", "Content-Length: 100"))
        channel.submit(InitRequest())
        take(listener)
        # The time is set again with each piece.
        monkeypatch.setattr(http_gateway, "BODY_S", 0.1)
        slow.sendall(b"x")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def _pem(folder: Path) -> Path:
    certificate(folder)
    (folder / "proxy.pem").chmod(0o600)
    return folder / "proxy.pem"


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_connections_are_bounded_and_silent_ones_cut(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before TLS has begun."""
    monkeypatch.setattr(http_listener, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(http_listener, "SILENT_S", 60)
    pem = _pem(tmp_path) if scheme == "https" else None
    with _listening(pem=pem) as (listener, address), ExitStack() as stack:
        served = http.client.HTTPConnection(*address, timeout=20)
        if pem:
            trusting = ssl.create_default_context(cafile=str(pem))
            served = http.client.HTTPSConnection(*address, timeout=20, context=trusting)
        stack.callback(served.close)
        for _ in range(2):
            served.request("GET", "/health")
            assert served.getresponse().read().endswith(b"ready\n")
            silent = [stack.enter_context(_connect(address)) for _ in range(3)]
            assert _is_cut(silent[2])
            assert listener._socket.is_full
            for connection in silent:
                connection.close()
            _until(listener, lambda: not listener._socket.is_full)
    monkeypatch.setattr(http_listener, "IDLE_S", 0.1)
    monkeypatch.setattr(http_listener, "SILENT_S", 0.1 if pem else 60)
    with _listening(pem=pem) as (_, address):
        for beginning in (b"", b"\x16\x03\x01" if pem else b"POST /v1/rpc HTTP/1.1\r\nX-Slow: "):
            with _connect(address) as connection:
                connection.sendall(beginning)
                assert _is_cut(connection)


def test_requests_in_flight_are_bounded_for_all_and_for_each_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_gateway, "MAX_REQUESTS", 2)
    monkeypatch.setattr(http_gateway, "MAX_CLIENT_REQUESTS", 1)
    with (
        _listening(FRIEND, OTHER) as (listener, address),
        HttpChannel(listener.endpoint, access=HttpAccess(FRIEND)) as first,
        HttpChannel(listener.endpoint, access=HttpAccess(OTHER)) as second,
    ):
        waits = first.submit(InitRequest())
        asked = take(listener)
        # On whatever connection.
        assert _status(address, _asks(BODY, f"Authorization: Bearer {FRIEND}")) == 503
        second.submit(InitRequest())
        assert take(listener).key == _digest(OTHER)
        monkeypatch.setattr(http_gateway, "MAX_CLIENT_REQUESTS", 64)
        assert _status(address, _asks(BODY, f"Authorization: Bearer {FRIEND}")) == 503
        assert _answer(listener, asked)
        until(lambda: first.arrived(waits))
        first.submit(InitRequest())
        assert take(listener).key == _digest(FRIEND)


def test_large_bodies_wait_for_room_and_come_in_turn() -> None:
    """Four that need more than all may hold, handed out one by one."""
    with _listening(max_message_bytes=5 * 2**20) as (listener, _), ExitStack() as stack:
        gateway, most = listener._gateway, 0
        for _ in range(4):
            channel = stack.enter_context(HttpChannel(listener.endpoint, timeout_s=60))
            channel.submit(LARGE)

        def all_are_read() -> bool:
            nonlocal most
            most = max(most, gateway._held.total())
            return gateway._underway.total() == 4

        until(all_are_read)
        assert 2**22 < max(most, gateway._held.total()) <= 2 * gateway._longest
        for _ in range(4):
            incoming = take(listener)
            assert sum(map(len, incoming.frames)) > 2**22
            assert _answer(listener, incoming)
        _until(listener, lambda: not gateway._held.total())


def _that_reads_nothing(address: tuple[str, int]) -> socket.socket:
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(20)
    raw.connect(address)
    return raw


def test_a_client_that_does_not_read_gets_no_more_than_a_message() -> None:
    with _listening(FRIEND, max_message_bytes=2**20) as (listener, address), ExitStack() as stack:
        sent = []
        for _ in range(4):
            raw = stack.enter_context(_that_reads_nothing(address))
            raw.sendall(_asks(BODY, f"Authorization: Bearer {FRIEND}"))
            sent.append(listener.send(take(listener).route, [b"h", bytes(2**24)]))
        assert sent[0]
        assert not all(sent)


@pytest.mark.parametrize("what", ["answers", "reply"])
def test_a_client_that_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(http_gateway, "BODY_S", 0.1)
    monkeypatch.setattr(http_gateway, "LEAST_BYTES_PER_S", 2**30)
    with _listening() as (listener, address):
        listener._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with _that_reads_nothing(address) as raw:
            if what == "reply":
                raw.sendall(_asks())
                assert listener.send(take(listener).route, [b"h", bytes(2**25)])
            else:
                with suppress(*RESET):
                    while True:
                        raw.sendall(1000 * _asks(b"", line="GET /health"))
            _until(listener, lambda: not listener._connections)


def test_a_connection_that_does_not_come_to_its_close_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with bytes that are not read, also in the middle of a request."""

    def later(transport: Any) -> None:
        transport._closing = True

    monkeypatch.setattr(http_listener, "IDLE_S", 0.1)
    monkeypatch.setattr("asyncio.selector_events._SelectorTransport.close", later)
    with _listening() as (listener, address), _connect(address) as raw:
        raw.sendall(_asks(b"no length\r\n", CHUNKED))
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
        _until(listener, lambda: not listener._connections)


def test_https_needs_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match="got no certificate"):
        open_listener("https://127.0.0.1:*")
    pem, no_key = _pem(tmp_path), tmp_path / "key.pem"
    pem.chmod(0o640)
    with pytest.raises(KeyFileError, match="mode 0640"):
        HttpKeys.read(None, pem, pem)
    pem.chmod(0o600)
    no_key.write_text("no key")
    no_key.chmod(0o600)
    with pytest.raises(SettingsError, match="--http-cert and --http-key: got"):
        HttpKeys.read(None, no_key, no_key)
    for one in ((pem, None), (None, pem)):
        with pytest.raises(SettingsError, match="expected --http-cert and --http-key"):
            HttpKeys.read(None, *one)
    listener = open_listener("https://127.0.0.1:*", http=HttpKeys.read(None, pem, pem))
    access = HttpAccess(ca=pem.read_text())
    with HttpChannel(listener.endpoint, access=access) as channel:
        assert listener.endpoint.startswith("https://127.0.0.1:")
        channel.submit(InitRequest())
        assert listener.wait(timeout_ms=LONG_MS)
    listener.close()


def test_a_thread_that_fails_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Any, **_more: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr("uvicorn.Server.serve", fail)
    with _listening() as (listener, _):
        with pytest.raises(EndpointError, match="no thread that lets clients in"):
            listener.wait(timeout_ms=LONG_MS)
        assert not listener.send((b"", b"1"), [b"x"])
