"""`/v1/embeddings`: the last hidden state of each input, with a length of one."""

from __future__ import annotations

import asyncio
import base64
import json

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tee_side.engine.request import Delivery, Request
from tee_side.serve.answers import head
from tee_side.serve.errors import wrong
from tee_side.serve.exchange import Exchange, precheck
from tee_side.serve.prompts import encode, require_model, require_room
from tee_side.serve.schema import EmbeddingRequest
from tee_side.serve.serving import (
    Caller,
    Counts,
    ServedModel,
    Serving,
    caller_of,
    serving_of,
)


class EmbeddingAnswer:
    """Collects the vectors. `as_base64`: of float32, lowest byte first; else as numbers."""

    content_type = "application/json"

    def __init__(self, model: ServedModel, count: int, *, as_base64: bool) -> None:
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

    def finish(self, counts: Counts) -> str:
        """Return the whole answer."""
        used = f'{{"prompt_tokens":{counts.prompt},"total_tokens":{counts.prompt}}}'
        begin = head("embd-", "list", self._model)
        return f'{begin}"data":[{",".join(self._found)}],"usage":{used}}}'


async def embeddings(body: EmbeddingRequest, request: HttpRequest) -> Response:
    """Return a vector for each input."""
    caller = caller_of(request)
    precheck(caller)
    return await asyncio.to_thread(prepare, serving_of(request), caller, body)


def prepare(serving: Serving, caller: Caller, body: EmbeddingRequest) -> Exchange:
    """Return the answer of a body. Raises ApiError."""
    model, param = serving.model, "body.input"
    require_model(model, body.model)
    if body.dimensions not in (None, model.config.hidden_size):
        raise wrong("body.dimensions", f"{model.config.hidden_size}, or nothing")
    inputs = encode(model, body.input, param, special=body.add_special_tokens is not False)
    for ids in inputs:
        require_room(model, ids, param, for_new=0)
    pooling = body.pooling or model.pooling
    requests = [
        Request(prompt_ids=ids, max_new_tokens=0, pooling=pooling, owner=caller.owner)
        for ids in inputs
    ]
    answer = EmbeddingAnswer(model, len(inputs), as_base64=body.encoding_format == "base64")
    return Exchange(serving, caller, requests, answer)
