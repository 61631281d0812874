"""An HTTP client of the server, what it got for an answer, and whether that is right."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from httpx2 import AsyncClient, TransportError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# No answer of these rows takes as long, unless it never comes.
HANGS_S = 90.0
Fields = Mapping[str, Any]


@dataclass
class Reply:
    """What came. `times`: of its events, after the request. `left`: by the client, before its end.

    `status`: 0 where the connection ended without one.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    times: list[float] = field(default_factory=list)
    left: bool = False

    @property
    def events(self) -> list[str]:
        """What stands behind `data: `, of a stream."""
        return [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]


@dataclass(frozen=True)
class Leave:
    """When a client closes its connection: `after_s` the request, or behind so many events."""

    after_s: float | None = None
    events: int = 2**30


async def ask(
    address: str,
    path: str,
    fields: Fields | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave: Leave | None = None,
    on_events: Callable[[], object] = lambda: None,
) -> Reply:
    """Post a body, or get a path without one. Raises TimeoutError for what hangs.

    `on_events`: called when some of them have come.
    """
    reply, leave, began = Reply(), leave or Leave(), time.monotonic()
    method = "GET" if fields is None else "POST"
    how: dict[str, Any] = {"timeout": None, "trust_env": False, "verify": False}
    try:
        async with (
            asyncio.timeout(HANGS_S if leave.after_s is None else leave.after_s),
            AsyncClient(base_url=f"http://{address}", **how) as client,
            client.stream(method, path, json=fields, headers=headers) as got,
        ):
            reply.status, reply.headers = got.status_code, dict(got.headers)
            async for piece in got.aiter_bytes():
                reply.body += piece
                if events := piece.count(b"data: {"):
                    reply.times += [time.monotonic() - began] * events
                    on_events()
                if len(reply.times) >= leave.events:
                    reply.left = True
                    break
    except TransportError:  # broken off: what there is counts
        pass
    except TimeoutError:
        if leave.after_s is None:
            raise
        reply.left = True
    return reply


@dataclass
class Answer:
    """An answer as it came: text, names of tokens, logprobs and end of each choice.

    `whole`: it came to its end, under one id.
    """

    choices: list[tuple[str, list[str], list[float], str | None]]
    usage: dict[str, int] = field(default_factory=dict)
    whole: bool = True

    @staticmethod
    def of(reply: Reply) -> Answer:
        found = Answer([], whole=reply.status == 200)
        if not found.whole:
            return found
        if not reply.headers["content-type"].startswith("text/event-stream"):
            parts = [json.loads(reply.body)]
        else:
            parts = [json.loads(event) for event in reply.events if event != "[DONE]"]
            found.whole = reply.events[-1:] == ["[DONE]"]
        for part in parts:
            found._take(part)
        found.whole &= len({part.get("id") for part in parts}) == 1
        found.whole &= all(end is not None for *_, end in found.choices)
        return found

    def _take(self, part: dict[str, Any]) -> None:
        for choice in part.get("choices", ()):
            index, delta = choice["index"], choice.get("delta") or choice.get("message") or choice
            while len(self.choices) <= index:
                self.choices.append(("", [], [], None))
            text, names, numbers, end = self.choices[index]
            self.whole &= end is None
            logprobs = choice["logprobs"] or {}
            names += logprobs.get("tokens", ())
            names += [one["token"] for one in logprobs.get("content", ())]
            numbers += logprobs.get("token_logprobs", ())
            numbers += [one["logprob"] for one in logprobs.get("content", ())]
            text += delta.get("content", delta.get("text")) or ""
            self.choices[index] = text, names, numbers, choice["finish_reason"]
        if usage := part.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}


@dataclass(frozen=True, eq=False)
class Job:
    """A request, whose fields say nothing of streaming, and what the server answers to it alone."""

    path: str
    fields: Fields
    right: Answer


def judge(job: Job, reply: Reply) -> Counter[str]:
    """Count an answer to its end as right, to the last byte, or wrong."""
    got, right = Answer.of(reply), job.right
    if got.whole and got.usage in ({}, right.usage) and got.choices == right.choices:
        used = right.usage
        return Counter(
            right=1, tokens=used["completion_tokens"], prompt_tokens=used["prompt_tokens"]
        )
    return Counter(wrong=1)


def is_broken_off(job: Job, reply: Reply) -> bool:
    """Say whether a stream is the right one up to one typed error, its last event."""
    events = reply.events if reply.status == 200 else []
    if not events or events[-1] == "[DONE]" or "error" not in json.loads(events[-1]):
        return False
    begins = all(
        right.startswith(text)
        for (right, *_), (text, *_) in zip(
            job.right.choices, Answer.of(reply).choices, strict=False
        )
    )
    return begins and json.loads(events[-1])["error"]["code"] is not None
