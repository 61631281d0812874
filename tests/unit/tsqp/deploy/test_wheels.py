"""The source of an image's runner: what a commit has, and nothing that lies beside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "tsqp/kept.py").write_text("y")
    assert commit_of(tmp_path) == f"{commit}-changed"


def test_a_tree_without_history_is_whole_but_for_what_was_made_in_it(tmp_path: Path) -> None:
    for name in ("README.md", "tsqp/a/b.py", "tsqp/a/__pycache__/b.pyc", "protocol/native/n.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "elsewhere.py").write_text("x")
    assert _tracked(tmp_path) == ["README.md", "tsqp/a/b.py"]
    assert commit_of(tmp_path) is None
