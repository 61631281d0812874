"""The web application: its paths, the clients that may use them, the bounds of every request.

`/tokenize`, `/detokenize` and `/tokenizer_info` use the words of vLLM and of llama.cpp. They are
plain functions, which the framework runs in threads: a long prompt takes long.
"""

import asyncio
import json
import logging
import re
import traceback
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from fastapi import FastAPI
from fastapi.routing import APIRoute, APIRouter
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import TsqpError
from tee_side.serve.answers import OfferedModel
from tee_side.serve.chat import chat_completions
from tee_side.serve.completions import completions, embeddings, encode_text, require_model
from tee_side.serve.conversation import encode_chat
from tee_side.serve.errors import ApiError, ErrorBody, answer_errors, of_engine, require
from tee_side.serve.exchange import EngineResponse, Serving, ending, require_ready, serving_of
from tee_side.serve.identity import AnswerReceipt
from tee_side.serve.responses import responses
from tee_side.serve.schema import Chat, DetokenizeRequest, TokenizeRequest

log = logging.getLogger("tee_side")

# By which a client finds a request again; it may give its own.
_REQUEST_ID = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Ids take 8 bytes a token, and text that is escaped to ASCII up to 12 bytes a character.
_BODY_BYTES_PER_TOKEN = 32
_Responses: TypeAlias = dict[int | str, dict[str, Any]]
_SSE: _Responses = {200: {"content": {"text/event-stream": {}}}}
_ERRORS: _Responses = {"default": {"model": ErrorBody, "description": "Error"}}
_TELEMETRY = ("tracing", "metrics", "logs", "operation_spans", "auto_configure")


class Guarded(APIRoute):
    """A path for those that `authorise` lets in; it is asked before the body is read.

    Where prompts are read, limits of the caller are asked then, too. To turn a long text into
    tokens costs more than all else until a first token is made.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler with the question in front of it."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            serving = serving_of(request)
            request.state.caller = serving.watch.request(serving.authorise(request))
            if self.path in _METERED:
                request.state.caller.precheck()
            response = await handler(request)
            if serving.receipts is not None and isinstance(response, EngineResponse):
                # The very bytes that the handler has read.
                response.receipt = AnswerReceipt(serving.receipts, await request.body())
            return response

        return guarded


class Bounds:
    """Bounds bodies, names requests, and ends what fails, without a word of it in the log."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length, read, started = Headers(scope=scope).get("content-length", ""), 0, False
        too_large = ApiError(413, f"a body may have {self._most} bytes", code="body_too_large")

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise too_large
            return message

        given = Headers(scope=scope).get(_REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        async def noted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_REQUEST_ID] = request_id
            started = True
            await send(message)

        if length.isdigit() and (len(length) > 18 or int(length) > self._most):
            await too_large.response()(scope, receive, noted)
            return
        try:
            await self._app(scope, bounded, noted)
        except BaseException as error:  # noqa: BLE001 - whose message may hold the prompt
            refused = of_engine(ending())
            if not isinstance(error, asyncio.CancelledError):
                frame = traceback.extract_tb(error.__traceback__)[-1]
                fields = {"error": type(error).__name__, "at": f"{frame.filename}:{frame.lineno}"}
                log.error("request_failed", extra={"fields": fields})
                refused = ApiError(500, "internal error")
            if not started:
                await refused.response()(scope, receive, noted)


def create_app(
    serving: Serving,
    *,
    allow_origins: Sequence[str] = (),
    min_body_bytes: int = 2**20,
) -> FastAPI:
    """Return the application. `allow_origins`: of web pages that may use it ("*" for all).

    A body may have `min_body_bytes`, which the event loop reads in a fifth of a second, and more
    where the model's context is long.
    """
    app = FastAPI(
        title="tee-runner",
        version=serving.version,
        # Their pages load scripts of a third party.
        docs_url=None,
        redoc_url=None,
        # Spans would hold what it must not let out, if a library switched them on.
        telemetry=dict.fromkeys(_TELEMETRY, False),  # type: ignore[arg-type]
    )
    app.state.serving = serving
    answer_errors(app)
    max_body_bytes = max(min_body_bytes, _BODY_BYTES_PER_TOKEN * serving.model.max_model_len)
    app.add_middleware(Bounds, max_body_bytes=max_body_bytes)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    guarded = APIRouter(route_class=Guarded, responses=_ERRORS)
    for method, path, endpoint, told in _GUARDED:
        guarded.add_api_route(path, endpoint, methods=[method], responses=told)
    app.include_router(guarded)
    app.add_api_route("/health", health, methods=["GET"], responses=_ERRORS)
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/version", version, methods=["GET"])
    return app


async def models(request: Request) -> dict[str, Any]:
    """List the one model that is served."""
    return {"object": "list", "data": [_described(serving_of(request).model)]}


async def model_of(name: str, request: Request) -> dict[str, Any]:
    """Describe the model of a name."""
    model = serving_of(request).model
    require_model(model, name, param=None)
    return _described(model)


async def health(request: Request) -> dict[str, str]:
    """Say that a token could be made; 503 else, and while a step waits for a lost service."""
    serving = serving_of(request)
    require_ready(serving)
    ApiError.unless(serving.engine.can_step, 503, "a step waits for a service", code="waiting")
    return {"status": "ok"}


async def version(request: Request) -> dict[str, str]:
    """Name the version."""
    return {"version": serving_of(request).version}


# What each form of a request may have.
_FIELDS_OF = {
    "prompt": {"model", "prompt", "add_special_tokens", "return_token_strs"},
    "messages": {"model", "messages", "return_token_strs", *Chat.model_fields},
    "content": {"model", "content", "add_special", "with_pieces", "parse_special"},
}


def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Return the token ids of a text or a conversation."""
    model = serving_of(request).model
    require_model(model, body.model)
    given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
    require(len(given) == 1, "body", "one of prompt, messages and content")
    for name in body.model_fields_set - _FIELDS_OF[given[0]]:
        require(getattr(body, name) is None, f"body.{name}", f"none beside {given[0]}")
    if body.content is not None:
        # llama.cpp's defaults: without special tokens, and nothing but the tokens.
        ids = encode_text(model, body.content, "body.content", special=bool(body.add_special))
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": at, "piece": _piece(model, at)} for at in ids]}
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = encode_text(model, body.prompt, "body.prompt", special=special)
    else:
        ids = encode_chat(model, body, tools=body.tools or [])
    strings = [json.loads(model.names(at)[0]) for at in ids] if body.return_token_strs else None
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "token_strs": strings,
    }


def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
    """Return the text of token ids: `prompt` is vLLM's name, `content` llama.cpp's."""
    model = serving_of(request).model
    require_model(model, body.model)
    require(
        max(body.tokens, default=0) < model.config.vocab_size,
        "body.tokens",
        f"token ids below {model.config.vocab_size}",
    )
    try:
        text = model.tokenizer.decode(body.tokens)
    except TsqpError as error:
        raise of_engine(error, "body.tokens") from None
    return {"prompt": text, "content": text}


def tokenizer_info(request: Request) -> dict[str, Any]:
    """Return what a client needs to write prompts by itself."""
    model = serving_of(request).model
    info, size = model.template.info(), model.tokenizer.raw.get_vocab_size()
    return {**info, "vocab_size": size, "model_max_length": model.max_model_len}


def _piece(model: OfferedModel, token_id: int) -> str | list[int]:
    """Return a token's text, or its bytes where it is none, as llama.cpp does."""
    content = model.token_bytes(token_id)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return list(content)


def _described(model: OfferedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tsqp",
        "max_model_len": model.max_model_len,
        "policy": model.policy,
        "system_fingerprint": model.system_fingerprint,
        # What holds where a request says nothing.
        "default_sampling_params": dict(model.sampling),
    }


_METERED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"),
)
_GUARDED: tuple[tuple[str, str, Callable[..., Any], _Responses], ...] = (
    ("POST", "/v1/completions", completions, _SSE),
    ("POST", "/v1/chat/completions", chat_completions, _SSE),
    ("POST", "/v1/responses", responses, _SSE),
    ("POST", "/v1/embeddings", embeddings, {}),
    ("POST", "/tokenize", tokenize, {}),
    ("POST", "/detokenize", detokenize, {}),
    ("GET", "/tokenizer_info", tokenizer_info, {}),
    ("GET", "/v1/models", models, {}),
    ("GET", "/v1/models/{name:path}", model_of, {}),
)
