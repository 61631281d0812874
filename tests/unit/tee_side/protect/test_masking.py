"""Each kind of mask gets what it needs, and what it may send and must return is checked.

That what crosses is fresh in every call: tests/contract/test_masks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from protocol.errors import MaskError
from tee_side.protect.masking import MaskRules, linear_masking
from tee_side.protect.masks.mask import Factors, FeatureSite, Mask, Masked, Seed
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.protect.pads.layout import site_number
from tee_side.protect.randomness import Randomness
from tests.kit.rows import each_row
from tsqp.lab.research.feature_permutation import FeaturePermutation
from tsqp.lab.research.row_permutation import RowPermutation

Tensor = torch.Tensor
X = torch.arange(12.0).reshape(3, 4)


def test_pads_and_keyed_maps_are_those_of_the_site() -> None:
    masked = linear_masking(None, Randomness())((0, "o_proj"))(X)
    assert masked.sent[0] is masked.unmask(X) is X
    pads = Mock()
    pads.draw.return_value = Factors(torch.full((3, 4), 7).int(), torch.ones(3, 2).int())
    masked = linear_masking(Pad(), Randomness(), pads=pads)((5, "down_proj"))(X.int())
    assert torch.equal(cast(Tensor, masked.sent[0]), X.int() + 7)
    assert masked.unmask(torch.ones(3, 2).int() * 3).tolist() == [[2, 2]] * 3
    pads.draw.assert_called_once_with(site_number(5, "down_proj"), 3)
    mask = FeaturePermutation()
    transforms: Any = {
        (layer, "o_proj"): mask.transform(
            FeatureSite(4, (4,), None, Randomness(bytes([layer]) * 32))
        )
        for layer in range(2)
    }
    hide = linear_masking(mask, Randomness(), transforms=transforms)
    first, second = (cast(Tensor, hide((layer, "o_proj"))(X).sent[0]) for layer in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(KeyError):
        hide((2, "o_proj"))(X)


def _same(y: Tensor) -> Tensor:
    return y


def _seed(x: Tensor, size: int = 32, rows: int = 3, features: int = 4) -> Masked:
    return Masked((x, Seed(bytes(size), (rows, features))), torch.add)


INTEGERS = "int32 .{}. to send, expected int32 .rows, 4., at most 3 rows"


@each_row(
    ("mask", "masked", "said"),
    [
        *(
            (mask, masked, said)
            for mask in (RowPermutation(), None)
            for masked, said in (
                (_same, "got Tensor, expected Masked"),
                (lambda x: Masked(x, _same), "got Masked, expected Masked"),
                (lambda x: Masked((x, x), _same), "got 2 tensors to send, expected 1 tensors"),
                (lambda x: Masked((x.double(),), _same), "got float64 .3, 4. to send"),
                (lambda x: Masked((x[:, :3],), _same), "got float32 .3, 3. to send, expected flo"),
                (lambda x: Masked((x[0],), _same), "got float32 .4. to send, expected float32 .ro"),
                (lambda x: Masked((Seed(bytes(32), (3, 4)),), _same), "got int32 .3, 4. to send"),
            )
        ),
        (Shares(), lambda x: _seed(x, 31), "a seed of 31 bytes, expected 32"),
        (Shares(), lambda x: _seed(x, 33), "a seed of 33 bytes, expected 32"),
        (Shares(), lambda x: _seed(x, rows=2), INTEGERS.format("2, 4")),
        (Shares(), lambda x: _seed(x, features=3), INTEGERS.format("3, 3")),
        (Shares(), lambda x: Masked((x,), _same), "got 1 tensors to send, expected 2"),
    ],
)
def test_what_must_not_cross_is_refused_before_it_is_sent(
    mask: Mask | None, masked: Callable[[Tensor], Any], said: str
) -> None:
    x, name = X.int() if isinstance(mask, Shares) else X, mask.name if mask else "no mask"
    rules = MaskRules(mask)
    with pytest.raises(MaskError, match=f"{name}: o_proj: (got )?{said}"):
        rules.check_sent("o_proj", x, rules.most_rows(3), masked(x))


def test_tensors_or_seeds_may_be_sent_and_seeds_of_rows_of_a_layer_alone() -> None:
    x, rules = X.int(), MaskRules(Shares())
    for sent in ((x, x), (x, Seed(bytes(32), (3, 4))), (Seed(bytes(32), (3, 4)), x)):
        rules.check_sent("o_proj", x, rules.most_rows(3), Masked(sent, torch.add))
    with pytest.raises(MaskError, match="lm_head: got a seed, expected one of rows of a layer's l"):
        rules.check_sent("lm_head", x, 3, _seed(x))
    # No more rows than the reply has room for: an honest service would be barred for it.
    for mask, most in ((RowPermutation(), 2 * 3 + 4096), (Pad(), 3), (None, 3)):
        rules = MaskRules(mask)
        rules.check_sent("o_proj", X, rules.most_rows(3), Masked((torch.ones(most, 4),), _same))
        many = Masked((torch.ones(most + 1, 4),), _same)
        with pytest.raises(MaskError, match=f"at most {most} rows"):
            rules.check_sent("o_proj", X, rules.most_rows(3), many)


@each_row(
    ("unmasked", "said"),
    [
        (None, "nothing from unmask, expected float32"),
        (X.double(), "float64 .3, 4. from unmask"),
        (X[:2], "float32 .2, 4. from unmask, expected float32 .3, 4."),
    ],
)
def test_what_unmask_returns_is_checked(unmasked: Tensor | None, said: str) -> None:
    rules = MaskRules(RowPermutation())
    rules.check_unmasked("o_proj", X, (3, 4), torch.float32)
    with pytest.raises(MaskError, match=f"o_proj: got {said}"):
        rules.check_unmasked("o_proj", unmasked, (3, 4), torch.float32)
