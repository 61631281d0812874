"""Vocabulary matching in every layer: plain, against permuted or mixed rows.

Token after token, the public model is run on what was read so far and each candidate, the most
likely first; the candidate whose hidden state is nearest to the observed one is taken
(arXiv 2505.18332). There the distance is L1; here it is Euclidean, which is one product for all
candidates. Whatever mixes the rows of a call leaves the space that they span: there a candidate is
compared with that space.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from tsqp.lab.leak.attack import View
from tsqp.lab.leak.matching import (
    FeatureMatcher,
    LastMade,
    Matcher,
    Matching,
    Observed,
    squares,
)
from tsqp.lab.leak.trace import Where


class Sorted(FeatureMatcher):
    """Rows but for the order of their features."""

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows with their features sorted."""
        return states_NI.sort(dim=-1).values


class _VocabularyMatching(Matching):
    source: ClassVar[str] = "vocabulary matching, arXiv 2505.18332"
    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.976
    needs: ClassVar[tuple[str, ...]] = ("no activations crossed",)
    ordered: ClassVar[bool]
    compares: ClassVar[type[FeatureMatcher]]

    def matcher(self, view: View) -> Matcher:
        """Return what compares rows."""
        return self.compares(ordered=self.ordered)


class PlainMatching(_VocabularyMatching):
    """Rows as they are, in their order."""

    name: ClassVar[str] = "vocabulary"
    reads: ClassVar[str] = "hidden states of every layer, by the nearest candidate's"
    ordered: ClassVar[bool] = True
    compares: ClassVar[type[FeatureMatcher]] = FeatureMatcher


class RowMatching(_VocabularyMatching):
    """Rows as they are, each compared with all that are left: against permuted rows."""

    name: ClassVar[str] = "vocabulary-rows"
    reads: ClassVar[str] = "hidden states of every layer among all rows not yet used"
    ordered: ClassVar[bool] = False
    compares: ClassVar[type[FeatureMatcher]] = FeatureMatcher


class FeatureMatching(_VocabularyMatching):
    """Sorted rows in their order: against a permuted hidden axis."""

    name: ClassVar[str] = "vocabulary-features"
    reads: ClassVar[str] = "sorted hidden states of every layer, by the nearest candidate's"
    ordered: ClassVar[bool] = True
    compares: ClassVar[type[FeatureMatcher]] = Sorted


class BothMatching(_VocabularyMatching):
    """Sorted rows, each compared with all that are left: against both permutations."""

    name: ClassVar[str] = "vocabulary-both"
    reads: ClassVar[str] = "sorted hidden states of every layer among all rows not yet used"
    ordered: ClassVar[bool] = False
    compares: ClassVar[type[FeatureMatcher]] = Sorted


# --------------------------------------------------------------------------------------- row space

# Of the largest singular value: what is below is rounding, of float32 or of bfloat16.
_RANK_TOLERANCE = 1e-5
_NEAR = 0.05


class RowSpace(Matcher):
    """How far a candidate is from the space that the rows span, relative to its length."""

    ordered = False

    def __init__(self) -> None:
        self._bases, self._squares = LastMade(), LastMade()

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        """See `Matcher.distances`. Rows that span everything say nothing: then all are far."""
        basis_BI = self._bases.of(observed.rows_RI, _basis)
        if len(basis_BI) >= observed.rows_RI.shape[1]:
            return torch.full((len(states_NI),), float("inf"))
        squares_N = self._squares.of(states_NI, squares)
        inside_N = (states_NI @ basis_BI.T).square().sum(-1) / squares_N
        distances_N = (1 - inside_N).clamp(min=0).sqrt()
        # Near 0 most digits have cancelled: what is left over tells more, and takes more memory.
        near = distances_N < _NEAR
        near_MI = states_NI[near]
        outside_MI = near_MI - (near_MI @ basis_BI.T) @ basis_BI
        distances_N[near] = torch.linalg.vector_norm(outside_MI, dim=-1) / squares_N[near].sqrt()
        return distances_N


def _basis(rows_RI: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows that span what some rows do: [B, I]."""
    _, sizes_B, basis_BI = torch.linalg.svd(rows_RI.double(), full_matrices=False)
    kept_BI: torch.Tensor = basis_BI[sizes_B > _RANK_TOLERANCE * sizes_B[:1]]
    return kept_BI.float()


class SubspaceMembership(Matching):
    """Candidates that lie in the space of a call's rows were in the call.

    In layer 0 that is a set, and at decode the token itself. Deeper, where a row depends on the
    tokens before it, candidates are run behind what was read so far, and their places follow. Blind
    where a call has as many rows as there are hidden dimensions, and of a segment whose hidden axis
    is permuted or rotated: candidates would have to be, too.
    """

    name: ClassVar[str] = "subspace"
    reads: ClassVar[str] = "which candidates lie in the space that a call's rows span"
    source: ClassVar[str] = "row space of any invertible mixing; checked on synthetic rows, V 6000"
    control: ClassVar[str] = "row-rotation"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.95

    def refuses(self, view: View) -> str | None:
        """No activations crossed, or none whose hidden axis is as it was."""
        if not view.row_places():
            return "no activations crossed"
        return None if self.places(view) else "the hidden axis is transformed"

    def matcher(self, view: View) -> Matcher:
        """Return what compares candidates with a space."""
        return RowSpace()

    def places(self, view: View) -> list[Where]:
        """Return where rows crossed, without segments under a mask."""
        masked = [one.mask is not None for one in view.policy.operators.get("segment", ())]
        return list(view.linear_places()) if any(masked) else view.row_places()
