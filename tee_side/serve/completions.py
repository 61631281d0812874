"""OpenAI's endpoints: prompts to token ids, and what is asked of the engine.

`/v1/completions`, `/v1/chat/completions` and `/v1/embeddings`, which returns the last hidden state
of each input, with a length of one. It is a plain function, which the framework runs in a thread,
as the others do what takes long: a long prompt does.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from protocol.errors import ModelError, TsqpError
from tee_side.chat.template import Conversation
from tee_side.engine.request import Request, SamplingSettings
from tee_side.serve.answers import (
    AnswerForm,
    ChatForm,
    CompletionForm,
    EmbeddingAnswer,
    OfferedModel,
    StreamedAnswer,
    WholeAnswer,
)
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.exchange import EngineResponse, Serving, serving_of
from tee_side.serve.grammar import GrammarKind, GrammarMatcher
from tee_side.serve.schema import (
    GRAMMARS,
    SAMPLING,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Generating,
    Prompt,
)
from tee_side.serve.watch import RequestWatch

# Of all prompts and samples of a request.
MAX_CHOICES = 2048

# The status that nginx logs for a client that has left; it is sent to no client.
_CLIENT_LEFT = 499

_Body = TypeVar("_Body", bound=Generating)


def listed(prompt: Prompt) -> list[str] | list[list[int]]:
    """Return one prompt or several as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[return-value]


def encode(
    model: OfferedModel,
    prompt: Prompt,
    param: str,
    *,
    special: bool,
    samples: int = 1,
    front: str = "",
) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, of texts with `front` before them. Raises ApiError."""
    prompts = listed(prompt)
    require(prompts, param, "at least one prompt")
    require(
        len(prompts) * samples <= MAX_CHOICES,
        param,
        f"at most {MAX_CHOICES} prompts, all samples counted",
    )
    ids_of = partial(encode_text, model, param=param, special=special)
    found: list[tuple[int, ...]] = []
    for one in prompts:
        found.append(tuple(ids_of(front + one) if isinstance(one, str) else one))
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
) -> list[int]:
    """Return the ids of a conversation. Raises ApiError."""
    turns = [_turn(message, f"body.messages.{at}") for at, message in enumerate(messages)]
    try:
        return model.template.encode(
            Conversation(messages=turns, add_generation_prompt=add_generation_prompt)
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
    ApiError.unless(
        room >= min(1, for_new),
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
    ApiError.unless(
        name in (None, model.name),
        404,
        "there is no such model (GET /v1/models names the one that is served)",
        param=param,
        code="model_not_found",
    )


async def prepared(
    prepare: Callable[[Serving, RequestWatch, _Body], EngineResponse],
    body: _Body,
    request: HttpRequest,
) -> Response:
    """Return the answer that `prepare` makes of a body, in a thread. Raises ApiError.

    Compiling a grammar may take seconds: of one owner, few are compiled at a time.
    """
    serving, caller = serving_of(request), request.state.caller
    if not any(_grammars(body)):
        return await asyncio.to_thread(prepare, serving, caller, body)
    places, turns = serving.compiling[caller.owner]
    ApiError.unless(
        not places.locked(),
        503,
        "too many grammars wait to be compiled: try again later",
        code="overloaded",
        headers={"retry-after": "1"},
    )
    async with places, turns:
        if await request.is_disconnected():
            return Response(status_code=_CLIENT_LEFT)
        caller.precheck()
        return await asyncio.to_thread(prepare, serving, caller, body)


def check_fields(model: OfferedModel, body: Generating) -> None:
    """Raise ApiError for another model, and for fields that do not go together."""
    require_model(model, body.model)
    require(body.stream_options is None or body.stream, "body.stream_options", "stream to be true")
    require(
        len(list(_grammars(body))) <= 1,
        "body",
        "one grammar (response_format, structured_outputs or guided_*)",
    )
    form = body.response_format
    require(
        form is None or (form.type == "json_schema") == (form.json_schema is not None),
        "body.response_format.json_schema",
        "a value with type json_schema, and none else",
    )


def exchange(
    serving: Serving,
    caller: RequestWatch,
    form: AnswerForm,
    body: Generating,
    *,
    prompts: Sequence[tuple[int, ...]],
    param: str,
    max_tokens: int,
    logprobs: int | None,
    echo: Sequence[str] | None = None,
) -> EngineResponse:
    """Return the answer of an endpoint. Raises ApiError; compiling a grammar takes a while.

    `param`: the field that the prompts came from. `max_tokens`: of each sample. `logprobs`: of new
    tokens, with so many of the likeliest; `echo`: what each prompt's choices begin with, with
    logprobs too if those of new tokens are wanted.
    """
    model = serving.model
    rooms = [require_room(model, ids, param, for_new=max_tokens) for ids in prompts]
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    sampling, grammar = _sampling(model, body), _grammar(serving, caller.owner, body)
    # Where nothing is made, 0 has the prompt read at all.
    of_prompt = 0 if logprobs is None and not max_tokens else logprobs
    requests = [
        Request(
            prompt_ids=ids,
            max_new_tokens=room,
            samples=body.n or 1,
            sampling=sampling,
            stop=tuple(stop),
            stop_ids=_stop_ids(model, body),
            logprobs=logprobs,
            prompt_logprobs=None if echo is None else of_prompt,
            grammar=grammar,
            owner=caller.owner,
            salt=body.cache_salt or "",
        )
        for ids, room in zip(prompts, rooms, strict=True)
    ]
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    written = StreamedAnswer if body.stream else WholeAnswer
    answer = written(form, model, requests, echo, with_usage=with_usage)
    return EngineResponse(serving, caller, requests, answer)


def _sampling(model: OfferedModel, body: Generating) -> SamplingSettings:
    """Return the settings, of which OpenAI's defaults hold: temperature 1."""
    settings: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING}
    settings["top_k"] = None if body.top_k is None else max(0, body.top_k)
    if body.logit_bias:
        size = model.config.vocab_size
        # Nine digits: Python's own conversion takes longer for more.
        ids = [
            int(key) if key.isascii() and key.isdigit() and len(key) < 10 else size
            for key in body.logit_bias
        ]
        require(max(ids) < size, "body.logit_bias", f"token ids below {size} as its keys")
        settings["logit_bias"] = dict(zip(ids, body.logit_bias.values(), strict=True))
    given = {name: value for name, value in settings.items() if value is not None}
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingSettings(temperature=temperature, **given)


def _stop_ids(model: OfferedModel, body: Generating) -> frozenset[int] | None:
    own = frozenset(body.stop_token_ids or ())
    require(
        not own or max(own) < model.config.vocab_size,
        "body.stop_token_ids",
        f"token ids below {model.config.vocab_size}",
    )
    if body.ignore_eos:
        return own
    return own | model.config.eos_token_ids if own else None


def _grammars(body: Generating) -> Iterator[tuple[str, GrammarKind, Any]]:
    """Yield what a text has to follow: the field, the kind, and the grammar itself."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        yield "response_format", "json_object", {}
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        yield "response_format", "json_schema", form.json_schema.schema_
    if outputs is not None and outputs.json_object:
        yield "structured_outputs", "json_object", {}
    for name, (kind, _) in GRAMMARS.items():
        if (guided := getattr(body, f"guided_{name}")) is not None:
            yield f"guided_{name}", kind, guided
        if outputs is not None and (structured := getattr(outputs, f"{name}_")) is not None:
            yield f"structured_outputs.{name}", kind, structured


def _grammar(serving: Serving, owner: str, body: Generating) -> GrammarMatcher | None:
    for field, kind, content in _grammars(body):
        try:
            return serving.compile_grammar(kind, content, owner)
        except TsqpError as error:
            raise of_engine(error, f"body.{field}") from None
    return None


# OpenAI's.
_DEFAULT_MAX_TOKENS = 16


async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
    """Continue each prompt."""
    return await prepared(prepare_completion, body, request)


def prepare_completion(
    serving: Serving, caller: RequestWatch, body: CompletionRequest
) -> EngineResponse:
    """Return the answer of a body. Raises ApiError."""
    model, param = serving.model, "body.prompt"
    check_fields(model, body)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    require(max_tokens != 0 or body.echo, "body.max_tokens", "at least 1 (0 with echo)")
    special = body.add_special_tokens is not False
    prompts = encode(model, body.prompt, param, special=special, samples=body.n or 1)
    echo = None
    if body.echo:
        # The client's own words where there are some: special tokens in them are shown.
        given = listed(body.prompt)
        echo = [one if isinstance(one, str) else model.tokenizer.decode(one) for one in given]
    return exchange(
        serving,
        caller,
        CompletionForm(),
        body,
        prompts=prompts,
        param=param,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        echo=echo,
    )


async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
    """Answer a conversation."""
    return await prepared(prepare_chat, body, request)


def prepare_chat(serving: Serving, caller: RequestWatch, body: ChatRequest) -> EngineResponse:
    """Return the answer of a body. Raises ApiError."""
    model = serving.model
    check_fields(model, body)
    require(not body.top_logprobs or body.logprobs, "body.top_logprobs", "logprobs to be true")
    add = body.add_generation_prompt is not False
    ids = encode_chat(model, body.messages, add_generation_prompt=add)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return exchange(
        serving,
        caller,
        ChatForm(),
        body,
        prompts=[tuple(ids)],
        param="body.messages",
        max_tokens=model.default_max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def embeddings(body: EmbeddingsRequest, request: HttpRequest) -> Response:
    """Return a vector for each input."""
    serving, caller = serving_of(request), request.state.caller
    model, param = serving.model, "body.input"
    require_model(model, body.model)
    most = model.config.hidden_size
    try:
        said = model.embedding
    except TsqpError:
        message = "a model whose vectors are not computed here"
        raise ApiError(400, message, param="body.model", code="invalid_prompt") from None
    if refused := said.refused(body.prompt_name, body.dimensions, most):
        require(False, f"body.{refused[0]}", refused[1])
    front = said.front(body.prompt_name)
    inputs = encode(
        model, body.input, param, front=front, special=body.add_special_tokens is not False
    )
    for ids in inputs:
        require_room(model, ids, param, for_new=0)
    pooling = body.pooling or said.pooling
    requests = [
        Request(prompt_ids=ids, max_new_tokens=0, pooling=pooling, owner=caller.owner)
        for ids in inputs
    ]
    as_base64, size = body.encoding_format == "base64", body.dimensions
    answer = EmbeddingAnswer(model, len(inputs), as_base64=as_base64, dimensions=size)
    return EngineResponse(serving, caller, requests, answer)
