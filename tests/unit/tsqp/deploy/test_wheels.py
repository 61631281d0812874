"""The source of an image's runner: what a commit has, and nothing that lies beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tsqp.deploy.wheels import _tracked, commit_of


def test_files_that_no_commit_has_are_in_no_image(tmp_path: Path) -> None:
    (tmp_path / "tsqp").mkdir()
    for name in ("tsqp/kept.py", "tsqp/left.py", "elsewhere.py"):
        (tmp_path / name).write_text("x")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "tsqp/kept.py"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    assert _tracked(tmp_path) == ["tsqp/kept.py"]
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "tsqp/kept.py").write_text("y")
    assert commit_of(tmp_path) == f"{commit}-changed"


def test_a_directory_without_history_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SettingsError, match="not a git repository"):
        commit_of(tmp_path)
