"""The model as clients see it, and answers: of text, streamed or whole, and embeddings.

JSON is put together from pieces that are rendered once: a stream has hundreds of tokens a second,
and a model of pydantic for each would cost more than the token.
"""

from __future__ import annotations

import base64
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TypeAlias

from protocol.model.config import ModelConfig
from tee_side.chat.template import ChatTemplate
from tee_side.engine.embedding import Embedding
from tee_side.engine.request import FinishReason, Logprob, NewToken, Request
from tee_side.engine.tokenizer import TextStream, Tokenizer
from tee_side.serve.background import Delivery

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
    """Tokens of an HTTP request; `cached`: of the prompt, those that were not computed again."""

    prompt: int
    completion: int = 0
    cached: int = 0

    def rounded(self, to: int) -> TokenCounts:
        """Return them as multiples of `to`, rounded up."""
        prompt, completion, cached = (
            n + -n % to for n in (self.prompt, self.completion, self.cached)
        )
        return TokenCounts(prompt, completion, min(cached, prompt))


@dataclass(frozen=True, kw_only=True)
class OfferedModel:
    """The model as clients see it.

    `max_model_len`: tokens of a prompt and its completion. `default_max_tokens`: of a chat's answer
    where the client names no limit. `created`: seconds since 1970. `read_embedding`: reads how
    texts become vectors.
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


# Forms: how an endpoint writes what all of them have. Everything is JSON.
#   entry      a token's log-probabilities; None for the first token of a prompt, which has none
#   logprobs   those of several tokens; the form may write null
#   opening    the delta that a stream's choice begins with, behind its index
#   delta      the text of a chunk's choice, behind its index
#   whole      the text of a whole choice, behind its index


class CompletionForm:
    """OpenAI's text_completion; log-probabilities are four lists."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

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

    def delta(self, text: str) -> str:
        """Write the text."""
        return f'"text":{json.dumps(text)}'

    whole = delta


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

    opening = '"delta":{"role":"assistant","content":""}'

    def delta(self, text: str) -> str:
        """Write the text of a chunk."""
        return f'"delta":{{"content":{json.dumps(text)}}}'

    def whole(self, text: str) -> str:
        """Write the message."""
        return f'"message":{{"role":"assistant","content":{json.dumps(text)},"refusal":null}}'


def _named(names: TokenNames, token_id: int, logprob: float) -> str:
    name, listed = names(token_id)
    return f'"token":{name},"logprob":{number(logprob)},"bytes":{listed}'


AnswerForm: TypeAlias = CompletionForm | ChatForm


class _Choice:
    """One sample of a request, whose tokens become pieces of text.

    `offset`: characters in front of the next token. It counts what stop strings hold back, so it
    depends on the tokens alone; a special token, and a part of a character, has no characters.
    `written`, `entries`: of the whole so far; a stream does not collect them.
    """

    def __init__(self, index: int, model: OfferedModel, request: Request, offset: int) -> None:
        self.index = index
        self.offset = offset
        before = request.prompt_ids
        self._shown = TextStream(model.tokenizer, request.stop, before)
        # Nothing is held back in this one.
        self._whole = TextStream(model.tokenizer, (), before) if request.stop else None
        self._stop_ids = (
            model.config.eos_token_ids if request.stop_ids is None else request.stop_ids
        )
        self.finish: FinishReason | None = None
        self.written: list[str] = []
        self.entries: list[Entry] = []

    def feed(self, token: NewToken) -> str:
        """Add a token, and return the text that can be shown now: all, with the last token."""
        token_id, finish = token.token_id, token.finish_reason
        if finish == "stop" and token_id in self._stop_ids:
            return self._shown.flush()
        text = self._shown.feed(token_id)
        self.offset += len(text if self._whole is None else self._whole.feed(token_id))
        return text if finish is None else text + self._shown.flush()


class WholeAnswer:
    """Collects the choices, and writes one JSON object at the end.

    `requests`: one a prompt; choices are numbered prompt by prompt. `echo`: what each choice begins
    with, by prompt. `with_usage`: whether a stream tells the counts at its end, as others do.
    """

    content_type = "application/json"

    def __init__(
        self,
        form: AnswerForm,
        model: OfferedModel,
        requests: Sequence[Request],
        echo: Sequence[str] | None = None,
        *,
        with_usage: bool = True,
    ) -> None:
        self._with_usage = with_usage
        self._form, self._model, self._requests, self._echo = form, model, requests, echo
        count = 0
        self._choices: list[list[_Choice]] = []
        for prompt, request in enumerate(requests):
            begun = 0 if echo is None else len(echo[prompt])
            indices = range(count, count + request.samples)
            self._choices.append([_Choice(at, model, request, begun) for at in indices])
            count += request.samples

    def add(self, prompt: int, delivery: Delivery) -> str:
        """Take what came of a prompt, and return what can be sent now. Raises ModelError."""
        return "".join(self._pieces(prompt, delivery))

    def finish(self, counts: TokenCounts) -> str:
        """Return the end of the answer."""
        choices = ",".join(
            self._written(c, self._form.whole("".join(c.written)), c.entries, c.finish)
            for choices in self._choices
            for c in choices
        )
        begin = head(self._form.id_prefix, self._form.whole_object, self._model)
        return f'{begin}"choices":[{choices}],"usage":{usage(counts)}}}'

    def _pieces(self, prompt: int, delivery: Delivery) -> Iterator[str]:
        choices, form, names = self._choices[prompt], self._form, self._model.names
        if (read := delivery.prompt) is not None:
            # What stands in front of the first token.
            for choice in choices:
                yield self._open(choice)
            if self._echo is not None:
                request, entries = self._requests[prompt], list[Entry]()
                if request.logprobs is not None and request.prompt_logprobs is not None:
                    stream, offset = TextStream(self._model.tokenizer), 0
                    rows = zip(request.prompt_ids, (None, *read.logprobs), strict=True)
                    for token_id, logprob in rows:
                        entries.append(form.entry(names, token_id, logprob, offset))
                        offset += len(stream.feed(token_id))
                for choice in choices:
                    yield self._write(choice, self._echo[prompt], entries, None)
        for token in delivery.tokens:
            choice, entries = choices[token.sample], list[Entry]()
            if (logprob := token.logprob) is not None:
                entries = [form.entry(names, token.token_id, logprob, choice.offset)]
            choice.finish = token.finish_reason
            yield self._write(choice, choice.feed(token), entries, token.finish_reason)
        if delivery.ended:
            # Where a prompt was read only.
            for choice in choices:
                if choice.finish is None:
                    choice.finish = "length"
                    yield self._write(choice, "", (), choice.finish)

    def _written(
        self, choice: _Choice, content: str, entries: Sequence[Entry], finish: FinishReason | None
    ) -> str:
        logprobs = self._form.logprobs(entries) if entries else "null"
        return (
            f'{{"index":{choice.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{_FINISH[finish]}}}'
        )

    def _open(self, choice: _Choice) -> str:
        return ""

    def _write(
        self, choice: _Choice, text: str, entries: Sequence[Entry], finish: FinishReason | None
    ) -> str:
        choice.written.append(text)
        choice.entries.extend(entries)
        return ""


class StreamedAnswer(WholeAnswer):
    """Writes an event for each token."""

    content_type = "text/event-stream"

    @cached_property
    def _head(self) -> str:
        return f"data: {head(self._form.id_prefix, self._form.chunk_object, self._model)}"

    def finish(self, counts: TokenCounts) -> str:
        """Return the last chunk, if there is one with the counts."""
        last = f'{self._head}"choices":[],"usage":{usage(counts)}}}\n\n'
        return last if self._with_usage else ""

    def _open(self, choice: _Choice) -> str:
        opening = self._form.opening
        return "" if opening is None else self._event(choice, opening, (), None)

    def _write(
        self, choice: _Choice, text: str, entries: Sequence[Entry], finish: FinishReason | None
    ) -> str:
        return self._event(choice, self._form.delta(text), entries, finish)

    def _event(
        self, choice: _Choice, content: str, entries: Sequence[Entry], finish: FinishReason | None
    ) -> str:
        written = self._written(choice, content, entries, finish)
        without = ',"usage":null' if self._with_usage else ""
        return f'{self._head}"choices":[{written}]{without}}}\n\n'


class EmbeddingAnswer:
    """Collects the vectors. `as_base64`: of float32, lowest byte first; else as numbers.

    `dimensions`: how many of their first elements; None for all.
    """

    content_type = "application/json"

    def __init__(
        self, model: OfferedModel, count: int, *, as_base64: bool, dimensions: int | None = None
    ) -> None:
        self._model, self._as_base64, self._dimensions = model, as_base64, dimensions
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

    def finish(self, counts: TokenCounts) -> str:
        """Return the whole answer."""
        used = f'{{"prompt_tokens":{counts.prompt},"total_tokens":{counts.prompt}}}'
        begin = head("embd-", "list", self._model)
        return f'{begin}"data":[{",".join(self._found)}],"usage":{used}}}'


AnswerWriter: TypeAlias = WholeAnswer | EmbeddingAnswer


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
    }
    return json.dumps(fields, separators=(",", ":"))
