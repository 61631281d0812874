"""The header of a safetensors file, and reading tensors by their place in it.

Written here although the safetensors library reads the format, because it reads through a mapping
(see `protocol.model.files`), takes headers of 100 MB, and would have to parse the header again for
every block. Format: https://huggingface.co/docs/safetensors, "Format"; the same files are accepted
as by the library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import ModelError, describe
from protocol.model.files import fill, opened, parse_json, shown

# The largest models that we run have some thousand tensors, at 150 bytes each.
MAX_HEADER_BYTES = 2 * 1024 * 1024
_MAX_DIMENSIONS = 8

# What the format knows, in bits per element; we read floats only.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_METADATA = "__metadata__"
_PICKLE_MAGICS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: its bytes are those from `begin` to `end`, counted from the file's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; a row of a vector is an element."""
        return (self.end - self.begin) // max(1, self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself: tensors by name, and metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def parse_header(start: bytes, size: int, where: str) -> Header:
    """Check a header. `start`: the file up to the end of its header; `size`: of the whole file.

    Offsets must cover the file without gaps and overlaps, and fit dtypes and shapes. Raises
    ModelError that names file and tensor.
    """
    raw = _raw_header(start, size, where)
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ModelError(f"{where}: {_METADATA}", got=describe(metadata), expected="texts by name")
    expected = begin_of_data = _header_end(start)
    entries = {name: _entry(name, raw[name], begin_of_data, where) for name in raw}
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != expected or entry.end > size:
            got = [entry.begin - begin_of_data, entry.end - begin_of_data]
            raise ModelError(
                f"{where}: {shown(entry.name)}: data_offsets",
                got=f"{got} of {size - begin_of_data} bytes",
                expected=f"to begin at {expected - begin_of_data}, and end within the file",
            )
        expected = entry.end
    if expected != size:
        raise _unparsable(where, start, size, f"{size - expected} bytes of no tensor at its end")
    return Header(entries, metadata)


class TensorFile:
    """One safetensors file whose header has been checked. Raises ModelError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as descriptor:
            self._stamp = _stamp(descriptor)
            size = os.fstat(descriptor).st_size
            start = bytearray(min(8, size))
            fill(descriptor, memoryview(start), 0, path)
            length = _header_end(start) - 8 if size >= 8 else 0
            if length <= min(MAX_HEADER_BYTES, size - 8):
                start.extend(bytes(length))
                fill(descriptor, memoryview(start)[8:], 8, path)
        header = parse_header(bytes(start), size, str(path))
        self.entries, self.metadata = header.entries, header.metadata

    @contextmanager
    def reading(self, entry: Entry) -> Iterator[int]:
        """Open the file again for a tensor. Raises ModelError if it is another file by now."""
        with opened(self.path) as descriptor:
            if _stamp(descriptor) != self._stamp:
                where = f"{self.path}: {shown(entry.name)}"
                got = "another content since the file was checked"
                raise ModelError(where, got=got, expected="the same")
            yield descriptor

    def read_rows(self, descriptor: int, entry: Entry, start: int, into: torch.Tensor) -> None:
        """Copy rows into memory of our own. `into`: uint8, a whole number of rows."""
        fill(descriptor, bytes_of(into), entry.begin + start * entry.row_bytes, self.path)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, flat; writing to it writes to the tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def _header_end(start: bytes | bytearray) -> int:
    return 8 + int.from_bytes(start[:8], "little")


def _stamp(descriptor: int) -> tuple[int, int, int, int]:
    """Return what changes when somebody replaces or rewrites a file without hiding it."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _raw_header(start: bytes, size: int, where: str) -> dict[str, object]:
    if len(start) < 8:
        raise _unparsable(where, start, size, "no header length")
    end = _header_end(start)
    if end > size:
        raise _unparsable(where, start, size, f"header length {end - 8}")
    if end - 8 > MAX_HEADER_BYTES:
        limit = f"at most {MAX_HEADER_BYTES}"
        raise ModelError(f"{where}: header length", got=str(end - 8), expected=limit)
    try:
        raw = parse_json(start[8:end], f"{where}: header")
    except ValueError as error:
        raise _unparsable(where, start, size, f"header: {error}"[:100]) from None
    if not isinstance(raw, dict):
        raise _unparsable(where, start, size, f"header: {describe(raw)}")
    return raw


def _entry(name: str, raw: object, begin_of_data: int, where: str) -> Entry:
    where = f"{where}: {shown(name)}"
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(where, got=describe(raw), expected="dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    sizes = f"at most {_MAX_DIMENSIONS} sizes of at least 0"
    for field, fits, expected in (
        ("dtype", isinstance(dtype, str) and dtype in _BITS, "one of the format's"),
        ("shape", _are_sizes(shape) and len(shape) <= _MAX_DIMENSIONS, sizes),
        ("data_offsets", _are_sizes(offsets) and len(offsets) == 2, "where it begins and ends"),
    ):
        if not fits:
            raise ModelError(f"{where}: {field}", got=describe(raw[field]), expected=expected)
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        got, expected = f"{offsets}: {end - begin} bytes", f"as many as {dtype} {shape} has"
        raise ModelError(f"{where}: data_offsets", got=got, expected=expected)
    return Entry(name, dtype, tuple(shape), begin_of_data + begin, begin_of_data + end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**63 for item in value
    )


def _unparsable(where: str, start: bytes, size: int, reason: str) -> ModelError:
    # Only here: a length of 640 begins like a pickle, too.
    pickled = start.startswith(_PICKLE_MAGICS)
    got = f"{size} bytes that do not parse ({reason})"
    return ModelError(
        where,
        got="a pickle, which can run code when it is loaded" if pickled else got,
        expected="a complete safetensors file",
    )
