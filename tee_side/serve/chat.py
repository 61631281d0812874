"""`/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tee_side.engine.request import Logprob
from tee_side.serve.answers import Entry
from tee_side.serve.errors import wrong
from tee_side.serve.exchange import Exchange
from tee_side.serve.generating import Wanted, check_fields, exchange, prepared
from tee_side.serve.prompts import encode_chat, require_model
from tee_side.serve.schema import ChatRequest
from tee_side.serve.serving import Caller, Serving
from tee_side.serve.token_names import TokenNames, number


class ChatForm:
    """OpenAI's chat.completion; log-probabilities are a list of objects."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def entry(
        self, names: TokenNames, token_id: int, logprob: Logprob | None, offset: int
    ) -> Entry:
        """Write the token; there is no offset, and no token without a logprob."""
        if logprob is None:
            return ()
        top = ",".join(f"{{{_named(names, *one)}}}" for one in logprob.top)
        return (f'{{{_named(names, token_id, logprob.logprob)},"top_logprobs":[{top}]}}',)

    def logprobs(self, entries: Sequence[Entry]) -> str:
        """Write the list."""
        return f'{{"content":[{",".join(entry[0] for entry in entries)}],"refusal":null}}'

    def opening(self) -> str:
        """Write the role."""
        return '"delta":{"role":"assistant","content":""}'

    def delta(self, text: str) -> str:
        """Write the text of a chunk."""
        return f'"delta":{{"content":{json.dumps(text)}}}'

    def whole(self, text: str) -> str:
        """Write the message."""
        return f'"message":{{"role":"assistant","content":{json.dumps(text)},"refusal":null}}'


_FORM = ChatForm()


def _named(names: TokenNames, token_id: int, logprob: float) -> str:
    name, listed = names.of(token_id)
    return f'"token":{name},"logprob":{number(logprob)},"bytes":{listed}'


async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await prepared(prepare, body, request)


def prepare(serving: Serving, caller: Caller, body: ChatRequest) -> Exchange:
    """Return the answer of a body. Raises ApiError."""
    model = serving.model
    require_model(model, body.model)
    check_fields(body)
    if body.top_logprobs and not body.logprobs:
        raise wrong("body.top_logprobs", "logprobs to be true")
    add = body.add_generation_prompt is not False
    ids = encode_chat(model, body.messages, add_generation_prompt=add)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    wanted = Wanted(
        prompts=[ids],
        param="body.messages",
        max_tokens=model.default_max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return exchange(serving, caller, _FORM, body, wanted)
