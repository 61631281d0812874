"""The header of a safetensors file, and reading tensors by their place in it.

Written here although the safetensors library reads the format, because it reads through a mapping
(see `protocol.model.files`), takes headers of 100 MB, and would have to parse the header again for
every block. Format: https://huggingface.co/docs/safetensors, "Format"; of the files that the
library accepts, those that hold floats of 16 bits or more and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from protocol.errors import ModelError, describe
from protocol.model.files import OpenFile, opened, parse_object, shown
from protocol.validation import Strict, validate_file

# The largest models that we run have some thousand tensors, at 150 bytes each.
MAX_HEADER_BYTES = 2 * 1024 * 1024
# Of a tensor, as it is read and pinned (`protocol.model.manifest`).
BLOCK_BYTES = 4 * 1024 * 1024

TORCH_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_METADATA = "__metadata__"
_PICKLE_MAGICS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))

_Size = Annotated[int, Field(ge=0, lt=2**63)]


def rows_per_block(shape: tuple[int, ...], row_bytes: int) -> int:
    """Return how many rows a block has: those of about 4 MiB; a vector's rows are elements."""
    return max(1, min(shape[0] if shape else 1, BLOCK_BYTES // max(1, row_bytes)))


class Entry(Strict):
    """A tensor in a file. `data_offsets`: where it begins and ends, from the header's end."""

    dtype: Literal["F16", "BF16", "F32", "F64"]
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[tuple[_Size, ...], Field(strict=False, max_length=8, fail_fast=True)]
    data_offsets: Annotated[tuple[_Size, _Size], Field(strict=False)]

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        begin, end = self.data_offsets
        size = math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize
        if end - begin != size:
            raise ValueError(f"data_offsets {size} bytes apart, not {end - begin}")
        return self

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next; a row of a vector is an element."""
        begin, end = self.data_offsets
        return (end - begin) // max(1, self.shape[0] if self.shape else 1)


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file says of itself. `data_begin`: bytes before the first tensor's."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_begin: int


def parse_header(start: bytes, size: int, where: str) -> Header:
    """Check a header. `start`: the file up to the end of its header, or more; `size`: of the file.

    Offsets must cover the file without gaps and overlaps, and fit dtypes and shapes. Raises
    ModelError that names file and tensor.
    """
    length = int.from_bytes(start[:8], "little")
    begin = 8 + length
    pickled = start.startswith(_PICKLE_MAGICS)
    ModelError.unless(
        length <= MAX_HEADER_BYTES or size < 8,
        where if pickled else f"{where}: header length",
        "a pickle, which can run code when it is loaded" if pickled else str(length),
        f"a safetensors file, whose header has at most {MAX_HEADER_BYTES} bytes",
    )
    whole = len(start) >= begin
    got = f"{size} bytes that do not parse (header length {length})"
    ModelError.unless(whole, where, got, "a complete safetensors file")
    raw = parse_object(start[8:begin], f"{where}: header")
    metadata = raw.pop(_METADATA, {})
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ModelError.unless(texts, f"{where}: {_METADATA}", describe(metadata), "texts by name")
    # One by one, so that the first fault ends the reading.
    entries = {name: validate_file(Entry, raw[name], f"{where}: {shown(name)}") for name in raw}
    covered = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        ModelError.unless(
            entry.data_offsets[0] == covered,
            f"{where}: {shown(name)}: data_offsets",
            str(list(entry.data_offsets)),
            f"to begin at {covered}, where the tensor before it ends",
        )
        covered = entry.data_offsets[1]
    expected = f"{begin + covered}, to which the last tensor's data_offsets lead"
    ModelError.unless(begin + covered == size, where, f"{size} bytes", expected)
    return Header(entries, metadata, begin)


class TensorFile:
    """One safetensors file whose header has been checked. Raises ModelError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as file:
            self._stamp = file.stamp
            self.header = parse_header(file.start(8 + MAX_HEADER_BYTES), file.size, str(path))

    @contextmanager
    def reading(self, name: str) -> Iterator[OpenFile]:
        """Open the file again for a tensor. Raises ModelError if it is another file by now."""
        with opened(self.path) as file:
            where = f"{self.path}: {shown(name)}"
            same = file.stamp == self._stamp
            got = "another content since the file was checked"
            ModelError.unless(same, where, got, "the same")
            yield file

    def read_rows(self, file: OpenFile, entry: Entry, start: int, into: torch.Tensor) -> None:
        """Copy rows into memory of our own. `into`: uint8, a whole number of rows."""
        place = self.header.data_begin + entry.data_offsets[0] + start * entry.row_bytes
        file.fill(bytes_of(into), place)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, flat; writing to it writes to the tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
