"""Sealed requests are answered as plain ones are, once; what was changed on the way is refused."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request

from protocol.codec import pack
from protocol.errors import EndpointError, ProtocolError
from tee_side.serve import sealing as module
from tee_side.serve.app import create_app
from tee_side.serve.errors import ApiError
from tee_side.serve.hpke_key import HpkeKey
from tee_side.serve.sealed_bodies import CHUNK_BYTES, CONTENT_TYPE
from tee_side.serve.sealed_heads import RequestHead
from tee_side.serve.sealing import WINDOW_S, Remembered, Sealing
from tests.kit.rows import each_row
from tests.kit.serve import (
    JSON,
    NOW_S,
    OUTSIDE,
    SAID,
    Connection,
    FakeEngine,
    FakeWatch,
    Reply,
    SealedRequest,
    ask,
    clock,
    connection,
    sealed,
    sealing,
    send,
    serving,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")
HELLO = json.dumps({"prompt": "Hello"}).encode()
BEARER = {"authorization": b"Bearer right"}
HYBRID = HpkeKey()

# What a client may ask; each is answered the same whether it is sealed or not.
ASKED: list[tuple[str, str, Any]] = [
    ("POST", COMPLETIONS, {"prompt": "Hello"}),
    ("POST", COMPLETIONS, {"prompt": ["Hello", "a cat"], "n": 2, "logprobs": 1}),
    ("POST", COMPLETIONS, {"prompt": "Hello", "stream": True}),
    ("POST", CHAT, {"messages": MESSAGES}),
    ("POST", CHAT, {"messages": MESSAGES, "stream": True}),
    ("POST", "/v1/embeddings", {"input": "a cat " * 60}),
    ("POST", "/tokenize", {"content": "a " * 60_000}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/demo", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/health", None),
    ("HEAD", "/health", None),
    ("GET", COMPLETIONS, None),
    ("POST", "/v1/nothing", {"prompt": "Hello"}),
    ("POST", COMPLETIONS, {"prompt": 4.5}),
    ("POST", COMPLETIONS, b"no JSON"),
]


def _authorise(request: Request) -> str:
    if request.headers.get("authorization") != "Bearer right":
        raise ApiError(401, "a key is needed", headers={"www-authenticate": "Bearer"})
    return "alice"


def content(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()


def answer(app: Sealing, asked: SealedRequest, **more: Any) -> Reply:
    """Send a request and open its answer. Raises ProtocolError."""
    return asked.opened(asyncio.run(send(app, asked.ask(**more))))


def code_of(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.error()["code"]


def unique(reply: Reply) -> tuple[int, dict[str, str], str]:
    """Leave out what differs from one answer to the next: ids and times."""
    text = reply.text
    for event in text.replace("data: ", "").split("\n\n") if text else ():
        if event.startswith("{"):
            fields = json.loads(event)
            for name in ("id", "created"):
                if name in fields:
                    text = text.replace(json.dumps(fields[name]), name)
    return reply.status, reply.headers, text


@each_row("method, path, body", ASKED)
def test_a_sealed_request_is_answered_as_a_plain_one(method: str, path: str, body: Any) -> None:
    app = create_app(serving())
    plain = asyncio.run(ask(app, method, path, content(body), {"content-type": "application/json"}))
    asked = sealed(path, content(body), method=method)
    for chunk in (2**30, 7):
        again = sealed(path, content(body), method=method)
        found = answer(sealing(app), again, chunk=chunk)
        assert unique(found) == unique(plain)
    assert answer(sealing(app), asked).status == plain.status


def test_a_sealed_request_to_a_hybrid_key_is_answered() -> None:
    asked = sealed(COMPLETIONS, HELLO, key=HYBRID)
    found = answer(sealing(create_app(serving()), key=HYBRID), asked)
    assert found.json()["choices"][0]["text"] == SAID


def test_a_body_may_come_in_many_chunks() -> None:
    pieces = [HELLO[at : at + 3] for at in range(0, len(HELLO), 3)]
    found = answer(sealing(create_app(serving())), sealed(COMPLETIONS, *pieces, b""))
    assert found.json()["choices"][0]["text"] == SAID


def test_the_query_of_a_target_is_sealed_to_as_well() -> None:
    app = sealing(create_app(serving()))
    for target, status in ((b"/health?a=b", 200), (b"/health", 400), (b"/health?a=c", 400)):
        asked = sealed("/health", method="GET", target=target)
        to = asked.ask()
        to.scope["query_string"] = b"a=b"
        reply = asyncio.run(send(app, to))
        assert (asked.opened(reply).status if status == 200 else reply.status) == status


def test_an_event_leaves_when_it_is_made() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        asked = sealed(COMPLETIONS, content({"prompt": "Hello", "stream": True}))
        to = asked.ask()
        task = asyncio.create_task(send(sealing(create_app(serving(engine))), to))
        await engine.submitted.wait()
        script = engine._script(engine.requests[0])
        for delivery in script:
            before = len(to.reply.writes)
            engine.step(delivery)
            while len(to.reply.writes) == before:
                to.changed.clear()
                await to.changed.wait()
            # No last chunk yet: what is there opens, and its end is missing.
            if delivery is not script[-1]:
                with pytest.raises(ProtocolError, match="an early end"):
                    asked.opened(to.reply)
        found = asked.opened(await task)
        assert found.events()[-1] == "[DONE]"
        assert len(found.writes) >= len(script)

    asyncio.run(run())


def test_outside_are_neither_content_nor_status_nor_headers() -> None:
    app = sealing(create_app(serving(authorise=_authorise)))
    for headers, status in ((JSON | BEARER, 200), (JSON, 401)):
        asked = sealed(COMPLETIONS, content({"prompt": "Hello canary"}), headers=headers)
        to = asked.ask()
        assert b"canary" not in b"".join(asked.parts)
        assert b"Bearer" not in b"".join(asked.parts)
        reply = asyncio.run(send(app, to))
        assert reply.headers == {
            "content-type": "message/tsqp-sealed",
            "cache-control": "no-store, no-transform",
            "x-accel-buffering": "no",
        }
        assert reply.status == 200
        data = b"".join(reply.writes)
        for word in (b"choices", b"error", b"json", b"canary", b"looked", b"ratelimit"):
            assert word not in data
        assert asked.opened(reply).status == status


def test_headers_outside_are_not_read_and_those_inside_are() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await ApiError(400, "seen").response()(scope, receive, send)

    asked = sealed("/health", method="PUT", headers={"a": b"inside", "content-length": b"0"})
    to = asked.ask()
    to.scope["headers"] += [(b"a", b"outside"), (b"authorization", b"Bearer right")]
    to.scope["extensions"] = {"http.response.pathsend": {}}
    assert asked.opened(asyncio.run(send(sealing(app), to))).status == 400
    assert seen[0]["headers"] == [(b"a", b"inside"), (b"content-length", b"0")]
    assert (seen[0]["method"], seen[0]["path"], seen[0]["extensions"]) == ("PUT", "/health", {})


@each_row(
    "kind",
    [
        "message/tsqp-sealed",
        "Message/TSQP-Sealed",
        "message/tsqp-sealed; a=b",
        " message/tsqp-sealed ;",
    ],
)
def test_the_content_type_may_be_written_otherwise(kind: str) -> None:
    asked = sealed("/health", method="GET")
    to = connection("POST", "/health", b"".join(asked.parts), {"content-type": kind})
    assert asked.opened(asyncio.run(send(sealing(create_app(serving())), to))).status == 200


def test_others_are_served_as_before() -> None:
    app = create_app(serving())
    for headers in ({"content-type": "application/json"}, {"content-type": "a/b"}, {}):
        plain = asyncio.run(ask(app, "POST", COMPLETIONS, HELLO, headers))
        reply = asyncio.run(send(sealing(app), connection("POST", COMPLETIONS, HELLO, headers)))
        assert unique(reply) == unique(plain)
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": "websocket", "headers": [(b"content-type", CONTENT_TYPE.encode())]}
    asyncio.run(sealing(inner)(scope, None, None))  # type: ignore[arg-type]
    assert seen == [scope]


# --------------------------------------------------------------------------------- refusals


@contextmanager
def untouched() -> Iterator[tuple[Sealing, FakeEngine]]:
    """Give an app whose engine must not be asked anything."""
    engine = FakeEngine()
    yield sealing(create_app(serving(engine))), engine
    assert engine.requests == []


def refusal(app: Sealing, asked: SealedRequest, to: Connection) -> tuple[int, str]:
    """Return what is answered, sealed where the request could be opened so far."""
    reply = asyncio.run(send(app, to))
    if reply.headers["content-type"] == CONTENT_TYPE:
        reply = asked.opened(reply)
    assert reply.headers["content-type"] == "application/json"
    return code_of(reply)


def test_no_bit_of_a_request_can_be_changed() -> None:
    asked = sealed(COMPLETIONS, HELLO[:9], HELLO[9:])
    data = b"".join(asked.parts)
    with untouched() as (app, _):
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1 << at % 8
            # As proxies send it: in one piece, or the head first.
            for chunk in (2**30, 100):
                to = connection("POST", COMPLETIONS, bytes(changed), OUTSIDE, chunk)
                found = refusal(sealing(app._app), asked, to)
                assert found == (400, "sealed_body"), at


def test_a_request_that_is_cut_anywhere_is_refused() -> None:
    asked = sealed(COMPLETIONS, HELLO[:9], HELLO[9:])
    data = b"".join(asked.parts)
    with untouched() as (app, _):
        for size in range(len(data)):
            for chunk in (2**30, 100):
                to = connection("POST", COMPLETIONS, data[:size], OUTSIDE, chunk)
                found = refusal(sealing(app._app), asked, to)
                assert found == (400, "sealed_body"), size


@each_row(
    "order",
    [[0, 1, 3, 2], [0, 1, 3], [0, 2, 3], [0, 2, 1, 3], [1, 2, 3], [0, 1, 2, 2, 3], [0, 1, 2, 3, 3]],
    ids=str,
)
def test_parts_of_a_request_are_neither_moved_nor_left_out(order: list[int]) -> None:
    asked = sealed(COMPLETIONS, HELLO[:9], HELLO[9:])
    with untouched() as (app, _):
        for chunk in (2**30, 50):
            data = b"".join(asked.parts[at] for at in order)
            to = connection("POST", COMPLETIONS, data, OUTSIDE, chunk)
            assert refusal(sealing(app._app), asked, to) == (400, "sealed_body")


def test_a_request_is_for_its_path_and_its_server_alone() -> None:
    with untouched() as (app, _):
        for asked, path in (
            (sealed(COMPLETIONS, HELLO), CHAT),
            (sealed(COMPLETIONS, HELLO), COMPLETIONS + "/"),
            (sealed(COMPLETIONS, HELLO, key=HpkeKey(hybrid=False)), COMPLETIONS),
            (sealed(COMPLETIONS, HELLO, key=HYBRID), COMPLETIONS),
        ):
            assert refusal(app, asked, asked.ask(path)) == (400, "sealed_body")


def test_parts_of_two_requests_do_not_open_together() -> None:
    one, two = sealed(COMPLETIONS, HELLO), sealed(COMPLETIONS, HELLO)
    with untouched() as (app, _):
        for parts in (
            [two.parts[0], *one.parts[1:]],
            [*one.parts[:1], *two.parts[1:]],
            [*one.parts[:2], *two.parts[2:]],
        ):
            asked = SealedRequest(COMPLETIONS, one.secret, parts)
            assert refusal(sealing(app._app), asked, asked.ask()) == (400, "sealed_body")


def _head(**fields: Any) -> bytes:
    return pack({"time": NOW_S, "method": "POST", "headers": JSON} | fields)


@each_row(
    "head",
    [
        b"\xc0",
        b"no map",
        b"\x80",
        _head() + b"\0",
        _head(more=1),
        _head(time=-1),
        _head(time=2**53),
        _head(time=float(NOW_S)),
        _head(time=True),
        _head(method="post"),
        _head(method="POST\n"),
        _head(method=b"POST"),
        _head(headers=[]),
        _head(headers={"a": "text"}),
        _head(headers={"a b": b""}),
        _head(headers={"a:": b""}),
        _head(headers={"": b""}),
        _head(headers={"a\n": b""}),
        _head(headers={"ä": b""}),
        _head(headers={"a" * 65: b""}),
        _head(headers={f"a{at}": b"" for at in range(129)}),
        _head(headers={"a": b"a" * CHUNK_BYTES}),
    ],
    ids=lambda head: repr(head[:60]),
)
def test_a_head_of_another_form_is_refused_and_not_quoted(head: bytes) -> None:
    asked = sealed(COMPLETIONS, HELLO, head=head)
    with untouched() as (app, _):
        reply = asyncio.run(send(app, asked.ask()))
        assert code_of(reply) == (400, "sealed_body")
        assert reply.error()["message"] == (
            "the sealed body could not be opened: another key or path, or other bytes"
        )


# --------------------------------------------------------------------------- once, and in time


def test_a_request_is_answered_once() -> None:
    engine = FakeEngine()
    app = sealing(create_app(serving(engine)))
    asked = sealed(COMPLETIONS, HELLO)
    first = asyncio.run(send(app, asked.ask()))
    assert asked.opened(first).status == 200
    for chunk in (2**30, 10):
        again = asyncio.run(send(app, asked.ask(chunk=chunk)))
        assert code_of(asked.opened(again)) == (400, "sealed_replay")
        # Another salt, and so another key: two answers tell nothing of each other.
        assert again.writes[0][:32] != first.writes[0][:32]
    # A request of the same content is another one.
    assert answer(app, sealed(COMPLETIONS, HELLO)).status == 200
    assert len(engine.requests) == 2


def test_a_request_that_still_runs_is_not_run_again() -> None:
    async def run() -> None:
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

    asyncio.run(run())


def test_what_failed_is_not_run_again_either() -> None:
    engine = FakeEngine(error=GONE)
    app = sealing(create_app(serving(engine)))
    asked = sealed(COMPLETIONS, HELLO)
    assert answer(app, asked).status == 503
    engine.error = None
    assert code_of(answer(app, asked)) == (400, "sealed_replay")
    limited = FakeWatch(full=None)
    app = sealing(create_app(serving(engine, watch=limited)))
    asked = sealed(COMPLETIONS, b"no JSON")
    assert answer(app, asked).status == 400
    assert code_of(answer(app, asked)) == (400, "sealed_replay")


@each_row(
    "method, path, headers, status",
    [
        ("POST", COMPLETIONS, JSON, 401),
        ("POST", "/v1/nothing", JSON | BEARER, 404),
        ("POST", "/health", JSON, 405),
        ("POST", COMPLETIONS, JSON | BEARER | {"content-length": b"99999999"}, 413),
        ("GET", "/v1/models", BEARER, 200),
        ("GET", "/v1/models", {}, 401),
        ("HEAD", "/health", {}, 200),
        ("OPTIONS", COMPLETIONS, {}, 405),
    ],
)
def test_reads_and_what_is_always_refused_take_no_memory(
    method: str, path: str, headers: dict[str, bytes], status: int
) -> None:
    engine = FakeEngine()
    app = sealing(create_app(serving(engine, authorise=_authorise)))
    asked = sealed(path, HELLO, method=method, headers=headers)
    for _ in range(3):
        assert answer(app, asked).status == status
    assert not any(app._remembered._by_second.values())
    assert engine.requests == []


@each_row(
    "late, admitted",
    [
        (-WINDOW_S - 1, False),
        (-WINDOW_S, True),
        (0, True),
        (WINDOW_S, True),
        (WINDOW_S + 1, False),
        (-NOW_S, False),
        (2**53 - 1 - NOW_S, False),
    ],
)
def test_a_request_is_of_now(late: int, admitted: bool) -> None:
    for method, path in (("POST", COMPLETIONS), ("GET", "/health")):
        found = answer(
            sealing(create_app(serving())),
            sealed(path, HELLO, method=method, time=NOW_S + late),
        )
        assert found.status == (200 if admitted else 400)
        if not admitted:
            assert code_of(found) == (400, "sealed_time")
            assert "within 120 s" in found.error()["message"]


def test_what_was_sent_before_is_refused_as_long_as_its_time_is_let_in() -> None:
    class Clock:
        now_s = float(NOW_S)

        def __call__(self) -> float:
            return self.now_s

    for ahead in (-WINDOW_S, 0, WINDOW_S):
        now = Clock()
        app = sealing(create_app(serving()), clock=now)
        asked = sealed(COMPLETIONS, HELLO, time=NOW_S + ahead)
        assert answer(app, asked).status == 200
        for later in (0, 1, 60, 119, 120, 121, 200, 239, 240, 241):
            now.now_s = NOW_S + later + 0.5
            expected = "sealed_replay" if later + 0.5 <= ahead + WINDOW_S else "sealed_time"
            assert code_of(answer(app, asked)) == (400, expected)
            # Others come meanwhile, and make what is too old be forgotten.
            fresh = sealed("/tokenize", b'{"content": "a"}', time=NOW_S + later)
            assert answer(app, fresh).status == 200
        assert len(app._remembered._by_second) <= 2 * WINDOW_S + 1
        # The clock is the host's, who might set it back.
        now.now_s = float(NOW_S)
        assert code_of(answer(app, asked)) == (400, "sealed_time")


def test_a_full_memory_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REMEMBERED", 3)
    now = [float(NOW_S)]
    app = sealing(create_app(serving()), clock=lambda: now[0])
    asked = [sealed(COMPLETIONS, HELLO, time=NOW_S + at) for at in range(3)]
    assert [answer(app, one).status for one in asked] == [200] * 3
    one_more = sealed(COMPLETIONS, HELLO)
    found = answer(app, one_more)
    assert code_of(found) == (503, "overloaded")
    assert found.headers["retry-after"] == "1"
    assert [code_of(answer(app, one))[1] for one in asked] == ["sealed_replay"] * 3
    # A read needs no place.
    assert answer(app, sealed("/health", method="GET")).status == 200
    now[0] += WINDOW_S + 0.5
    assert answer(app, sealed(COMPLETIONS, HELLO, time=NOW_S + 9)).status == 200


def test_what_is_remembered_takes_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.MAX_REMEMBERED == 65536
    monkeypatch.setattr(module, "MAX_REMEMBERED", 4096)
    remembered = Remembered(clock)
    heads = [
        RequestHead(time=NOW_S + late, method="POST", headers={})
        for late in range(-WINDOW_S, WINDOW_S + 1)
    ]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for at in range(4096):
            remembered.add(at.to_bytes(32), heads[at % len(heads)])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) * 65536 / 4096 < 16_000_000
    with pytest.raises(ApiError) as error:
        remembered.add(b"one more", heads[0])
    assert error.value.status_code == 503
    remembered.remove((5).to_bytes(32), heads[5])
    remembered.add(b"one more", heads[0])


# ------------------------------------------------------------------------- bounds, and leaving


def test_the_bound_of_bodies_is_the_same_as_of_plain_ones() -> None:
    most = 32 * serving().model.max_model_len
    app = create_app(serving(), min_body_bytes=1000)
    body = content({"prompt": "a" * most})
    small = content({"prompt": "a" * 400})
    taken = 0

    class Counted(Connection):
        async def receive(self) -> Any:
            nonlocal taken
            message = await super().receive()
            taken += len(message.get("body", b""))
            return message

    for headers in (JSON, JSON | {"content-length": str(len(body)).encode()}):
        asked = sealed(COMPLETIONS, body * 30, headers=headers)
        data, taken = b"".join(asked.parts), 0
        to = Counted("POST", COMPLETIONS, data, OUTSIDE, 1000)
        found = asked.opened(asyncio.run(send(sealing(app), to)))
        assert code_of(found) == (413, "body_too_large")
        # It was not read to its end.
        assert taken <= most + 2 * CHUNK_BYTES < len(data)
    assert answer(sealing(app), sealed(COMPLETIONS, small), chunk=100).status == 200


def test_a_client_that_leaves_before_its_head_gets_nothing() -> None:
    asked = sealed(COMPLETIONS, HELLO)
    data = b"".join(asked.parts)

    async def run(size: int) -> None:
        to = connection("POST", COMPLETIONS, data[:size], OUTSIDE)
        to._messages[-1]["more_body"] = True
        to.leave()
        with untouched() as (app, _):
            await send(app, to)
        assert to.reply == Reply()

    for size in (0, 10, len(asked.parts[0]), len(asked.parts[0]) + 20):
        asyncio.run(run(size))


def test_a_client_that_leaves_ends_its_request() -> None:
    async def run() -> None:
        engine = FakeEngine(hold=True)
        asked = sealed(COMPLETIONS, content({"prompt": "Hello", "stream": True}))
        to = asked.ask()
        task = asyncio.create_task(send(sealing(create_app(serving(engine))), to))
        await engine.submitted.wait()
        to.leave()
        await engine.was_cancelled.wait()
        await task
        with pytest.raises((ProtocolError, AssertionError, ValueError)):
            asked.opened(to.reply)

    asyncio.run(run())


def test_a_client_that_leaves_within_its_body_is_not_answered() -> None:
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive(), await receive(), await receive()])

    asked = sealed(COMPLETIONS, HELLO[:9], HELLO[9:])
    to = connection("POST", COMPLETIONS, b"".join(asked.parts[:3]), OUTSIDE)
    to._messages[-1]["more_body"] = True
    to.leave()
    asyncio.run(send(sealing(app), to))
    first = {"type": "http.request", "body": HELLO[:9], "more_body": True}
    assert got == [first, *[{"type": "http.disconnect"}] * 2]


def test_an_error_in_a_stream_is_sealed_and_ends_it() -> None:
    engine = FakeEngine(error=GONE, fail_after=2)
    asked = sealed(COMPLETIONS, content({"prompt": "Hello", "stream": True}))
    found = answer(sealing(create_app(serving(engine))), asked)
    assert found.status == 200
    assert "error" in found.events()[-1]


def test_an_answer_that_its_app_does_not_end_has_no_last_chunk() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    asked = sealed(COMPLETIONS, HELLO)
    reply = asyncio.run(send(sealing(app), asked.ask()))
    with pytest.raises(ProtocolError, match="an early end"):
        asked.opened(reply)


def test_no_bit_of_an_answer_can_be_changed_and_it_cannot_be_cut() -> None:
    asked = sealed(COMPLETIONS, content({"prompt": "Hello", "max_tokens": 2, "stream": True}))
    reply = asyncio.run(send(sealing(create_app(serving())), asked.ask()))
    data = b"".join(reply.writes)
    assert asked.opened(reply).events()[-1] == "[DONE]"
    others = [data[:size] for size in range(len(data))]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        others.append(bytes(changed))
    writes = [b"".join(reply.writes[:2]), *reply.writes[2:]]
    others += [b"".join([writes[0], *writes[2:]]), b"".join([writes[0], writes[2], writes[1]])]
    others += [data + writes[-1], data + b"\0"]
    for other in others:
        with pytest.raises((ProtocolError, ValueError)):
            asked.opened(Reply(reply.status, reply.headers, [other]))
    another = sealed(COMPLETIONS, HELLO)
    with pytest.raises(ProtocolError):
        another.opened(reply)


def test_headers_of_one_name_are_sealed_as_one() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"Vary", b"a"), (b"x", b"1"), (b"vary", b"b")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body"})

    found = answer(sealing(app), sealed("/health", method="GET"))
    assert (found.status, found.headers) == (204, {"vary": "a, b", "x": "1"})
