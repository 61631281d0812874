"""Compiled kernels: which are chosen, that a wrong or broken one is not, what threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol import native
from protocol.errors import KernelError
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


@compiled_only
def test_every_variant_of_this_processor_proves_itself() -> None:
    assert KERNELS[:2] == ("torch", PORTABLE)
    assert not [name for name in native.library.variants() if differs(native.library, name)]


@compiled_only
@each_row("kernel", ["product", "rope", "attention"])
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


_SHORT, _OTHER = "cut short, or no library", "built for another processor or system"
# By name: a damage, and what is said of it. Byte 18 of an ELF header names the machine.
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "half": (lambda library: library[: len(library) // 2], _SHORT),
    "less": (lambda library: library[:-1], _SHORT),
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
