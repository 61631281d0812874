"""The check of floats: rounding passes, and no error beyond the published tolerance does.

Under every mask: tests/contract/test_masks.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from protocol.errors import ActivationRangeError
from tee_side.protect.randomness import Randomness
from tests.kit.rows import each_row
from tsqp.lab.research.float_check import (
    EmbeddingCheck,
    FloatCheck,
    FloatProductCheck,
    ProductCheck,
    Tolerance,
    within_tolerance,
)
from tsqp.lab.research.row_masks import FloatNoise, RowMix

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
PLAIN = Tolerance.of(torch.float32, None)
MIXED = Tolerance.of(torch.float32, RowMix())


def _floats(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (_floats((96, 160), seed=seed) * 160**-0.5).to(dtype)


def _with(y: Tensor, row: int, column: int, value: float | Tensor) -> Tensor:
    y = y.clone()
    y[row, column] = value
    return y


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda y: _with(y, 0, 0, y[0, 0] + y.norm() / 2),
    "sign": lambda y: -y,
    "a tenth more": lambda y: y * 1.1,
    "zeros": torch.zeros_like,
    "NaN": lambda y: _with(y, 0, 3, math.nan),
    "infinity": lambda y: _with(y, 0, 3, math.inf),
    "opposite infinities": lambda y: _with(_with(y, 0, 0, math.inf), 0, 1, -math.inf),
    "the largest number": lambda y: torch.full_like(y, torch.finfo(y.dtype).max),
    "shifted": lambda y: y.roll(1, dims=-1),
}


@each_dtype
def test_honest_products_pass_and_lies_are_refused(dtype: torch.dtype) -> None:
    randomness = Randomness()
    for seed in range(8):
        weight, x = _weight(dtype, seed), _floats((3, 160), dtype, 100 + seed)
        if seed % 2:  # outliers
            x[:, 3] *= 100
            x[-1] *= 10
        y = torch.nn.functional.linear(x, weight)
        # The service to blame is found by multiplying; in two blocks, as they are read from disk.
        near = Tolerance.of(dtype, None).of_answers()
        blocks = [(slice(start, start + 50), weight[start : start + 50]) for start in (0, 50)]
        assert within_tolerance(x, blocks, y, near)
        for lie, wrong in LIES.items() if not seed % 2 else ():
            assert not within_tolerance(x, blocks, wrong(y), near), lie
        check = FloatCheck.draw(weight, randomness)
        assert len(check._vectors) == 8  # one vector misses a small lie now and then
        for mask in (None, RowMix()):
            tolerance = Tolerance.of(dtype, mask)
            assert check.holds(x, y, [x], tolerance)
            for lie, wrong in LIES.items() if not seed % 2 else ():
                assert not check.holds(x, wrong(y), [x], tolerance), lie
    # A product far larger than that of a vector without a direction.
    weight = _weight(dtype)
    x = weight[:5] * 50
    check, y = FloatCheck.draw(weight, randomness), torch.nn.functional.linear(x, weight)
    assert check.holds(x, y, [x], Tolerance.of(dtype, None))
    assert not check.holds(x, y * 1.05, [x], Tolerance.of(dtype, None))
    # A large reply does not widen its own limit: no error hides behind a larger one.
    for factor in (1e1, 1e2, 1e4):
        wrong_y = _with(y, 1, 1, y[1, 1] + 50 * factor)
        assert not check.holds(x, wrong_y, [x], Tolerance.of(dtype, None))


def test_limits_are_those_of_a_row_and_of_what_was_sent() -> None:
    weight, x = _floats((600, 1024), seed=1) / 32, _floats((3, 1024), seed=2)
    y = torch.nn.functional.linear(x, weight)
    check = FloatCheck.draw(weight, Randomness())
    assert check.holds(x, y, [x], PLAIN)
    assert not check.holds(x, y * (1 + 1e-3), [x], PLAIN)
    torch.testing.assert_close(check._products, check._vectors @ weight.double())
    assert check.gain == pytest.approx(float(weight.double().norm()) / 32)
    assert "tensor" not in repr(check)
    # Each row has a limit of its own unless rows are mixed.
    x[0] *= 1e6
    y = torch.nn.functional.linear(x, weight)
    wrong = _with(y, 1, 1, y[1, 1] + 1e-2)
    assert check.holds(x, y, [x], PLAIN)
    assert not check.holds(x, wrong, [x], PLAIN)
    assert check.holds(x, wrong, [x], MIXED)
    # Noise that was sent widens the limit, and only that.
    x, noise = _floats((1, 1024), seed=2), _floats((1, 1024), seed=3) * 1e5
    served = torch.nn.functional.linear(x + noise, weight)
    y = (served.double() - noise.double() @ weight.double().t()).float()
    assert check.holds(x, y, [x + noise], PLAIN)
    assert not check.holds(x, y, [x], PLAIN)


@each_row("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_not_finite_cannot_be_verified(value: float) -> None:
    weight, x = _weight(), _with(_floats((2, 160)), 1, 4, value)
    y = torch.nn.functional.linear(x, weight)
    check = FloatCheck.draw(weight, Randomness())
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    spoiled = a.clone(), b.clone()
    for operand in spoiled:
        operand[0, 0, 0] = value
    for call in (
        lambda: check.holds(x, y, [x], PLAIN),
        lambda: check.holds(x, y, [x], MIXED),
        lambda: within_tolerance(x, [(slice(0, 96), weight)], y, PLAIN.of_answers()),
        lambda: ProductCheck(PLAIN, Randomness()).holds((spoiled[0], b), a @ b, []),
        lambda: ProductCheck(PLAIN, Randomness()).holds((a, spoiled[1]), a @ b, []),
    ):
        with pytest.raises(ActivationRangeError, match="not finite"):
            call()


@each_row(
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
    size = torch.tensor([[1.0, 4.0], [2.0, 8.0]], dtype=torch.float64)
    for mask in (None, RowMix(), FloatNoise()):
        found, together = Tolerance.of(dtype, mask), isinstance(mask, RowMix)
        assert (found.relative, found.together) == (relative, together)
        assert found.declared == (0.0 if mask is None else mask.tolerance)
        # Limits are added up.
        limits, own = Tolerance(0.5, 0.25, 0.125, together), size.clone()
        if together:
            own[:] = size[:, 1:]
        assert torch.equal(limits.limit(size, 16), 0.5 * own + 0.25 * 4 * 8 + 0.125 * 4)
        assert limits.limit(size[:, :0], 16).shape == (2, 0)


def test_an_error_beyond_the_tolerance_passes_as_rarely_as_eight_vectors_make_it() -> None:
    # A chi-squared variable with 8 degrees of freedom is below 8 / times^2 in so many of 400 draws
    # on average: 42, 8 and 0.06. With 4 vectors there would be 89, 36 and 3.
    bounds = {1.5: (20, 66), 2.0: (1, 20), 4.0: (0, 1)}
    weight, x = _floats((64, 48), seed=1) / 48**0.5, _floats((1, 48), seed=2)
    y = x.double() @ weight.double().t()
    # As large as it gets beside rounding, which is not the subject.
    tolerance, randomness = Tolerance(0.01, 0.0, 0.0, together=False), Randomness(bytes(32))
    unit, passed = _with(torch.zeros_like(y), 0, 5, 1.0), dict.fromkeys(bounds, 0)
    for _ in range(400):
        check = FloatCheck.draw(weight, randomness)
        # The limit of these very vectors, so that only the estimate of the error is left to chance.
        size = (x.double() @ check._products.t()).square().mean().sqrt() + check.gain * x.norm()
        for times in bounds:
            wrong = y + times * 0.01 * float(size) * unit
            passed[times] += check.holds(x, wrong, [x], tolerance)
    assert all(least <= passed[times] <= most for times, (least, most) in bounds.items()), passed


@each_dtype
@each_row("rows", [1, 9])
def test_honest_products_of_activations_pass_and_wrong_ones_do_not(
    dtype: torch.dtype, rows: int
) -> None:
    # Always the same vectors: one row leaves a lie of a tenth a chance of 1 in 3,000 in bfloat16.
    check = ProductCheck(Tolerance.of(dtype, None), Randomness(bytes(32)))
    for seed in range(6):
        a, b = _floats((2, rows, 16), dtype, seed), _floats((2, 16, 50), dtype, 100 + seed)
        if seed % 2:
            a = a.float().softmax(-1).to(dtype)
        y = torch.matmul(a, b)
        assert check.holds((a, b), y, [])
        for lie, wrong in LIES.items():
            changed = y.clone()
            changed[1] = wrong(y[1])
            assert not check.holds((a, b), changed, []), lie


def test_an_answer_has_half_the_room_of_what_is_refused_and_each_row_its_own() -> None:
    """A liar at the edge of the tolerance is not acquitted, which would blame the mask."""
    weight, x = _weight(), _floats((1, 160), seed=2)
    y, blocks = x.double() @ weight.double().t(), [(slice(0, 96), weight)]
    size = float(y.norm() + weight.double().norm() / 160**0.5 * x.double().norm())
    unit = _with(torch.zeros_like(y), 0, 3, MIXED.relative * size)
    for share, right in ((0.45, True), (0.55, False), (0.95, False)):
        assert within_tolerance(x, blocks, y + share * unit, MIXED.of_answers()) == right
    # Under a row mask a result is judged by the largest row: it is not known which row carried the
    # rounding of which. What one service sent is not.
    x = _floats((3, 160), seed=2)
    x[1] *= 1e-3
    wrong = torch.nn.functional.linear(x, weight)
    assert within_tolerance(x, blocks, wrong, MIXED.of_answers())
    wrong[1] *= 1 + 1e-4
    assert not within_tolerance(x, blocks, wrong, MIXED.of_answers())
    assert within_tolerance(x, blocks, wrong, MIXED)


def test_rows_of_a_table_are_compared_and_who_holds_other_weights_is_always_to_blame() -> None:
    table = _weight()
    found = table[[3, 5]]
    assert EmbeddingCheck(table).holds(torch.tensor([3, 5]), found, [])
    found[1, 0] += 1
    assert not EmbeddingCheck(table).holds(torch.tensor([3, 5]), found, [])
    given: Any = (None, None, None)
    assert list(FloatProductCheck(*given, transformed=True).wrong([given] * 2, given)) == [0, 1]
