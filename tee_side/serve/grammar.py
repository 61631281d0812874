"""Texts that must follow a grammar: a mask over the vocabulary for every token, by llguidance.

A grammar is compiled once a request, within limits on its text, on work and on memory; a sample
starts with a copy of it. No error quotes the grammar, nor the text that it is applied to.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from protocol.errors import ModelError, PromptError
from tee_side.chat.call_grammar import JSON_OPTIONS
from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve import grammar_trial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "tool schema"]

MAX_GRAMMAR_BYTES = 64 * 1024
_MOST_REMEMBERED = 1024

# What of a schema costs more than its size says, up to a quote: `pattern` and `patternProperties`.
_COSTLY = ('"pattern', '"multipleOf', '"x-guidance')


# A token by its id, which a process without the vocabulary does not know.
_BY_ID = re.compile(r"<\[\d+\]>")


class CallsSource(NamedTuple):
    """A grammar of calls, in Lark, and the schemas in it, as JSON."""

    lark: str
    schemas: str


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    `vocab_size`: of the logits, which may have more rows than the tokenizer has tokens; those rows
    are never allowed. `eos_token_ids`: what is allowed when a grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._raw = tokenizer.raw
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        # That passed a trial, by owner and digest: how long a grammar takes tells no other owner
        # that it was used.
        self._affordable: set[tuple[str, bytes]] = set()

    def compile(
        self,
        kind: GrammarKind,
        source: str | Mapping[str, Any] | Sequence[str] | CallsSource = "",
        owner: str = "",
        *,
        lead: str | None = None,
        where: str = "grammar",
    ) -> GrammarMatcher:
        """Return a grammar at its beginning. It may take seconds: never call it where others wait.

        `source`: a schema as text or object, unused for `json_object`; a regular expression of the
        whole text; a grammar in Lark's syntax as llguidance has it; a list of texts; or calls.
        `owner`: whose, by whom it may have been used before. `lead`: a grammar in Lark's syntax of
        what stands before the text, and @answer for the text. Raises
        PromptError with `where` for one that is malformed, unsupported, too large, too costly or
        that nothing can follow; ModelError where the model's tokenizer is not supported.
        """
        read, form = _READERS[kind]
        # The words of what reading raises may quote the source.
        with PromptError.instead_of(
            (ValueError, TypeError, AttributeError, RecursionError),
            where,
            f"a {kind} of another form",
            form,
        ):
            size, grammar, costly = read(source)
        if size > MAX_GRAMMAR_BYTES:
            raise PromptError(where, f"a {kind} of {size} bytes", f"at most {MAX_GRAMMAR_BYTES}")
        # In this process only what a process of its own could compile: what a client wrote, as it
        # is. In calls, that stands within texts, where a token by its id would be none.
        tried = _BY_ID.sub(r'\\"~\\"', grammar) if kind == "tool schema" else grammar
        fits = not costly or self._is_affordable(owner, tried)
        if lead is not None:
            first, *others = json.loads(grammar)["grammars"]
            parts = [{"lark_grammar": lead}, first | {"name": "answer"}, *others]
            grammar = json.dumps({"grammars": parts})
        matcher = grammar_trial.compiled(self._tokenizer, grammar) if fits else None
        if matcher is None or matcher.is_error():
            raise PromptError(
                where,
                f"a {kind} that is not compiled",
                "one that llguidance supports, within its limits",
            )
        return GrammarMatcher(matcher, where)

    def _is_affordable(self, owner: str, grammar: str) -> bool:
        key = owner, hashlib.sha256(grammar.encode()).digest()
        if key in self._affordable:
            return True
        if fits := _is_affordable(grammar):
            if len(self._affordable) >= _MOST_REMEMBERED:
                self._affordable.clear()
            self._affordable.add(key)
        return fits

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The library's own reading of the vocabulary; a second of work for a large one."""
        from llguidance import LLTokenizer

        size = max(self._vocab_size, self._raw.get_vocab_size())
        try:
            return LLTokenizer(self._raw.to_str(), n_vocab=size, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise ModelError(
                "tokenizer", str(error)[:160], "one that llguidance can read, and an EOS token"
            ) from None


@dataclass(frozen=True, eq=False)
class GrammarMatcher:
    """Where a text is in its grammar: that of a request at the beginning, of which samples copy it.

    `hide` and `advance` raise PromptError where the text so far makes the next mask too costly.
    """

    _matcher: LLMatcher
    _where: str

    def copy(self) -> GrammarMatcher:
        """Return another one at the same place."""
        return GrammarMatcher(self._matcher.deep_copy(), self._where)

    def hide(self, scores_V: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for every token that is not allowed next."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require(not self._matcher.is_error())
        allowed_V = np.unpackbits(mask, bitorder="little")[: len(scores_V)]
        return scores_V.masked_fill(torch.from_numpy(allowed_V == 0), float("-inf"))

    def advance(self, token_id: int) -> None:
        """Take a token that `hide` allowed."""
        self._require(self._matcher.consume_token(token_id))

    def _require(self, well: bool) -> None:
        expected = "one that a text can end, within the limits of a token"
        PromptError.unless(well, self._where, "a grammar that cannot go on", expected)


def _is_affordable(grammar: str) -> bool:
    """Compile in a process that has limits of its own."""
    trial = [sys.executable, "-I", str(Path(grammar_trial.__file__))]
    done = subprocess.run(trial, input=grammar.encode(), capture_output=True, check=False)
    return done.returncode == 0


# Readers of a source: bytes of it, the library's text for it, and whether it needs a trial.


def _read_schema(source: Any) -> tuple[int, str, bool]:
    from llguidance import LLMatcher

    schema = json.loads(source) if isinstance(source, str) else source
    text = json.dumps(schema, allow_nan=False)
    if not isinstance(schema, dict):
        raise TypeError("a schema is an object")
    grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    return len(text), grammar, any(word in text for word in _COSTLY)


def _read_regex(source: Any) -> tuple[int, str, bool]:
    from llguidance import LLMatcher

    return len(source.encode()), LLMatcher.grammar_from_regex(source), True


def _read_choice(source: Any) -> tuple[int, str, bool]:
    texts = list(source)
    if isinstance(source, str) or not all(isinstance(text, str) for text in texts) or not texts:
        raise TypeError("a choice is a list of texts")
    size = sum(len(text.encode()) for text in texts)
    return size, _lark("start: " + " | ".join(json.dumps(text) for text in texts)), False


def _read_calls(source: Any) -> tuple[int, str, bool]:
    costly = any(word in source.schemas for word in _COSTLY)
    return len(source.lark.encode()), _lark(source.lark), costly


def _lark(text: str) -> str:
    """Wrap a Lark grammar, which the library would otherwise take for JSON if it looked like it."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


_READERS: dict[GrammarKind, tuple[Callable[[Any], tuple[int, str, bool]], str]] = {
    "json_schema": (_read_schema, "a JSON object"),
    "json_object": (lambda _source: _read_schema({"type": "object"}), "anything"),
    "regex": (_read_regex, "Unicode text"),
    "grammar": (lambda text: (len(text.encode()), _lark(text), True), "Unicode text"),
    "choice": (_read_choice, "a list of Unicode texts"),
    "tool schema": (_read_calls, "schemas"),
}
