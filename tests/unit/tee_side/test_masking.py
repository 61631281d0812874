"""Each kind of mask gets what it needs, or the policy is refused."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import PolicyError
from tee_side.protect.masking import linear_masking
from tee_side.protect.masks.mask import Factors, FeatureSite, Mask, RowMask, Seed
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.protect.pads.layout import site_number
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.row_permutation import RowPermutation

X = torch.arange(12.0).reshape(3, 4)


class SomePads:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def draw(self, site: int, rows: int) -> Factors:
        self.asked.append((site, rows))
        return Factors(torch.full((rows, 4), 7, dtype=torch.int32), torch.ones(rows, 2).int())


def test_no_mask_sends_the_input_itself() -> None:
    masked = linear_masking(None, Randomness())((0, "o_proj"))(X)
    assert masked.sent[0] is X
    assert masked.unmask(X) is X


def test_a_row_mask_draws_from_the_generator_given() -> None:
    hide = linear_masking(RowPermutation(), Randomness(bytes(32)))
    first, second = hide((0, "o_proj"))(X), hide((0, "o_proj"))(X)
    again = linear_masking(RowPermutation(), Randomness(bytes(32)))((0, "o_proj"))(X)
    assert torch.equal(first.sent[0], again.sent[0])
    assert not torch.equal(first.sent[0], second.sent[0])
    assert torch.equal(first.unmask(first.sent[0]), X)


def test_shares_are_a_fresh_seed_and_what_is_left() -> None:
    hide = linear_masking(Shares(), Randomness())((0, "o_proj"))
    keys = set()
    for _ in range(2):
        masked = hide(X.int())
        one, two = masked.sent
        assert isinstance(one, Seed)
        assert isinstance(two, torch.Tensor)
        assert torch.equal(one.elements() + two, X.int())
        keys.add(bytes(one.key))
    assert len(keys) == 2


def test_an_additive_mask_asks_for_the_sites_factors() -> None:
    pads = SomePads()
    hide = linear_masking(Pad(), Randomness(), pads=pads)  # type: ignore[arg-type]
    masked = hide((5, "down_proj"))(X.int())
    assert torch.equal(masked.sent[0], X.int() + 7)
    assert masked.unmask(torch.ones(3, 2).int() * 3).tolist() == [[2, 2]] * 3
    assert pads.asked == [(site_number(5, "down_proj"), 3)]


def test_a_feature_mask_uses_the_map_of_the_site() -> None:
    mask = FeaturePermutation()
    transforms = {
        (layer, "o_proj"): mask.transform(
            FeatureSite(4, (4,), None, Randomness(bytes([layer]) * 32))
        )
        for layer in range(2)
    }
    hide = linear_masking(mask, Randomness(), transforms=transforms)  # type: ignore[arg-type]
    first, second = hide((0, "o_proj"))(X), hide((1, "o_proj"))(X)
    assert not torch.equal(first.sent[0], second.sent[0])
    with pytest.raises(KeyError):
        hide((2, "o_proj"))(X)


def test_an_additive_mask_without_factors_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"mask pad: got no factors"):
        linear_masking(Pad(), Randomness())


def test_a_feature_mask_without_its_key_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"feature-permutation: got no key, expected --key"):
        linear_masking(FeaturePermutation(), Randomness())


def test_a_mask_of_no_kind_is_refused() -> None:
    class Own(Mask):
        name = "own"
        kind = "row"
        hides = known_break = source = cost = "x"
        broken = True
        tolerance = 1.0

    with pytest.raises(PolicyError, match=r"mask own: got Own, expected a RowMask"):
        linear_masking(Own(), Randomness())
    assert not issubclass(Own, RowMask)
