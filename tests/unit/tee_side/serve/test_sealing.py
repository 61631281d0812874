"""Sealed requests are answered as plain ones are, once; what was changed on the way is refused."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.encoding import pack
from protocol.errors import ProtocolError
from tee_side.serve import identity as module
from tee_side.serve.app import create_app
from tee_side.serve.errors import ApiError
from tee_side.serve.identity import WINDOW_S, Sealing
from tee_side.serve.sealed import (
    CHUNK_BYTES,
    CONTENT_TYPE,
    KEY_BYTES,
    Direction,
    HpkeKey,
    open_secret,
    seal_secret,
)
from tests.kit.rows import each_row
from tests.kit.serve import (
    GONE,
    JSON,
    KEY,
    NOW_S,
    OUTSIDE,
    Clock,
    Connection,
    FakeEngine,
    Reply,
    SealedRequest,
    ask,
    authorise,
    in_a_loop,
    sealed,
    sealing,
    send,
    serving,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = json.dumps({"prompt": "Hello"}).encode()
BEARER = {"authorization": b"Bearer right"}
HYBRID = HpkeKey()

# What a client may ask; each is answered the same whether it is sealed or not.
ASKED: list[tuple[str, str, Any]] = [
    # Letters that fill events up would be others each time.
    (
        "POST",
        COMPLETIONS,
        {"prompt": "Hello", "stream": True, "stream_options": {"include_obfuscation": False}},
    ),
    ("POST", "/v1/embeddings", {"input": "a cat " * 60}),
    ("POST", "/tokenize", {"content": "a " * 40_000}),
    ("HEAD", "/health", None),
    ("POST", COMPLETIONS, b"no JSON"),
]


def content(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()


def answer(app: Sealing, asked: SealedRequest, **more: Any) -> Reply:
    return asked.opened(asyncio.run(send(app, asked.ask(**more))))


def code_of(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.error()["code"]


def unique(reply: Reply) -> tuple[int, dict[str, str], str]:
    """Leave out what differs from one answer to the next: ids and times."""
    text = re.sub(r'"(id":"\w+-\w+|created":\d+)', "", reply.text)
    headers = {name: one for name, one in reply.headers.items() if name != "x-request-id"}
    return reply.status, headers, text


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(serving())


@each_row("method, path, body", ASKED)
def test_a_sealed_request_is_answered_as_a_plain_one(
    app: Any, method: str, path: str, body: Any
) -> None:
    plain = asyncio.run(ask(app, method, path, content(body), {"content-type": "application/json"}))
    for chunk in (2**30, 177):
        asked = sealed(path, content(body), method=method)
        reply = asyncio.run(send(sealing(app), asked.ask(chunk=chunk)))
        assert unique(asked.opened(reply)) == unique(plain)
        # Outside are neither its status nor its headers.
        assert reply.status == 200
        assert reply.headers == {
            "content-type": "message/tsqp-sealed",
            "cache-control": "no-store, no-transform",
            "x-accel-buffering": "no",
        }


def test_headers_outside_are_not_read_and_those_inside_and_the_query_are() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await ApiError(400, "seen").response()(scope, receive, send)

    headers = {"a": b"inside", "content-length": b"0"}
    for query, found in ((b"a=b", "seen"), (b"a=c", None)):
        asked = sealed("/health", method="PUT", headers=headers, target=b"/health?a=b")
        to = asked.ask()
        to.scope["headers"] += [(b"a", b"outside"), (b"authorization", b"Bearer right")]
        to.scope |= {"extensions": {"http.response.pathsend": {}}, "query_string": query}
        reply = asyncio.run(send(sealing(app), to))
        reply = asked.opened(reply) if found else reply
        assert reply.error()["code"] == (None if found else "sealed_body")
    assert [scope["headers"] for scope in seen] == [
        [*((k.encode(), v) for k, v in headers.items())]
    ]
    assert (seen[0]["method"], seen[0]["path"], seen[0]["extensions"]) == ("PUT", "/health", {})


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def _head(**fields: Any) -> bytes:
    return pack({"time": NOW_S, "method": "POST", "headers": JSON} | fields)


HEADS = [
    b"no map",
    _head(more=1),
    _head(time=2**53),
    *(_head(method=method) for method in ("post", "POST\n")),
    *(_head(headers={name: b""}) for name in ("a b", "a:", "", "a\n", "a" * 65)),
    _head(headers={f"a{at}": b"" for at in range(129)}),
    _head(headers={"a": b"a" * CHUNK_BYTES}),
]


def _changed() -> Iterator[tuple[SealedRequest, bytes, str]]:
    """Yield requests, what comes of each, and to which path."""
    asked = sealed(COMPLETIONS, HELLO[:9], HELLO[9:])
    parts = asked.parts
    data = b"".join(parts)
    for at in range(0, len(data), 16):
        yield asked, flipped(data, at), COMPLETIONS
        yield asked, data[:at], COMPLETIONS
    # A request is for its path and its server alone, and no part of another.
    other = sealed(COMPLETIONS, HELLO)
    yield asked, b"".join([*parts[:2], *other.parts[2:]]), COMPLETIONS
    for path in (CHAT, COMPLETIONS + "/"):
        yield asked, data, path
    others = [sealed(COMPLETIONS, HELLO, key=key) for key in (HpkeKey(hybrid=False), HYBRID)]
    for asked in (*others, *(sealed(COMPLETIONS, HELLO, head=head) for head in HEADS)):
        yield asked, b"".join(asked.parts), COMPLETIONS


def test_a_request_that_was_changed_cut_or_sent_elsewhere_is_refused() -> None:
    engine, told = FakeEngine(), {}
    app = create_app(serving(engine))
    for number, (asked, data, path) in enumerate(_changed()):
        # As proxies send it: in one piece, or the head first.
        for chunk in (2**30, 100):
            to = Connection("POST", path, data, OUTSIDE, chunk)
            reply = asyncio.run(send(sealing(app), to))
            if reply.headers["content-type"] == CONTENT_TYPE:
                reply = asked.opened(reply)
            told[number, chunk] = (*code_of(reply), reply.error()["message"])
    said = "the sealed body could not be opened: another key or path, or other bytes"
    wanted = (400, "sealed_body", said)
    assert [place for place, found in told.items() if found != wanted] == []
    assert engine.requests == []


def test_a_request_is_answered_once() -> None:
    engine = FakeEngine()
    app = sealing(create_app(serving(engine)))
    asked = sealed(COMPLETIONS, HELLO)
    first = asyncio.run(send(app, asked.ask()))
    assert asked.opened(first).status == 200
    again = asyncio.run(send(app, asked.ask(chunk=10)))
    assert code_of(asked.opened(again)) == (400, "sealed_replay")
    # Another salt, and so another key: two answers tell nothing of each other.
    assert again.writes[0][:32] != first.writes[0][:32]
    assert len(engine.requests) == 1
    # What failed, or was refused for its content, is not run again either.
    engine.error = GONE
    for body, status in ((HELLO, 503), (b"no JSON", 400)):
        asked = sealed(COMPLETIONS, body)
        assert answer(app, asked).status == status
        assert code_of(answer(app, asked)) == (400, "sealed_replay")


@in_a_loop
async def test_a_request_that_still_runs_is_not_run_again() -> None:
    engine = FakeEngine(hold=True)
    app = sealing(create_app(serving(engine)))
    asked = sealed(COMPLETIONS, HELLO)
    task = asyncio.create_task(send(app, asked.ask()))
    await engine.submitted.wait()
    again = asked.opened(await send(app, asked.ask()))
    assert code_of(again) == (400, "sealed_replay")
    for delivery in engine._script(engine.requests[0]):
        engine.step(delivery)
    assert asked.opened(await task).status == 200
    assert len(engine.requests) == 1


@each_row(
    "method, path, headers, status",
    [
        ("POST", COMPLETIONS, JSON, 401),
        ("POST", "/v1/nothing", JSON | BEARER, 404),
        ("POST", "/health", JSON, 405),
        ("POST", COMPLETIONS, JSON | BEARER | {"content-length": b"99999999"}, 413),
        ("GET", "/v1/models", BEARER, 200),
    ],
)
def test_reads_and_what_is_always_refused_take_no_memory(
    method: str, path: str, headers: dict[str, bytes], status: int
) -> None:
    engine = FakeEngine()
    app = sealing(create_app(serving(engine, authorise=authorise)))
    asked = sealed(path, HELLO, method=method, headers=headers)
    for _ in range(3):
        assert answer(app, asked).status == status
    assert not any(app._by_second.values())
    assert engine.requests == []


def test_a_request_is_of_now(app: Any) -> None:
    within = (-WINDOW_S, 0, WINDOW_S)
    for late in (*within, -WINDOW_S - 1, WINDOW_S + 1, 2**53 - 1 - NOW_S):
        for method, path in (("POST", COMPLETIONS), ("GET", "/health")):
            asked = sealed(path, HELLO, method=method, time=NOW_S + late)
            found = answer(sealing(app), asked)
            if late in within:
                assert found.status == 200
            else:
                assert code_of(found) == (400, "sealed_time")


def test_what_was_sent_before_is_refused_as_long_as_its_time_is_let_in(app: Any) -> None:
    for ahead in (-WINDOW_S, WINDOW_S):
        now = Clock(NOW_S)
        by = sealing(app, clock=now)
        asked = sealed(COMPLETIONS, HELLO, time=NOW_S + ahead)
        assert answer(by, asked).status == 200
        for later in (0, 119, 120, 239, 240):
            now.now_s = NOW_S + later + 0.5
            expected = "sealed_replay" if later + 0.5 <= ahead + WINDOW_S else "sealed_time"
            assert code_of(answer(by, asked)) == (400, expected)
            # Others come meanwhile, and make what is too old be forgotten.
            fresh = sealed("/tokenize", b'{"content": "a"}', time=NOW_S + later)
            assert answer(by, fresh).status == 200
        assert len(by._by_second) <= 2 * WINDOW_S + 1
        # The clock is the host's, who might set it back.
        now.now_s = float(NOW_S)
        assert code_of(answer(by, asked)) == (400, "sealed_time")


def test_a_full_memory_forgets_nothing(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    now = Clock(NOW_S)
    by = sealing(app, clock=now)
    asked = [sealed(COMPLETIONS, HELLO, time=NOW_S + at) for at in range(3)]
    assert [answer(by, one).status for one in asked] == [200] * 3
    found = answer(by, sealed(COMPLETIONS, HELLO))
    assert code_of(found) == (503, "overloaded")
    assert found.headers["retry-after"] == "1"
    assert [code_of(answer(by, one))[1] for one in asked] == ["sealed_replay"] * 3
    now.wait(WINDOW_S + 0.5)
    assert answer(by, sealed(COMPLETIONS, HELLO, time=NOW_S + 9)).status == 200


def test_an_answer_ends_as_its_app_ends_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Vary", b"a"), (b"x", b"1"), (b"vary", b"b")]
        more = scope["method"] == "POST"
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": more})

    with pytest.raises(ProtocolError, match="an early end"):
        answer(sealing(app), sealed(COMPLETIONS, HELLO))
    # Headers of one name are sealed as one.
    found = answer(sealing(app), sealed("/health", method="GET"))
    assert (found.status, found.headers) == (204, {"vary": "a, b", "x": "1"})


def test_a_client_that_leaves_before_its_head_gets_nothing() -> None:
    async def app(*_: Any) -> None:
        pytest.fail("a request without its head")

    asked = sealed(COMPLETIONS, HELLO)
    for size in (0, 10, len(asked.parts[0]), len(asked.parts[0]) + 20):
        to = Connection("POST", COMPLETIONS, b"".join(asked.parts)[:size], OUTSIDE)
        to._messages[-1]["more_body"] = True
        to.leave()
        asyncio.run(send(sealing(app), to))
        assert to.reply == Reply()


TARGET = b"/v1/completions?a=b"
DOMAIN = b"TSQP sealed body 1\0"
SALT, SECRET = b"s" * 32, b"k" * 32
# A chunk has this much beside its content.
MORE = 5 + 16
PIECES = [b"head", b"", b"Once upon a time", b"x" * 40]


def sealer(name: str = "request", salt: bytes = SALT, secret: bytes = SECRET) -> Direction:
    return Direction(name.encode(), salt, secret)  # type: ignore[arg-type]


def chunks_of(pieces: list[bytes]) -> list[bytes]:
    sealing = sealer()
    return [sealing.seal(piece, final=at + 1 == len(pieces)) for at, piece in enumerate(pieces)]


def opening(data: bytes, by: Direction, step: int) -> Iterator[bytes]:
    """Open what comes in steps of so many bytes, to its end. Raises ProtocolError."""
    for at in range(0, len(data), step):
        yield from by.open(data[at : at + step])
    by.close()


def opened(data: bytes, by: Direction | None = None, step: int = 2**30) -> list[bytes]:
    return list(opening(data, by or sealer(), step))


def refused(data: bytes, step: int = 2**30) -> str:
    """Have data refused; what was opened before is the beginning of what was sealed."""
    found = list[bytes]()
    with pytest.raises(ProtocolError) as error:
        found.extend(opening(data, sealer(), step))
    assert found == PIECES[: len(found)] != PIECES
    return str(error.value)


@each_row(
    "hybrid, suite, public, sealed",
    [(True, "mlkem768-x25519", 1216, 1168), (False, "x25519", 32, 80)],
)
def test_a_secret_opens_as_it_is_by_its_key_and_at_its_target_alone(
    hybrid: bool, suite: str, public: int, sealed: int
) -> None:
    mine = HYBRID if hybrid else KEY
    assert (mine.suite, len(mine.public), mine.sealed_bytes) == (suite, public, sealed)
    secret, front = seal_secret(mine.suite, mine.public, TARGET)
    assert (len(secret), len(front)) == (KEY_BYTES, sealed)
    assert open_secret(mine, front, TARGET) == secret
    again, another = seal_secret(mine.suite, mine.public, TARGET)
    assert again != secret
    assert another[:32] != front[:32]
    others = [(HpkeKey(hybrid=hybrid), front, TARGET)]
    others += [(mine, front, target) for target in (b"", b"/v1/chat/completions")]
    fronts = [front[:-1], front + b"\0", bytes(len(front))]
    fronts += [flipped(front, at) for at in range(0, len(front), 7)]
    for by, data, target in [*others, *((mine, one, TARGET) for one in fronts)]:
        with pytest.raises(ProtocolError, match="another key, purpose or content"):
            open_secret(by, data, target)


@each_row(
    "suite, public",
    [
        ("x25519", bytes(32)),  # of small order: no secret comes of it
        ("x25519", HYBRID.public),
        ("mlkem768-x25519", HYBRID.public + b"x"),
        ("mlkem768-x25519", b"\xff" * 1216),
        ("mlkem768-x25519", HYBRID.public[:-32] + bytes(32)),
    ],
    ids=str,
)
def test_nothing_is_sealed_to_what_is_no_key_of_the_suite(suite: str, public: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"another public key, expected one of {suite}"):
        seal_secret(suite, public, TARGET)  # type: ignore[arg-type]


@each_row("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_a_piece_of_any_size_opens_as_it_was(size: int) -> None:
    piece = bytes(at % 251 for at in range(size))
    for final in (True, False):
        sealing = sealer()
        sealed = sealing.seal(piece, final=final)
        count = max(1, -(-size // CHUNK_BYTES))
        assert len(sealed) == size + count * MORE
        if not final:
            sealed += sealing.seal(b"", final=True)
        found = opened(sealed)
        assert b"".join(found) == piece
        assert max(map(len, found)) <= CHUNK_BYTES
        assert opened(sealed, step=1000) == found


def test_a_body_that_was_changed_cut_or_put_in_another_order_is_refused() -> None:
    one, two, three, last = parts = chunks_of(PIECES)
    sealed = b"".join(parts)
    for at in range(len(sealed)):
        refused(flipped(sealed, at))
        for step in (2**30, 7):
            assert "an early end" in refused(sealed[:at], step)
    other = sealer(secret=b"o" * 32).seal(b"head")
    for order in (
        [two, one, three, last],
        [one, three, last],
        [one, one, two, three, last],
        [other, two, three, last],
    ):
        for step in (2**30, 1):
            refused(b"".join(order), step)
    # Its last chunk is the end, at the place of another as well.
    early = chunks_of(PIECES[:2])[-1]
    assert opened(one + early) == PIECES[:2]
    for more in (b"\0", two, early):
        for step in (1, 2**30):
            with pytest.raises(ProtocolError, match="more bytes"):
                opened(one + early + more, step=step)


def test_a_chunk_says_a_length_that_one_can_have() -> None:
    for length in (CHUNK_BYTES + 17, 2**31, 2**32 - 1):
        with pytest.raises(ProtocolError, match="a longer chunk, expected 65536 bytes at most"):
            sealer().open(b"\0" + length.to_bytes(4))
    assert sealer().open(b"\0" + (CHUNK_BYTES + 16).to_bytes(4)) == []
    for length in range(16):  # short of a tag
        with pytest.raises(ProtocolError, match="other bytes"):
            sealer().open(b"\1" + length.to_bytes(4) + bytes(length))


@each_row("change", [{"name": "response"}, {"salt": b"S" * 32}, {"secret": b"K" * 32}], ids=str)
def test_another_direction_salt_or_secret_has_another_key(change: dict[str, bytes]) -> None:
    sealed = sealer().seal(b"one", final=True)
    assert opened(sealed) == [b"one"]
    assert opened(sealer(**change).seal(b"one", final=True), sealer(**change)) == [b"one"]  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="other bytes"):
        opened(sealed, sealer(**change))  # type: ignore[arg-type]


@each_row("hybrid", [True, False])
def test_the_format_is_the_one_that_is_written_down(hybrid: bool) -> None:
    """Read by what the module's first lines say, and no code of it."""
    x25519, mlkem = X25519PrivateKey.generate(), MLKEM768PrivateKey.generate()
    public = x25519.public_key().public_bytes_raw()
    private: X25519PrivateKey | hpke.MLKEM768X25519PrivateKey = x25519
    kem, size = hpke.KEM.X25519, 32
    if hybrid:
        public = mlkem.public_key().public_bytes_raw() + public
        private = hpke.MLKEM768X25519PrivateKey(mlkem, x25519)
        kem, size = hpke.KEM.MLKEM768_X25519, 1120
    secret, front = seal_secret("mlkem768-x25519" if hybrid else "x25519", public, TARGET)
    suite = hpke.Suite(kem, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    assert len(front) == size + 32 + 16
    assert suite.decrypt(front, private, DOMAIN + TARGET) == secret
    for name in ("request", "response"):
        sealing = sealer(name, front, secret)
        data = sealing.seal(b"head") + sealing.seal(b"body", final=True)
        by = AESGCM(HKDF(SHA256(), 32, front, DOMAIN + name.encode()).derive(secret))
        expected = b""
        for at, piece in enumerate((b"head", b"body")):
            before = bytes([at]) + (4 + 16).to_bytes(4, "big")
            expected += before + by.encrypt(at.to_bytes(12, "big"), piece, before)
        assert data == expected
