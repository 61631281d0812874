"""`/v1/completions`."""

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
from tee_side.serve.prompts import encode, listed, require_model
from tee_side.serve.schema import CompletionRequest
from tee_side.serve.serving import Caller, Serving
from tee_side.serve.token_names import TokenNames, number

# OpenAI's.
_DEFAULT_MAX_TOKENS = 16


class CompletionForm:
    """OpenAI's text_completion; log-probabilities are four lists."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def entry(
        self, names: TokenNames, token_id: int, logprob: Logprob | None, offset: int
    ) -> Entry:
        """Write the token, its logprob, the likeliest with the token itself, and the offset."""
        name = names.of(token_id)[0]
        if logprob is None:
            return name, "null", "null", str(offset)
        top: dict[str, str] = {}
        for other, value in logprob.top:
            top.setdefault(names.of(other)[0], number(value))
        top[name] = own = number(logprob.logprob)
        pairs = ",".join(f"{key}:{value}" for key, value in top.items())
        return name, own, f"{{{pairs}}}", str(offset)

    def logprobs(self, entries: Sequence[Entry]) -> str:
        """Write the lists."""
        tokens, own, top, offsets = (",".join(column) for column in zip(*entries, strict=True))
        return (
            f'{{"tokens":[{tokens}],"token_logprobs":[{own}],'
            f'"top_logprobs":[{top}],"text_offset":[{offsets}]}}'
        )

    def opening(self) -> None:
        """Write nothing: the first chunk has text."""
        return

    def delta(self, text: str) -> str:
        """Write the text."""
        return f'"text":{json.dumps(text)}'

    whole = delta


_FORM = CompletionForm()


async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
    """Continue each prompt."""
    return await prepared(prepare, body, request)


def prepare(serving: Serving, caller: Caller, body: CompletionRequest) -> Exchange:
    """Return the answer of a body. Raises ApiError."""
    model, param = serving.model, "body.prompt"
    require_model(model, body.model)
    check_fields(body)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise wrong("body.max_tokens", "at least 1 (0 with echo)")
    special = body.add_special_tokens is not False
    prompts = encode(model, body.prompt, param, special=special, samples=body.n or 1)
    echo = None
    if body.echo:
        # The client's own words where there are some: special tokens in them are shown.
        given = listed(body.prompt)
        echo = [one if isinstance(one, str) else model.tokenizer.decode(one) for one in given]
    wanted = Wanted(
        prompts=prompts, param=param, max_tokens=max_tokens, logprobs=body.logprobs, echo=echo
    )
    return exchange(serving, caller, _FORM, body, wanted)
