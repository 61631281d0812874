"""Subspace membership: whatever mixes the rows of a call leaves the space that they span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from tsqp.lab.leak.attack import Attack, Reading, View, Work
from tsqp.lab.leak.matching import (
    FIRST_PLACES,
    Matcher,
    Observed,
    Present,
    Squares,
    look_up,
    search,
)
from tsqp.lab.leak.trace import Where

# Of the largest singular value: what is below is rounding, of float32 or of bfloat16.
_RANK_TOLERANCE = 1e-5
_NEAR = 0.05


class RowSpace(Matcher):
    """How far a candidate is from the space that the rows span, relative to its length."""

    ordered = False

    def __init__(self) -> None:
        self._memo: tuple[torch.Tensor, torch.Tensor] | None = None
        self._squares = Squares()

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        """See `Matcher.distances`. Rows that span everything say nothing: then all are far."""
        basis_BI = self._basis(observed.rows_RI)
        if len(basis_BI) >= observed.rows_RI.shape[1]:
            return torch.full((len(states_NI),), float("inf"))
        squares_N = self._squares.of(states_NI)
        inside_N = (states_NI @ basis_BI.T).square().sum(-1) / squares_N
        distances_N = (1 - inside_N).clamp(min=0).sqrt()
        # Near 0 most digits have cancelled: what is left over tells more, and takes more memory.
        near = distances_N < _NEAR
        near_MI = states_NI[near]
        outside_MI = near_MI - (near_MI @ basis_BI.T) @ basis_BI
        distances_N[near] = torch.linalg.vector_norm(outside_MI, dim=-1) / squares_N[near].sqrt()
        return distances_N

    def _basis(self, rows_RI: torch.Tensor) -> torch.Tensor:
        if self._memo is None or self._memo[0] is not rows_RI:
            _, sizes_B, basis_BI = torch.linalg.svd(rows_RI.double(), full_matrices=False)
            kept = sizes_B > _RANK_TOLERANCE * sizes_B[:1]
            self._memo = (rows_RI, basis_BI[kept].float())
        return self._memo[1]


class SubspaceMembership(Attack):
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
        return None if _places(view) else "the hidden axis is transformed"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look decoded tokens up in layer 0, search the others in deeper places."""
        present = Present(view, RowSpace())
        for where in _places(view):
            if where in FIRST_PLACES:
                yield from look_up(view, RowSpace(), work, where)
            elif view.public.has_layers:
                yield from search(view, RowSpace(), where, work, present)


def _places(view: View) -> list[Where]:
    """Return where rows crossed, without segments under a mask."""
    masked = [one.mask is not None for one in view.policy.operators.get("segment", ())]
    return list(view.linear_places()) if any(masked) else view.row_places()
