"""The exact check: honest products pass, wrong ones do not, whatever the numbers and secrets are.

Random products and errors: tests/property/test_verification_property.py; under masks:
tests/contract/test_masks.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from protocol.integer import exact_product
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import SECURITY_BITS, VECTORS, ExactCheck
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.rows import each_row

# What a sum of integers must stay below, as `tee_side.protect.calibration` checks before it sends.
LIMIT = 2**31 - 1


def _weight(out_features: int, in_features: int) -> torch.Tensor:
    shape = (out_features, in_features)
    weight: torch.Tensor = torch.randint(-127, 128, shape)
    return weight.to(torch.int8)


def _inputs(rows: int, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return inputs as large as the range check lets through."""
    x = torch.randn(rows, weight_OI.shape[1], dtype=torch.float64)
    largest = max(1.0, float(weight_OI.double().norm(dim=1).max()))
    scaled: torch.Tensor = x / x.norm(dim=1, keepdim=True) * LIMIT * 0.995 / largest
    return scaled.to(torch.int32)


def _with(y: torch.Tensor, row: int, column: int, value: torch.Tensor | float) -> torch.Tensor:
    y = y.clone()
    y[row, column] = value
    return y


def _check_with(s_kO: torch.Tensor, weight_OI: torch.Tensor) -> ExactCheck:
    """Return a check with secrets of our choice."""
    product_kI = s_kO.long() @ weight_OI.long()
    low_kI = product_kI.to(torch.int32)
    return ExactCheck(s_kO, low_kI, ((product_kI - low_kI) >> 32).to(torch.int32))


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("shape", [(320, 96), (7, 300), (2, 2), (1024, 33), (2**16, 3), (2**17 + 3, 3)])
def test_an_honest_product_passes_and_one_wrong_element_anywhere_does_not(
    kernels: str, shape: tuple[int, int]
) -> None:
    """Vocabularies among them, which are larger than a block of the weight."""
    weight = _weight(*shape)
    rows = 600 if shape[0] < 2**10 else 2
    x = _inputs(rows, weight)
    with using_kernels(kernels):
        check, y = ExactCheck.draw(weight, Randomness()), exact_product(x, weight)
        assert check.vectors_kO.shape == (VECTORS, shape[0])
        assert check.nbytes == 4 * VECTORS * (shape[0] + 2 * shape[1])
        products_kI = check.low_kI.long() + (check.high_kI.long() << 32)
        assert torch.equal(products_kI, check.vectors_kO.long() @ weight.long())
        # Guards the test: the product is what int64 says, and next to the largest that there is.
        assert torch.equal(y.long(), x.long() @ weight.long().t())
        assert check.holds(x, y)
        for row in {0, 1, 255 % rows, 256 % rows, rows - 1}:
            for column in (0, shape[0] - 1):
                assert not check.holds(x, _with(y, row, column, y[row, column] + 1))


def test_a_product_that_wrapped_is_refused() -> None:
    """What the range check should have refused: the ring's result is not the integer's."""
    weight = torch.full((8, 64), 127, dtype=torch.int8)
    x = torch.full((1, 64), 2**20, dtype=torch.int32)
    y = exact_product(x, weight)
    assert not torch.equal(y.long(), x.long() @ weight.long().t())
    assert not ExactCheck.draw(weight, Randomness()).holds(x, y)


@pytest.mark.parametrize("kernels", KERNELS)
@each_row("value", [None, -(2**31), 2**31 - 1])
def test_the_check_is_exact_at_the_largest_numbers_that_there_are(
    kernels: str, value: int | None
) -> None:
    """Secrets at either end or drawn, x at the bound of the range check, y at the ends of 32 bits.

    The largest sums, which wrap at 2^64.
    """
    for outputs in (2**14, 2**14 + 1, 131_071):
        weight = torch.full((outputs, 1), 127, dtype=torch.int8)
        drawn = ExactCheck.draw(weight, Randomness())
        secrets = torch.full_like(drawn.vectors_kO, value or 0)
        for sign in (1, -1):
            with using_kernels(kernels):
                check = drawn if value is None else _check_with(secrets, weight)
                # |x w| < 2^31, as near as whole numbers get.
                x = torch.tensor([[sign * (LIMIT // 127)]], dtype=torch.int32)
                y = torch.full((1, outputs), int(x) * 127, dtype=torch.int32)
                assert check.holds(x, y)
                assert not check.holds(x, _with(y, 0, outputs - 1, y[0, -1] + 1))
                for extreme in (-(2**31), LIMIT):
                    assert not check.holds(x, torch.full_like(y, extreme))


def test_an_error_of_any_size_passes_under_one_secret_of_all() -> None:
    """The step of the proof: of 2^32 values of an entry, at most one hides an error of it."""
    weight, x = torch.zeros(1, 1, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.int32)
    blind = torch.zeros(VECTORS, 1, dtype=torch.int32)
    missed = []
    for error_bits in range(32):
        error = torch.tensor([[-(1 << error_bits)]]).to(torch.int32)
        assert _check_with(blind, weight).holds(x, error)
        for bit in range(32):
            for s in (1 << bit, -(1 << bit), (1 << bit) + 1):
                for vector in range(VECTORS):  # the other one says nothing
                    entry = blind.clone()
                    entry[vector] = torch.tensor(s).to(torch.int32)
                    if entry.any() and _check_with(entry, weight).holds(x, error):
                        missed.append((error_bits, s, vector))
    assert missed == []


# ---------------------------------------------------------------------------------- the secrets


def test_secrets_are_uniform_fresh_and_as_many_as_is_promised() -> None:
    weight, one = torch.zeros(60_000, 1, dtype=torch.int8), Randomness()
    first, second = ExactCheck.draw(weight, one), ExactCheck.draw(weight, one)
    others = (second, ExactCheck.draw(weight, Randomness()))
    assert SECURITY_BITS == 64
    for other in others:
        assert float((first.vectors_kO == other.vectors_kO).double().mean()) < 1e-3
    for shift in (0, 12, 24):
        parts = (first.vectors_kO >> shift) & 0xFF
        counts = torch.bincount(parts.flatten(), minlength=256).double()
        expected = parts.numel() / 256
        # Chi-squared with 255 degrees of freedom: six deviations above its mean.
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < 255 + 6 * math.sqrt(2 * 255)
    for text in (repr(first), str(first)):
        assert text == "ExactCheck()"
