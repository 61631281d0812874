"""What a client sends is sealed to a key that was proved; a changed answer is an error."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tee_side.attest.appraisal import AppraisalPolicy
from tee_side.serve.identity import Identity
from tee_side.serve.sealed import (
    CONTENT_TYPE,
    Direction,
    HpkeKey,
    RequestHead,
    ResponseHead,
    open_secret,
)
from tests.kit.evidence import body_of, identity
from tests.kit.rows import each_row
from tsqp.client import NotAttestedError
from tsqp.client.attested_tls import MAX_ANSWER_BYTES
from tsqp.client.transports import ProvedTransport, SealedTransport, UnsealedError

KEY = HpkeKey(hybrid=False)
HYBRID = HpkeKey()
SALT = b"s" * 32
PIECES = [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]
WHOLE = b"".join(PIECES)
URL = "https://proxy.example/v1/completions?a=b%20c"


class Pieces(httpx2.SyncByteStream):
    """A body that comes in pieces. `gone`: pieces that were asked for; `closed`: by the reader."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces, self.gone, self.closed = pieces, 0, False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            self.gone += 1
            yield piece

    def close(self) -> None:
        self.closed = True


class Server(httpx2.BaseTransport):
    """Opens a request as a server does, and answers with `PIECES`, `change`d on the way."""

    def __init__(self, key: HpkeKey = KEY, inner: int = 200, **outer: Any) -> None:
        self.key, self.inner, self.outer = key, inner, outer
        self.sent: list[httpx2.Request] = []
        self.head = RequestHead(time=0, method="NONE", headers={})
        self.body, self.target = b"", b""
        self.parts: list[bytes] = []
        self.change: Callable[[list[bytes]], list[bytes]] = list
        self.stream = Pieces([])

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.sent.append(request)
        data = request.read()
        front = data[: self.key.sealed_bytes]
        secret = open_secret(self.key, front, self.target or request.url.raw_path)
        opening = Direction(b"request", front, secret)
        head, *body = opening.open(data[len(front) :])
        opening.close()
        self.head, self.body = RequestHead.decode(head), b"".join(body)
        direction = Direction(b"response", SALT, secret)
        headers = {"content-type": b"text/event-stream", "location": b"/elsewhere"}
        said = ResponseHead(status=self.inner, headers=headers).encode()
        self.parts = [SALT + direction.seal(said), *map(direction.seal, PIECES)]
        self.parts.append(direction.seal(b"", final=True))
        self.stream = Pieces(self.change(self.parts))
        return httpx2.Response(
            self.outer.get("status", 200),
            headers=self.outer.get("headers", {"content-type": CONTENT_TYPE}),
            stream=self.stream,
        )

    def client(self) -> httpx2.Client:
        return httpx2.Client(transport=SealedTransport(self, self.key.suite, self.key.public))


def ask(server: Server) -> bytes:
    with server.client() as client:
        return client.post(URL, json={"prompt": "Hello"}).content


def refused(server: Server) -> str:
    with pytest.raises(httpx2.RemoteProtocolError) as error:
        ask(server)
    assert server.stream.closed
    return str(error.value)


@each_row("key", [KEY, HYBRID], ids=lambda key: key.suite)
def test_a_request_is_sealed_and_its_answer_opened(key: HpkeKey) -> None:
    server, begun = Server(key), int(time.time())
    headers = {"authorization": "Bearer canary", "x-twice": "canary"}
    with server.client() as client:
        content = b"canary " * 20_000
        timeout = httpx2.Timeout(7, read=3)
        answer = client.put(URL, content=content, headers=headers, timeout=timeout)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    assert answer.content == WHOLE
    assert (server.head.method, server.body) == ("PUT", content)
    assert begun <= server.head.time <= time.time()
    assert server.head.headers["authorization"] == b"Bearer canary"
    assert not server.head.headers.keys() & {"connection", "accept-encoding", "transfer-encoding"}
    (sent,) = server.sent
    assert (sent.method, str(sent.url)) == ("POST", URL)
    assert b"canary" not in sent.content
    assert dict(sent.headers) == {
        "host": "proxy.example",
        "accept": CONTENT_TYPE,
        "accept-encoding": "identity",
        "content-type": CONTENT_TYPE,
        "content-length": str(len(sent.content)),
    }
    assert sent.extensions["timeout"] == {"connect": 7, "read": 3, "write": 7, "pool": 7}


@each_row(
    "url, target",
    [
        (URL, b"/v1/completions?a=b%20c"),
        ("https://proxy.example", b"/"),
        ("https://proxy.example/a%20b/", b"/a%20b/"),
        ("https://proxy.example/a?b=?", b"/a?b=?"),
        ("https://proxy.example/a#b", b"/a"),
    ],
)
def test_a_request_is_sealed_to_its_path_and_query_and_each_time_anew(
    url: str, target: bytes
) -> None:
    server = Server()
    server.target = target
    with server.client() as client:
        for _ in range(2):
            assert client.get(url).content == WHOLE
    one, two = (request.content for request in server.sent)
    assert one[: KEY.sealed_bytes] != two[: KEY.sealed_bytes]


def test_a_piece_is_there_before_the_next_one_comes_and_an_answer_that_is_left_is_closed() -> None:
    server = Server()
    with server.client() as client, client.stream("POST", URL) as answer:
        assert next(answer.iter_raw()) == PIECES[0]
    assert server.stream.closed
    assert server.stream.gone == 2


def test_an_answer_may_be_of_any_status_and_in_pieces_of_any_size() -> None:
    for status in (204, 307, 401, 429, 500):
        with Server(inner=status).client() as client:
            assert client.get(URL).status_code == status
    assert ask(Server(headers={"content-type": "Message/TSQP-Sealed; charset=a"})) == WHOLE
    server = Server()
    for size in (1, 5, 2**20):

        def cut(parts: list[bytes], size: int = size) -> list[bytes]:
            data = b"".join(parts)
            return [data[at : at + size] for at in range(0, len(data), size)]

        server.change = cut
        assert ask(server) == WHOLE


def test_an_answer_that_was_cut_or_changed_anywhere_is_an_error() -> None:
    server = Server()
    ask(server)
    captured = server.parts
    size = sum(map(len, captured))
    for end in range(0, size, 3):
        server.change = lambda parts, end=end: [b"".join(parts)[:end]]
        assert "an early end, expected the last chunk" in refused(server)
    for count in range(5):
        server.change = lambda parts, count=count: parts[:count]
        assert "an early end" in refused(server)
    for at in range(0, size, 3):

        def changed(parts: list[bytes], at: int = at) -> list[bytes]:
            data = bytearray(b"".join(parts))
            data[at] ^= 1 << at % 8
            return [bytes(data)]

        server.change = changed
        refused(server)
    for order in ([0, 2, 1, 3, 4], [0, 1, 3, 4], [4], [1, 2, 3, 4], [0, 1, 1, 2, 3, 4], [0, 4, 4]):
        server.change = lambda parts, order=order: [parts[at] for at in order]
        refused(server)
    server.change = lambda _parts: captured
    assert "other bytes" in refused(server)


@each_row(
    "outer",
    [
        {"status": 502},
        {"status": 302, "headers": {"location": "https://other.example/"}},
        {"headers": {"content-type": "text/event-stream"}},
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


class Carrier(httpx2.BaseTransport):
    """Answers with statements; what else comes is kept, and answered by a proxy's word.

    `most`: blanks follow a statement up to so many bytes.
    """

    def __init__(self, by: Identity, most: int = 0) -> None:
        self.by, self.most = by, most
        self.nonces, self.kept = list[bytes](), list[httpx2.Request]()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path != "/v1/attestation":
            self.kept.append(request)
            return httpx2.Response(400, content=b"no")
        self.nonces.append(bytes.fromhex(request.url.params["nonce"]))
        content = body_of(self.by.state(self.nonces[-1])).ljust(self.most)
        return httpx2.Response(200, content=content)


def post(transport: httpx2.BaseTransport) -> httpx2.Response:
    return httpx2.Client(transport=transport).post(URL, content=b"a canary")


def test_what_goes_out_is_sealed_to_the_key_that_was_proved(policy: AppraisalPolicy) -> None:
    now_s, carrier = 0.0, Carrier(identity())
    transport = ProvedTransport("https://a.test", policy, carrier, 60.0, lambda: now_s)
    transport.prove()
    # It is asked again after a while, and after an answer in the clear: the key may be another.
    for now_s, asked in ((59.0, 1), (59.5, 2), (130.0, 3)):  # noqa: B007
        with pytest.raises(UnsealedError) as error:
            post(transport)
        assert error.value.status == 400
        assert len(set(carrier.nonces)) == asked
    key, body = carrier.by.hpke_key, carrier.kept[0].read()
    assert b"canary" not in body
    assert open_secret(key, body[: key.sealed_bytes], httpx2.URL(URL).raw_path)
    # One that was sealed all along is asked again as well.
    transport = ProvedTransport("https://a.test", policy, carrier, 60.0, lambda: now_s)
    transport.prove()
    now_s, carrier.by = 190.0, identity(model=bytes(32))
    with pytest.raises(NotAttestedError, match="new evidence: model"):
        post(transport)
    assert len(carrier.kept) == 3


@each_row("status, answer", [(200, b"{}"), (200, b"[]"), (401, b"{}")])
def test_an_answer_that_proves_nothing_ends_it(
    policy: AppraisalPolicy, status: int, answer: bytes
) -> None:
    carried: list[str] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        carried.append(request.url.path)
        return httpx2.Response(status, content=answer)

    with pytest.raises(NotAttestedError):
        post(ProvedTransport("https://a.test", policy, httpx2.MockTransport(handle), 60.0))
    assert carried == ["/v1/attestation"]
    for size, passes in ((MAX_ANSWER_BYTES, True), (MAX_ANSWER_BYTES + 1, False)):
        transport = ProvedTransport("https://a.test", policy, Carrier(identity(), size), 60.0)
        if passes:
            transport.prove()
        else:
            with pytest.raises(NotAttestedError, match="new evidence: got a long answer"):
                transport.prove()
