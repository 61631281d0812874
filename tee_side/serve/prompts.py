"""Prompts to token ids, and the endpoints that answer from prompts without generating.

`/tokenize`, `/detokenize` and `/tokenizer_info` use the words of vLLM and of llama.cpp.
`/v1/embeddings` returns the last hidden state of each input, with a length of one. They are
plain functions, which the framework runs in threads: a long prompt takes long.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from protocol.errors import ModelError, TsqpError
from tee_side.engine.request import Delivery, Request
from tee_side.serve.answers import OfferedModel, TokenCounts, head
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.exchange import EngineResponse, caller_of, serving_of
from tee_side.serve.schema import (
    ChatMessage,
    DetokenizeRequest,
    EmbeddingsRequest,
    Prompt,
    TokenizeRequest,
)

# Of all prompts and samples of a request.
MAX_CHOICES = 2048


def listed(prompt: Prompt) -> list[str] | list[list[int]]:
    """Return one prompt or several as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[return-value]


def encode(
    model: OfferedModel, prompt: Prompt, param: str, *, special: bool, samples: int = 1
) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. Raises ApiError."""
    prompts = listed(prompt)
    require(prompts, param, "at least one prompt")
    require(
        len(prompts) * samples <= MAX_CHOICES,
        param,
        f"at most {MAX_CHOICES} prompts, all samples counted",
    )
    found: list[tuple[int, ...]] = []
    for one in prompts:
        ids = encode_text(model, one, param, special=special) if isinstance(one, str) else one
        found.append(tuple(ids))
        require(found[-1], param, "at least one token")
        require(
            max(found[-1]) < model.config.vocab_size,
            param,
            f"token ids below {model.config.vocab_size}",
        )
    return found


def encode_text(model: OfferedModel, text: str, param: str, *, special: bool) -> list[int]:
    """Return the ids of a text. Raises ApiError."""
    try:
        return model.tokenizer.encode(text, add_special_tokens=special)
    except TsqpError as error:
        raise of_engine(error, param) from None


def encode_chat(
    model: OfferedModel, messages: Sequence[ChatMessage], *, add_generation_prompt: bool
) -> tuple[int, ...]:
    """Return the ids of a conversation. Raises ApiError."""
    turns = [_turn(message, f"body.messages.{at}") for at, message in enumerate(messages)]
    try:
        ids = model.tokenizer.apply_chat_template(
            turns, add_generation_prompt=add_generation_prompt
        )
    except ModelError:
        # The operator's to mend; a completion may still be asked for.
        raise ApiError(
            400,
            "the model has no chat template, or one that fails",
            param="body.messages",
            code="no_chat_template",
        ) from None
    except TsqpError as error:
        raise of_engine(error, "body.messages") from None
    return tuple(ids)


def _turn(message: ChatMessage, param: str) -> dict[str, str]:
    content = message.content
    require(content is not None or message.role == "assistant", f"{param}.content", "a value")
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text or "",
    }
    return turn | ({} if message.name is None else {"name": message.name})


def require_room(model: OfferedModel, ids: Sequence[int], param: str, *, for_new: int) -> int:
    """Return how many tokens may follow a prompt, up to `for_new`.

    Raises ApiError, in llama.cpp's form, where none is possible and one is wanted, or where the
    prompt alone is too long.
    """
    room = model.max_model_len - len(ids)
    if room < min(1, for_new):
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens, and the context {model.max_model_len}",
            kind="exceed_context_size_error",
            param=param,
            code="context_length_exceeded",
            n_prompt_tokens=len(ids),
            n_ctx=model.max_model_len,
        )
    return min(for_new, room)


def require_model(
    model: OfferedModel, name: str | None, *, param: str | None = "body.model"
) -> None:
    """Raise ApiError (404) for the name of another model than the one that is served."""
    if name is not None and name != model.name:
        raise ApiError(
            404,
            "there is no such model (GET /v1/models names the one that is served)",
            param=param,
            code="model_not_found",
        )


# What each form of a request may have.
_FIELDS_OF = {
    "prompt": {"model", "prompt", "add_special_tokens", "return_token_strs"},
    "messages": {"model", "messages", "add_generation_prompt", "return_token_strs"},
    "content": {"model", "content", "add_special", "with_pieces", "parse_special"},
}


def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
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
        add = body.add_generation_prompt is not False
        ids = list(encode_chat(model, body.messages or [], add_generation_prompt=add))
    strings = [json.loads(model.names.of(at)[0]) for at in ids] if body.return_token_strs else None
    answer = {"tokens": ids, "count": len(ids), "max_model_len": model.max_model_len}
    return answer | {"token_strs": strings}


def detokenize(body: DetokenizeRequest, request: HttpRequest) -> dict[str, str]:
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


def tokenizer_info(request: HttpRequest) -> dict[str, Any]:
    """Return what a client needs to write prompts by itself."""
    model = serving_of(request).model
    size = model.tokenizer.vocabulary_size
    return {**model.tokenizer.info(), "vocab_size": size, "model_max_length": model.max_model_len}


def _piece(model: OfferedModel, token_id: int) -> str | list[int]:
    """Return a token's text, or its bytes where it is none, as llama.cpp does."""
    content = model.tokenizer.token_bytes(token_id)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return list(content)


class EmbeddingAnswer:
    """Collects the vectors. `as_base64`: of float32, lowest byte first; else as numbers."""

    content_type = "application/json"

    def __init__(self, model: OfferedModel, count: int, *, as_base64: bool) -> None:
        self._model, self._as_base64 = model, as_base64
        self._found = [""] * count

    def add(self, prompt: int, delivery: Delivery) -> str:
        """Take a vector."""
        read = delivery.prompt
        if read is not None and read.pooled_D is not None:
            unit_D = torch.nn.functional.normalize(read.pooled_D.to(torch.float32), dim=-1)
            if self._as_base64:
                content = unit_D.numpy().astype("<f4").tobytes()
                written = f'"{base64.b64encode(content).decode()}"'
            else:
                written = json.dumps(unit_D.tolist(), separators=(",", ":"))
            item = f'{{"object":"embedding","index":{prompt},"embedding":{written}}}'
            self._found[prompt] = item
        return ""

    def finish(self, counts: TokenCounts) -> str:
        """Return the whole answer."""
        used = f'{{"prompt_tokens":{counts.prompt},"total_tokens":{counts.prompt}}}'
        begin = head("embd-", "list", self._model)
        return f'{begin}"data":[{",".join(self._found)}],"usage":{used}}}'


def embeddings(body: EmbeddingsRequest, request: HttpRequest) -> Response:
    """Return a vector for each input."""
    serving, caller = serving_of(request), caller_of(request)
    model, param = serving.model, "body.input"
    require_model(model, body.model)
    require(
        body.dimensions in (None, model.config.hidden_size),
        "body.dimensions",
        f"{model.config.hidden_size}, or nothing",
    )
    inputs = encode(model, body.input, param, special=body.add_special_tokens is not False)
    for ids in inputs:
        require_room(model, ids, param, for_new=0)
    pooling = body.pooling or model.pooling
    requests = [
        Request(prompt_ids=ids, max_new_tokens=0, pooling=pooling, owner=caller.owner)
        for ids in inputs
    ]
    answer = EmbeddingAnswer(model, len(inputs), as_base64=body.encoding_format == "base64")
    return EngineResponse(serving, caller, requests, answer)
