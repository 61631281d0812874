"""Signs, integers, permutations and rotations have their distributions. A fixed key decides."""

from __future__ import annotations

import math

import pytest
import torch

from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import integers, orthogonal, permutation, signs

KEY = bytes(range(32))


def test_signs_are_of_both_kinds_equally() -> None:
    drawn = signs(Randomness(KEY), 200, 200)
    assert set(drawn.unique().tolist()) == {-1, 1}
    assert abs(float(drawn.float().mean())) < 5 / math.sqrt(drawn.numel())


def test_integers_reach_both_ends() -> None:
    counts = torch.bincount(integers(Randomness(KEY), 7, 7000), minlength=7)
    assert len(counts) == 7
    # Within 5 sigma of its mean, with 6 degrees of freedom.
    assert abs(float(((counts - 1000.0) ** 2 / 1000).sum()) - 6) < 5 * math.sqrt(12)


def test_permutations_are_equally_likely() -> None:
    generator = Randomness(KEY)
    orders = torch.stack([permutation(generator, 4) for _ in range(12_000)])
    counts = orders.unique(dim=0, return_counts=True)[1]
    assert len(counts) == 24
    assert abs(float(((counts - 500.0) ** 2 / 500).sum()) - 23) < 5 * math.sqrt(46)


def test_a_permutation_is_drawn_again_on_a_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a sort breaks ties is not random."""
    generator = Randomness(KEY)
    draws = [torch.tensor([5, 3, 5]), torch.tensor([2, -9, 1])]
    monkeypatch.setattr(generator, "elements", lambda shape, dtype: draws.pop(0))
    assert permutation(generator, 3).tolist() == [1, 2, 0]


def test_rotations_have_no_preferred_sign() -> None:
    """Without the sign fix the diagonal of LAPACK's Q leans to one side, and det is constant."""
    generator = Randomness(KEY)
    turns = torch.stack([orthogonal(generator, 3) for _ in range(2000)])
    assert torch.allclose(turns @ turns.mT, torch.eye(3, dtype=torch.float64), atol=1e-13)
    assert float(turns.mean(0).abs().max()) < 5 / math.sqrt(3 * 2000)
    assert abs(float(torch.linalg.det(turns).mean())) < 5 / math.sqrt(2000)
