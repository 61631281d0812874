"""A channel over HTTP: servers and proxies that answer anything but a reply."""

from __future__ import annotations

import select
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from protocol.connect import open_channel
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    KeyFileError,
    ProtocolError,
    SettingsError,
)
from protocol.http_access import HttpAccess, read_token
from protocol.http_channel import HttpChannel
from protocol.messages import LMHeadRequest, TensorReply
from protocol.tensors import from_torch, to_torch
from tests.e2e.tls_ending_proxy import _contexts
from tests.kit.rows import each_row
from tests.kit.wire import Answer, answer, good, http_peer, message

TOKEN = "tsqp-" + "t" * 43
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.zeros(4)))
OURS = "tsqp-instance: aa"


def _ask(url: str, *, timeout_s: float = 20.0, access: HttpAccess | None = None) -> torch.Tensor:
    with HttpChannel(url, timeout_s=timeout_s, access=access) as channel:
        reply = channel.call(REQUEST).response
        assert isinstance(reply, TensorReply)
        return to_torch(reply.output)


def test_a_connection_is_used_again_below_the_path_of_the_url() -> None:
    with http_peer(good) as peer, HttpChannel(f"{peer.url}/of/model/") as channel:
        for _ in range(3):
            channel.call(REQUEST)
        assert not peer.closed.is_set()
    heads = [head for head, _ in peer.requests]
    assert len(heads) == 3
    assert all(head.startswith("POST /of/model/v1/rpc HTTP/1.1\r\n") for head in heads)
    assert len({head.partition("tsqp-channel: ")[2][:32] for head in heads}) == 1
    assert "authorization" not in heads[0].lower()


def test_the_token_is_sent_and_stands_in_no_error() -> None:
    access = HttpAccess(token=TOKEN)
    assert TOKEN not in repr(access)
    refused = pytest.raises(EndpointError, match="got HTTP status 401, expected a token")
    with http_peer(lambda _: answer(401)) as peer, refused as info:
        _ask(peer.url, access=access)
    assert f"authorization: Bearer {TOKEN}\r\n" in peer.requests[0][0]
    assert TOKEN not in str(info.value)


def test_a_token_never_crosses_a_network_in_the_clear() -> None:
    with pytest.raises(SettingsError, match="expected https://: the token is a secret"):
        HttpChannel("http://gpu.example", access=HttpAccess(token=TOKEN))
    for url in ("https://gpu.example", "http://127.0.0.1:1", "http://[::1]:1", "http://localhost"):
        HttpChannel(url, access=HttpAccess(token=TOKEN)).close()


@each_row(
    ("said", "error", "match"),
    [
        (lambda _: answer(302, b"", "Location: http://127.0.0.1:1/"), EndpointError, "status 302"),
        (
            lambda _: answer(404, b"", OURS),
            EndpointError,
            "status 404, expected gpu-service --http",
        ),
        (lambda _: answer(200, b"<html>"), EndpointError, "status 200 of another server"),
        (lambda _: answer(200, b"<html>", OURS), ProtocolError, "0 frames|1819568188 frames"),
        (lambda _: answer(200, b"", OURS), ProtocolError, "0 frames in 0 bytes"),
        (lambda _: answer(200, message([b"x"]) + b"y", OURS), ProtocolError, "no byte behind them"),
        (lambda body: good(body)[:-1], EndpointError, "a lost connection"),
        (lambda _: answer(500), EndpointError, "lost connection .* HTTP status 500"),
        (lambda _: answer(413, b"", OURS), EndpointError, "lost connection .* HTTP status 413"),
        (lambda _: answer(503, b"", OURS), EndpointError, "lost connection .* HTTP status 503"),
        (lambda _: b"", EndpointError, "a lost connection"),
        (lambda _: b"SSH-2.0-x\r\n\r\n", EndpointError, "a lost connection"),
        (
            lambda _: b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 30_000,
            EndpointError,
            "a lost connection",
        ),
    ],
)
def test_what_is_no_reply(said: Answer, error: type[Exception], match: str) -> None:
    # The connection ends with each answer: one that is cut short is not waited for.
    with http_peer(_once(said)) as peer, pytest.raises(error, match=match) as info:
        _ask(peer.url)
    assert "127.0.0.1:1/" not in str(info.value)


def _once(said: Answer) -> Answer:
    """Close the connection behind an answer."""

    def close(body: bytes) -> bytes:
        return said(body).replace(
            b"\r\nContent-Length", b"\r\nConnection: close\r\nContent-Length", 1
        )

    return close


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
            with pytest.raises(ProtocolError, match="and more, expected at most 1000") as info:
                channel.call(REQUEST)
            assert info.value.code is ErrorCode.LIMIT_EXCEEDED
        assert stop.wait(20), "it goes on receiving"
        thread.join()


def test_a_proxy_whose_service_is_not_there_yet_is_waited_for() -> None:
    """As a host does that starts a machine when it is asked."""
    starting = [lambda _: answer(502), lambda _: answer(503), lambda _: answer(504)]
    with http_peer(*starting, good) as peer:
        assert _ask(peer.url).tolist() == [1.0] * 4
    assert len(peer.requests) == 4
    with http_peer(lambda _: answer(503)) as peer, pytest.raises(DeadlineExceededError):
        _ask(peer.url, timeout_s=0.2)


def test_once_there_a_service_that_is_gone_is_a_lost_connection() -> None:
    with http_peer(good, lambda _: answer(502)) as peer, HttpChannel(peer.url) as channel:
        channel.call(REQUEST)
        with pytest.raises(EndpointError, match=r"a lost connection .*HTTP status 502"):
            channel.call(REQUEST)
    assert len(peer.requests) == 2


def test_a_loss_is_one_for_all_that_is_in_flight() -> None:
    held = threading.Event()

    def hold(_: bytes) -> bytes:
        held.wait(20)
        return b""

    with http_peer(hold, hold, hold, good) as peer, HttpChannel(peer.url) as channel:
        first, *others = (channel.submit(REQUEST) for _ in range(3))
        while len(peer.requests) < 3:
            assert not channel.arrived(first)
        held.set()
        until = time.monotonic() + 20
        while channel._done.qsize() < 3 and time.monotonic() < until:
            select.select([], [], [], 0.001)
        lost = pytest.raises(EndpointError, match="a lost connection while LMHead")
        with lost:
            channel.wait(first)
        later = channel.submit(REQUEST)
        for request_id in others:
            with lost:
                channel.wait(request_id)
        channel.wait(later)


def test_another_process_is_no_successor_where_one_is_asked_for() -> None:
    """A host may put several processes behind one URL; the handshake was with one of them."""
    replies = (good, good, lambda body: good(body, "bb"))
    with http_peer(*replies) as peer, HttpChannel(peer.url) as channel:
        channel.use_one_connection()
        channel.call(REQUEST)
        channel.call(REQUEST)
        with pytest.raises(EndpointError, match="a lost connection while LMHead"):
            channel.call(REQUEST)
        with pytest.raises(EndpointError, match="before LMHead could be sent"):
            channel.submit(REQUEST)
    with http_peer(*replies) as peer, HttpChannel(peer.url) as channel:
        for _ in range(3):
            channel.call(REQUEST)


@each_row("given_up", ["abandon", "wait", "close"])
def test_what_is_given_up_ends_its_connection(given_up: str) -> None:
    waiting = threading.Event()

    def hold(body: bytes) -> bytes:
        waiting.wait(20)
        return good(body)

    with http_peer(hold, good) as peer, HttpChannel(peer.url) as channel:
        request_id = channel.submit(REQUEST, timeout_s=0.3 if given_up == "wait" else 20)
        while not peer.requests:
            channel.arrived(request_id)
        if given_up == "abandon":
            channel.abandon(request_id)
        elif given_up == "wait":
            with pytest.raises(DeadlineExceededError):
                channel.wait(request_id)
        else:
            channel.close()
            channel.close()
        waiting.set()
        assert peer.closed.wait(20)
        if given_up != "close":
            channel.call(REQUEST)


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_peer(lambda _: answer(500)) as proxy, http_peer(good) as peer:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        _ask(peer.url)
    assert not proxy.requests


def test_a_name_that_is_no_host_is_not_there() -> None:
    with pytest.raises(DeadlineExceededError):
        _ask("http://" + "a" * 70 + ".invalid:1", timeout_s=0.2)


# ------------------------------------------------------------------------------------------ TLS


def test_a_certificate_is_verified(tmp_path: Path) -> None:
    serving, _ = _contexts(tmp_path)
    ca = (tmp_path / "proxy.pem").read_text()
    with http_peer(good, tls=serving) as peer:
        assert _ask(peer.url, access=HttpAccess(TOKEN, ca)).tolist() == [1.0] * 4
        for url, trusted in ((peer.url, None), (peer.url.replace("127.0.0.1", "localhost"), ca)):
            with pytest.raises(EndpointError, match=r"got TLS that fails: .*, expected a certif"):
                _ask(url, access=HttpAccess(TOKEN, trusted))
        assert len(peer.requests) == 1, "a request was sent before the certificate was known"


def test_what_speaks_no_tls_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(answer(400))

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(EndpointError, match="got TLS that fails"):
            _ask(f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def test_a_file_without_a_ca_is_refused() -> None:
    with pytest.raises(SettingsError, match="--http-ca: got something else"):
        HttpChannel("https://gpu.example", access=HttpAccess(ca="no certificate"))


# ---------------------------------------------------------------------------------------- tokens


def test_a_token_is_read_from_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(KeyFileError, match="mode 0640"):
        read_token(path)


@each_row("text", ["", "short", TOKEN + "\n\n", TOKEN + "\r\nX: y", "tok en" * 10, "ä" * 40])
def test_what_is_no_token_is_refused_and_not_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="that are no token") as info:
        read_token(path)
    assert len(text) < 5 or text.strip() not in str(info.value)


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(EndpointError, match="got no URL"):
        HttpChannel("tcp://127.0.0.1:1")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "httpcore2", None)
    monkeypatch.delitem(sys.modules, "protocol.http_channel", raising=False)
    monkeypatch.delitem(sys.modules, "protocol.http_streams", raising=False)
    with pytest.raises(SettingsError, match=r"got no httpcore2, expected .*'\.\[http\]'"):
        open_channel("http://127.0.0.1:1")
