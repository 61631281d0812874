"""A small server for the tests of the chat page: a real runner, behind the few paths it needs."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tee_side.chat.template import ChatTemplate, Conversation
from tee_side.engine.request import SamplingSettings
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tsqp.page.feed import Feed, PageRequests, page_routes
from tsqp.run.settings import model_directory

DEMO = model_directory("demo")


@contextmanager
def running() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve the page on a free port; yield its address and the bodies that come in."""
    feed, bodies = Feed(), list[dict[str, Any]]()
    settings = RunnerSettings(DEMO, load_policy("tee-only"), (), link=feed, dtype="float32")
    with Runner(settings) as runner:

        async def complete(request: Request) -> Response:
            bodies.append(body := await request.json())
            return StreamingResponse(_events(runner, body), media_type="text/event-stream")

        def models(_: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "demo", "object": "model"}]})

        routes = [
            Route("/v1/models", models),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            *page_routes(feed, runner),
        ]
        app = Starlette(routes=routes, middleware=[Middleware(PageRequests, feed=feed)])
        with _serving(app) as address:
            yield address, bodies


def _events(runner: Runner, body: dict[str, Any]) -> Iterator[str]:
    yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    prompt_ids = ChatTemplate(runner.tokenizer).encode(Conversation(messages=body["messages"]))
    sampling = SamplingSettings(temperature=body["temperature"], seed=0)
    generation = runner.generate(prompt_ids, max_new_tokens=body["max_tokens"], sampling=sampling)
    for piece in generation:
        yield _event({"choices": [{"index": 0, "delta": {"content": piece}}]})
    result = generation.result()
    ended = {"index": 0, "delta": {}, "finish_reason": result.finish_reason}
    yield _event({"choices": [ended]})
    yield _event({"choices": [], "usage": result.usage.model_dump()})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@contextmanager
def _serving(app: Starlette) -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # who connects from now on waits
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
