"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in the words of vLLM and of llama.cpp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest

from protocol.errors import TsqpError
from tee_side.serve.errors import of_engine, wrong
from tee_side.serve.exchange import precheck
from tee_side.serve.prompts import encode_chat, encode_text, require_model
from tee_side.serve.schema import DetokenizeRequest, TokenizeRequest
from tee_side.serve.serving import ServedModel, caller_of, serving_of

# What each form of a request may have.
_FIELDS_OF = {
    "prompt": {"model", "prompt", "add_special_tokens", "return_token_strs"},
    "messages": {"model", "messages", "add_generation_prompt", "return_token_strs"},
    "content": {"model", "content", "add_special", "with_pieces", "parse_special"},
}


async def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
    """Return the token ids of a text or a conversation."""
    model = serving_of(request).model
    require_model(model, body.model)
    precheck(caller_of(request))
    return await asyncio.to_thread(_tokenize, model, body)


async def detokenize(body: DetokenizeRequest, request: HttpRequest) -> dict[str, str]:
    """Return the text of token ids: `prompt` is vLLM's name, `content` llama.cpp's."""
    model = serving_of(request).model
    require_model(model, body.model)
    if max(body.tokens, default=0) >= model.config.vocab_size:
        raise wrong("body.tokens", f"token ids below {model.config.vocab_size}")
    try:
        text = await asyncio.to_thread(model.tokenizer.decode, body.tokens)
    except TsqpError as error:
        raise of_engine(error, "body.tokens") from None
    return {"prompt": text, "content": text}


async def tokenizer_info(request: HttpRequest) -> dict[str, Any]:
    """Return what a client needs to write prompts by itself."""
    model = serving_of(request).model
    try:
        info = await asyncio.to_thread(model.tokenizer.info)
    except TsqpError as error:
        raise of_engine(error) from None
    size = model.tokenizer.vocabulary_size
    return {**info, "vocab_size": size, "model_max_length": model.max_model_len}


def _tokenize(model: ServedModel, body: TokenizeRequest) -> dict[str, Any]:
    given = [name for name in ("prompt", "messages", "content") if getattr(body, name) is not None]
    if len(given) != 1:
        raise wrong("body", "one of prompt, messages and content")
    for name in body.model_fields_set - _FIELDS_OF[given[0]]:
        if getattr(body, name) is not None:
            raise wrong(f"body.{name}", f"none beside {given[0]}")
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
        add = body.add_generation_prompt is not False
        ids = list(encode_chat(model, body.messages or [], add_generation_prompt=add))
    strings = _strings(model, ids) if body.return_token_strs else None
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len}
    return answer | {"token_strs": strings}


def _piece(model: ServedModel, token_id: int) -> str | list[int]:
    """Return a token's text, or its bytes where it is none, as llama.cpp does."""
    content = model.tokenizer.token_bytes(token_id)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return list(content)


def _strings(model: ServedModel, ids: Sequence[int]) -> list[str]:
    return [json.loads(model.names.of(token_id)[0]) for token_id in ids]
