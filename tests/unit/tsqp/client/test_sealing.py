"""What a client sends is sealed, and an answer that was changed, cut or not sealed is an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from protocol.codec import pack
from protocol.errors import ProtocolError
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.sealed_bodies import CONTENT_TYPE, Direction, open_secret
from tee_side.serve.sealed_heads import RequestHead, ResponseHead
from tests.kit.rows import each_row
from tsqp.client.sealing import SealedTransport, UnsealedError

KEY = HpkeKey(hybrid=False)
HYBRID = HpkeKey()
SALT = b"s" * 32
PIECES = [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]
URL = "https://proxy.example/v1/completions?a=b%20c"
TARGET = b"/v1/completions?a=b%20c"


class Pieces(httpx2.SyncByteStream):
    """A body that comes in pieces. `gone`: pieces that were asked for; `closed`: by the reader."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self.pieces, self.error, self.gone, self.closed = pieces, error, 0, False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            self.gone += 1
            yield piece
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


class Server(httpx2.BaseTransport):
    """Opens a request as a server does, and answers with `pieces`, `change`d on the way."""

    def __init__(self, key: HpkeKey = KEY, inner: int = 200, **outer: Any) -> None:
        self.key, self.inner, self.outer = key, inner, outer
        self.sent: list[httpx2.Request] = []
        self.head = RequestHead(time=0, method="NONE", headers={})
        self.body, self.closed = b"", False
        self.headers = {"content-type": b"text/event-stream", "x-ratelimit-limit": b"9"}
        self.parts: list[bytes] = []
        self.said: bytes | None = None
        self.target = b""
        self.change: Any = list
        self.stream = Pieces([])

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(request)
        data = request.read()
        front = data[: self.key.sealed_bytes]
        target = self.target or request.url.raw_path
        secret = open_secret(self.key, front, target)
        opening = Direction(b"request", front, secret)
        head, *body = opening.open(data[len(front) :])
        opening.close()
        self.head, self.body = RequestHead.decode(head), b"".join(body)
        direction = Direction(b"response", SALT, secret)
        said = ResponseHead(status=self.inner, headers=self.headers).encode()
        first = SALT + direction.seal(said if self.said is None else self.said)
        self.parts = [first, *(direction.seal(piece) for piece in PIECES)]
        self.parts.append(direction.seal(b"", final=True))
        self.stream = Pieces(self.change(self.parts), self.outer.get("error"))
        return httpx2.Response(
            self.outer.get("status", 200),
            headers=self.outer.get("headers", {"content-type": CONTENT_TYPE}),
            stream=self.stream,
        )

    def close(self) -> None:
        self.closed = True


def client_of(server: Server) -> httpx2.Client:
    transport = SealedTransport(server, server.key.suite, server.key.public)
    return httpx2.Client(transport=transport)


def ask(server: Server) -> bytes:
    """Ask, and read the answer to its end. Raises httpx2.RemoteProtocolError."""
    with client_of(server) as client:
        return client.post(URL, json={"prompt": "Hello"}).content


@each_row("key", [KEY, HYBRID], ids=lambda key: key.suite)
def test_a_request_is_sealed_and_its_answer_opened(key: HpkeKey) -> None:
    server, begun = Server(key), int(time.time())
    with client_of(server) as client:
        headers = {"authorization": "Bearer canary", "x-twice": "canary"}
        answer = client.post(URL, content=b"canary " * 20_000, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    assert answer.headers["x-ratelimit-limit"] == "9"
    assert answer.content == b"".join(PIECES)
    assert (server.head.method, server.body) == ("POST", b"canary " * 20_000)
    assert begun <= server.head.time <= time.time()
    assert server.head.headers["authorization"] == b"Bearer canary"
    assert server.head.headers["content-length"] == b"140000"
    assert not server.head.headers.keys() & {"connection", "accept-encoding", "transfer-encoding"}
    (sent,) = server.sent
    assert str(sent.url) == URL
    assert b"canary" not in sent.content
    assert dict(sent.headers) == {
        "host": "proxy.example",
        "accept": CONTENT_TYPE,
        "accept-encoding": "identity",
        "content-type": CONTENT_TYPE,
        "content-length": str(len(sent.content)),
    }
    assert server.closed


@each_row(
    "url, target",
    [
        (URL, TARGET),
        ("https://proxy.example", b"/"),
        ("https://proxy.example/a", b"/a"),
        ("https://proxy.example/a%20b/", b"/a%20b/"),
        ("https://proxy.example/a?", b"/a"),
        ("https://proxy.example/a?b=?", b"/a?b=?"),
        ("https://proxy.example/a#b", b"/a"),
    ],
)
def test_a_request_is_sealed_to_its_path_and_query(url: str, target: bytes) -> None:
    server = Server()
    server.target = target
    with client_of(server) as client:
        assert client.get(url).content == b"".join(PIECES)


@each_row("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_outside_every_method_is_a_post(method: str) -> None:
    server = Server()
    with client_of(server) as client:
        client.request(method, URL)
    assert (server.sent[0].method, server.head.method) == ("POST", method)


def test_a_status_inside_is_the_answers() -> None:
    for status in (204, 307, 401, 429, 500):
        server = Server(inner=status)
        server.headers["location"] = b"/elsewhere"
        with client_of(server) as client:
            assert client.get(URL).status_code == status


def test_a_request_that_is_sent_again_is_sealed_anew() -> None:
    server = Server()
    with client_of(server) as client:
        for _ in range(2):
            client.post(URL, json={"prompt": "Hello"})
    one, two = (request.content for request in server.sent)
    assert one[: KEY.sealed_bytes] != two[: KEY.sealed_bytes]


def test_the_timeouts_of_a_request_are_those_of_the_outer_one() -> None:
    server = Server()
    with client_of(server) as client:
        client.get(URL, timeout=httpx2.Timeout(7, read=3))
    assert server.sent[0].extensions["timeout"] == {"connect": 7, "read": 3, "write": 7, "pool": 7}


def test_a_piece_is_there_before_the_next_one_comes() -> None:
    server = Server()
    with client_of(server) as client, client.stream("POST", URL) as answer:
        pieces = answer.iter_raw()
        for at, piece in enumerate(PIECES):
            assert next(pieces) == piece
            assert server.stream.gone == at + 2
        assert list(pieces) == []
        assert server.stream.closed


def test_an_answer_may_come_in_pieces_of_any_size() -> None:
    for size in (1, 5, 2**20):
        server = Server()

        def cut(parts: list[bytes], size: int = size) -> list[bytes]:
            data = b"".join(parts)
            return [data[at : at + size] for at in range(0, len(data), size)]

        server.change = cut
        assert ask(server) == b"".join(PIECES)


@each_row("kind", ["message/tsqp-sealed", "Message/TSQP-Sealed; charset=utf-8"])
def test_the_content_type_may_be_written_otherwise(kind: str) -> None:
    assert ask(Server(headers={"content-type": kind})) == b"".join(PIECES)


def test_an_answer_that_is_left_is_closed() -> None:
    server = Server()
    with client_of(server) as client, client.stream("POST", URL) as answer:
        assert next(answer.iter_raw()) == PIECES[0]
    assert server.stream.closed
    assert server.stream.gone == 2


def refused(server: Server) -> str:
    with pytest.raises(httpx2.RemoteProtocolError) as error:
        ask(server)
    assert server.stream.closed
    assert error.value.request.url == URL
    return str(error.value)


def test_an_answer_that_is_cut_is_an_error() -> None:
    server = Server()
    ask(server)
    size = sum(map(len, server.parts))
    for end in range(size):
        server.change = lambda parts, end=end: [b"".join(parts)[:end]]
        assert "an early end, expected the last chunk" in refused(server)
    for count in range(5):
        server.change = lambda parts, count=count: parts[:count]
        assert "an early end" in refused(server)


def test_no_bit_of_an_answer_can_be_changed() -> None:
    server = Server()
    ask(server)
    for at in range(sum(map(len, server.parts))):

        def changed(parts: list[bytes], at: int = at) -> list[bytes]:
            data = bytearray(b"".join(parts))
            data[at] ^= 1 << at % 8
            return [bytes(data)]

        server.change = changed
        refused(server)


@each_row(
    "order",
    [
        [0, 2, 1, 3, 4],
        [0, 1, 3, 4],
        [0, 4],
        [4],
        [1, 2, 3, 4],
        [0, 1, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 4],
    ],
    ids=str,
)
def test_pieces_of_an_answer_are_neither_moved_nor_left_out(order: list[int]) -> None:
    server = Server()
    server.change = lambda parts: [parts[at] for at in order]
    refused(server)


def test_the_answer_to_another_request_is_an_error() -> None:
    server = Server()
    ask(server)
    captured = server.parts
    server.change = lambda _parts: captured
    assert "other bytes" in refused(server)


def test_what_came_before_a_change_is_given_and_then_the_error() -> None:
    server = Server()
    server.change = lambda parts: [*parts[:3], parts[4]]
    with client_of(server) as client, client.stream("POST", URL) as answer:
        pieces = answer.iter_raw()
        assert [next(pieces), next(pieces)] == PIECES[:2]
        with pytest.raises(httpx2.RemoteProtocolError, match="other bytes"):
            next(pieces)


@each_row(
    "outer",
    [
        {"status": 502},
        {"status": 400, "headers": {"content-type": "application/json"}},
        {"status": 302, "headers": {"location": "https://other.example/"}},
        {"headers": {"content-type": "text/event-stream"}},
        {"headers": {}},
        {"status": 201},
    ],
    ids=str,
)
def test_an_answer_without_a_seal_is_never_given(outer: dict[str, Any]) -> None:
    server = Server(**outer)
    server.change = lambda _parts: [b'{"error": {"message": "canary"}}']
    message = refused(server)
    assert f"got status {outer.get('status', 200)} and no seal" in message
    assert "canary" not in message
    assert len(server.sent) == 1
    with pytest.raises(UnsealedError) as error:
        ask(Server(**outer))
    assert error.value.status == outer.get("status", 200)


@each_row(
    "head",
    [
        *(b"", b"no map", b"\x80", b"\xc0"),
        *(pack({"status": status, "headers": {}}) for status in (199, 600, -1, "200", 200.0)),
        pack({"status": 200, "headers": {"a b": b""}}),
        pack({"status": 200, "headers": {}, "more": 1}),
    ],
)
def test_a_head_of_another_form_is_an_error(head: bytes) -> None:
    server = Server()
    server.said = head
    assert refused(server).startswith("sealed head")


def test_errors_of_the_other_transport_are_its_own() -> None:
    server = Server(error=httpx2.ReadTimeout("late"))
    with pytest.raises(httpx2.ReadTimeout):
        ask(server)
    assert server.stream.closed


@each_row("suite, public", [("x25519", HYBRID.public), ("mlkem768-x25519", KEY.public)], ids=str)
def test_what_is_no_key_of_the_suite_is_refused_at_once(suite: Any, public: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"one of {suite}"):
        SealedTransport(Server(), suite, public)
