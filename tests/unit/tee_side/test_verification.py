"""The checks themselves: honest products pass, wrong ones do not, whatever their numbers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from protocol.errors import ActivationRangeError
from protocol.integer import exact_product
from tee_side.protect.randomness import Randomness
from tee_side.protect.verification import SECURITY_BITS, VECTORS, ExactCheck
from tests.kit.rows import each_row
from tsqp.catalogue import our_masks
from tsqp.lab.research.float_check import FLOAT_VECTORS, FloatCheck, Tolerance, within_tolerance
from tsqp.lab.research.float_noise import FloatNoise
from tsqp.lab.research.operators import product_holds
from tsqp.lab.research.row_mix import RowMix

# What a sum of integers must stay below, as `tee_side.protect.calibration` checks before it sends.
LIMIT = 2**31 - 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _weight(out_features: int, in_features: int, seed: int = 0) -> torch.Tensor:
    shape = (out_features, in_features)
    weight: torch.Tensor = torch.randint(-127, 128, shape, generator=_generator(seed))
    return weight.to(torch.int8)


def _inputs(rows: int, weight_OI: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return inputs as large as the range check lets through."""
    x = torch.randn(rows, weight_OI.shape[1], generator=_generator(seed), dtype=torch.float64)
    largest = max(1.0, float(weight_OI.double().norm(dim=1).max()))
    scaled: torch.Tensor = x / x.norm(dim=1, keepdim=True) * LIMIT * 0.995 / largest
    return scaled.to(torch.int32)


def _product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    return exact_product(x_TI, weight_OI)


# ---------------------------------------------------------------------------------- integers


def test_more_is_proved_than_is_promised() -> None:
    assert SECURITY_BITS == 64


@pytest.mark.parametrize("out_features", [2**16, 2**16 + 1, 2**17 + 3])
def test_a_vocabulary_may_be_as_large_as_it_likes(out_features: int) -> None:
    weight = _weight(out_features, 3)
    check = ExactCheck.draw(weight, Randomness())
    assert torch.equal(_products(check), check.vectors_kO.long() @ weight.long())
    x = _inputs(2, weight)
    y = _product(x, weight)
    assert check.holds(x, y)
    assert not check.holds(x, _with(y, 1, out_features - 1, y[1, -1] + 1))


def _products(check: ExactCheck) -> torch.Tensor:
    return check.low_kI.long() + (check.high_kI.long() << 32)


@pytest.mark.parametrize("shape", [(48, 48), (320, 96), (7, 300), (2, 2), (1024, 33)])
@pytest.mark.parametrize("rows", [1, 5, 700])
def test_an_honest_product_of_integers_passes(shape: tuple[int, int], rows: int) -> None:
    weight = _weight(*shape)
    check = ExactCheck.draw(weight, Randomness())
    assert check.vectors_kO.shape == (VECTORS, shape[0])
    assert check.low_kI.shape == check.high_kI.shape == (VECTORS, shape[1])
    assert check.nbytes == 4 * VECTORS * (shape[0] + 2 * shape[1])
    x = _inputs(rows, weight)
    y = _product(x, weight)
    # Guards the test: the product is what int64 says, and next to the largest that there is.
    assert torch.equal(y.long(), x.long() @ weight.long().t())
    assert check.holds(x, y)


def test_thousands_of_honest_products_pass() -> None:
    randomness = Randomness()
    for seed in range(40):
        weight = _weight(96, 64, seed)
        check = ExactCheck.draw(weight, randomness)
        for count in range(100):
            x = _inputs(1 + count % 3, weight, seed=1000 * seed + count)
            assert check.holds(x, _product(x, weight))


INTEGER_LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element by 1": lambda y: _with(y, 0, -1, y[0, -1] + 1),
    "one element by -1": lambda y: _with(y, -1, 0, y[-1, 0] - 1),
    "one element by 256": lambda y: _with(y, 0, 1, y[0, 1] + 256),
    "one element by 2^31": lambda y: _with(y, 0, 1, y[0, 1] ^ -(2**31)),
    "two elements, +1 and -1": lambda y: _with(_with(y, 0, 0, y[0, 0] + 1), 0, 1, y[0, 1] - 1),
    "low-rank": lambda y: (
        y + torch.outer(torch.arange(1, len(y) + 1), torch.arange(y.shape[1])).to(torch.int32)
    ),
    "sign": lambda y: -y,
    "x(1 + 1e-3)": lambda y: (y.double() * 1.001).round().to(torch.int32),
    "zeros": torch.zeros_like,
    "everything by 2^24": lambda y: y + 2**24,
    "shifted": lambda y: y.roll(1, dims=1),
    "the largest integers": lambda y: torch.full_like(y, LIMIT),
    "the smallest integers": lambda y: torch.full_like(y, -(2**31)),
}


def _with(y: torch.Tensor, row: int, column: int, value: torch.Tensor | float) -> torch.Tensor:
    y = y.clone()
    y[row, column] = value
    return y


@each_row("lie", INTEGER_LIES)
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_a_wrong_product_of_integers_is_refused(lie: str, rows: int) -> None:
    weight = _weight(320, 96)
    x = _inputs(rows, weight)
    y = _product(x, weight)
    wrong = INTEGER_LIES[lie](y)
    assert not torch.equal(wrong, y)
    randomness = Randomness()
    for _ in range(20 if rows < 700 else 3):
        check = ExactCheck.draw(weight, randomness)
        assert not check.holds(x, wrong)
        assert check.holds(x, y)


def test_a_wrong_row_among_many_is_refused_wherever_it_is() -> None:
    weight = _weight(2048, 32)
    check, x = ExactCheck.draw(weight, Randomness()), _inputs(600, weight)
    y = _product(x, weight)
    for row in (0, 1, 255, 256, 599):
        assert not check.holds(x, _with(y, row, 5, y[row, 5] + 1))


def test_a_product_that_wrapped_is_refused() -> None:
    """What the range check should have refused: the ring's result is not the integer's."""
    weight = torch.full((8, 64), 127, dtype=torch.int8)
    x = torch.full((1, 64), 2**20, dtype=torch.int32)
    y = _product(x, weight)
    assert not torch.equal(y.long(), x.long() @ weight.long().t())
    assert not ExactCheck.draw(weight, Randomness()).holds(x, y)


@pytest.mark.parametrize("out_features", [2**14, 2**14 + 1, 131_071])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_check_is_exact_at_the_largest_numbers_that_there_are(
    out_features: int, sign: int
) -> None:
    """y at both ends of 32 bits in every output, and x at the bound of the range check."""
    weight = torch.full((out_features, 1), 127, dtype=torch.int8)
    check = ExactCheck.draw(weight, Randomness())
    # |x w| < 2^31, as near as whole numbers get.
    x = torch.tensor([[sign * (LIMIT // 127)]], dtype=torch.int32)
    y = torch.full((1, out_features), int(x) * 127, dtype=torch.int32)
    assert check.holds(x, y)
    for column in (0, out_features // 2, out_features - 1):
        assert not check.holds(x, _with(y, 0, column, y[0, column] + 1)) or _blind(check, column)
    for value in (-(2**31), LIMIT):
        extreme = torch.full_like(y, value)
        assert not check.holds(x, extreme)


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1])
def test_sums_are_exact_where_all_secrets_are_the_largest(value: int) -> None:
    """The worst secrets that can be drawn, and the largest products: sums that wrap at 2^64."""
    outputs = 131_071
    weight = torch.full((outputs, 1), -127, dtype=torch.int8)
    check = _check_with(torch.full((VECTORS, outputs), value, dtype=torch.int32), weight)
    x = torch.tensor([[-(LIMIT // 127)]], dtype=torch.int32)
    y = torch.full((1, outputs), int(x) * -127, dtype=torch.int32)
    assert check.holds(x, y)
    for extreme in (-(2**31), LIMIT):
        assert not check.holds(x, torch.full_like(y, extreme))
    assert not check.holds(x, _with(y, 0, outputs - 1, y[0, outputs - 1] + 1))


def _check_with(s_kO: torch.Tensor, weight_OI: torch.Tensor) -> ExactCheck:
    """Return a check with secrets of our choice."""
    product_kI = s_kO.long() @ weight_OI.long()
    low_kI = product_kI.to(torch.int32)
    return ExactCheck(s_kO, low_kI, ((product_kI - low_kI) >> 32).to(torch.int32))


def _blind(check: ExactCheck, column: int) -> bool:
    """Say whether all vectors are zero at an output: once in 2^64 draws."""
    return bool((check.vectors_kO[:, column] == 0).all())


@pytest.mark.parametrize("error_bits", range(32))
def test_an_error_of_any_size_passes_under_one_secret_of_all(error_bits: int) -> None:
    """The step of the proof: of 2^32 values of an entry, at most one hides an error of it."""
    weight = torch.zeros(1, 1, dtype=torch.int8)
    x = torch.zeros(1, 1, dtype=torch.int32)
    error = torch.tensor([[-(1 << error_bits)]]).to(torch.int32)
    for bit in range(32):
        for s in (1 << bit, -(1 << bit), (1 << bit) + 1):
            entry = torch.tensor([[s], [0]]).to(torch.int32)  # one vector says nothing
            assert not _check_with(entry, weight).holds(x, error) or int(entry[0]) == 0
    blind = torch.zeros(VECTORS, 1, dtype=torch.int32)
    assert _check_with(blind, weight).holds(x, error)


# ------------------------------------------------------------------------------- the secrets


def test_entries_are_uniform_over_their_bits() -> None:
    check = ExactCheck.draw(torch.zeros(60_000, 1, dtype=torch.int8), Randomness())
    for shift in (0, 12, 24):
        parts = (check.vectors_kO >> shift) & 0xFF
        counts = torch.bincount(parts.flatten(), minlength=256).double()
        expected = parts.numel() / 256
        # Chi-squared with 255 degrees of freedom: six deviations above its mean.
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert chi < 255 + 6 * math.sqrt(2 * 255)


def test_an_adversary_that_guesses_the_secrets_is_refused() -> None:
    """It knows how they are drawn, and makes an error that its own would not see."""
    weight = _weight(64, 48)
    x = _inputs(1, weight)
    y = _product(x, weight)
    drawn = ExactCheck.draw(weight, Randomness())
    known = torch.cat((drawn.vectors_kO[:1], torch.zeros_like(drawn.vectors_kO[:1])))
    guess = _check_with(known, weight)
    wrong = y + _unseen_by(guess)
    assert guess.holds(x, wrong)
    for _ in range(50):
        assert not ExactCheck.draw(weight, Randomness()).holds(x, wrong)
    # Nor does it help to know one of the two: the other is independent of it.
    assert not drawn.holds(x, wrong)


def _unseen_by(check: ExactCheck) -> torch.Tensor:
    """Return an error, int32 [1, O], that a check of one vector does not see."""
    s_1O = check.vectors_kO[:1].long()
    errors = list(torch.eye(s_1O.shape[1], dtype=torch.int64))
    for s_O in s_1O:
        # Two errors with sums t and u make one of which nothing is left: u times one - t the other.
        sums = [int(s_O @ error) for error in errors]
        pairs = list(zip(errors, sums, strict=True))
        errors = [
            one * (u // math.gcd(t, u)) - other * (t // math.gcd(t, u))
            for (one, t), (other, u) in zip(pairs[::2], pairs[1::2], strict=True)
            if t and u
        ]
        errors = errors[: len(errors) // 2 * 2]
    smallest: torch.Tensor = min(errors, key=lambda error: int(error.abs().max()))
    assert 0 < int(smallest.abs().max()) < 2**31
    return smallest.to(torch.int32)[None]


def test_secrets_differ_from_draw_to_draw_and_from_run_to_run() -> None:
    weight, one = _weight(64, 48), Randomness()
    first, second = ExactCheck.draw(weight, one), ExactCheck.draw(weight, one)
    third = ExactCheck.draw(weight, Randomness())
    assert not torch.equal(first.vectors_kO, second.vectors_kO)
    assert not torch.equal(first.vectors_kO, third.vectors_kO)
    floats = weight.float()
    assert not torch.equal(
        FloatCheck.draw(floats, one)._vectors, FloatCheck.draw(floats, Randomness())._vectors
    )


@pytest.mark.parametrize("shown", [repr, str, lambda check: f"{check}"])
def test_no_secret_is_shown(shown: Callable[[object], str]) -> None:
    weight = _weight(64, 48)
    for check in (
        ExactCheck.draw(weight, Randomness()),
        FloatCheck.draw(weight.float(), Randomness()),
    ):
        text = shown(check)
        assert "tensor" not in text
        assert "vectors" not in text
        assert "_kI" not in text
        assert type(check).__name__ in text  # guards the test


def test_vectors_and_their_products_belong_together() -> None:
    weight = _weight(64, 48)
    exact = ExactCheck.draw(weight, Randomness())
    assert torch.equal(_products(exact), exact.vectors_kO.long() @ weight.long())
    floats = FloatCheck.draw(weight.float(), Randomness())
    assert floats._vectors.shape == (FLOAT_VECTORS, 64)
    torch.testing.assert_close(floats._products, floats._vectors @ weight.double())
    assert floats.gain == pytest.approx(float(weight.double().norm()) / 48**0.5)


# ------------------------------------------------------------------------------------ floats


def _floats(
    shape: Sequence[int], dtype: torch.dtype, seed: int = 0, scale: float = 1.0
) -> torch.Tensor:
    return (torch.randn(*shape, generator=_generator(seed)) * scale).to(dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("outliers", [False, True])
def test_honest_products_of_floats_pass(dtype: torch.dtype, rows: int, outliers: bool) -> None:
    tolerance, randomness = Tolerance.of(dtype, None), Randomness()
    for seed in range(60):
        weight = _floats((96, 160), dtype, seed, 160**-0.5)
        x = _floats((rows, 160), dtype, 100 + seed)
        if outliers:
            x[:, 3] *= 100
            x[-1] *= 10
        check = FloatCheck.draw(weight, randomness)
        y = torch.nn.functional.linear(x, weight)
        assert check.holds(x, y, [x], tolerance)


def test_a_weight_of_more_than_one_block_is_summed_up_row_by_row() -> None:
    weight, x = _floats((600, 1024), torch.float32, 1, 1 / 32), _floats((3, 1024), torch.float32, 2)
    y = torch.nn.functional.linear(x, weight)
    check = FloatCheck.draw(weight, Randomness())
    assert check.holds(x, y, [x], Tolerance.of(torch.float32, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_input_along_a_weights_rows_passes(dtype: torch.dtype) -> None:
    """A product far larger than that of a vector without a direction."""
    weight = _floats((96, 160), dtype, 1, 160**-0.5)
    check = FloatCheck.draw(weight, Randomness())
    x = weight[:5] * 50
    y = torch.nn.functional.linear(x, weight)
    assert check.holds(x, y, [x], Tolerance.of(dtype, None))
    assert not check.holds(x, y * 1.05, [x], Tolerance.of(dtype, None))


FLOAT_LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one element": lambda y: _with(y, 0, 0, y[0, 0] + y.norm() / 2),
    "low-rank": lambda y: y + 0.3 * y.abs().amax() * torch.ones_like(y),
    "sign": lambda y: -y,
    "a tenth more": lambda y: y * 1.1,
    "zeros": torch.zeros_like,
    "NaN": lambda y: _with(y, 0, 3, torch.tensor(math.nan)),
    "all NaN": lambda y: torch.full_like(y, math.nan),
    "infinity": lambda y: _with(y, 0, 3, torch.tensor(math.inf)),
    "minus infinity": lambda y: _with(y, -1, -1, torch.tensor(-math.inf)),
    "opposite infinities": lambda y: _with(
        _with(y, 0, 0, torch.tensor(math.inf)), 0, 1, torch.tensor(-math.inf)
    ),
    "the largest number": lambda y: torch.full_like(y, torch.finfo(y.dtype).max),
    "shifted": lambda y: y.roll(1, dims=-1),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@each_row("lie", FLOAT_LIES)
def test_a_wrong_product_of_floats_is_refused(lie: str, dtype: torch.dtype, together: bool) -> None:
    weight, x = _floats((96, 160), dtype, 1, 160**-0.5), _floats((2, 160), dtype, 2)
    y = torch.nn.functional.linear(x, weight)
    wrong = FLOAT_LIES[lie](y)
    tolerance = Tolerance.of(dtype, RowMix() if together else None)
    for _ in range(20):
        check = FloatCheck.draw(weight, Randomness())
        assert not check.holds(x, wrong, [x], tolerance)
        assert check.holds(x, y, [x], tolerance)


def test_in_float32_a_thousandth_is_refused() -> None:
    weight, x = _floats((96, 160), torch.float32, 1), _floats((2, 160), torch.float32, 2)
    y = torch.nn.functional.linear(x, weight) * (1 + 1e-3)
    check = FloatCheck.draw(weight, Randomness())
    assert not check.holds(x, y, [x], Tolerance.of(torch.float32, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_reply_does_not_widen_its_own_limit(dtype: torch.dtype) -> None:
    """Where the limit grew with y, an error could hide behind a larger one."""
    weight, x = _floats((96, 160), dtype, 1, 160**-0.5), _floats((2, 160), dtype, 2)
    y = torch.nn.functional.linear(x, weight)
    check, tolerance = FloatCheck.draw(weight, Randomness()), Tolerance.of(dtype, None)
    for factor in (1e1, 1e2, 1e4):
        assert not check.holds(x, _with(y, 1, 1, y[1, 1] + factor), [x], tolerance)


def test_each_row_has_a_limit_of_its_own_unless_rows_are_mixed() -> None:
    weight = _floats((96, 160), torch.float32, 1, 160**-0.5)
    x = _floats((2, 160), torch.float32, 2)
    x[0] *= 1e6
    y = torch.nn.functional.linear(x, weight)
    wrong = _with(y, 1, 1, y[1, 1] + 1e-2)
    check = FloatCheck.draw(weight, Randomness())
    assert not check.holds(x, wrong, [x], Tolerance.of(torch.float32, None))
    assert check.holds(x, wrong, [x], Tolerance.of(torch.float32, RowMix()))
    assert check.holds(x, y, [x], Tolerance.of(torch.float32, None))


def test_noise_that_was_sent_widens_the_limit_and_only_that() -> None:
    weight = _floats((96, 160), torch.float32, 1, 160**-0.5)
    x = _floats((1, 160), torch.float32, 2)
    noise = _floats((1, 160), torch.float32, 3, 1e5)
    served = torch.nn.functional.linear(x + noise, weight)
    y = (served.double() - noise.double() @ weight.double().t()).float()
    check, tolerance = FloatCheck.draw(weight, Randomness()), Tolerance.of(torch.float32, None)
    assert check.holds(x, y, [x + noise], tolerance)
    assert not check.holds(x, y, [x], tolerance)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_not_finite_cannot_be_verified(value: float) -> None:
    weight, x = _floats((96, 160), torch.float32), _floats((2, 160), torch.float32)
    x[1, 4] = value
    y = torch.nn.functional.linear(x, weight)
    check = FloatCheck.draw(weight, Randomness())
    for tolerance in (Tolerance.of(torch.float32, None), Tolerance.of(torch.float32, RowMix())):
        with pytest.raises(ActivationRangeError, match="not finite"):
            check.holds(x, y, [x], tolerance)


def test_zeros_must_give_zeros() -> None:
    weight, x = _floats((96, 160), torch.float32), torch.zeros(2, 160)
    check, tolerance = FloatCheck.draw(weight, Randomness()), Tolerance.of(torch.float32, None)
    y = torch.zeros(2, 96)
    assert check.holds(x, y, [x], tolerance)
    assert not check.holds(x, _with(y, 0, 0, torch.tensor(1e-30)), [x], tolerance)


def test_the_smallest_numbers_of_half_precision_are_rounded_and_pass() -> None:
    weight, x = _floats((96, 160), torch.float16, 1, 160**-0.5), _floats((1, 160), torch.float16)
    x = (x * 1e-7).to(torch.float16)
    assert bool(x.any())
    y = torch.nn.functional.linear(x.float(), weight.float()).to(torch.float16)
    check = FloatCheck.draw(weight, Randomness())
    assert check.holds(x, y, [x], Tolerance.of(torch.float16, None))


def test_what_a_mask_declares_holds_of_every_element_relative_to_the_largest() -> None:
    """Of all elements at once, in a row that is small beside the largest; and of no more."""
    weight, x = _floats((96, 160), torch.float32, 1, 160**-0.5), _floats((3, 160), torch.float32, 2)
    x[1] *= 1e-4
    plain = x.double() @ weight.double().t()
    declared = FloatNoise.tolerance * float(plain.abs().max())
    tolerance = Tolerance.of(torch.float32, FloatNoise())
    assert tolerance.declared == FloatNoise.tolerance
    for _ in range(20):
        check = FloatCheck.draw(weight, Randomness())
        for error in (_with(torch.zeros_like(plain), 1, 7, declared), declared):
            assert check.holds(x, (plain + error).float(), [x], tolerance)
            assert not check.holds(x, (plain + 1000 * error).float(), [x], tolerance)


@pytest.mark.parametrize("together", [False, True])
def test_limits_are_added_up(together: bool) -> None:
    size = torch.tensor([[1.0, 4.0], [2.0, 8.0]], dtype=torch.float64)
    found = Tolerance(0.5, 0.25, 0.125, together).limit(size, 16)
    own = torch.tensor([[4.0, 4.0], [8.0, 8.0]]) if together else size
    assert torch.equal(found, 0.5 * own.double() + 0.25 * 4 * 8 + 0.125 * 4)
    assert Tolerance(0.5, 0.25, 0.125, together).limit(size[:, :0], 16).shape == (2, 0)


def test_a_tolerance_is_that_of_dtype_and_mask() -> None:
    for dtype in DTYPES:
        clear = Tolerance.of(dtype, None)
        assert 2 * torch.finfo(dtype).eps < clear.relative < 20 * torch.finfo(dtype).eps
        assert not clear.together
        for mask in our_masks().values():
            if mask.arithmetic == "float":
                found = Tolerance.of(dtype, mask())
                assert found.relative == clear.relative
                assert found.declared == mask.tolerance > clear.declared == 0
                assert found.together == (mask.kind == "row")


# -------------------------------------------------------------------- products of activations


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_honest_products_of_activations_pass_and_wrong_ones_do_not(
    dtype: torch.dtype, rows: int
) -> None:
    # Always the same vectors: one row leaves a lie of a tenth a chance of 1 in 3,000 in bfloat16.
    tolerance, randomness = Tolerance.of(dtype, None), Randomness(bytes(32))
    for seed in range(20):
        a, b = _floats((2, rows, 16), dtype, seed), _floats((2, 16, 50), dtype, 100 + seed)
        if seed % 2:
            a = a.float().softmax(-1).to(dtype)
        y = torch.matmul(a, b)
        assert product_holds(a, b, y, tolerance, randomness)
        for lie, wrong in FLOAT_LIES.items():
            changed = y.clone()
            changed[1] = wrong(y[1])
            assert not product_holds(a, b, changed, tolerance, randomness), lie


def test_products_of_activations_that_are_not_finite_cannot_be_verified() -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    tolerance = Tolerance.of(torch.float32, None)
    for operand in (a, b):
        spoiled = operand.clone()
        spoiled[0, 0, 0] = math.nan
        given = (spoiled, b) if operand is a else (a, spoiled)
        with pytest.raises(ActivationRangeError):
            product_holds(*given, a @ b, tolerance, Randomness())


def test_vectors_of_activations_are_fresh_in_every_call() -> None:
    """An error that one call's vectors do not see must not pass the next one's."""
    a, b = _floats((1, 3, 16), torch.float32, 1), _floats((1, 16, 50), torch.float32, 2)
    tolerance = Tolerance.of(torch.float32, None)
    s_Nk = Randomness(bytes(32)).normal(50, FLOAT_VECTORS)
    unseen = torch.linalg.svd(s_Nk.t()).Vh[-1]
    assert float((unseen @ s_Nk).norm()) < 1e-10
    wrong = (a.double() @ b.double() + 100 * unseen).float()
    assert product_holds(a, b, wrong, tolerance, Randomness(bytes(32)))
    randomness = Randomness(bytes(32))
    randomness.normal(50, FLOAT_VECTORS)
    assert not product_holds(a, b, wrong, tolerance, randomness)


# ---------------------------------------------------------------------------- without secrets


@pytest.mark.parametrize("dtype", DTYPES)
def test_who_is_to_blame_is_found_by_multiplying(dtype: torch.dtype) -> None:
    weight, x = _floats((96, 160), dtype, 1, 160**-0.5), _floats((2, 160), dtype, 2)
    y, tolerance = torch.nn.functional.linear(x, weight), Tolerance.of(dtype, None)
    # In two blocks, as they are read from disk.
    blocks = [(slice(start, start + 50), weight[start : start + 50]) for start in (0, 50)]
    assert within_tolerance(x, blocks, y, tolerance.of_answers())
    for lie, wrong in FLOAT_LIES.items():
        assert not within_tolerance(x, blocks, wrong(y), tolerance.of_answers()), lie


def test_who_is_right_has_half_the_room_of_what_is_refused() -> None:
    """A liar at the edge of the tolerance is not acquitted, which would blame the mask."""
    weight, x = _floats((96, 160), torch.float32, 1, 160**-0.5), _floats((1, 160), torch.float32, 2)
    y = x.double() @ weight.double().t()
    tolerance = Tolerance.of(torch.float32, RowMix())
    size = float(y.norm() + weight.double().norm() / 160**0.5 * x.double().norm())
    unit = torch.zeros_like(y)
    unit[0, 3] = tolerance.relative * size
    blocks = [(slice(0, 96), weight)]
    for share, right in ((0.45, True), (0.55, False), (0.95, False)):
        assert within_tolerance(x, blocks, y + share * unit, tolerance.of_answers()) == right


def test_answers_to_what_is_not_finite_are_nobodys_lie() -> None:
    x, weight = torch.full((1, 4), math.inf), torch.ones(3, 4)
    with pytest.raises(ActivationRangeError):
        within_tolerance(
            x,
            [(slice(0, 3), weight)],
            torch.zeros(1, 3),
            Tolerance.of(torch.float32, None).of_answers(),
        )
