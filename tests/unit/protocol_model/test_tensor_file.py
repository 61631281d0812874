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


def _parse(content: bytes) -> object:
    return parse_header(content, len(content), "file")


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
    assert entries["b"].row_bytes == 4
    assert entries["a"].row_bytes == 2
    found = torch.empty(8, dtype=torch.uint8)
    with file.reading("b") as descriptor:
        file.read_rows(descriptor, entries["b"], 1, found)
    assert torch.equal(found.view(torch.float16).reshape(2, 2), tensors["b"][1:])


GOOD: list[Any] = [
    {},
    {"a": ENTRY},
    {"a": ENTRY, "__metadata__": {"k": "v"}},
    {"a": ENTRY, "b": {"dtype": "F16", "shape": [0], "data_offsets": [24, 24]}},
    json.dumps({"a": ENTRY}).encode() + b"   ",
]
BAD: list[tuple[Any, str]] = [
    ({"a": {**ENTRY, "data_offsets": [0, 20]}}, "a"),
    ({"a": {**ENTRY, "data_offsets": [24, 0]}}, "a"),
    ({"a": {**ENTRY, "data_offsets": [4, 28]}}, "a: data_offsets"),
    ({"a": {**ENTRY, "data_offsets": [-24, 0]}}, "a: data_offsets.0"),
    ({"a": {**ENTRY, "data_offsets": [0.0, 24.0]}}, "a: data_offsets.0"),
    ({"a": {**ENTRY, "data_offsets": [0]}}, "a: data_offsets.1"),
    ({"a": ENTRY, "b": ENTRY}, "b: data_offsets"),
    ({"a": {**ENTRY, "shape": [2, -3]}}, "a: shape.1"),
    ({"a": {**ENTRY, "shape": [2**64, 2**64]}}, "a: shape.0"),
    ({"a": {**ENTRY, "shape": [True, 6]}}, "a: shape.0"),
    ({"a": {**ENTRY, "shape": None}}, "a: shape"),
    ({"a": {**ENTRY, "dtype": "F33"}}, "a: dtype"),
    ({"a": {"dtype": "U8", "shape": [24], "data_offsets": [0, 24]}}, "a: dtype"),
    ({"a": {**ENTRY, "dtype": ["F32"]}}, "a: dtype"),
    ({"a": {**ENTRY, "extra": 0}}, "a: extra"),
    ({"a": []}, "a"),
    ({"__metadata__": {"k": 1}, "a": ENTRY}, "__metadata__"),
    ({"__metadata__": [], "a": ENTRY}, "__metadata__"),
    (b'{"a": {}, "a": {}}', "header: a"),
]


@pytest.mark.parametrize("header", GOOD, ids=range(len(GOOD)))
def test_a_good_header_is_taken_as_the_library_takes_it(tmp_path: Path, header: Any) -> None:
    content = _file(header, bytes(24) if header else b"")
    assert _library_reads(content, tmp_path / "f")
    _parse(content)


@each_row(("header", "field"), BAD, ids=range(len(BAD)))
def test_a_bad_header_is_refused_by_tensor_and_field(header: Any, field: str) -> None:
    with pytest.raises(ModelError) as caught:
        _parse(_file(header))
    assert caught.value.where == f"file: {field}"


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b"\xff", b"\0\0", b"[" * 5_000])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    content = _file(header)
    assert not _library_reads(content, tmp_path / "f")
    with pytest.raises(ModelError, match=r"file: header: got .*, expected a JSON object"):
        _parse(content)


def test_bytes_of_no_tensor_are_refused(tmp_path: Path) -> None:
    content = _file({"a": ENTRY}, bytes(25))
    assert not _library_reads(content, tmp_path / "f")
    with pytest.raises(ModelError, match=r"file: got \d+ bytes, expected \d+, to which"):
        _parse(content)


def test_a_header_that_is_too_long_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = _file(b"{}" + b" " * (MAX_HEADER_BYTES - 2), b"")
    path.write_bytes(content)
    assert TensorFile(path).header.entries == {}
    path.write_bytes(_file(b"{}" + b" " * (MAX_HEADER_BYTES - 1), b""))
    with pytest.raises(ModelError, match=f"f: header length: got {MAX_HEADER_BYTES + 1}, expected"):
        TensorFile(path)


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_begins_like_a_pickle_is_none(tmp_path: Path, length: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(_file(json.dumps({"a": ENTRY}).encode().ljust(length)))
    assert path.read_bytes()[:1] == b"\x80"
    assert set(TensorFile(path).header.entries) == {"a"}


@pytest.mark.parametrize("how", ["rewritten", "replaced", "gone"])
def test_a_file_that_has_changed_is_not_read_by_the_old_header(tmp_path: Path, how: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(_file({"a": ENTRY}))
    file = TensorFile(path)
    with file.reading("a"):
        pass
    if how == "rewritten":
        path.write_bytes(_file({"a": ENTRY}, bytes(23) + b"x") + b"x")
    elif how == "replaced":
        (tmp_path / "g").write_bytes(_file({"a": ENTRY}))
        (tmp_path / "g").replace(path)
    else:
        path.unlink()
    with (
        pytest.raises(ModelError, match=r"since the file was checked|no such file"),
        file.reading("a"),
    ):
        pass
