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


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "a").write_bytes(b"inside")
    (tmp_path / "a").write_bytes(b"outside")
    return made


def test_a_file_is_read_up_to_its_limit(directory: Path) -> None:
    assert read_bytes(directory / "a", 6) == b"inside"
    with pytest.raises(ModelError, match="a: got 6 bytes, expected at most 5"):
        read_bytes(directory / "a", 5)


def test_a_file_that_says_it_is_empty_is_not_read_for_ever(tmp_path: Path) -> None:
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert b"Name:" in read_bytes(path, 100_000, inside=False)
    with pytest.raises(ModelError, match="got 11 bytes, expected at most 10"):
        read_bytes(path, 10, inside=False)


@pytest.mark.parametrize("target", ["../a", "../../etc/passwd", "/dev/zero", "../nowhere"])
def test_a_link_out_of_the_directory_is_refused(directory: Path, target: str) -> None:
    (directory / "link").symlink_to(target)
    with pytest.raises(ModelError, match="link: got a link that leads out of the directory"):
        read_bytes(directory / "link", 100)
    assert is_there(directory / "link")


def test_a_link_out_through_a_folder_is_refused(directory: Path) -> None:
    (directory / "up").symlink_to("..")
    (directory / "link").symlink_to("up/a")
    with pytest.raises(ModelError, match="leads out"):
        read_bytes(directory / "link", 100)


def test_a_link_within_the_directory_is_followed(directory: Path, tmp_path: Path) -> None:
    (directory / "link").symlink_to("a")
    assert read_bytes(directory / "link", 100) == b"inside"
    (tmp_path / "other").symlink_to(directory)  # the directory itself may be a link
    assert read_bytes(tmp_path / "other" / "link", 100) == b"inside"


def test_where_a_person_names_the_file_links_are_followed(directory: Path) -> None:
    (directory / "link").symlink_to("../a")
    assert read_bytes(directory / "link", 100, inside=False) == b"outside"


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
    for name, kind in (("pipe", "a pipe"), ("folder", "a directory")):
        with pytest.raises(ModelError, match=f"{name}: got {kind}, expected a regular file"):
            read_bytes(directory / name, 100)
    with pytest.raises(ModelError, match="got a device, expected a regular file"):
        read_bytes(Path("/dev/zero"), 100, inside=False)


@pytest.mark.parametrize("name", ["none", "x" * 300, "a\0b", "\ud800", "a/b"])
def test_a_name_that_opens_nothing_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(ModelError), opened(directory / name, inside=False):
        pass
    assert not is_there(directory / name)


def test_a_circle_of_links_is_refused(directory: Path) -> None:
    (directory / "x").symlink_to("y")
    (directory / "y").symlink_to("x")
    with pytest.raises(ModelError, match="x: got "):
        read_bytes(directory / "x", 100)


def test_a_descriptor_is_closed_in_the_end(directory: Path) -> None:
    with opened(directory / "a") as descriptor:
        os.fstat(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_buffer_is_filled_or_the_file_is_too_short(directory: Path) -> None:
    path, buffer = directory / "a", bytearray(4)
    with opened(path) as descriptor:
        fill(descriptor, memoryview(buffer), 1, path)
        assert buffer == b"nsid"
        for offset, got in ((5, 6), (99, 99)):
            with pytest.raises(ModelError, match=f"a: got {got} bytes, expected {offset + 4}$"):
                fill(descriptor, memoryview(buffer), offset, path)


def test_a_key_twice_is_refused_at_any_depth() -> None:
    content = b'{"a": {"b": 1}, "b": [{"a": 2}]}'
    assert parse_object(content, "f") == {"a": {"b": 1}, "b": [{"a": 2}]}
    twice = b'{"x": [{"a": 1, "b": 2, "b": 2}]}'
    with pytest.raises(ModelError, match="f: b: got this key twice, expected it once"):
        parse_object(twice, "f")
    with pytest.raises(ManifestError):
        parse_object(twice, "f", ManifestError)


@pytest.mark.parametrize(
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
    if "keys" in said:
        limit_structure(content, "f", lists=5, items=3)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"[" * 10_000, b'{"a":' * 10_000])
def test_what_is_no_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"^f: got .*, expected a JSON object$"):
        parse_object(content, "f")


def test_names_from_files_are_shown_in_one_short_line() -> None:
    assert shown("model.norm.weight") == "model.norm.weight"
    for name in ("a\nb", "\x1b[2J", "x" * 10_000, "\u202e", "\ud800"):
        assert shown(name).isprintable()
        assert len(shown(name)) < 400
