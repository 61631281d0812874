"""Files of a model directory: no link out of it, nothing that waits, nothing without an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ManifestError, ModelError
from protocol.model.files import (
    fill,
    is_there,
    limit_structure,
    opened,
    parse_object,
    read_bytes,
    require_inside,
    shown,
)
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
    link.unlink()
    link.symlink_to("circle")
    (directory / "circle").symlink_to("link")
    with pytest.raises(ModelError, match="link: got "):
        read_bytes(link, 100)


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


def test_what_is_no_file_is_refused_without_waiting(directory: Path) -> None:
    os.mkfifo(directory / "pipe")
    (directory / "folder").mkdir()
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory"), ("/dev/zero", "a device")):
        with pytest.raises(ModelError, match=f"{name}: got {kind}, expected a regular file"):
            read_bytes(directory / name, 100, inside=not name.startswith("/"))
    for name in ("none", "x" * 300, "a\0b", "\ud800", "a/b"):
        with pytest.raises(ModelError), opened(directory / name, inside=False):
            pass
        assert not is_there(directory / name)


def test_a_buffer_is_filled_or_the_file_is_too_short(directory: Path) -> None:
    path, buffer = directory / "a", bytearray(4)
    with opened(path) as descriptor:
        fill(descriptor, memoryview(buffer), 1, path)
        assert buffer == b"nsid"
        for offset, got in ((5, 6), (99, 99)):
            with pytest.raises(ModelError, match=f"a: got {got} bytes, expected {offset + 4}$"):
                fill(descriptor, memoryview(buffer), offset, path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


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


@each_row(
    ("content", "said"),
    [
        (b"[{}]" * 2 + b"{" + b"," * 3 + b":" * 2, ""),
        (b"[{}]" * 2 + b"{{", "got 6 lists, expected at most 5"),
        (b"," * 4, "got 4 items, expected at most 3"),
        (b":" * 3, "got 3 keys, expected at most 2"),
    ],
)
def test_structure_is_counted_before_it_is_parsed(content: bytes, said: str) -> None:
    limits = {"lists": 5, "items": 3, "keys": 2}
    if not said:
        limit_structure(content, "f", **limits)
        return
    with pytest.raises(ManifestError, match=f"^f: {said}"):
        limit_structure(content, "f", ManifestError, **limits)


def test_names_from_files_are_shown_in_one_short_line() -> None:
    assert shown("model.norm.weight") == "model.norm.weight"
    for name in ("a\nb", "\x1b[2J", "x" * 10_000, "\u202e", "\ud800"):
        assert shown(name).isprintable()
        assert len(shown(name)) < 400
