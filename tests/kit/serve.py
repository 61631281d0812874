"""An engine that says what a test wants, an HTTP client without a network, and a served model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest

from protocol.errors import EndpointError, PromptError
from protocol.model.config import read_config
from tee_side.chat.template import ChatTemplate
from tee_side.engine.request import Logprob, NewToken, PromptRead, Request
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.answers import OfferedModel
from tee_side.serve.app import create_app
from tee_side.serve.background import Delivery, EngineStats, State
from tee_side.serve.errors import ApiError
from tee_side.serve.exchange import Serving
from tee_side.serve.grammar import GrammarKind
from tee_side.serve.identity import Sealing
from tee_side.serve.sealed import (
    CONTENT_TYPE,
    SALT_BYTES,
    Direction,
    HpkeKey,
    RequestHead,
    ResponseHead,
    seal_secret,
)
from tsqp.run.settings import model_directory

GONE = EndpointError("ipc:///tmp/gpu", got="nothing", expected="a reply")
SAID = "The cat sat on the mat, and looked at a bird."


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(model_directory("demo"))


@cache
def template() -> ChatTemplate:
    return ChatTemplate(tokenizer())


@cache
def model(**changes: Any) -> OfferedModel:
    config = read_config(model_directory("demo"))
    fields = {
        "name": "demo",
        "policy": "shielded",
        "config": config,
        "tokenizer": tokenizer(),
        "template": template(),
        "max_model_len": config.context_length,
        "default_max_tokens": 64,
        "system_fingerprint": "fp-avx2",
        "created": 1_700_000_000,
    }
    return OfferedModel(**(fields | changes))


@dataclass(eq=False)
class FakeTicket:
    request: Request
    deliver: Callable[[Delivery], None]


def logprob(token_id: int, count: int) -> Logprob:
    """Make up numbers that depend on the token alone; those of a prompt are as good as others."""
    top = tuple((other, -1.0 - at / 7) for at, other in enumerate(range(300, 300 + count)))
    return Logprob(token_id, dict(top).get(token_id, -5.0 - token_id / 3), top)


@dataclass
class FakeEngine:
    """Delivers `says` to every sample, a token a turn of the event loop.

    `hold`: deliveries wait until the test calls `step`. `fail_after`: tokens before `error`.
    `numbers`: makes up log-probabilities.
    """

    says: Sequence[int] = field(default_factory=lambda: tokenizer().encode(SAID)[1:])
    state: State = "ready"
    can_step: bool = True
    hold: bool = False
    at_once: bool = False
    refuse: Exception | None = None
    unfit: Exception | None = None
    error: Exception | None = None
    fail_after: int = 0
    reused: int = 0
    numbers: Callable[[int, int], Logprob] = logprob
    open: list[FakeTicket] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    cancelled: list[FakeTicket] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def check(self, _request: Request) -> None:
        if self.unfit is not None:
            raise self.unfit

    def submit(self, request: Request, deliver: Callable[[Delivery], None]) -> FakeTicket:
        if self.refuse is not None:
            raise self.refuse
        ticket = FakeTicket(request, deliver)
        self.requests.append(request)
        self.open.append(ticket)
        self.submitted.set()
        script = self._script(request)
        if self.at_once:
            for delivery in script:
                self._give(ticket, delivery)
        elif not self.hold:
            asyncio.get_running_loop().call_soon(self._next, ticket, iter(script))
        return ticket

    def cancel(self, ticket: FakeTicket) -> None:
        if ticket in self.open:
            self.open.remove(ticket)
            self.cancelled.append(ticket)
            self.was_cancelled.set()

    def step(self, delivery: Delivery, ticket: int = 0) -> None:
        self._give(self.open[ticket], delivery)

    def _next(self, ticket: FakeTicket, script: Any) -> None:
        if ticket in self.open and (delivery := next(script, None)) is not None:
            self._give(ticket, delivery)
            asyncio.get_running_loop().call_soon(self._next, ticket, script)

    def _give(self, ticket: FakeTicket, delivery: Delivery) -> None:
        if delivery.ended:
            self.open.remove(ticket)
        ticket.deliver(delivery)

    def _script(self, request: Request) -> list[Delivery]:
        ids = list(self.says[: request.max_new_tokens])
        tokens = [
            tuple(self._token(request, sample, ids, at) for sample in range(request.samples))
            for at in range(len(ids))
        ]
        found = [
            Delivery(each, self._read(request) if not at else None)
            for at, each in enumerate(tokens or [()])
        ]
        if self.error is not None:
            return [*found[: self.fail_after], Delivery(error=self.error, ended=True)]
        return [*found[:-1], replace(found[-1], ended=True)]

    def _token(self, request: Request, sample: int, ids: Sequence[int], at: int) -> NewToken:
        last = at + 1 == len(ids)
        cut = len(ids) < len(self.says)
        number = None if request.logprobs is None else self.numbers(ids[at], request.logprobs)
        return NewToken(sample, ids[at], number, ("length" if cut else "stop") if last else None)

    def _read(self, request: Request) -> PromptRead:
        count = request.prompt_logprobs
        rest = request.prompt_ids[1:]
        numbers = () if count is None else tuple(self.numbers(one, count) for one in rest)
        pooled = None
        if request.pooling is not None:
            pooled = torch.tensor([float(len(request.prompt_ids)), 2.0, -2.0])
        return PromptRead(numbers, pooled, self.reused)


@dataclass
class FakeWatch:
    """Admits everything and keeps account, or refuses: with `refusal`, or `full` beforehand."""

    refusal: Exception | None = None
    full: Exception | None = None
    prechecked: list[str] = field(default_factory=list)
    begun: list[tuple[str, int, int]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    ended: list[tuple[str, int, int]] = field(default_factory=list)
    receipts: list[bytes | None] = field(default_factory=list)

    def request(self, owner: str) -> FakeWatch:
        self.owner = owner
        return self

    def precheck(self) -> None:
        self.prechecked.append(self.owner)
        if self.full:
            raise self.full

    def begin(self, prompt_tokens: int, max_tokens: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.begun.append((self.owner, prompt_tokens, max_tokens))

    def headers(self) -> Mapping[str, str]:
        return {"x-ratelimit-limit-requests": "9"}

    def token(self, count: int) -> None:
        self.events.append(count)

    def end(
        self, outcome: str, prompt_tokens: int, completion_tokens: int, receipt: bytes | None
    ) -> None:
        self.ended.append((outcome, prompt_tokens, completion_tokens))
        self.receipts.append(receipt)


def compile_grammar(kind: GrammarKind, content: Any, _owner: str, lead: str | None = None) -> Any:
    if content == "(":
        raise PromptError("grammar", got="an open bracket", expected="a regular expression")
    return SimpleNamespace(kind=kind, content=content, lead=lead)


def authorise(request: HttpRequest) -> str:
    if request.headers.get("authorization") != "Bearer right":
        raise ApiError(401, "a key is needed", headers={"www-authenticate": "Bearer"})
    return "alice"


def serving(engine: FakeEngine | None = None, **changes: Any) -> Serving:
    fields: dict[str, Any] = {
        "watch": FakeWatch(),
        "engine": engine or FakeEngine(),
        "model": model(),
        "compile_grammar": compile_grammar,
        "version": "1.2.3",
    }
    return Serving(**(fields | changes))


@dataclass
class Reply:
    """What came back; `writes`: the non-empty pieces of the body, as they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.writes).decode()

    def json(self) -> Any:
        return json.loads(self.text)

    def error(self) -> dict[str, Any]:
        body = self.json()
        assert list(body) == ["error"]
        found: dict[str, Any] = body["error"]
        assert {"message", "type", "param", "code"} <= found.keys()
        return found

    def events(self) -> list[Any]:
        """Return the JSON of each event; the last one is [DONE] as a string, if it is there.

        Letters that fill an event up are left out.
        """
        lines = self.text.split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        texts = [line.removeprefix("data: ") for line in lines]
        found = [text if text == "[DONE]" else json.loads(text) for text in texts]
        for event in found:
            if isinstance(event, dict):
                event.pop("obfuscation", None)
        return found


class Connection:
    """One request to an app, which the test may leave. A body that is no bytes is sent as JSON."""

    def __init__(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        chunk: int = 2**30,
    ) -> None:
        self.reply = Reply()
        self.changed = asyncio.Event()
        self._left = asyncio.Event()
        sent = {**(headers or {})}
        if body is not None and not isinstance(body, bytes):
            sent = {"content-type": "application/json", **sent}
            body = json.dumps(body).encode()
        body = body or b""
        parts = [body[at : at + chunk] for at in range(0, len(body), chunk)] or [b""]
        self._messages = [
            {"type": "http.request", "body": part, "more_body": at + 1 < len(parts)}
            for at, part in enumerate(parts)
        ]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Any:
        if self._messages:
            return self._messages.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not self.reply.status
            self.reply.status = message["status"]
            self.reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message["body"]:
            self.reply.writes.append(message["body"])
        self.changed.set()


async def send(app: FastAPI | Sealing, to: Connection) -> Reply:
    await app(to.scope, to.receive, to.send)
    return to.reply


async def ask(app: FastAPI, *parts: Any, **more: Any) -> Reply:
    return await send(app, Connection(*parts, **more))


@cache
def _app() -> FastAPI:
    return create_app(serving())


def call(app: FastAPI | Serving, *parts: Any, **more: Any) -> Reply:
    """Send one request in an event loop of its own; to make an app takes longer than to answer."""
    if isinstance(app, Serving):
        _app().state.serving = app
        app = _app()
    return asyncio.run(ask(app, *parts, **more))


def complete(engine: FakeEngine | None = None, **body: Any) -> Reply:
    return call(serving(engine), "POST", "/v1/completions", {"prompt": "Hello"} | body)


def chat(engine: FakeEngine | None = None, **body: Any) -> Reply:
    messages = [{"role": "user", "content": "Hello"}]
    return call(serving(engine), "POST", "/v1/chat/completions", {"messages": messages} | body)


def embed(engine: FakeEngine | None = None, **body: Any) -> Reply:
    return call(serving(engine), "POST", "/v1/embeddings", {"input": [5, 6]} | body)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*fixtures: Any, **more: Any) -> None:
        asyncio.run(test(*fixtures, **more))

    return run


@asynccontextmanager
async def connected(app: FastAPI, *parts: Any, **more: Any) -> AsyncIterator[Connection]:
    found = Connection(*parts, **more)
    task = asyncio.create_task(send(app, found))
    try:
        yield found
    finally:
        found.leave()
        await task


def engine_stats(**changed: float | None) -> EngineStats:
    """Return the engine's, each number another one; no pads were made."""
    numbers = {field.name: at for at, field in enumerate(fields(EngineStats), start=1)}
    return EngineStats(**(numbers | {"kv_usage": 0.25, "pads_made": 0} | changed))  # type: ignore[arg-type]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


NOW_S = 1_764_000_000
KEY = HpkeKey(hybrid=False)
JSON = {"content-type": b"application/json"}
OUTSIDE = {"content-type": CONTENT_TYPE}


def clock() -> float:
    return float(NOW_S)


class SealedRequest(NamedTuple):
    """What a client sends, in parts: the secret, the head, chunks of the body."""

    path: str
    secret: bytes
    parts: list[bytes]

    def ask(self, path: str = "", chunk: int = 2**30) -> Connection:
        body = b"".join(self.parts)
        return Connection("POST", path or self.path, body, OUTSIDE, chunk)

    def opened(self, reply: Reply) -> Reply:
        """Open an answer. Raises ProtocolError."""
        assert reply.status == 200
        assert reply.headers["content-type"] == CONTENT_TYPE
        data = b"".join(reply.writes)
        opening = Direction(b"response", data[:SALT_BYTES], self.secret)
        head, *rest = opening.open(data[SALT_BYTES:])
        opening.close()
        read = ResponseHead.decode(head)
        headers = {name: value.decode() for name, value in read.headers.items()}
        return Reply(read.status, headers, [piece for piece in rest if piece])


def sealed(
    path: str,
    *pieces: bytes,
    method: str = "POST",
    headers: dict[str, bytes] = JSON,
    key: HpkeKey = KEY,
    target: bytes | None = None,
    head: bytes | None = None,
    time: int = NOW_S,
) -> SealedRequest:
    """Seal a request, each piece in chunks of its own. `head`: in place of the one of the rest."""
    secret, front = seal_secret(key.suite, key.public, target or path.encode())
    direction = Direction(b"request", front, secret)
    first = head or RequestHead(time=time, method=method, headers=headers).encode()
    parts = [front, direction.seal(first)]
    pieces = pieces or (b"",)
    parts += [direction.seal(one) for one in pieces[:-1]]
    return SealedRequest(path, secret, [*parts, direction.seal(pieces[-1], final=True)])


def sealing(app: Any, **changes: Any) -> Sealing:
    return Sealing(app, **({"key": KEY, "clock": clock} | changes))
