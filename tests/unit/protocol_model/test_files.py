"""Files of a model directory: no link out of it, nothing without an end; headers of tensors."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ManifestError, ModelError
from protocol.model.files import fill, is_there, opened, parse_object, read_bytes, require_inside
from protocol.model.tensor_file import MAX_HEADER_BYTES, TensorFile, parse_header
from tests.kit.rows import each_row


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "a").write_bytes(b"inside")
    (tmp_path / "a").write_bytes(b"outside")
    return made


def test_a_file_is_read_up_to_its_limit_whatever_size_it_claims(directory: Path) -> None:
    assert read_bytes(directory / "a", 6) == b"inside"
    with pytest.raises(ModelError, match="a: got 6 bytes, expected at most 5"):
        read_bytes(directory / "a", 5)
    endless = Path("/proc/self/status")
    assert endless.stat().st_size == 0
    assert b"Name:" in read_bytes(endless, 100_000, inside=False)
    with pytest.raises(ModelError, match="got 11 bytes, expected at most 10"):
        read_bytes(endless, 10, inside=False)


def test_links_are_followed_within_the_directory_alone(directory: Path, tmp_path: Path) -> None:
    link = directory / "link"
    (directory / "up").symlink_to("..")
    for target in ("../a", "../../etc/passwd", "/dev/zero", "../nowhere", "up/a"):
        link.symlink_to(target)
        with pytest.raises(ModelError, match="link: got a link that leads out of the directory"):
            read_bytes(link, 100)
        assert is_there(link)
        link.unlink()
    link.symlink_to("../a")  # where a person names the file
    assert read_bytes(link, 100, inside=False) == b"outside"
    link.unlink()
    link.symlink_to("a")
    assert read_bytes(link, 100) == b"inside"
    (tmp_path / "other").symlink_to(directory)  # the directory itself may be a link
    assert read_bytes(tmp_path / "other" / "link", 100) == b"inside"


def test_a_snapshot_of_hugging_faces_cache_is_links_to_blobs(tmp_path: Path) -> None:
    root = tmp_path / "models--x--y"
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "blobs" / "0123").write_bytes(b"blob")
    (root / "refs").write_bytes(b"no blob")
    link = root / "snapshots" / "abc" / "config.json"
    link.symlink_to("../../blobs/0123")
    assert read_bytes(link, 100) == b"blob"
    assert require_inside(link) == root / "blobs" / "0123"
    link.unlink()
    link.symlink_to("../../refs")
    with pytest.raises(ModelError, match="leads out"):
        read_bytes(link, 100)


def test_what_is_no_file_or_too_short_is_refused_without_waiting(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory"), ("/dev/zero", "a device")):
        with pytest.raises(ModelError, match=f"{name}: got {kind}, expected a regular file"):
            read_bytes(directory / name, 100, inside=not name.startswith("/"))
    for name in ("none", "x" * 300, "a\0b", "\ud800", "a/b"):
        with pytest.raises(ModelError), opened(directory / name, inside=False):
            pass
        assert not is_there(directory / name)
    path, buffer = directory / "a", memoryview(bytearray(4))
    with opened(path) as descriptor:
        fill(descriptor, buffer, 1, path)
        assert buffer == b"nsid"
        with pytest.raises(ModelError, match=r"a: got 6 bytes, expected 9$"):
            fill(descriptor, buffer, 5, path)


@each_row(
    ("content", "said"),
    [
        *((content, "") for content in (b"", b"{", b"\xff", b"[]", b"[" * 10_000)),
        (b'{"a":' * 10_000, ""),
        (b'{"x": [{"a": 1, "b": 2, "b": 2}]}', ": b: got this key twice"),
    ],
)
def test_what_is_no_json_object_is_refused(content: bytes, said: str) -> None:
    for error in (ModelError, ManifestError):
        with pytest.raises(error, match=rf"^f{said}" if said else r"^f: got .*, expected a JSON"):
            parse_object(content, "f", error)
    good = b'{"a": {"b": 1}, "b": [{"a": 2}]}'
    assert parse_object(good, "f") == {"a": {"b": 1}, "b": [{"a": 2}]}


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def _file(header: object, data: bytes = bytes(24)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _with(**changes: object) -> dict[str, Any]:
    return {"a": {**ENTRY, **changes}}


# Whole files, and what of them is refused.
FILES: list[tuple[bytes, str]] = [
    (_file({}, b""), ""),
    (_file({"a": ENTRY}), ""),
    (_file({"a": ENTRY, "__metadata__": {"k": "v"}}), ""),
    (_file(json.dumps({"a": ENTRY}).encode() + b"   "), ""),
    (_file(_with(data_offsets=[0, 20])), "a"),
    (_file(_with(data_offsets=[0, 25]), bytes(25)), "a"),
    (_file(_with(data_offsets=[24, 0])), "a"),
    (_file(_with(data_offsets=[4, 28]), bytes(28)), "a: data_offsets"),
    (_file(_with(data_offsets=[-24, 0])), "a: data_offsets.0"),
    (_file(_with(data_offsets=[0])), "a: data_offsets.1"),
    (_file({"a": ENTRY, "b": ENTRY}), "b: data_offsets"),
    (_file(_with(shape=[2, -3])), "a: shape.1"),
    (_file(_with(shape=[2**64, 2**64])), "a: shape.0"),
    (_file(_with(shape=[True, 6])), "a: shape.0"),
    (_file(_with(dtype="F33")), "a: dtype"),
    (_file(_with(extra=0)), "a: extra"),
    (_file({"__metadata__": {"k": 1}, "a": ENTRY}), "__metadata__"),
    (_file(b'{"a": {}, "a": {}}'), "header: a"),
    *((_file(raw), "header") for raw in (b"", b"[]", b"{", b"\xff", b"\0\0", b"[" * 5_000)),
    (_file({"a": ENTRY}, bytes(25)), "!"),
    # The library reads bytes too; we do not.
    (_file(_with(dtype="U8", shape=[24])), "a: dtype"),
]


@each_row(("content", "field"), FILES, ids=map(str, range(len(FILES))))
def test_a_file_is_refused_by_tensor_and_field(content: bytes, field: str) -> None:
    if not field:
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
