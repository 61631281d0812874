"""A library that is broken is named, and torch computes: in a process of its own, as it may die."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import protocol
from protocol import native
from tests.kit.service import FreshPython

pytestmark = pytest.mark.skipif(native.library is None, reason="no compiler built the kernels")

_CHILD = """
import sys, torch
from protocol import native
from protocol.integer import ring_product
from tsqp.doctor import examine
product = ring_product(torch.full((1, 8), 7).int(), torch.full((3, 8), 2).to(torch.int8))
print(native.choice().variant, product.tolist())
print(*(one.detail for one in examine() if one.name == "kernels"), sep="\\n")
"""

_MACHINE = 18  # in an ELF header


def _half(library: bytes) -> bytes:
    return library[: len(library) // 2]


def _other_machine(library: bytes) -> bytes:
    return library[:_MACHINE] + (0xF3).to_bytes(2, sys.byteorder) + library[_MACHINE + 2 :]


def _other_symbols(library: bytes) -> bytes:
    return library.replace(b"PyInit__native", b"PyInit__nothin")


_SHORT, _OTHER = "cut short, or no library", "built for another processor or system"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_half, _SHORT),
        (lambda library: library[:-1], _SHORT),
        pytest.param(lambda library: library[:20], _SHORT, marks=pytest.mark.more),
        (lambda library: b"", _SHORT),
        pytest.param(lambda library: b"no library " * 1000, _SHORT, marks=pytest.mark.more),
        (_other_machine, _OTHER),
        (_other_symbols, _OTHER),
    ],
)
def test_a_library_that_does_not_load_is_named_and_torch_computes(
    fresh_python: FreshPython, damage: Callable[[bytes], bytes], why: str, tmp_path: Path
) -> None:
    source = Path(protocol.__file__).parent
    shutil.copytree(source, tmp_path / "protocol", ignore=shutil.ignore_patterns("__pycache__"))
    library = tmp_path / "protocol" / "native" / Path(native.library.__file__).name
    library.write_bytes(damage(Path(native.library.__file__).read_bytes()))
    ended = fresh_python.run(_CHILD, folder=tmp_path, paths=(tmp_path, source.parent))
    assert ended.returncode == 0, ended.stderr
    computed, detail = ended.stdout.splitlines()
    assert computed == "torch [[112, 112, 112]]"
    assert detail == f"does not load: {why}; torch computes, which is slower"
