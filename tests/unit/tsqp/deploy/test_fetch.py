"""Packages come from a folder, and have the content that the lock says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tsqp.deploy.fetch import fetch
from tsqp.deploy.lock import Artifact


def _artifact(content: bytes, url: str = "ftp://archive.invalid/a.deb") -> Artifact:
    return Artifact(name="a", version="1", url=url, sha256=hashlib.sha256(content).hexdigest())


def test_a_saved_package_is_taken_from_the_first_folder_that_has_it(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("empty", "first", "second")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "a.deb").write_bytes(b"first")
    (folders[2] / "a.deb").write_bytes(b"second")
    fetch([_artifact(b"first")], tmp_path / "into", folders)
    assert (tmp_path / "into" / "a.deb").read_bytes() == b"first"


def test_another_content_is_refused_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"changed")
    into = tmp_path / "into"
    with pytest.raises(SettingsError, match="expected " + _artifact(b"right").sha256):
        fetch([_artifact(b"right")], into, [tmp_path])
    assert not list(into.iterdir())
    # Also one that lies there already.
    (into / "a.deb").write_bytes(b"changed")
    with pytest.raises(SettingsError, match="SHA-256"):
        fetch([_artifact(b"right")], into)


def test_one_from_an_address_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"there")
    url = (tmp_path / "a.deb").as_uri()
    fetch([_artifact(b"there", url)], tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["a.deb"]
    with pytest.raises(SettingsError, match="SHA-256"):
        fetch([_artifact(b"other", url)], tmp_path / "other")


def test_one_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"a\.deb: got no folder that has it"):
        fetch([_artifact(b"")], tmp_path / "into")
    gone = _artifact(b"", (tmp_path / "gone.deb").as_uri())
    with pytest.raises(SettingsError, match=r"gone\.deb"):
        fetch([gone], tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())
