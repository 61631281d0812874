"""Compiled kernels: which are chosen, that a wrong one is not, and what threads share."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from protocol import native
from protocol.errors import KernelError
from protocol.integer import ring_product
from protocol.native.proof import PORTABLE, differs
from tests.kit.kernels import KERNELS, using_kernels

REAL = native.library
compiled_only = pytest.mark.skipif(native.library is None, reason="no compiler built the kernels")


@pytest.fixture
def chosen_again() -> Iterator[None]:
    before = native.choice()
    yield
    native.use(before.variant)


class Library:
    """The compiled library, one of whose kernels is wrong in one variant."""

    def __init__(self, variant: str, kernel: str) -> None:
        self._wrong, self._kernel, self._used = variant, kernel, PORTABLE

    def use(self, variant: str) -> None:
        self._used = variant
        REAL.use(variant)

    def __getattr__(self, name: str) -> Any:
        function = getattr(REAL, name)
        if name != self._kernel or self._used != self._wrong:
            return function
        return lambda *_: 0  # does nothing: what was in memory before stays


@compiled_only
def test_every_variant_of_this_processor_proves_itself() -> None:
    assert KERNELS[:2] == ("torch", PORTABLE)
    assert not [name for name in native.library.variants() if differs(native.library, name)]


@compiled_only
@pytest.mark.parametrize(
    "kernel", ["product", "encode", "rms_norm", "silu_mul", "rope", "attention"]
)
def test_a_variant_with_a_wrong_kernel_is_not_used(
    kernel: str, monkeypatch: pytest.MonkeyPatch, chosen_again: None
) -> None:
    best = native.library.variants()[-1]
    if best == PORTABLE:
        pytest.skip("a processor with the portable variant alone")
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", Library(best, kernel))
        found = native.use()
        assert best in found.refused
        assert found.variant != best
        with pytest.raises(KernelError, match=f"kernels {best}: got wrong results"):
            native.use(best)


def test_an_unknown_variant_is_refused_with_those_that_there_are(chosen_again: None) -> None:
    expected = "got 'sse9', expected one of auto, torch"
    with pytest.raises(KernelError, match=expected):
        native.use("sse9")


def test_without_a_library_torch_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chosen_again: None
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", None)
        assert native.use() == native.Choice("torch", (), False)
        assert [record.message for record in caplog.records] == ["no_compiled_kernels"]
        assert not native.compiled_for(torch.float32)
        with pytest.raises(KernelError):
            native.use(PORTABLE)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 40])
def test_products_have_the_same_bits_however_they_are_computed(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-128, 128, (131, 197), generator=generator).to(torch.int8)
    elements = torch.randint(-(2**31), 2**31, (rows, 197), generator=generator).to(torch.int32)
    exact = (elements.long() @ weight.long().t()).to(torch.int32)
    for name in KERNELS:
        with using_kernels(name):
            assert torch.equal(ring_product(elements, weight), exact), name
            assert torch.equal(ring_product(elements, weight[5:69]), exact[:, 5:69]), name


@compiled_only
def test_threads_and_forked_children_have_pools_of_their_own() -> None:
    # More threads than cores, and jobs of different sizes back to back: workers wake up late, in
    # the middle of a job that is not the one they were woken for.
    products = []
    for outputs in (2048, 512, 1024):
        weight = torch.randint(-128, 128, (outputs, 256)).to(torch.int8)
        elements = torch.randint(-(2**31), 2**31, (32, 256)).to(torch.int32)
        exact = (elements.long() @ weight.long().t()).to(torch.int32)
        products.append((elements, weight, exact))
    wrong: list[int] = []

    def compute(number: int) -> None:
        wrong.extend(
            number
            for _ in range(100)
            for elements, weight, exact in products
            # By numpy: torch's own threads do not outlive a fork.
            if not np.array_equal(ring_product(elements, weight).numpy(), exact.numpy())
        )

    native.set_threads(4)
    try:
        threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        compute(3)
        child = multiprocessing.get_context("fork").Process(
            target=_exit_if_right, args=(compute, wrong)
        )
        child.start()
        child.join(60)
    finally:
        native.set_threads(1)
    assert not wrong
    assert child.exitcode == 0


@compiled_only
def test_a_forked_child_leaves_pools_of_other_threads_alone() -> None:
    made, forked = threading.Event(), threading.Event()

    def keep_a_pool() -> None:
        _make_a_pool()
        made.set()
        forked.wait(60)

    native.set_threads(3)
    try:
        thread = threading.Thread(target=keep_a_pool)
        thread.start()
        made.wait(60)
        child = multiprocessing.get_context("fork").Process(target=_make_a_pool)
        child.start()
        child.join(60)
        forked.set()
        thread.join()
    finally:
        native.set_threads(1)
    assert child.exitcode == 0


@compiled_only
def test_another_number_of_threads_frees_no_pool_that_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, changed = threading.Event(), threading.Event()
    freed: list[int] = []
    seen: list[bool] = []

    def look() -> None:
        pool = native.own.pool  # as a call in progress has it
        used = int(pool)
        made.set()
        changed.wait(60)
        seen.append(used in freed)
        del pool
        seen.append(used in freed)
        seen.append(native.own.pool == used)

    real = native.library
    counted = SimpleNamespace(pool_new=real.pool_new, pool_free=freed.append)
    monkeypatch.setattr(native, "library", counted)
    thread = threading.Thread(target=look)
    thread.start()
    made.wait(60)
    native.set_threads(2)
    changed.set()
    thread.join()
    native.set_threads(1)
    assert seen == [False, True, False]
    for pool in freed:
        real.pool_free(pool)


def _make_a_pool() -> None:
    assert native.own.pool


def _exit_if_right(compute: Any, wrong: list[int]) -> None:
    compute(4)
    raise SystemExit(len(wrong))
