"""The chat page: what services received for each answer, as it was sent to them, and the attack.

A `Feed` wraps the runner's channels (`RunnerSettings.link`), and is told which answers are under
way. What crosses while one page alone is answered belongs to that page; while others are answered
too, it is counted, and neither kept nor shown. The command adds `page_routes` to the server's app,
and `PageRequests` as middleware, which knows whose each request is.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.messages import FUSED_MODULES, Request
from protocol.prepared import Payload, PreparedRequest
from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.generation import PadTotals, Totals
from tee_side.model.batch import kv_bytes
from tee_side.runner import Runner
from tsqp.link import WrappedChannel
from tsqp.operator_table import LIGHT_OPERATORS
from tsqp.page.seen import ReceivedTensors, Seen, VocabularyMatcher, describe_request, summarise

HEAD_BYTES = 64
MAX_PAGES = 8  # whose last answer is kept
_MAX_ROWS = 1024  # of the first layer, for the attack
# For so long a request that was broken off may still have a step under way.
_SETTLING_S = 1.0
_OPERATORS = {
    **{" ".join(modules): operator for operator, modules in FUSED_MODULES.items()},
    **dict.fromkeys(("LMHead", "RingLMHead"), "lm_head"),
}


@dataclass(slots=True, eq=False)
class PageAnswer:
    """What crossed for one request to the server. `page`: whose, None for another client's.

    `others`: requests that crossed while others were answered too. `until`: when it is certainly
    over. `samples`: the beginnings of requests, as JSON has them. Of each, `head` is up to 64 bytes
    in hex, `ms` is since the answer began, and its first tensor has `rows` of `width` numbers.
    """

    number: int
    page: str | None
    began: float = field(default_factory=time.monotonic)
    until: float = float("inf")
    others: int = 0
    received: ReceivedTensors = field(default_factory=lambda: ReceivedTensors(_MAX_ROWS))
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=32))

    def add(self, seen: Seen) -> None:
        """Take note of a request."""
        self.received.add(seen)
        first = seen.first
        self.samples.append(
            {
                "number": self.received.requests,
                "ms": round((time.monotonic() - self.began) * 1e3, 1),
                "operator": _OPERATORS.get(seen.what, seen.what),
                "layer": seen.layer,
                "rows": first.numel() // first.shape[-1],
                "width": first.shape[-1],
                "dtype": str(first.dtype).removeprefix("torch."),
                "head": first.reshape(-1).view(torch.uint8)[:HEAD_BYTES].numpy().tobytes().hex(),
            }
        )

    def described(self, since: int) -> dict[str, Any]:
        """Return all of it as JSON has it, with the samples that came after one."""
        summary = summarise(self.received.counts)
        return {
            "answer": self.number,
            "running": self.until == float("inf"),
            "requests": self.received.requests,
            "others": self.others,
            "rows": self.received.rows,
            "bytes": None if summary is None else asdict(summary),
            "histogram": self.received.counts.tolist(),
            "samples": [sample for sample in self.samples if sample["number"] > since],
        }


class Feed:
    """The last answer of each page; wraps channels (`protocol.channel.ChannelWrapper`).

    Channels write from the engine's thread, pages are answered from others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[PageAnswer] = []
        self._last: dict[str, PageAnswer] = {}
        self._answers = 0

    def __call__(self, channel: Channel, timeout_s: float) -> TappedChannel:
        """Return the channel with this feed looking on."""
        return TappedChannel(channel, self._saw)

    @contextmanager
    def answering(self, page: str | None) -> Iterator[Callable[[], None]]:
        """Attribute what crosses in the block to a page; None for a client that has none.

        Call what it gives once the answer is complete: else a step may still be under way.
        """
        with self._lock:
            self._answers += 1
            answer = PageAnswer(self._answers, page)
            self._running.append(answer)
            if page is not None:
                self._last.pop(page, None)
                self._last[page] = answer
                if len(self._last) > MAX_PAGES:
                    del self._last[next(iter(self._last))]
        complete = threading.Event()
        try:
            yield complete.set
        finally:
            with self._lock:
                answer.until = time.monotonic() + (0 if complete.is_set() else _SETTLING_S)

    def described(self, page: str, since: int) -> dict[str, Any] | None:
        """Return the page's last answer, see `PageAnswer.described`; None if it has none."""
        with self._lock:
            answer = self._last.get(page)
            return None if answer is None else answer.described(since)

    def inputs(self, page: str) -> list[torch.Tensor]:
        """Return what the first layer was given for the page's last answer."""
        with self._lock:
            return list(self._last[page].received.inputs) if page in self._last else []

    def _saw(self, request: Request) -> None:
        with self._lock:
            now = time.monotonic()
            self._running = [answer for answer in self._running if now < answer.until]
            pages = {answer.page for answer in self._running}
            if not pages or (seen := describe_request(request)) is None:
                return
            if len(pages) == 1 and None not in pages:
                self._running[-1].add(seen)
                return
            for answer in self._running:
                answer.others += 1


class TappedChannel(WrappedChannel):
    """A `Channel` of which each request is shown once it is sent, before its reply is taken."""

    def __init__(self, channel: Channel, saw: Callable[[Request], None]) -> None:
        super().__init__(channel)
        self._saw = saw

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        request_id = self._channel.start(prepared, payload, timeout_s)
        self._saw(prepared.request(payload))
        return request_id


PAGE_HEADER = "x-tsqp-page"
_PAGE_ID = re.compile("[0-9a-f]{32}")


class _Said(BaseModel):
    """A conversation, and what was answered so far."""

    messages: list[dict[str, str]]
    answer: str


def page_routes(feed: Feed, runner: Runner) -> list[Route]:
    """Return `/`, and what the page asks for. Raises OSError for a page that is not installed."""
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    headers, matcher = page_headers(page), VocabularyMatcher(runner.settings.model)
    template = ChatTemplate(matcher.tokenizer)

    def show(_: HttpRequest) -> Response:
        return HTMLResponse(page, headers=headers)

    def sent(request: HttpRequest) -> Response:
        since = request.query_params.get("since", "0")
        if (owner := page_of(request.headers)) is None or not re.fullmatch("[0-9]{1,9}", since):
            return _refused(f"{PAGE_HEADER} or since", "32 hex digits, and a number")
        return _json({"tee": _described(runner), "sent": feed.described(owner, int(since))})

    async def read(request: HttpRequest) -> Response:
        owner = page_of(request.headers)
        try:
            said = _Said.model_validate_json(await request.body())
        except ValidationError:
            return _refused("body", "messages and answer")
        if owner is None:
            return _refused(PAGE_HEADER, "32 hex digits")

        def attack() -> dict[str, Any]:
            prompt_ids = template.encode(Conversation(messages=said.messages))
            found = matcher.read(feed.inputs(owner), prompt_ids, said.answer)
            return {"prompt_ids": prompt_ids, "read": found and asdict(found)}

        try:
            return _json(await run_in_threadpool(attack))
        except TsqpError as error:
            return _refused(error.where, error.expected)

    return [
        Route("/", show),
        Route("/page/feed", sent),
        Route("/page/read", read, methods=["POST"]),
    ]


class PageRequests:
    """ASGI middleware that tells the feed whose answer is under way."""

    def __init__(self, app: ASGIApp, feed: Feed) -> None:
        self._app, self._feed = app, feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; of what the server computes, until its answer is complete."""
        computes = scope["type"] == "http" and scope["method"] == "POST"
        if not computes or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        with self._feed.answering(page_of(Headers(scope=scope))) as complete:

            async def passing(message: Message) -> None:
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    complete()

            await self._app(scope, receive, passing)


def _described(runner: Runner) -> dict[str, Any]:
    """Return what the page says of the TEE, as JSON has it."""
    policy, pads = runner.policy, PadTotals.since(Totals(), runner.totals())
    return {
        "policy": policy.name,
        "summary": policy.summary,
        "operators": {
            operator: [str(placement) for placement in placements]
            for operator, placements in policy.operators.items()
        },
        "light_operators": LIGHT_OPERATORS,
        "broken": any(mask.broken for mask in policy.masks),
        "kv_bytes_per_token": kv_bytes(runner.config, 1, runner.dtype),
        "pads": None if pads is None else pads.model_dump(),
    }


def page_of(headers: Mapping[str, str]) -> str | None:
    """Return the id of the page that a request says it is of; None for none."""
    found = headers.get(PAGE_HEADER, "")
    return found if _PAGE_ID.fullmatch(found) else None


def page_headers(page: str) -> dict[str, str]:
    """Return the headers under which a page runs its own script and style, and loads nothing."""

    def hashes(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = hashlib.sha256(content.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')};"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


def _json(content: object) -> Response:
    return JSONResponse(content, headers={"cache-control": "no-store"})


def _refused(where: str, expected: str) -> Response:
    return JSONResponse(
        {"error": {"message": f"{where}: expected {expected}", "type": "invalid_request_error"}},
        400,
    )
