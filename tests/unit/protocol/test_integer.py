"""The ring's products equal int64 arithmetic modulo 2^32, bit by bit, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from protocol import integer
from protocol.errors import KernelError
from protocol.integer import (
    DIGITS,
    MAX_IN_FEATURES,
    check_kernels,
    combine_digits,
    digits_below,
    digits_needed,
    empty_weight,
    exact_product,
    int8_product,
    ring_product,
    to_digits,
)
from tests.kit.rows import each_row

CPU = torch.device("cpu")
LOW, HIGH = -(2**31), 2**31 - 1
# -128 in every digit, 127 in every digit, and the ends of int32.
EXTREMES = (0x7F7F7F80, 0x7F7F7F7F, LOW, HIGH, -1, 0)


def _elements(*shape: int, low: int = LOW, high: int = HIGH, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(torch.int32)


def _weight(out_features: int, in_features: int, value: int | None = None) -> torch.Tensor:
    weight = empty_weight(out_features, in_features, CPU)
    if value is not None:
        return weight.fill_(value)
    return weight.copy_(_elements(out_features, in_features, low=-128, high=127, seed=1))


def _reference(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in int64, brought into the range of int32 modulo 2^32 by hand."""
    exact = elements.long() @ weight.long().t()
    return ((exact + 2**31) % 2**32 - 2**31).to(torch.int32)


@each_row("value", [0, 1, -1, 127, 128, -128, -129, 255, 256, 32767, -32768, *EXTREMES])
def test_digits_add_up_to_the_element(value: int) -> None:
    digits = to_digits(torch.tensor([[value]], dtype=torch.int32))
    assert (digits.dtype, digits.shape) == (torch.int8, (DIGITS, 1, 1))
    total = sum(int(digit) * 256**index for index, digit in enumerate(digits.flatten()))
    assert (total - value) % 2**32 == 0


def test_digits_of_random_elements_add_up() -> None:
    elements = _elements(7, 33)
    before = elements.clone()
    places = torch.tensor([1, 256, 256**2, 256**3])[:, None, None]
    total = (to_digits(elements).long() * places).sum(0)
    assert torch.equal(total.to(torch.int32), elements)
    assert torch.equal(elements, before)


@each_row(
    ("low", "high", "count"),
    [
        (0, 0, 1),
        (-128, 127, 1),
        (0, 128, 2),
        (-129, 0, 2),
        (-0x8080, 0x7F7F, 2),
        (0, 0x7F80, 3),
        (-0x8081, 0, 3),
        (-0x808080, 0x7F7F7F, 3),
        (0, 0x7F7F80, 4),
        (-0x808081, 0, 4),
        (LOW, HIGH, 4),
    ],
)
def test_as_few_digits_as_hold_the_values(low: int, high: int, count: int) -> None:
    values = torch.tensor([[low, 0, high]], dtype=torch.int32)
    assert digits_needed(values) == count
    digits = to_digits(values, count)
    places = torch.tensor([256**index for index in range(count)])[:, None, None]
    # Exactly, not only modulo 2^32, wherever fewer than all digits are used.
    if count < DIGITS:
        assert torch.equal((digits.long() * places).sum(0), values.long())


@pytest.mark.parametrize(
    ("bound", "count"),
    [
        (0, 1),
        (127, 1),
        (127.5, 2),
        (0x7F7F, 2),
        (0x7F80, 3),
        (0x7F7F7F, 3),
        (0x7F7F80, 4),
        (2e9, 4),
    ],
)
def test_digits_below_a_bound_hold_every_value_within_it(bound: float, count: int) -> None:
    assert digits_below(bound) == count
    values = torch.tensor([[int(bound), -int(bound)]], dtype=torch.int32)
    assert digits_needed(values) <= count


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_digits_combine_modulo_the_ring(count: int) -> None:
    products = _elements(count, 5, 9)
    places = torch.tensor([256**index for index in range(count)])[:, None, None]
    expected = (products.long() * places).sum(0).to(torch.int32)
    out = torch.empty(5, 9, dtype=torch.int32)
    assert combine_digits(products.clone(), out) is out
    assert torch.equal(out, expected)
    assert torch.equal(combine_digits(products), expected)


SHAPES = [(2, 1), (3, 5), (37, 19), (48, 96), (256, 64), (513, 130)]


@each_row("rows", [1, 2, 3, 4, 7, 16, 17, 31, 64, 100, 255, 300])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_ring_product_equals_int64_modulo_the_ring(
    rows: int, in_features: int, out_features: int
) -> None:
    elements, weight = _elements(rows, in_features), _weight(out_features, in_features)
    expected = _reference(elements, weight)
    product = ring_product(elements, weight)
    assert (product.dtype, product.shape) == (torch.int32, (rows, out_features))
    assert torch.equal(product, expected)
    assert torch.equal(exact_product(elements, weight), expected)


def test_no_rows_give_no_rows() -> None:
    none, weight = _elements(0, 8), _weight(5, 8)
    for product in (ring_product, exact_product):
        assert product(none, weight).shape == (0, 5)


@each_row("value", EXTREMES)
@pytest.mark.parametrize("weight_value", [-128, -127, 127])
@pytest.mark.parametrize("in_features", [2, 63, 2048, 8192])
def test_extreme_values_neither_saturate_nor_round(
    value: int, weight_value: int, in_features: int
) -> None:
    elements = torch.full((5, in_features), value, dtype=torch.int32)
    weight = _weight(9, in_features, weight_value)
    assert torch.equal(ring_product(elements, weight), _reference(elements, weight))


def test_the_longest_product_that_is_allowed_is_exact() -> None:
    elements = torch.full((1, MAX_IN_FEATURES), 0x7F7F7F80, dtype=torch.int32)
    weight = _weight(2, MAX_IN_FEATURES, -128)
    assert torch.equal(ring_product(elements, weight), _reference(elements, weight))


@pytest.mark.parametrize("in_features", [1, MAX_IN_FEATURES + 1])
def test_a_product_that_could_be_wrong_is_refused_with_both_numbers(in_features: int) -> None:
    elements = torch.zeros(1, in_features, dtype=torch.int32)
    weight = _weight(2, in_features, 0)
    with pytest.raises(KernelError) as caught:
        ring_product(elements, weight)
    assert caught.value.got == f"{in_features} in_features"
    assert caught.value.expected == f"2 to {MAX_IN_FEATURES}"


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("rows", [1, 5, 32, 33, 64, 65, 97])
def test_rows_in_blocks_give_the_same_numbers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    elements, weight = _elements(rows, 40), _weight(24, 40)
    whole = ring_product(elements, weight)
    sizes: list[int] = []

    def counted(part: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        sizes.append(len(part) // DIGITS)
        return int8_product(part, *arguments)

    monkeypatch.setattr(integer, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(integer, "int8_product", counted)
    assert torch.equal(ring_product(elements, weight), whole)
    assert sum(sizes) == rows
    assert len(sizes) == -(-rows // 32)
    assert max(sizes) <= 32


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(
    ("low", "high", "count"), [(-128, 127, 1), (-30000, 30000, 2), (-130000, 130000, 3)]
)
def test_small_values_cost_few_digits_and_are_exact(
    low: int, high: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, weight = _elements(6, 128, low=low, high=high), _weight(10, 128)
    values[0, 0], values[0, 1] = low, high
    rows: list[int] = []

    def counted(part: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        rows.append(len(part))
        return int8_product(part, *arguments)

    monkeypatch.setattr(integer, "int8_product", counted)
    exact = values.long() @ weight.long().t()
    assert int(exact.abs().max()) < 2**31
    assert torch.equal(exact_product(values, weight).long(), exact)
    assert rows == [6 * count]


@pytest.mark.usefixtures("torch_kernels")
def test_any_layout_of_the_weight_gives_the_same_numbers() -> None:
    elements, weight = _elements(9, 50), _weight(70, 50)
    expected = _reference(elements, weight)
    assert weight.t().is_contiguous()
    assert torch.equal(ring_product(elements, weight.contiguous()), expected)
    for rows in (slice(0, 33), slice(33, 70), slice(5, 6)):
        assert torch.equal(ring_product(elements, weight[rows]), expected[:, rows])


def test_this_processors_products_are_exact() -> None:
    check_kernels(CPU)


def _saturating(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """Pairs of products saturated at int16, as `vpmaddubsw` has them."""
    return (rows.long() @ weight.long()).clamp(-(2**15), 2**15 - 1).to(torch.int32)


def _last_row_wrong(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    product = (rows.long() @ weight.long()).to(torch.int32)
    if len(rows) > 100:
        product[-1] += 1
    return product


def _head_wrong(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """Wrong for the LM head's layout alone."""
    product = (rows.long() @ weight.long()).to(torch.int32)
    return product if weight.is_contiguous() else product + 1


def _layers_wrong(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """Wrong for the layout of the layers' weights alone."""
    product = (rows.long() @ weight.long()).to(torch.int32)
    return product + 1 if weight.is_contiguous() else product


def _one_row_wrong(rows: torch.Tensor, weight: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
    """As the LM head asks at decode: one row of one digit."""
    product = (rows.long() @ weight.long()).to(torch.int32)
    return product + 1 if len(rows) == 1 else product


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize(
    "broken", [_saturating, _last_row_wrong, _head_wrong, _layers_wrong, _one_row_wrong]
)
def test_a_processor_that_is_not_exact_is_found(
    broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_int_mm", broken)
    with pytest.raises(KernelError, match=r"int8 products on cpu: got wrong numbers for \["):
        check_kernels(CPU)


def test_a_device_s_own_product_is_what_is_checked() -> None:
    def wrong(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ring_product(elements, weight) + (len(elements) == 33)

    with pytest.raises(KernelError, match=r"got wrong numbers for \[33, "):
        check_kernels(CPU, wrong)
