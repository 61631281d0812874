"""Headers of safetensors files: those of the library are read alike, others refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from protocol.errors import ModelError
from protocol.model.tensor_file import MAX_HEADER_BYTES, TensorFile, parse_header
from tests.kit.rows import each_row

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _file(header: object, data: bytes = bytes(24)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _library_reads(content: bytes, path: Path) -> bool:
    path.write_bytes(content)
    try:
        with safe_open(path, framework="pt") as file:
            return file is not None
    except SafetensorError:
        return False


def test_what_the_library_writes_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "b": torch.arange(6, dtype=torch.float16).reshape(3, 2),
        "a": torch.arange(5, dtype=torch.bfloat16),
        "none": torch.empty(0, 7),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    save_file(tensors, path, {"format": "pt"})
    file = TensorFile(path)
    entries, data = file.header.entries, path.read_bytes()[file.header.data_begin :]
    assert file.header.metadata == {"format": "pt"}
    assert set(entries) == set(tensors)
    for name, tensor in tensors.items():
        begin, end = entries[name].data_offsets
        assert entries[name].shape == tuple(tensor.shape)
        assert data[begin:end] == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert (entries["b"].row_bytes, entries["a"].row_bytes) == (4, 2)
    found = torch.empty(8, dtype=torch.uint8)
    with file.reading("b") as descriptor:
        file.read_rows(descriptor, entries["b"], 1, found)
    assert torch.equal(found.view(torch.float16).reshape(2, 2), tensors["b"][1:])


def _with(**changes: object) -> dict[str, Any]:
    return {"a": {**ENTRY, **changes}}


# Whole files, and what of them is refused; nothing where the library takes them as well.
FILES: list[tuple[bytes, str]] = [
    (_file({}, b""), ""),
    (_file({"a": ENTRY}), ""),
    (_file({"a": ENTRY, "__metadata__": {"k": "v"}}), ""),
    (_file({"a": ENTRY, "b": {"dtype": "F16", "shape": [0], "data_offsets": [24, 24]}}), ""),
    (_file(json.dumps({"a": ENTRY}).encode() + b"   "), ""),
    (_file(_with(data_offsets=[0, 20])), "a"),
    (_file(_with(data_offsets=[0, 25]), bytes(25)), "a"),
    (_file(_with(data_offsets=[24, 0])), "a"),
    (_file(_with(data_offsets=[4, 28]), bytes(28)), "a: data_offsets"),
    (_file(_with(data_offsets=[-24, 0])), "a: data_offsets.0"),
    (_file(_with(data_offsets=[0.0, 24.0])), "a: data_offsets.0"),
    (_file(_with(data_offsets=[0])), "a: data_offsets.1"),
    (_file({"a": ENTRY, "b": ENTRY}), "b: data_offsets"),
    (_file(_with(shape=[2, -3])), "a: shape.1"),
    (_file(_with(shape=[2**64, 2**64])), "a: shape.0"),
    (_file(_with(shape=[True, 6])), "a: shape.0"),
    (_file(_with(shape=None)), "a: shape"),
    (_file(_with(dtype="F33")), "a: dtype"),
    (_file(_with(dtype=["F32"])), "a: dtype"),
    (_file(_with(extra=0)), "a: extra"),
    (_file({"a": []}), "a"),
    (_file({"__metadata__": {"k": 1}, "a": ENTRY}), "__metadata__"),
    (_file({"__metadata__": [], "a": ENTRY}), "__metadata__"),
    (_file(b'{"a": {}, "a": {}}'), "header: a"),
    *((_file(raw), "header") for raw in (b"", b"[]", b"{", b"\xff", b"\0\0", b"[" * 5_000)),
    (_file({"a": ENTRY}, bytes(25)), "!"),
    # The library reads bytes too; we do not.
    (_file(_with(dtype="U8", shape=[24])), "a: dtype"),
]


@each_row(("content", "field"), FILES, ids=map(str, range(len(FILES))))
def test_a_file_is_refused_by_tensor_and_field(tmp_path: Path, content: bytes, field: str) -> None:
    if not field:
        assert _library_reads(content, tmp_path / "f")
        parse_header(content, len(content), "file")
        return
    with pytest.raises(ModelError) as caught:
        parse_header(content, len(content), "file")
    assert caught.value.where == ("file" if field == "!" else f"file: {field}")


def test_a_header_that_is_too_long_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(_file(b"{}" + b" " * (MAX_HEADER_BYTES - 2), b""))
    assert TensorFile(path).header.entries == {}
    path.write_bytes(_file(b"{}" + b" " * (MAX_HEADER_BYTES - 1), b""))
    with pytest.raises(ModelError, match=f"f: header length: got {MAX_HEADER_BYTES + 1}, expected"):
        TensorFile(path)
    # A length that begins like a pickle is none.
    for length in (640, 896, 1152, 1408):
        path.write_bytes(_file(json.dumps({"a": ENTRY}).encode().ljust(length)))
        assert path.read_bytes()[:1] == b"\x80"
        assert set(TensorFile(path).header.entries) == {"a"}


def test_a_file_that_has_changed_is_not_read_by_the_old_header(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "g"
    for how in ("rewritten", "replaced", "gone"):
        path.write_bytes(_file({"a": ENTRY}))
        file = TensorFile(path)
        with file.reading("a"):
            pass
        if how == "rewritten":
            path.write_bytes(_file({"a": ENTRY}, bytes(23) + b"x") + b"x")
        elif how == "replaced":
            other.write_bytes(_file({"a": ENTRY}))
            other.replace(path)
        else:
            path.unlink()
        said = "no such file" if how == "gone" else "since the file was checked"
        with pytest.raises(ModelError, match=said), file.reading("a"):
            pass
