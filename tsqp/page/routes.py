"""The chat page over HTTP: the page, its feed and the attack; and which request is whose.

The command adds `page_routes` to the server's app, and `PageRequests` as middleware.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import TsqpError
from tee_side.engine.generation import PadTotals, Totals
from tee_side.model.batch import kv_bytes
from tee_side.runner import Runner
from tee_side.words import LIGHT_OPERATORS
from tsqp.page.feed import Feed
from tsqp.page.seen import VocabularyMatcher

PAGE_HEADER = "x-tsqp-page"
_PAGE_ID = re.compile("[0-9a-f]{32}")


class _Said(BaseModel):
    """A conversation, and what was answered so far."""

    messages: list[dict[str, str]]
    answer: str


def page_routes(feed: Feed, runner: Runner) -> list[Route]:
    """Return `/`, and what the page asks for. Raises OSError for a page that is not installed."""
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    headers, matcher = page_headers(page), VocabularyMatcher(Path(runner.model_directory))

    def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    def sent(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if (owner := page_of(request.headers)) is None or not re.fullmatch("[0-9]{1,9}", since):
            return _refused(f"{PAGE_HEADER} or since", "32 hex digits, and a number")
        return _json({"tee": _described(runner), "sent": feed.described(owner, int(since))})

    async def read(request: Request) -> Response:
        owner = page_of(request.headers)
        try:
            said = _Said.model_validate_json(await request.body())
        except ValidationError:
            return _refused("body", "messages and answer")
        if owner is None:
            return _refused(PAGE_HEADER, "32 hex digits")

        def attack() -> dict[str, Any]:
            prompt_ids = matcher.tokenizer.apply_chat_template(said.messages)
            found = matcher.read(feed.inputs(owner), prompt_ids, said.answer)
            read = None if found is None else {**asdict(found), "better": found.better}
            return {"prompt_ids": prompt_ids, "read": read}

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
    error = {"message": f"{where}: expected {expected}", "type": "invalid_request_error"}
    return JSONResponse({"error": error}, 400)
