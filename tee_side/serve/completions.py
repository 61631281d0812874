"""Prompts to token ids, and what is asked of the engine.

`/v1/completions`, and `/v1/embeddings`, which returns the last hidden state of each input, with a
length of one. It is a plain function, which the framework runs in a thread, as the others do what
takes long: a long prompt does.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from protocol.errors import TsqpError
from tee_side.chat.reply import ReplyReader
from tee_side.engine.reading import MAX_TOP
from tee_side.engine.request import Grammar, Request, SamplingSettings
from tee_side.serve.answers import (
    AnswerForm,
    CompletionForm,
    EmbeddingAnswer,
    OfferedModel,
    Shape,
    StreamedAnswer,
    WholeAnswer,
    Writing,
)
from tee_side.serve.constraints import TokenRules, all_but, spellings
from tee_side.serve.conversation import encode_chat
from tee_side.serve.errors import ApiError, of_engine, require
from tee_side.serve.exchange import EngineResponse, Serving, serving_of
from tee_side.serve.grammar import CallsSource, GrammarKind, GrammarMatcher
from tee_side.serve.schema import (
    GRAMMARS,
    SAMPLING,
    Chat,
    CompletionRequest,
    EmbeddingsRequest,
    Generating,
    Prompt,
    StreamOptions,
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


def require_room(model: OfferedModel, ids: Sequence[int], param: str, *, for_new: int) -> int:
    """Return how many tokens may follow a prompt, up to `for_new`.

    Raises ApiError, in llama.cpp's form, where none is possible and one is wanted, or where the
    prompt alone is too long.
    """
    room = model.max_model_len - len(ids)
    # Clients know the case by the words of the first sentence.
    ApiError.unless(
        room >= min(1, for_new),
        400,
        f"This model's maximum context length is {model.max_model_len} tokens."
        f" The prompt is too long: it has {len(ids)}.",
        kind="exceed_context_size_error",
        param=param,
        code="context_length_exceeded",
        n_prompt_tokens=len(ids),
        n_ctx=model.max_model_len,
    )
    return min(for_new, room)


def truncated(ids: Sequence[int], body: Any, model: OfferedModel) -> Sequence[int]:
    """Return the last ids of a prompt, as many as a request wants; -1: as there is room for."""
    last = body.truncate_prompt_tokens
    require(last != 0, "body.truncate_prompt_tokens", "at least 1, or -1")
    most = model.max_model_len - 1 if last == -1 else last
    return ids if most is None else ids[-most:]


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
    *,
    compiles: bool = False,
) -> Response:
    """Return the answer that `prepare` makes of a body, in a thread. Raises ApiError.

    Compiling a grammar may take seconds: of one owner, few are compiled at a time. `compiles`: one
    is, whatever the fields say that both endpoints have.
    """
    serving, caller = serving_of(request), request.state.caller
    if not compiles and not any(grammars(body)):
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
    same = body.best_of in (None, 0, 1, body.n)
    require(same, "body.best_of", "as many as n: all samples are returned")
    streamed = body.stream and body.prompt_logprobs is not None
    require(not streamed, "body.prompt_logprobs", "stream to be false")
    require(
        len(list(grammars(body))) <= 1,
        "body",
        "one grammar (response_format, structured_outputs or guided_*)",
    )
    form = body.response_format
    require(
        form is None or (form.type == "json_schema") == (form.json_schema is not None),
        "body.response_format.json_schema",
        "a value with type json_schema, and none else",
    )
    require(
        form is None or form.type == "json_object" or form.schema_ is None,
        "body.response_format.schema",
        "none but with type json_object",
    )


@dataclass(frozen=True)
class Reading:
    """How the text of a reply is read, and what it has to follow.

    `reader`: makes what reads a choice; `shown`: special tokens that it has to see. `lead`: what
    stands before an answer that follows a grammar; `calls`: the grammar of the whole reply.
    """

    reader: Callable[[], ReplyReader] | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    lead: str | None = None
    calls: CallsSource | None = None


def exchange(
    serving: Serving,
    caller: RequestWatch,
    writing: Writing,
    body: Generating,
    *,
    prompts: Sequence[tuple[int, ...]],
    param: str,
    max_tokens: int,
    logprobs: int | None,
    echo: Sequence[str] | None = None,
    reading: Reading | None = None,
) -> EngineResponse:
    """Return the answer of an endpoint. Raises ApiError; compiling a grammar takes a while.

    `writing`: makes what writes it.
    `param`: the field that the prompts came from. `max_tokens`: of each sample, -1 for as many as
    there is room for. `logprobs`: of new tokens, with so many of the likeliest; `echo`: what each
    prompt's choices begin with, with logprobs too if those of new tokens are wanted.
    """
    model, reading = serving.model, reading or Reading()
    most = model.max_model_len if max_tokens < 0 else max_tokens
    rooms = [require_room(model, ids, param, for_new=most) for ids in prompts]
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    sampling, grammar = _sampling(model, body), _rules(serving, caller.owner, body, reading)
    # Where nothing is made, 0 has the prompt read at all.
    of_prompt = None if echo is None else 0 if logprobs is None and not max_tokens else logprobs
    told = body.prompt_logprobs
    told = MAX_TOP if told == -1 else told
    requests = [
        Request(
            prompt_ids=ids,
            max_new_tokens=room,
            samples=body.n or 1,
            sampling=sampling,
            stop=tuple(filter(None, stop)),
            stop_ids=_stop_ids(model, body),
            logprobs=logprobs,
            prompt_logprobs=of_prompt if told is None else max(told, of_prompt or 0),
            grammar=grammar,
            owner=caller.owner,
            salt=body.cache_salt or "",
        )
        for ids, room in zip(prompts, rooms, strict=True)
    ]
    options = body.stream_options or StreamOptions()
    every = body.skip_special_tokens is False
    shape = Shape(
        reader=reading.reader,
        shown=model.replies.special if every else reading.shown,
        keeps_stop=bool(body.include_stop_str_in_output),
        echo=echo,
        usage=not body.stream or bool(options.include_usage),
        running_usage=bool(options.continuous_usage_stats),
        filled=options.include_obfuscation is not False,
        prompt_logprobs=told,
        ids=bool(body.return_token_ids),
        names_are_ids=bool(body.return_tokens_as_token_ids),
    )
    return EngineResponse(serving, caller, requests, writing(model, requests, shape))


def written_in(form: AnswerForm, body: Generating) -> Writing:
    """Return what writes an answer in a form, at once or as it comes."""
    return partial(StreamedAnswer if body.stream else WholeAnswer, form)


def _sampling(model: OfferedModel, body: Generating) -> SamplingSettings:
    """Return the settings: the model's own where a request says nothing, else OpenAI's."""
    settings: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING}
    settings["top_k"] = None if body.top_k is None else max(0, body.top_k)
    settings["temperature"] = body.temperature
    if body.seed not in (None, -1):
        settings["seed"] = body.seed % 2**62
    if body.logit_bias:
        # Nine digits: Python's own conversion takes longer for more.
        size = model.config.vocab_size
        ids = [
            int(key) if key.isascii() and key.isdigit() and len(key) < 10 else size
            for key in body.logit_bias
        ]
        _require_ids(model, ids, "body.logit_bias", " as its keys")
        settings["logit_bias"] = dict(zip(ids, body.logit_bias.values(), strict=True))
    given = {name: value for name, value in settings.items() if value is not None}
    return SamplingSettings(**{"temperature": 1.0, **model.sampling, **given})


def _require_ids(model: OfferedModel, ids: Iterable[int], param: str, what: str = "") -> None:
    size = model.config.vocab_size
    require(max(ids, default=0) < size, param, f"token ids below {size}{what}")


def _stop_ids(model: OfferedModel, body: Generating) -> frozenset[int] | None:
    own = frozenset(body.stop_token_ids or ())
    _require_ids(model, own, "body.stop_token_ids")
    if body.ignore_eos:
        return own
    return own | model.config.eos_token_ids if own else None


def grammars(body: Generating) -> Iterator[tuple[str, GrammarKind, Any]]:
    """Yield what a text has to follow: the field, the kind, and the grammar itself."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_object":
        kind: GrammarKind = "json_object" if form.schema_ is None else "json_schema"
        yield "response_format", kind, form.schema_ or {}
    if form is not None and form.type == "json_schema" and form.json_schema is not None:
        yield "response_format", "json_schema", form.json_schema.schema_
    if outputs is not None and outputs.json_object:
        yield "structured_outputs", "json_object", {}
    for name, (kind, _) in GRAMMARS.items():
        if (guided := getattr(body, f"guided_{name}")) is not None:
            yield f"guided_{name}", kind, guided
        if outputs is not None and (structured := getattr(outputs, f"{name}_")) is not None:
            yield f"structured_outputs.{name}", kind, structured


def _rules(serving: Serving, owner: str, body: Generating, reading: Reading) -> Grammar | None:
    """Return what the tokens of a reply have to follow, None for nothing. Raises ApiError."""
    grammar, model = _grammar(serving, owner, body, reading), serving.model
    allowed = body.allowed_token_ids
    _require_ids(model, allowed or (), "body.allowed_token_ids")
    try:
        unwanted = spellings(model.tokenizer, body.bad_words or ())
    except TsqpError as error:
        raise of_engine(error, "body.bad_words") from None
    if allowed is None and not body.min_tokens and not unwanted:
        return grammar
    ends = _stop_ids(model, body)
    return TokenRules(
        grammar=grammar,
        hidden_V=None if allowed is None else all_but(allowed, model.config.vocab_size),
        minimum=body.min_tokens or 0,
        end_ids=model.config.eos_token_ids if ends is None else ends,
        unwanted=unwanted,
    )


def _grammar(
    serving: Serving, owner: str, body: Generating, reading: Reading
) -> GrammarMatcher | None:
    found = list(grammars(body))
    if reading.calls is not None:
        # That of an answer without calls is part of it.
        own = all(field == "response_format" for field, *_ in found)
        require(own, "body.tools", f"no {found[0][0] if found else ''} beside tools")
        found = [("tools", "tool schema", reading.calls)]
    for field_name, kind, content in found:
        try:
            return serving.compile_grammar(kind, content, owner, lead=reading.lead)
        except TsqpError as error:
            raise of_engine(error, f"body.{field_name}") from None
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
    prompts = [tuple(truncated(ids, body, model)) for ids in prompts]
    echo = None
    if body.echo:
        # The client's own words where there are some: special tokens in them are shown.
        given, whole = listed(body.prompt), body.truncate_prompt_tokens is None
        echo = [
            one if whole and isinstance(one, str) else model.tokenizer.decode(ids)
            for one, ids in zip(given, prompts, strict=True)
        ]
    return exchange(
        serving,
        caller,
        written_in(CompletionForm(), body),
        body,
        prompts=prompts,
        param=param,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        echo=echo,
    )


def embeddings(body: EmbeddingsRequest, request: HttpRequest) -> Response:
    """Return a vector for each input."""
    serving, caller = serving_of(request), request.state.caller
    model, said = serving.model, body.messages is not None
    param = "body.messages" if said else "body.input"
    require_model(model, body.model)
    require(said != (body.input is not None), "body", "one of input and messages")
    others = {"add_special_tokens", "prompt_name"} if said else Chat.model_fields.keys()
    for name in body.model_fields_set & others:
        require(not getattr(body, name), f"body.{name}", f"none beside {param[5:]}")
    most = model.config.hidden_size
    try:
        how = model.embedding
    except TsqpError:
        raise ApiError(
            400,
            "a model whose vectors are not computed here",
            param="body.model",
            code="invalid_prompt",
        ) from None
    if refused := how.refused(body.prompt_name, body.dimensions, most):
        require(False, f"body.{refused[0]}", refused[1])
    if body.input is None:
        inputs = [tuple(encode_chat(model, body, tools=body.tools or []))]
    else:
        front, special = how.front(body.prompt_name), body.add_special_tokens is not False
        inputs = encode(model, body.input, param, front=front, special=special)
    inputs = [tuple(truncated(ids, body, model)) for ids in inputs]
    for ids in inputs:
        require_room(model, ids, param, for_new=0)
    pooling = body.pooling or how.pooling
    requests = [
        Request(prompt_ids=ids, max_new_tokens=0, pooling=pooling, owner=caller.owner)
        for ids in inputs
    ]
    as_base64, size = body.encoding_format == "base64", body.dimensions
    answer = EmbeddingAnswer(model, len(inputs), as_base64=as_base64, dimensions=size)
    return EngineResponse(serving, caller, requests, answer)
