"""A chat over HTTP, with nothing but the standard library: what any client of OpenAI's API does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from tsqp.processes import START_TIMEOUT_S, ProcessError


def stream_chat(
    base_url: str, said: str, max_tokens: int, show: Callable[[str], None]
) -> list[bytes]:
    """Say something and return the bytes of each token of the answer; `show` gets its text.

    Raises ProcessError for an answer that is none.
    """
    body = {
        "messages": [{"role": "user", "content": said}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
    }
    tokens = []
    for choice in _choices(base_url, body):
        show(choice["delta"]["content"])
        logprobs = choice["logprobs"] or {"content": []}
        tokens += [bytes(token["bytes"]) for token in logprobs["content"]]
    return tokens


def _choices(base_url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what the events of a stream hold. An error ends it, and so does a lost connection."""
    url = urlsplit(base_url)
    with closing(HTTPConnection(url.netloc, timeout=START_TIMEOUT_S)) as connection:
        headers = {"content-type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        with connection.getresponse() as reply:
            for line in reply:
                kind, _, event = line.decode().strip().partition(": ")
                if kind != "data":
                    continue  # nothing, or a comment such as a receipt
                if event == "[DONE]":
                    return
                content = json.loads(event)
                if "choices" not in content:
                    break
                yield from content["choices"]
        got = f"status {reply.status} and no end"
        raise ProcessError("tee-runner serve", got=got, expected="a whole answer")
