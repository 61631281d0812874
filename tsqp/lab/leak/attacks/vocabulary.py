"""Vocabulary matching in every layer: plain, and against permuted rows, features, or both.

Token after token, the public model is run on what was read so far and each candidate, the most
likely first; the candidate whose hidden state is nearest to the observed one is taken
(arXiv 2505.18332). There the distance is L1; here it is Euclidean, which is one product for all
candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.matching import FIRST_PLACES, FeatureMatcher, Present, look_up, search
from tsqp.lab.leak.trace import Where


class Sorted(FeatureMatcher):
    """Rows but for the order of their features."""

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows with their features sorted."""
        return states_NI.sort(dim=-1).values


class _VocabularyMatching(Attack):
    source: ClassVar[str] = "vocabulary matching, arXiv 2505.18332"
    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.976
    ordered: ClassVar[bool]
    matcher: ClassVar[type[FeatureMatcher]]

    def refuses(self, view: View) -> str | None:
        """No activations crossed."""
        return None if view.row_places() else "no activations crossed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look up in the first layer, search at every other place."""
        present = None if self.ordered else Present(view, self.matcher(ordered=False))
        for where in view.row_places():
            matcher = self.matcher(ordered=self.ordered)
            if where in FIRST_PLACES:
                yield from look_up(view, matcher, work, where)
            elif view.public.has_layers:
                yield from search(view, matcher, where, work, present)


class PlainMatching(_VocabularyMatching):
    """Rows as they are, in their order."""

    name: ClassVar[str] = "vocabulary"
    reads: ClassVar[str] = "hidden states of every layer, by the nearest candidate's"
    ordered: ClassVar[bool] = True
    matcher: ClassVar[type[FeatureMatcher]] = FeatureMatcher


class RowMatching(_VocabularyMatching):
    """Rows as they are, each compared with all that are left: against permuted rows."""

    name: ClassVar[str] = "vocabulary-rows"
    reads: ClassVar[str] = "hidden states of every layer among all rows not yet used"
    ordered: ClassVar[bool] = False
    matcher: ClassVar[type[FeatureMatcher]] = FeatureMatcher


class FeatureMatching(_VocabularyMatching):
    """Sorted rows in their order: against a permuted hidden axis."""

    name: ClassVar[str] = "vocabulary-features"
    reads: ClassVar[str] = "sorted hidden states of every layer, by the nearest candidate's"
    ordered: ClassVar[bool] = True
    matcher: ClassVar[type[FeatureMatcher]] = Sorted


class BothMatching(_VocabularyMatching):
    """Sorted rows, each compared with all that are left: against both permutations."""

    name: ClassVar[str] = "vocabulary-both"
    reads: ClassVar[str] = "sorted hidden states of every layer among all rows not yet used"
    ordered: ClassVar[bool] = False
    matcher: ClassVar[type[FeatureMatcher]] = Sorted
