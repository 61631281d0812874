"""The model as clients see it, and answers: of text, streamed or whole, and embeddings.

JSON is put together from pieces that are rendered once: a stream has hundreds of tokens a second,
and a model of pydantic for each would cost more than the token.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

from protocol.model.config import ModelConfig
from tee_side.chat.calls import CallPiece
from tee_side.chat.reply import MarkedStream, Piece, ReplyForm, ReplyReader, add_calls
from tee_side.chat.template import ChatTemplate
from tee_side.engine.embedding import Embedding
from tee_side.engine.request import FinishReason, Logprob, NewToken, PromptRead, Request
from tee_side.engine.tokenizer import TextStream, Tokenizer
from tee_side.serve.background import Delivery
from tee_side.serve.errors import ApiError

TokenNames: TypeAlias = Callable[[int], tuple[str, str]]


# How byte-level BPE writes bytes: those that print as themselves, the others from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}
# How sentencepiece names the token of a byte.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Returns the bytes that a token of a model stands for, which may be part of a character.

    They are those inside of a text: a tokenizer that begins a text with a space of its own leaves
    that one out when it decodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, raw = tokenizer, tokenizer.raw
        self._added = {i: token.content for i, token in raw.get_added_tokens_decoder().items()}
        # Names of the library's decoders that this tokenizer has; its state is their JSON.
        state = {} if raw.decoder is None else json.loads(raw.decoder.__getstate__())
        self._decoders = {part.get("type") for part in state.get("decoders", [state])}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token.

        A special token stands for its name, an id that is no token's (a padded row of the
        embedding) for nothing. Raises ModelError.
        """
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.raw.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders and all(c in _BYTE_OF for c in token):
            return bytes(_BYTE_OF[c] for c in token)
        if "ByteFallback" in self._decoders and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._decoders & {"ByteFallback", "Metaspace"}:
            return token.replace("▁", " ").encode()
        return self._tokenizer.decode([token_id]).encode()


def token_name(token_bytes: TokenBytes, token_id: int) -> tuple[str, str]:
    r"""Return a token's name, and its bytes as a list, or null for an id without a token, as JSON.

    No two tokens of different bytes have the same name. A part of a character is
    `bytes:\xe2\x80`, as OpenAI's completions write it.
    """
    content = token_bytes(token_id)
    try:
        name = content.decode("utf-8") or f"token_id:{token_id}"
    except UnicodeDecodeError:
        name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
    listed = "null" if not content else json.dumps(list(content), separators=(",", ":"))
    return json.dumps(name), listed


def number(logprob: float) -> str:
    """Write a logprob: JSON has no infinity, and clients know -9999.0 as what cannot be."""
    return repr(max(logprob, -9999.0))


@dataclass(slots=True)
class TokenCounts:
    """Tokens of an HTTP request.

    `cached`: of the prompt, those that were not computed again; `reasoning`: of the completion,
    those of thinking.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0

    def rounded(self, to: int) -> TokenCounts:
        """Return them as multiples of `to`, rounded up."""
        prompt, completion, cached, reasoning = (n + -n % to for n in astuple(self))
        return TokenCounts(prompt, completion, min(cached, prompt), min(reasoning, completion))


@dataclass(frozen=True, kw_only=True)
class OfferedModel:
    """The model as clients see it.

    `max_model_len`: tokens of a prompt and its completion. `default_max_tokens`: of a chat's answer
    where the client names no limit. `created`: seconds since 1970. `read_embedding`: reads how
    texts become vectors. `tool_parser`: the form of its calls, None for what its template shows.
    `reasoning_effort`, `sampling`: what holds where a request says nothing.
    """

    name: str
    policy: str
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    max_model_len: int
    default_max_tokens: int
    system_fingerprint: str
    created: int
    read_embedding: Callable[[], Embedding] = Embedding
    tool_parser: str | None = None
    reasoning_effort: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def replies(self) -> ReplyForm:
        """How it writes replies."""
        return ReplyForm(self.template, self.tool_parser)

    @cached_property
    def embedding(self) -> Embedding:
        """How texts become vectors. Raises ModelError for what files say and we do not compute."""
        return self.read_embedding()

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Bytes of its tokens."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def names(self) -> TokenNames:
        """Names of its tokens."""
        return cache(partial(token_name, self.token_bytes))


# Log-probabilities of one token, as pieces of JSON.
Entry: TypeAlias = tuple[str, ...]

_FINISH: dict[FinishReason | None, str] = {None: "null", "stop": '"stop"', "length": '"length"'}
# Events are filled up to a multiple of so many bytes.
_FILLED_TO = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How an answer is written, beside its endpoint's form.

    `reader`: makes what tells thinking, text and calls apart, None for text alone. `shown`: special
    tokens that are text, by their ids. `keeps_stop`: a stop string is part of the text. `echo`:
    what each choice begins with, by prompt. `usage`: a stream tells the counts at its end, as
    others do; `running_usage`: in each chunk, too. `filled`: random letters fill events up.
    `prompt_logprobs`: how many of the likeliest are told of each token of a prompt, None for none.
    `ids`: token ids are told; `names_are_ids`: in place of what tokens are.
    """

    reader: Callable[[], ReplyReader] | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    keeps_stop: bool = False
    echo: Sequence[str] | None = None
    usage: bool = True
    running_usage: bool = False
    filled: bool = False
    prompt_logprobs: int | None = None
    ids: bool = False
    names_are_ids: bool = False


# Forms: how an endpoint writes what all of them have. Everything is JSON.
#   entry      a token's log-probabilities; None for the first token of a prompt, which has none
#   logprobs   those of several tokens; the form may write null
#   opening    the delta that a stream's choice begins with, behind its index
#   delta      a chunk's piece of a choice, behind its index
#   whole      a whole choice, behind its index
# `of_prompt_apart`: what is told of a prompt stands beside the choices, not in each.


class CompletionForm:
    """OpenAI's text_completion; log-probabilities are four lists."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    of_prompt_apart = False

    def entry(
        self, names: TokenNames, token_id: int, logprob: Logprob | None, offset: int
    ) -> Entry:
        """Write the token, its logprob, the likeliest with the token itself, and the offset."""
        name = names(token_id)[0]
        if logprob is None:
            return name, "null", "null", str(offset)
        top: dict[str, str] = {}
        for other, value in logprob.top:
            top.setdefault(names(other)[0], number(value))
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

    # The first chunk has text.
    opening = None

    def delta(self, piece: Piece) -> str:
        """Write the text."""
        return f'"text":{json.dumps(piece.content)}'

    def whole(self, pieces: Sequence[Piece]) -> str:
        """Write the text."""
        return f'"text":{json.dumps("".join(piece.content for piece in pieces))}'


class ChatForm:
    """OpenAI's chat.completion; log-probabilities are a list of objects."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    of_prompt_apart = True

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

    opening = '"delta":{"role":"assistant","content":""}'

    def delta(self, piece: Piece) -> str:
        """Write a chunk: text, unless there is something else alone."""
        said: dict[str, Any] = {}
        if piece.reasoning:
            said |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.calls:
            said["tool_calls"] = [_chunk_of_call(call) for call in piece.calls]
        if piece.content or not said:
            said["content"] = piece.content
        return f'"delta":{json.dumps(said, separators=(",", ":"))}'

    def whole(self, pieces: Sequence[Piece]) -> str:
        """Write the message; its content is null where tools are called without a word."""
        content = "".join(piece.content for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        calls: list[dict[str, Any]] = []
        add_calls(calls, chain.from_iterable(piece.calls for piece in pieces))
        said: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            said |= {"content": content or None, "tool_calls": calls}
        if reasoning:
            said |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return f'"message":{json.dumps(said, separators=(",", ":"))}'


def _chunk_of_call(call: CallPiece) -> dict[str, Any]:
    function: dict[str, str | None] = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    function = {"name": call.name} | function
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _named(names: TokenNames, token_id: int, logprob: float) -> str:
    name, listed = names(token_id)
    return f'"token":{name},"logprob":{number(logprob)},"bytes":{listed}'


AnswerForm: TypeAlias = CompletionForm | ChatForm


class _Choice:
    """One sample of a request, whose tokens become pieces.

    `offset`: characters in front of the next token. It counts what stop strings hold back, so it
    depends on the tokens alone; a special token, and a part of a character, has no characters.
    `thinks`: its last token belongs to its thinking. `pieces`, `entries`, `ids`: of the whole so
    far; a stream does not collect them.
    """

    def __init__(
        self, index: int, model: OfferedModel, request: Request, shape: Shape, offset: int
    ) -> None:
        self.index = index
        self.offset = offset
        before = request.prompt_ids
        self._shown = MarkedStream(model.tokenizer, request.stop, before, shape.shown)
        self._shown.keeps_stop = shape.keeps_stop
        # Nothing is held back in this one.
        self._whole = TextStream(model.tokenizer, (), before) if request.stop else None
        self._stop_ids = (
            model.config.eos_token_ids if request.stop_ids is None else request.stop_ids
        )
        self.reader = None if shape.reader is None else shape.reader()
        self.thinks = False
        self.finish: FinishReason | None = None
        self.pieces: list[Piece] = []
        self.entries: list[Entry] = []
        self.ids: list[int] = []

    def feed(self, token: NewToken) -> Piece:
        """Add a token, and return what can be shown now: all, with the last token."""
        token_id, finish = token.token_id, token.finish_reason
        if finish == "stop" and token_id in self._stop_ids:
            text = self._shown.flush()
        else:
            text = self._shown.feed(token_id)
            self.offset += len(text if self._whole is None else self._whole.feed(token_id))
            text += "" if finish is None else self._shown.flush()
        final = finish is not None
        return Piece(text) if self.reader is None else self.reader.feed(text, final=final)

    @property
    def ending(self) -> str:
        """Why it has ended, as JSON."""
        called = self.finish == "stop" and self.reader is not None and self.reader.called
        return '"tool_calls"' if called else _FINISH[self.finish]


class _Answer:
    """What all have.

    `streamed`: what is returned is sent as it comes, and `done` at the end. `counts`: of the HTTP
    request; they are told as multiples of `round_usage`.
    """

    content_type = "application/json"
    streamed, done = False, ""

    def __init__(self) -> None:
        self.counts, self.round_usage = TokenCounts(0), 1

    def failed(self, error: ApiError) -> str:
        """Return the last event of a stream that fails."""
        return f"data: {error.body}\n\n"


class WholeAnswer(_Answer):
    """Collects the choices, and writes one JSON object at the end.

    `requests`: one a prompt; choices are numbered prompt by prompt.
    """

    def __init__(
        self,
        form: AnswerForm,
        model: OfferedModel,
        requests: Sequence[Request],
        shape: Shape | None = None,
    ) -> None:
        self._shape = shape = Shape() if shape is None else shape
        self._form, self._model, self._requests = form, model, requests
        self._names = _id_name if shape.names_are_ids else model.names
        super().__init__()
        count, echo = 0, shape.echo
        self._choices: list[list[_Choice]] = []
        for prompt, request in enumerate(requests):
            begun = 0 if echo is None else len(echo[prompt])
            indices = range(count, count + request.samples)
            self._choices.append([_Choice(at, model, request, shape, begun) for at in indices])
            count += request.samples
        # What is told of each prompt.
        self._of_prompts = [""] * len(requests)

    def add(self, prompt: int, delivery: Delivery) -> str:
        """Take what came of a prompt, and return what can be sent now. Raises ModelError."""
        return "".join(self._pieces(prompt, delivery))

    def finish(self) -> str:
        """Return the end of the answer."""
        form, (first, *_) = self._form, self._of_prompts
        within, beside = ([""], first) if form.of_prompt_apart else (self._of_prompts, "")
        written = [
            self._written(c, form.whole(c.pieces), c.entries, c.ids, more)
            for choices, more in zip(self._choices, within, strict=True)
            for c in choices
        ]
        begin = head(form.id_prefix, form.whole_object, self._model)
        return f'{begin}"choices":[{",".join(written)}],"usage":{self._usage()}{beside}}}'

    def _usage(self) -> str:
        return usage(self.counts.rounded(self.round_usage))

    def _pieces(self, prompt: int, delivery: Delivery) -> Iterator[str]:
        choices, form, names = self._choices[prompt], self._form, self._names
        if (read := delivery.prompt) is not None:
            self._of_prompts[prompt] = self._of_prompt(self._requests[prompt], read)
            # What stands in front of the first token.
            for choice in choices:
                yield self._open(choice, self._of_prompts[prompt])
            if (echo := self._shape.echo) is not None:
                request, entries = self._requests[prompt], list[Entry]()
                if request.logprobs is not None and request.prompt_logprobs is not None:
                    stream, offset = TextStream(self._model.tokenizer), 0
                    rows = zip(request.prompt_ids, (None, *read.logprobs), strict=True)
                    for token_id, logprob in rows:
                        # There may be more, for `prompt_logprobs`.
                        few = logprob and replace(logprob, top=logprob.top[: request.logprobs])
                        entries.append(form.entry(names, token_id, few, offset))
                        offset += len(stream.feed(token_id))
                for choice in choices:
                    yield self._write(choice, Piece(echo[prompt]), entries, ())
        for token in delivery.tokens:
            choice, entries = choices[token.sample], list[Entry]()
            if (logprob := token.logprob) is not None:
                entries = [form.entry(names, token.token_id, logprob, choice.offset)]
            choice.thinks = choice.reader is not None and choice.reader.thinks
            self.counts.reasoning += choice.thinks
            choice.finish = token.finish_reason
            yield self._write(choice, choice.feed(token), entries, (token.token_id,))
        if delivery.ended:
            # Where a prompt was read only.
            for choice in choices:
                if choice.finish is None:
                    choice.finish = "length"
                    yield self._write(choice, Piece(), (), ())

    def _of_prompt(self, request: Request, read: PromptRead) -> str:
        """Write what is told of a prompt, as vLLM does."""
        told = f',"prompt_token_ids":{list(request.prompt_ids)}' if self._shape.ids else ""
        if (most := self._shape.prompt_logprobs) is None:
            return told
        rows = [
            {
                str(token_id): {"logprob": max(value, -9999.0), "rank": rank}
                | {"decoded_token": json.loads(self._model.names(token_id)[0])}
                for token_id, value, rank in _ranked(logprob, most)
            }
            for logprob in read.logprobs
        ]
        return f'{told},"prompt_logprobs":{json.dumps([None, *rows], separators=(",", ":"))}'

    def _written(
        self,
        choice: _Choice,
        content: str,
        entries: Sequence[Entry],
        ids: Sequence[int],
        more: str = "",
    ) -> str:
        logprobs = self._form.logprobs(entries) if entries else "null"
        more += f',"token_ids":{list(ids)}' if self._shape.ids else ""
        return (
            f'{{"index":{choice.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{choice.ending}{more}}}'
        )

    def _open(self, choice: _Choice, more: str) -> str:
        return ""

    def _write(
        self, choice: _Choice, piece: Piece, entries: Sequence[Entry], ids: Sequence[int]
    ) -> str:
        choice.pieces.append(piece)
        choice.entries.extend(entries)
        choice.ids.extend(ids)
        return ""


def _ranked(logprob: Logprob, most: int) -> Iterator[tuple[int, float, int | None]]:
    """Yield id, logprob and rank of the token itself and of the likeliest; its rank, if known."""
    top = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top[:most], 1)}
    yield logprob.token_id, logprob.logprob, top.pop(logprob.token_id, (0.0, None))[1]
    for token_id, (value, rank) in top.items():
        yield token_id, value, rank


def _id_name(token_id: int) -> tuple[str, str]:
    return f'"token_id:{token_id}"', "null"


class StreamedAnswer(WholeAnswer):
    """Writes an event for each token."""

    content_type = "text/event-stream"
    streamed, done = True, "data: [DONE]\n\n"

    @cached_property
    def _head(self) -> str:
        return f"data: {head(self._form.id_prefix, self._form.chunk_object, self._model)}"

    def finish(self) -> str:
        """Return the last chunk, if there is one with the counts."""
        last = f'{self._head}"choices":[],"usage":{self._usage()}}}\n\n'
        return last if self._shape.usage else ""

    def _open(self, choice: _Choice, more: str) -> str:
        opening = self._form.opening
        if opening is None:
            return self._event(choice, '"text":""', (), (), more) if more else ""
        return self._event(choice, opening, (), (), more)

    def _write(
        self, choice: _Choice, piece: Piece, entries: Sequence[Entry], ids: Sequence[int]
    ) -> str:
        return self._event(choice, self._form.delta(piece), entries, ids)

    def _event(
        self,
        choice: _Choice,
        content: str,
        entries: Sequence[Entry],
        ids: Sequence[int],
        more: str = "",
    ) -> str:
        within, beside = ("", more) if self._form.of_prompt_apart else (more, "")
        written = self._written(choice, content, entries, ids, within)
        told = self._usage() if self._shape.running_usage else "null"
        counted = f',"usage":{told}' if self._shape.usage else ""
        event = f'{self._head}"choices":[{written}]{counted}{beside}'
        return f"{filled(event) if self._shape.filled else event}}}\n\n"


def filled(event: str) -> str:
    """Fill an event up that lacks its last bracket, so that its size tells less of its text."""
    letters = -(len(event) + len(',"obfuscation":""}')) % _FILLED_TO
    return f'{event},"obfuscation":"{secrets.token_hex(_FILLED_TO // 2)[:letters]}"'


class EmbeddingAnswer(_Answer):
    """Collects the vectors. `as_base64`: of float32, lowest byte first; else as numbers.

    `dimensions`: how many of their first elements; None for all.
    """

    def __init__(
        self, model: OfferedModel, count: int, *, as_base64: bool, dimensions: int | None = None
    ) -> None:
        self._model, self._as_base64, self._dimensions = model, as_base64, dimensions
        super().__init__()
        self._found = [""] * count

    def add(self, prompt: int, delivery: Delivery) -> str:
        """Take a vector."""
        read = delivery.prompt
        if read is not None and read.pooled_D is not None:
            vector_D = self._model.embedding.vector(read.pooled_D, self._dimensions)
            if self._as_base64:
                content = vector_D.numpy().astype("<f4").tobytes()
                written = f'"{base64.b64encode(content).decode()}"'
            else:
                written = json.dumps(vector_D.tolist(), separators=(",", ":"))
            self._found[prompt] = f'{{"object":"embedding","index":{prompt},"embedding":{written}}}'
        return ""

    def finish(self) -> str:
        """Return the whole answer."""
        prompt = self.counts.rounded(self.round_usage).prompt
        used = f'{{"prompt_tokens":{prompt},"total_tokens":{prompt}}}'
        begin = head("embd-", "list", self._model)
        return f'{begin}"data":[{",".join(self._found)}],"usage":{used}}}'


AnswerWriter: TypeAlias = WholeAnswer | EmbeddingAnswer
# Makes what writes an answer.
Writing: TypeAlias = Callable[[OfferedModel, Sequence[Request], Shape], WholeAnswer]


def head(id_prefix: str, kind: str, model: OfferedModel) -> str:
    """Return the beginning of a JSON object, with a new id."""
    fields = {
        "id": f"{id_prefix}{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.system_fingerprint,
    }
    return f"{json.dumps(fields, separators=(',', ':'))[:-1]},"


def usage(counts: TokenCounts) -> str:
    """Write the counts of an answer."""
    fields = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning},
    }
    return json.dumps(fields, separators=(",", ":"))
