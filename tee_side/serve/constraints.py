"""Tokens that a text may not have now: what vLLM's fields say of them, beside a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tee_side.engine.request import Grammar
from tee_side.engine.tokenizer import Tokenizer

_HIDDEN = float("-inf")


@dataclass
class TokenRules:
    """A grammar of the engine, with further rules.

    `allowed`: no other ids; None for all. `minimum`: tokens before one that ends a text
    (`end_ids`). `unwanted`: sequences of ids that a text does not have.
    """

    grammar: Grammar | None = None
    allowed: Sequence[int] | None = None
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

        A grammar's own end wins: where it leaves nothing else, the rules hide nothing of it.
        """
        if self.grammar is not None:
            scores_V = self.grammar.hide(scores_V)
        hidden = {ids[-1] for ids in self.unwanted if self._ends_with(ids[:-1])}
        if len(self._ids) < self.minimum:
            hidden |= self.end_ids
        ruled_V = scores_V.clone()
        if self.allowed is not None:
            others_V = torch.ones(len(ruled_V), dtype=torch.bool)
            others_V[list(self.allowed)] = False
            ruled_V[others_V] = _HIDDEN
        ruled_V[list(hidden)] = _HIDDEN
        return ruled_V if bool((ruled_V > _HIDDEN).any()) else scores_V

    def _ends_with(self, ids: Sequence[int]) -> bool:
        return not ids or self._ids[-len(ids) :] == list(ids)

    def advance(self, token_id: int) -> None:
        """Take a token."""
        self._ids.append(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)


def spellings(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the ids of words, at the beginning of a text and within one. Raises PromptError."""
    both = [text for word in words if word.strip() for text in (word, f" {word.lstrip()}")]
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in both)
    return list(dict.fromkeys(ids for ids in found if ids))
