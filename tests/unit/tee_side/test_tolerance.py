"""How large a tolerance is, in figures: what is published of it rests on them."""

from __future__ import annotations

import pytest
import torch

from tee_side.protect.randomness import Randomness
from tsqp.lab.research.float_check import FloatCheck, Tolerance, within_tolerance
from tsqp.lab.research.row_mix import RowMix


@pytest.mark.parametrize(
    ("dtype", "relative"),
    [
        (torch.float32, (2 + 16) * 2**-23),
        (torch.bfloat16, 2 * 2**-7 + 16 * 2**-23),
        (torch.float16, 2 * 2**-10 + 16 * 2**-23),
    ],
)
def test_a_tolerance_is_two_units_of_the_reply_and_sixteen_of_float32(
    dtype: torch.dtype, relative: float
) -> None:
    """The logit shift that docs/verification.md gives was measured with these."""
    assert Tolerance.of(dtype, None).relative == relative
    assert Tolerance.of(dtype, RowMix()).relative == relative


@pytest.mark.parametrize(
    ("times", "least", "most"),
    # A chi-squared variable with 8 degrees of freedom is below 8 / times^2 in so many of 2000 draws
    # on average: 210, 38 and 0.3. With 4 vectors there would be 447, 180 and 14.
    [(1.5, 120, 320), (2.0, 10, 80), (4.0, 0, 3)],
)
def test_an_error_beyond_the_tolerance_passes_as_rarely_as_eight_vectors_make_it(
    times: float, least: int, most: int
) -> None:
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) / 48**0.5
    x = torch.randn(1, 48, generator=torch.Generator().manual_seed(2))
    y = x.double() @ weight.double().t()
    # As large as it gets beside rounding, which is not the subject.
    tolerance = Tolerance(0.01, 0.0, 0.0, together=False)
    randomness = Randomness(bytes(32))
    unit = torch.zeros_like(y)
    unit[0, 5] = 1.0
    passed = 0
    for _ in range(2000):
        check = FloatCheck.draw(weight, randomness)
        # The limit of these very vectors, so that only the estimate of the error is left to chance.
        size = (x.double() @ check._products.t()).square().mean().sqrt() + check.gain * x.norm()
        passed += check.holds(x, y + times * 0.01 * float(size) * unit, [x], tolerance)
    assert least <= passed <= most


def test_a_small_row_is_judged_by_itself_when_a_liar_is_looked_for() -> None:
    """Under a row mask a result is judged by the largest row; what one service sent is not.

    Else a lie about a small row would pass as right, and leave the blame with the mask.
    """
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)) / 160**0.5
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-3
    y = torch.nn.functional.linear(x, weight)
    result = Tolerance.of(torch.float32, RowMix())
    blocks = [(slice(0, 96), weight)]
    assert within_tolerance(x, blocks, y, result.of_answers())
    wrong = y.clone()
    wrong[1] *= 1 + 1e-4
    assert not within_tolerance(x, blocks, wrong, result.of_answers())
    # Of a result it is not known which row carried the rounding of which.
    assert within_tolerance(x, blocks, wrong, result)
