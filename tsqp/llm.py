"""A model in Python: `LLM("demo", gpu=["unix:///tmp/gpu.sock"]).generate(["Once upon a time"])`.

Names are those of vLLM's `LLM`, as far as they mean the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from protocol.errors import PromptError, SettingsError
from protocol.validation import did_you_mean, first_problem
from tee_side.chat.calls import CALL_FORMS, CallReader
from tee_side.chat.history import encode_history
from tee_side.chat.reply import MarkedStream, ReplyForm, ReplyReader, add_calls
from tee_side.chat.template import Conversation
from tee_side.engine.reading import MAX_TOP
from tee_side.engine.request import Logprob, Request, SamplingSettings
from tee_side.serve.background import BackgroundEngine, Delivery, EngineStats, Ticket
from tsqp.run.conversations import chat_template
from tsqp.run.load import engine_settings, load, open_runner
from tsqp.run.settings import RunSettings, plain_type, settings_of

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]


# In an error of what has no bounds in SamplingSettings.
_EXPECTED = {
    **dict.fromkeys(("n", "max_tokens"), "an integer"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), f"None, or 0 to {MAX_TOP}"),
    "stop": "texts that are not empty",
}
_Integer = Annotated[int, Field(strict=True)]
_Likeliest = Annotated[int, Field(strict=True, ge=0, le=MAX_TOP)]
_Stop = Annotated[str, Field(strict=True, min_length=1)]


class SamplingParams(SamplingSettings):
    """How to sample, and what to return. Raises PromptError.

    `n`: samples of each prompt. `logprobs`, `prompt_logprobs`: of each token, with so many of the
    likeliest. `seed`: None for a fresh one. `ignore_eos`: go on after the end of the text.
    """

    n: _Integer = 1
    max_tokens: _Integer = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    stop: _Stop | list[_Stop] | tuple[_Stop, ...] = ()
    ignore_eos: bool = False
    logprobs: _Likeliest | None = None
    prompt_logprobs: _Likeliest | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, given: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, dict) and given.get("top_k") == -1:  # off, in vLLM
            given = given | {"top_k": 0}
        try:
            return read(given)
        except ValidationError as error:
            problem = first_problem(error, cls.model_fields)
            name = str(next(iter(problem.path), ""))
            if name in _EXPECTED:
                where = f"SamplingParams.{name}"
                raise PromptError(where, "another value", _EXPECTED[name]) from None
            where = f"SamplingParams.{problem.field}"
            raise PromptError(where, problem.got, problem.expected) from None


@dataclass
class CompletionOutput:
    """One sample. `logprobs`: of each token, None where they were not asked for.

    Of a chat, `reasoning` and `tool_calls` are apart from the text, as OpenAI's API names them.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """A prompt and its samples. `prompt_logprobs`: None for the first token, and for nothing."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprob | None] | None = None
    num_cached_tokens: int = 0


class LLM(AbstractContextManager["LLM"]):
    """A model, ready to generate, in this process: the TEE's side. Use as a context manager.

    `model`: a Hugging Face directory, or "demo". `gpu`: services. `options`: those of `tee-runner
    serve` about the run, by their names with `_`: `policy`, `bank`, `identity`, `service_key`,
    `threads`, ... What the GPU side learns is printed on stderr, once.

    `max_num_seqs`: sequences that run at a time; `max_num_batched_tokens`: rows of a step.
    `speculative_tokens`, `enable_prefix_caching`: see `EngineSettings`; both are off.
    `tool_parser`: the form of the model's tool calls; None: what its chat template shows. Raises as
    `Runner`, and SettingsError for options that there are not.
    """

    def __init__(
        self,
        model: str,
        *,
        gpu: Sequence[str] = (),
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        speculative_tokens: int = 0,
        enable_prefix_caching: bool = False,
        tool_parser: str | None = None,
        **options: Any,
    ) -> None:
        SettingsError.unless(
            tool_parser in (None, *CALL_FORMS),
            "LLM: tool_parser",
            "another form",
            f"one of {', '.join(CALL_FORMS)}",
        )
        told = options | {"model": model, "step_tokens": max_num_batched_tokens}
        settings = settings_from(told | ({"gpu": gpu} if gpu else {}))
        loaded = load(settings, text_needed=True)
        engine = replace(
            engine_settings(settings),
            max_model_len=max_model_len,
            max_sequences=max_num_seqs,
            max_waiting=sys.maxsize,
            speculative_tokens=speculative_tokens,
            prefix_reuse=enable_prefix_caching,
        )
        with ExitStack() as opened:
            runner = opened.enter_context(
                open_runner(settings, loaded, None, idles=True, engine=engine)
            )
            self._tokenizer = runner.tokenizer
            template = chat_template(settings, runner.tokenizer)
            self._form = ReplyForm(template, tool_parser)
            # Read once it is asked for: files may say what we do not compute, and generate.
            self._embedding, self._size = cache(runner.embedding), runner.config.hidden_size
            self._engine = BackgroundEngine(
                runner.engine,
                call=lambda deliver: deliver(),
                filling=runner.filling,
                totals=runner.totals,
            )
            self._engine.start()
            opened.callback(self._engine.close)
            self._closing = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs, and disconnect from the services."""
        self._closing.close()

    @property
    def stats(self) -> EngineStats:
        """How the engine stands, and what it has done."""
        return self._engine.stats()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """Return what follows each prompt, a text or token ids, all of them side by side.

        Raises PromptError, LimitError, and what the engine met.
        """
        PromptError.unless(
            isinstance(prompts, str | list | tuple),
            "prompts",
            "something else",
            "a text, or a list",
        )
        given = [prompts] if isinstance(prompts, str) else prompts
        with ExitStack() as ending:
            running = [
                ending.enter_context(closing(self._start(prompt, sampling_params)))
                for prompt in given
            ]
            return [one.result() for one in running]

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> list[RequestOutput]:
        """Return the assistant's next turn of a conversation, one output. Raises as `generate`.

        Options are those of `/v1/chat/completions`. All of the tools may be called, none has to be;
        arguments follow no grammar.
        """
        form, asked = self._form, add_generation_prompt
        told, variables = form.told(reasoning_effort), chat_template_kwargs or {}
        PromptError.unless(
            isinstance(variables, Mapping), "chat_template_kwargs", "something else", "a mapping"
        )
        ids = self._chat_ids(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=not continue_final_message if asked is None else asked,
            continue_final_message=continue_final_message,
            variables={**told, **variables},
        )
        thinking, inside = form.behind(ids)
        wrong = KeyError, TypeError, AttributeError
        with PromptError.instead_of(wrong, "tools", "something else", "functions, as OpenAI's"):
            functions = [tool["function"] for tool in tools or ()]
            known = {one["name"]: one.get("parameters") or {} for one in functions}
            PromptError.unless(
                not any(one.get("strict") for one in functions),
                "tools",
                "strict",
                "none that is: that takes a server",
            )
        PromptError.unless(
            form.calls or not known,
            "tools",
            "a model whose template knows no tools, or writes calls in an unknown form",
            "none, or tool_parser",
        )

        def reader() -> ReplyReader:
            calls = CallReader(form.calls, known) if known and form.calls else None
            return ReplyReader(thinking, inside=inside, calls=calls)

        with closing(self._start(ids, sampling_params, reader, form.shown)) as running:
            return [running.result()]

    def stream(
        self, prompt: str | Sequence[int] | Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Yield one sample's text as it comes; of a conversation, too. Raises as `generate`."""
        said = not isinstance(prompt, str) and any(isinstance(one, Mapping) for one in prompt)
        ids = self._chat_ids(prompt) if said else prompt  # type: ignore[arg-type]
        with closing(self._start(ids, params)) as running:  # type: ignore[arg-type]
            yield from running

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """Return a vector of each text, as the model's own files say.

        `prompt_name`: which of the model's prompts stands in front of each; `dimensions`: how many
        of the first elements. Raises PromptError, LimitError, and what the engine met.
        """
        said = self._embedding()
        if refused := said.refused(prompt_name, dimensions, self._size):
            raise PromptError(refused[0], "another value", refused[1])
        front = said.front(prompt_name)
        given = [texts] if isinstance(texts, str) else texts
        fine = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
        PromptError.unless(fine, "texts", "something else", "a text, or a list of texts")
        vectors = []
        with ExitStack() as ending:
            running = []
            for text in given:
                ids = tuple(self._tokenizer.encode(front + text))
                request = Request(prompt_ids=ids, max_new_tokens=0, pooling=said.pooling)
                self._engine.check(request)
                one = _Running(self._engine, request, None, ())
                running.append(ending.enter_context(closing(one)))
            for one in running:
                one.result()
                if one.pooled_D is not None:
                    vectors.append(said.vector(one.pooled_D, dimensions).tolist())
        return vectors

    def _chat_ids(self, messages: Sequence[Message], **more: Any) -> list[int]:
        PromptError.unless(
            isinstance(messages, Sequence) and all(isinstance(one, Mapping) for one in messages),
            "messages",
            "something else",
            "mappings, as OpenAI's",
        )
        return encode_history(self._form, Conversation(messages=messages, **more))

    def _start(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        reader: Callable[[], ReplyReader] = ReplyReader,
        shown: Mapping[int, str] | None = None,
    ) -> _Running:
        params = SamplingParams() if params is None else params
        PromptError.unless(
            isinstance(params, SamplingParams),
            "sampling_params",
            "something else",
            "SamplingParams, the same for all prompts",
        )
        whole = isinstance(prompt, list | tuple) and all(type(one) is int for one in prompt)
        PromptError.unless(
            isinstance(prompt, str) or whole, "prompt", "something else", "a text, or token ids"
        )
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop)
        request = Request(
            prompt_ids=tuple(ids),
            max_new_tokens=params.max_tokens,
            samples=params.n,
            sampling=params,
            stop=stop,
            stop_ids=frozenset() if params.ignore_eos else None,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )
        self._engine.check(request)
        text = prompt if isinstance(prompt, str) else None
        streams = [
            (MarkedStream(self._tokenizer, stop, request.prompt_ids, shown), reader())
            for _ in range(params.n)
        ]
        return _Running(self._engine, request, text, streams)


class _Running:
    """A request under way; iterate over it for the text of its first sample."""

    def __init__(
        self,
        engine: BackgroundEngine,
        request: Request,
        prompt: str | None,
        streams: Sequence[tuple[MarkedStream, ReplyReader]],
    ) -> None:
        self._engine, self._streams = engine, streams
        self._deliveries: SimpleQueue[Delivery] = SimpleQueue()
        outputs = [
            CompletionOutput(index, logprobs=None if request.logprobs is None else [])
            for index in range(request.samples)
        ]
        self._output = RequestOutput(
            prompt,
            list(request.prompt_ids),
            outputs,
            None if request.prompt_logprobs is None else [],
        )
        self.pooled_D: torch.Tensor | None = None
        self._ticket: Ticket = engine.submit(request, self._deliveries.put)

    def __iter__(self) -> Iterator[str]:
        first = self._output.outputs[0]
        ended, shown = False, 0
        while not ended:
            ended = self._take(self._deliveries.get())
            if len(first.text) > shown:
                yield first.text[shown:]
                shown = len(first.text)

    def result(self) -> RequestOutput:
        """Wait for the end."""
        while not self._take(self._deliveries.get()):
            pass
        return self._output

    def close(self) -> None:
        """Give up, if it has not ended."""
        self._engine.cancel(self._ticket)

    def _take(self, delivery: Delivery) -> bool:
        if delivery.error is not None:
            raise delivery.error
        if delivery.prompt is not None:
            self._output.num_cached_tokens = delivery.prompt.reused_tokens
            self.pooled_D = delivery.prompt.pooled_D
            if self._output.prompt_logprobs is not None:
                self._output.prompt_logprobs = [None, *delivery.prompt.logprobs]
        for token in delivery.tokens:
            output, (stream, reader) = (
                self._output.outputs[token.sample],
                self._streams[token.sample],
            )
            output.token_ids.append(token.token_id)
            text, final = stream.feed(token.token_id), token.finish_reason is not None
            piece = reader.feed(text + stream.flush() if final else text, final=final)
            output.text += piece.content
            output.reasoning += piece.reasoning
            add_calls(output.tool_calls, piece.calls)
            if token.logprob is not None and output.logprobs is not None:
                output.logprobs.append(token.logprob)
            if token.finish_reason is not None:
                output.finish_reason = token.finish_reason
        return delivery.ended


def settings_from(given: Mapping[str, object]) -> RunSettings:
    """Return the settings of a run, made of values in Python. None leaves a setting at its default.

    One value may stand for several. Raises SettingsError, with the nearest name for an unknown one.
    """
    known = settings_of(RunSettings)
    values = {}
    for name, value in given.items():
        hint = did_you_mean(name, known)
        SettingsError.unless(
            name in known,
            "LLM",
            f"the option {name!r}",
            f"one of tee-runner serve's, about the run{hint}; SamplingParams have others",
        )
        one, _, several = plain_type(known[name][1])
        truth = isinstance(value, bool) and one is not bool
        SettingsError.unless(not truth, f"LLM: {name}", str(value), "no true or false")
        if value is not None:
            values[name] = (value,) if several and isinstance(value, str | Path) else value
    try:
        return TypeAdapter(RunSettings).validate_python(values)
    except ValidationError as error:
        problem = first_problem(error, known)
        raise SettingsError(f"LLM: {problem.field}", problem.got, problem.expected) from None
