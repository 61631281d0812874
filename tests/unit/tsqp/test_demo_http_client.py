"""The demo's HTTP client: a stream that does not end well is no answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tsqp.demo.http_client import stream_chat
from tsqp.processes import ProcessError

TOKENS = ("on", "ce")


def event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


CHUNKS = "".join(
    event(
        {
            "choices": [
                {
                    "delta": {"content": text},
                    "logprobs": {"content": [{"bytes": list(text.encode())}]},
                }
            ]
        }
    )
    for text in TOKENS
)
OPENING = event({"choices": [{"delta": {"content": ""}, "logprobs": None}]})
ERROR = {"error": {"message": "the service was lost"}}


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Serve one request; yield the base URL, and what was asked."""
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        thread.join()


def test_text_is_shown_as_it_comes_and_tokens_are_returned() -> None:
    shown: list[str] = []
    with answering(200, f"{OPENING}{CHUNKS}: a comment\n\ndata: [DONE]\n\n") as (url, asked):
        assert stream_chat(url, "hello", 7, shown.append) == [b"on", b"ce"]
    assert shown == ["", *TOKENS]
    (body,) = asked
    assert (body["max_tokens"], body["stream"]) == (7, True)
    assert body["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, CHUNKS), (200, CHUNKS + event(ERROR)), (503, json.dumps(ERROR)), (200, "")],
)
def test_no_end_is_an_error(status: int, body: str) -> None:
    with answering(status, body) as (url, _), pytest.raises(ProcessError) as refused:
        stream_chat(url, "hello", 7, lambda _: None)
    assert refused.value.got == f"status {status} and no end"
