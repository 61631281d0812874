"""Tokens that a text may not have now: what vLLM's fields say of them, beside a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tee_side.engine.request import Grammar
from tee_side.engine.tokenizer import Tokenizer

_HIDDEN = float("-inf")


@dataclass(eq=False)
class TokenRules:
    """A grammar of the engine, with further rules.

    `hidden_V`: true for ids that are never allowed; None for none. `minimum`: tokens before one
    that ends a text (`end_ids`). `unwanted`: sequences of ids that a text does not have.
    """

    grammar: Grammar | None = None
    hidden_V: torch.Tensor | None = None
    minimum: int = 0
    end_ids: frozenset[int] = frozenset()
    unwanted: Sequence[tuple[int, ...]] = ()
    _ids: list[int] = field(default_factory=list)

    def copy(self) -> TokenRules:
        """Return another one at the same place."""
        grammar = None if self.grammar is None else self.grammar.copy()
        return replace(self, grammar=grammar, _ids=list(self._ids))

    def hide(self, scores_V: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for every token that is not allowed next.

        Where nothing would be left, unwanted texts and the minimum give way, and then all rules
        but the grammar.
        """
        if self.grammar is not None:
            scores_V = self.grammar.hide(scores_V)
        hidden = {ids[-1] for ids in self.unwanted if self._ends_with(ids[:-1])}
        if len(self._ids) < self.minimum:
            hidden |= self.end_ids
        known_V = scores_V.clone()
        if self.hidden_V is not None:
            known_V[self.hidden_V] = _HIDDEN
        ruled_V = known_V.clone()
        ruled_V[list(hidden)] = _HIDDEN
        left = (one for one in (ruled_V, known_V) if bool((one > _HIDDEN).any()))
        return next(left, scores_V)

    def _ends_with(self, ids: Sequence[int]) -> bool:
        return not ids or self._ids[-len(ids) :] == list(ids)

    def advance(self, token_id: int) -> None:
        """Take a token."""
        self._ids.append(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)


def all_but(allowed: Sequence[int], size: int) -> torch.Tensor:
    """Return for each of so many ids whether it is none of these."""
    hidden_V = torch.ones(size, dtype=torch.bool)
    hidden_V[list(allowed)] = False
    return hidden_V


def spellings(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the ids of words, at the beginning of a text and within one. Raises PromptError."""
    both = [text for word in words if word.strip() for text in (word, f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in both)
    return list(dict.fromkeys(ids for ids in found if ids))
