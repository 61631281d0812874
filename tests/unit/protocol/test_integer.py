"""The ring's products equal int64 arithmetic modulo 2^32, bit by bit, whatever the sizes.

And compiled kernels: which are chosen, that a wrong or broken one is not, what threads share.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gpu_side.kernels import digits_needed, exact_product
from protocol import native
from protocol.errors import KernelError
from protocol.integer import (
    DIGITS,
    MAX_IN_FEATURES,
    check_kernels,
    digits_below,
    empty_weight,
    ring_product,
    to_digits,
)
from protocol.native import PORTABLE, differs, load
from tests.kit.kernels import KERNELS, using_kernels
from tests.kit.rows import each_row

CPU = torch.device("cpu")
LOW, HIGH = -(2**31), 2**31 - 1
# -128 in every digit, 127 in every digit, and the ends of int32.
EXTREMES = (0x7F7F7F80, 0x7F7F7F7F, LOW, HIGH, -1, 0)


def _elements(*shape: int, low: int = LOW, high: int = HIGH) -> torch.Tensor:
    return torch.randint(low, high + 1, shape).to(torch.int32)


def _weight(out_features: int, in_features: int, value: int | None = None) -> torch.Tensor:
    weight = empty_weight(out_features, in_features, CPU)
    if value is not None:
        return weight.fill_(value)
    return weight.copy_(_elements(out_features, in_features, low=-128, high=127))


def _reference(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in integers, brought into the range of int32 modulo 2^32 by hand."""
    if elements.shape[1] <= 8192:  # sums below 2^53 are exact in float64, which is faster
        exact = (elements.double() @ weight.double().t()).long()
    else:
        exact = elements.long() @ weight.long().t()
    return ((exact + 2**31) % 2**32 - 2**31).to(torch.int32)


def _summed(digits: torch.Tensor) -> torch.Tensor:
    """Add digits up in int64: sum of 256^i digits[i]."""
    places = torch.tensor([256**index for index in range(len(digits))])[:, None, None]
    return (digits.long() * places).sum(0)


def test_digits_add_up_to_the_elements() -> None:
    for elements in (torch.tensor([[0, -1, 128, -129, *EXTREMES]]).int(), _elements(7, 33)):
        before = elements.clone()
        digits = to_digits(elements)
        assert (digits.dtype, digits.shape) == (torch.int8, (DIGITS, *elements.shape))
        assert torch.equal(_summed(digits).to(torch.int32), before)
        assert torch.equal(elements, before)


@each_row(
    ("low", "high", "count"),
    [
        (-128, 127, 1),
        (0, 128, 2),
        (-129, 0, 2),
        (-0x8080, 0x7F7F, 2),
        (0, 0x7F80, 3),
        (-0x8081, 0, 3),
        (-0x808080, 0x7F7F7F, 3),
        (0, 0x7F7F80, 4),
        (LOW, HIGH, 4),
    ],
)
def test_as_few_digits_as_hold_the_values(low: int, high: int, count: int) -> None:
    values = torch.tensor([[low, 0, high]], dtype=torch.int32)
    assert digits_needed(values) == count
    assert digits_below(high) <= count <= digits_below(max(-low, high) + 1)
    # Exactly, not only modulo 2^32, wherever fewer than all digits are used.
    if count < DIGITS:
        assert torch.equal(_summed(to_digits(values, count)), values.long())


ROWS = (0, 1, 3, 17, 64)
SHAPES = [(2, 1), (37, 19), (48, 96), (513, 130)]


@each_row("kernels", KERNELS)
def test_products_equal_int64_modulo_the_ring(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    for limit in ("_MIN_BLOCK_ROWS", "_BLOCK_ELEMENTS"):
        monkeypatch.setattr(f"protocol.integer.{limit}", 16)  # several blocks, the last smaller
    with using_kernels(kernels):
        for in_features, out_features in SHAPES:
            weight = _weight(out_features, in_features)
            for rows in ROWS:
                elements = _elements(rows, in_features)
                expected = _reference(elements, weight)
                found = ring_product(elements, weight), exact_product(elements, weight)
                half = slice(out_features // 2, out_features)
                part = ring_product(elements, weight[half])
                same = [torch.equal(one, expected) for one in found]
                if not (all(same) and torch.equal(part, expected[:, half])):
                    wrong.append((rows, in_features, out_features, same))
        # Extreme values neither saturate nor round.
        for in_features in (2, 63, 2048, 8192):
            for value in EXTREMES:
                elements = torch.full((5, in_features), value, dtype=torch.int32)
                for byte in (-128, -127, 127):
                    weight = _weight(9, in_features, byte)
                    expected = _reference(elements, weight)
                    found = ring_product(elements, weight), exact_product(elements, weight)
                    same = [torch.equal(one, expected) for one in found]
                    if not all(same):
                        wrong.append((value, byte, in_features, same))
    assert not wrong


def test_a_product_that_could_be_wrong_is_refused_and_the_longest_other_is_exact() -> None:
    elements = torch.full((1, MAX_IN_FEATURES), 0x7F7F7F80, dtype=torch.int32)
    weight = _weight(2, MAX_IN_FEATURES, -128)
    assert torch.equal(ring_product(elements, weight), _reference(elements, weight))
    for in_features in (1, MAX_IN_FEATURES + 1):
        elements = torch.zeros(1, in_features, dtype=torch.int32)
        with pytest.raises(KernelError) as caught:
            ring_product(elements, _weight(2, in_features, 0))
        assert caught.value.got == f"{in_features} in_features"
        assert caught.value.expected == f"2 to {MAX_IN_FEATURES}"


def _exact(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.long() @ weight.long()


# By what is wrong: a product of digits that is not the exact one.
BROKEN = {
    # Pairs of products saturated at int16, as `vpmaddubsw` has them.
    "saturating": lambda rows, weight: _exact(rows, weight).clamp(-(2**15), 2**15 - 1),
    "many rows": lambda rows, weight: _exact(rows, weight) + (len(rows) > 100),
    # As the LM head asks at decode: one row of one digit.
    "one row": lambda rows, weight: _exact(rows, weight) + (len(rows) == 1),
    "the LM head's layout": lambda rows, weight: (
        _exact(rows, weight) + (not weight.is_contiguous())
    ),
    "the layers' layout": lambda rows, weight: _exact(rows, weight) + weight.is_contiguous(),
}


@pytest.mark.usefixtures("torch_kernels")
@each_row("broken", BROKEN)
def test_a_processor_that_is_not_exact_is_found(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return BROKEN[broken](rows, weight).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", product)
    with pytest.raises(KernelError, match=r"int8 products on cpu: got wrong numbers for \["):
        check_kernels(CPU)


REAL = native.library
compiled_only = pytest.mark.skipif(native.library is None, reason="no compiler built the kernels")


@pytest.fixture
def chosen_again() -> Iterator[None]:
    before = native.choice()
    yield
    native.use(before.variant)


@compiled_only
def test_every_variant_of_this_processor_proves_itself() -> None:
    assert KERNELS[:2] == ("torch", PORTABLE)
    assert not [name for name in native.library.variants() if differs(native.library, name)]


@compiled_only
@each_row("kernel", ["draw", "product", "rope", "attention"])
def test_a_variant_with_a_wrong_kernel_is_not_used(
    kernel: str, monkeypatch: pytest.MonkeyPatch, chosen_again: None
) -> None:
    best = REAL.variants()[-1]
    if best == PORTABLE:
        pytest.skip("a processor with the portable variant alone")
    right, library = getattr(REAL, kernel), Mock(wraps=REAL)
    used = library.use
    # It does nothing, and says that it did: what was in memory before stays.
    wrong = {kernel: lambda *given: 1 if used.call_args.args == (best,) else right(*given)}
    library.configure_mock(**wrong)
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", library)
        found = native.use()
        assert best in found.refused
        assert found.variant != best
        with pytest.raises(KernelError, match=f"kernels {best}: got wrong results"):
            native.use(best)


def test_without_a_library_torch_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen_again: None
) -> None:
    with pytest.raises(KernelError, match="got 'sse9', expected one of auto, torch"):
        native.use("sse9")
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", None)
        assert native.use() == native.Choice("torch", ())
        assert [record.message for record in caplog.records] == ["no_compiled_kernels"]
        assert not native.compiled_for(torch.float32)
        with pytest.raises(KernelError):
            native.use(PORTABLE)


def _compute_with_own_pool(others: int) -> None:
    assert native.own.pool != others
    assert native.own.pool.process == os.getpid()
    elements, weight = torch.ones(32, 256, dtype=torch.int32), _weight(2048, 256, 1)
    assert set(ring_product(elements, weight).flatten().tolist()) == {256}


@compiled_only
def test_threads_and_forked_children_have_pools_of_their_own() -> None:
    before = native.threads(), torch.get_num_threads()
    native.set_threads(3)
    # With threads of torch, of an earlier test, a forked child would wait for OpenMP's.
    torch.set_num_threads(1)
    try:
        _compute_with_own_pool(0)
        with ThreadPoolExecutor(1) as another:
            another.submit(_compute_with_own_pool, native.own.pool).result()
        child = multiprocessing.get_context("fork").Process(
            target=_compute_with_own_pool, args=(0,)
        )
        child.start()
        child.join(60)
        child.kill()
        assert child.exitcode == 0
    finally:
        native.set_threads(before[0])
        torch.set_num_threads(before[1])


_SHORT, _OTHER = "cut short, or no library", "built for another processor or system"
# By name: a damage, and what is said of it. Byte 18 of an ELF header names the machine.
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda library: library[: len(library) // 2], _SHORT),
    "empty": (lambda library: b"", _SHORT),
    "machine": (lambda library: library[:18] + b"\xf3\0" + library[20:], _OTHER),
    "symbols": (lambda library: library.replace(b"PyInit__native", b"PyInit__nothin"), _OTHER),
}


@compiled_only
def test_a_library_that_does_not_load_is_of_no_use_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    whole = Path(REAL.__file__).read_bytes()
    found = {}
    for name, (damage, _) in DAMAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / Path(REAL.__file__).name).write_bytes(damage(whole))
        found[name] = load(f"{name}._native")
    assert found == {name: (None, why) for name, (_, why) in DAMAGES.items()}
    assert load("protocol.native._native") == (REAL, "")
    assert load("protocol.native._none") == (None, "")
