"""Noise is rounded once, together with what it hides, and hides its last bits as well."""

from __future__ import annotations

import pytest
import torch

from tee_side.protect.masks.mask import Factors
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.float_noise import FloatNoise

MASK = FloatNoise(sigma=4.0)


def _noise(rows: int, features: int) -> torch.Tensor:
    return MASK.draw(Randomness(bytes(32)).ring(rows, features))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_sent_is_the_number_of_its_dtype_nearest_to_the_sum(dtype: torch.dtype) -> None:
    """An r rounded before would add an error that u does not take away."""
    x_TI = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    r_TI = _noise(64, 512)
    (sent,) = MASK.mask(x_TI, Factors(r_TI, torch.zeros(64, 3))).sent
    assert sent.dtype == dtype
    exact = x_TI.double() + r_TI.double()
    error = (sent.double() - exact).abs()
    # Half a unit in the last place, and what the sum's own rounding to float32 may add to it.
    limit = (torch.finfo(dtype).eps / 2 + 2**-23) * exact.abs() + 2**-23
    assert bool((error <= limit).all())


def test_the_last_bits_of_the_input_do_not_cross() -> None:
    """As they would if r had fewer bits than x."""
    x_TI = torch.rand(64, 512, generator=torch.Generator().manual_seed(0))
    (sent,) = MASK.mask(x_TI, Factors(_noise(64, 512), torch.zeros(64, 3))).sent
    for bits in range(2, 16):
        step = 2.0**-bits
        # The distance of their remainders, around the circle.
        apart = ((sent - x_TI) / step).frac().abs()
        same = torch.minimum(apart, 1 - apart) < 0.01
        assert float(same.double().mean()) < 0.05, bits


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_noise_has_the_standard_deviation_that_was_asked_for(sigma: float) -> None:
    r_TI = FloatNoise(sigma=sigma).draw(Randomness(bytes(32)).ring(256, 512))
    # 131,072 numbers: four standard errors are 0.8 %.
    assert float(r_TI.std()) == pytest.approx(sigma, rel=0.008)
