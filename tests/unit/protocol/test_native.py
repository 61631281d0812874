"""Compiled kernels: which are chosen, that a wrong or broken one is not, what threads share."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol import native
from protocol.errors import KernelError
from protocol.integer import ring_product
from protocol.native.loading import load
from protocol.native.proof import PORTABLE, differs
from tests.kit.kernels import KERNELS
from tests.kit.rows import each_row

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


# ------------------------------------------------------------------------------ what is chosen


@compiled_only
def test_every_variant_of_this_processor_proves_itself() -> None:
    assert KERNELS[:2] == ("torch", PORTABLE)
    assert not [name for name in native.library.variants() if differs(native.library, name)]


@compiled_only
@each_row("kernel", ["product", "encode", "rms_norm", "silu_mul", "rope", "attention"])
def test_a_variant_with_a_wrong_kernel_is_not_used(
    kernel: str, monkeypatch: pytest.MonkeyPatch, chosen_again: None
) -> None:
    best = REAL.variants()[-1]
    if best == PORTABLE:
        pytest.skip("a processor with the portable variant alone")
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", Library(best, kernel))
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
        assert native.use() == native.Choice("torch", (), False)
        assert [record.message for record in caplog.records] == ["no_compiled_kernels"]
        assert not native.compiled_for(torch.float32)
        with pytest.raises(KernelError):
            native.use(PORTABLE)


# ------------------------------------------------------------------------ a library that is broken

_MACHINE = 18  # in an ELF header
_SHORT, _OTHER = "cut short, or no library", "built for another processor or system"


def _other_machine(library: bytes) -> bytes:
    return library[:_MACHINE] + (0xF3).to_bytes(2, sys.byteorder) + library[_MACHINE + 2 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda library: library[: len(library) // 2], _SHORT),
    "less": (lambda library: library[:-1], _SHORT),
    "begun": (lambda library: library[:20], _SHORT),
    "empty": (lambda library: b"", _SHORT),
    "noise": (lambda library: b"no library " * 1000, _SHORT),
    "machine": (_other_machine, _OTHER),
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


# --------------------------------------------------------------------------------- threads, forks


@pytest.fixture
def _threads_again() -> Iterator[None]:
    yield
    native.set_threads(1)


def _exit_status_in_a_fork(work: Callable[[], object]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


@compiled_only
@pytest.mark.usefixtures("_threads_again")
def test_threads_and_forked_children_have_pools_of_their_own() -> None:
    # More threads than cores, and jobs of different sizes back to back: workers wake up late, in
    # the middle of a job that is not the one they were woken for.
    products = []
    for outputs in (2048, 512, 1024):
        weight = torch.randint(-128, 128, (outputs, 256)).to(torch.int8)
        elements = torch.randint(-(2**31), 2**31, (32, 256)).to(torch.int32)
        exact = (elements.double() @ weight.double().t()).long().to(torch.int32)
        products.append((elements, weight, exact))
    wrong: list[int] = []

    def compute(number: int) -> None:
        wrong.extend(
            number
            for _ in range(25)
            for elements, weight, exact in products
            # By numpy: torch's own threads do not outlive a fork.
            if not np.array_equal(ring_product(elements, weight).numpy(), exact.numpy())
        )

    def compute_and_exit() -> None:
        compute(4)
        raise SystemExit(len(wrong))

    native.set_threads(4)
    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compute(3)
    assert _exit_status_in_a_fork(compute_and_exit) == 0
    assert not wrong


@compiled_only
@pytest.mark.usefixtures("_threads_again")
def test_a_forked_child_leaves_pools_of_other_threads_alone() -> None:
    made, forked = threading.Event(), threading.Event()

    def keep_a_pool() -> None:
        assert native.own.pool
        made.set()
        forked.wait(60)

    native.set_threads(3)
    thread = threading.Thread(target=keep_a_pool)
    thread.start()
    made.wait(60)
    assert _exit_status_in_a_fork(lambda: native.own.pool) == 0
    forked.set()
    thread.join()
