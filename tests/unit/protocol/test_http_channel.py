"""A channel over HTTP: servers and proxies that answer anything but a reply."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import open_request
from protocol.curve import HttpAccess
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    KeyFileError,
    ProtocolError,
    SettingsError,
)
from protocol.http_channel import HttpChannel
from protocol.messages import LMHeadRequest, TensorReply
from protocol.stream_wire import frames_in, to_pieces
from protocol.tensors import from_torch, to_torch
from tests.kit.http_proxy import certificate
from tests.kit.rows import each_row
from tests.kit.wire import tensor_reply
from tsqp.key_files import read_token

TOKEN = "tsqp-" + "t" * 43
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.zeros(4)))
OURS = "tsqp-instance: aa"
LOST = "a lost connection"
# Takes the body of a request, and returns an answer; nothing ends the connection.
Answer = Callable[[bytes], bytes]


def _answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _says(status: int, body: bytes = b"", *headers: str) -> Answer:
    return lambda _: _answer(status, body, *headers)


def _good(body: bytes, instance: str = "aa") -> bytes:
    frames = frames_in(memoryview(bytearray(body)), "test", max_frames=64, max_message_bytes=2**30)
    opened = open_request(frames, 2**30)
    sent = tensor_reply(opened.request_id, torch.ones(4))
    return _answer(200, b"".join(to_pieces(sent)[0]), f"TSQP-Instance: {instance}")


class Peer(ThreadingHTTPServer):
    """`answers`: one request each; the last is for all that follow. `heads`: what it has got."""

    daemon_threads = False

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.answers, self.heads = list(answers), list[str]()
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: Peer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body, peer = self.rfile.read(int(self.headers["content-length"])), self.server
        peer.heads.append(f"{self.requestline}\r\n{self.headers}")
        said = (peer.answers[0] if len(peer.answers) == 1 else peer.answers.pop(0))(body)
        self.wfile.write(said)
        self.close_connection = not said or b"Connection: close" in said

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_peer(*answers: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Peer]:
    """Serve on a port of loopback until the block ends, and the channels in it."""
    with Peer(*answers, tls=tls) as peer:
        thread = threading.Thread(target=peer.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield peer
        finally:
            peer.shutdown()
            thread.join()


def _ask(url: str, *, timeout_s: float = 20.0, access: HttpAccess | None = None) -> torch.Tensor:
    with HttpChannel(url, timeout_s=timeout_s, access=access) as channel:
        reply = channel.call(REQUEST).response
        assert not channel._requests  # no reply is kept
        assert isinstance(reply, TensorReply)
        return to_torch(reply.output)


@each_row(
    ("said", "error", "match"),
    [
        (_says(302, b"", "Location: http://127.0.0.1:1/"), EndpointError, "status 302"),
        (_says(404, b"", OURS), EndpointError, "status 404, expected gpu-service --http"),
        (_says(200, b"<html>"), EndpointError, "status 200 of another server"),
        (_says(200, b"<html>", OURS), ProtocolError, "1836345404 frames"),
        (
            _says(200, bytes(to_pieces([b"x"])[0][0]) + b"y", OURS),
            ProtocolError,
            "no byte behind them",
        ),
        (lambda body: _good(body)[:-1], EndpointError, LOST),
        (_says(500), EndpointError, "lost connection .* HTTP status 500"),
        (lambda _: b"SSH-2.0-x\r\n\r\n", EndpointError, LOST),
        (lambda _: b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 30_000, EndpointError, LOST),
    ],
)
def test_what_is_no_reply(said: Answer, error: type[Exception], match: str) -> None:
    def once(body: bytes) -> bytes:
        """End the connection with the answer: one that is cut short is not waited for."""
        head = b"\r\nContent-Length"
        return said(body).replace(head, b"\r\nConnection: close" + head, 1)

    with http_peer(once) as peer, pytest.raises(error, match=match) as info:
        _ask(peer.url)
    assert "127.0.0.1:1/" not in str(info.value)


@each_row("chunked", [False, True])
def test_a_reply_is_bounded_while_it_is_read(chunked: bool) -> None:
    """A server that sends without end, whatever it says of the length."""
    stop = threading.Event()

    def endless(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(2**16)
            length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {2**40}"
            connection.sendall(f"HTTP/1.1 200 X\r\n{OURS}\r\n{length}\r\n\r\n".encode())
            piece = (b"4000\r\n" if chunked else b"") + bytes(0x4000) + b"\r\n" * chunked
            try:
                while not stop.is_set():
                    connection.sendall(piece)
            except OSError:
                stop.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=endless, args=(listening,))
        thread.start()
        with HttpChannel(f"http://127.0.0.1:{listening.getsockname()[1]}") as channel:
            channel.limit_replies(1000)
            with pytest.raises(ProtocolError, match="bytes, expected at most ") as info:
                channel.call(REQUEST)
            assert info.value.code is ErrorCode.LIMIT_EXCEEDED
        assert stop.wait(20), "it goes on receiving"
        thread.join()


def test_another_process_is_no_successor_where_one_is_asked_for() -> None:
    """A host may put several processes behind one URL; the handshake was with one of them."""
    replies = (_good, _good, lambda body: _good(body, "bb"))
    with http_peer(*replies) as peer, HttpChannel(peer.url) as channel:
        channel.use_one_connection()
        channel.call(REQUEST)
        channel.call(REQUEST)
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.call(REQUEST)
        with pytest.raises(EndpointError, match="before LMHead could be sent"):
            channel.submit(REQUEST)
    with http_peer(*replies) as peer, HttpChannel(f"{peer.url}/of/model/") as channel:
        for _ in range(3):
            channel.call(REQUEST)
    assert all(head.startswith("POST /of/model/v1/rpc HTTP/1.1\r\n") for head in peer.heads)
    assert "authorization" not in peer.heads[0].lower()


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy whose service is not there yet is waited for, and so is one that is not there itself.
    with http_peer(_says(500)) as proxy, http_peer(_says(502), _says(504), _good) as peer:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        _ask(peer.url)
    assert (len(proxy.heads), len(peer.heads)) == (0, 3)
    with pytest.raises(DeadlineExceededError):
        _ask(peer.url, timeout_s=0.1)


def test_a_certificate_is_verified(tmp_path: Path) -> None:
    serving, _ = certificate(tmp_path)
    ca = (tmp_path / "proxy.pem").read_text()
    with http_peer(_good, tls=serving) as peer:
        assert _ask(peer.url, access=HttpAccess(TOKEN, ca)).tolist() == [1.0] * 4
        for url, trusted in ((peer.url, None), (peer.url.replace("127.0.0.1", "localhost"), ca)):
            with pytest.raises(EndpointError, match=r"got TLS that fails: .*, expected a certif"):
                _ask(url, access=HttpAccess(TOKEN, trusted))
        assert len(peer.heads) == 1, "a request was sent before the certificate was known"
    with http_peer(_good) as plain, pytest.raises(EndpointError, match="got TLS that fails"):
        _ask(plain.url.replace("http:", "https:"))
    with pytest.raises(SettingsError, match="--http-ca: got something else"):
        HttpChannel("https://gpu.example", access=HttpAccess(ca="no certificate"))


def test_a_token_is_sent_where_it_stays_secret_and_stands_in_no_error() -> None:
    access = HttpAccess(token=TOKEN)
    assert TOKEN not in repr(access)
    refused = pytest.raises(EndpointError, match="got HTTP status 401, expected a token")
    with http_peer(_says(401)) as peer, refused as info:
        _ask(peer.url, access=access)
    assert f"authorization: Bearer {TOKEN}\n" in peer.heads[0]
    assert TOKEN not in str(info.value)
    with pytest.raises(SettingsError, match="expected https://: the token is a secret"):
        HttpChannel("http://gpu.example", access=access)
    for url in ("https://gpu.example", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost"):
        with HttpChannel(url, access=access) as channel:
            channel.close()


def test_a_token_is_a_line_of_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="mode 0640"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    for text in ("", "t" * 31, TOKEN + "\n\n", TOKEN + "\r\nX: y", "tok en" * 10, "ä" * 40):
        path.write_text(text)
        with pytest.raises(KeyFileError, match="that are no token") as info:
            read_token(path)
        assert not text or text.strip() not in str(info.value)
