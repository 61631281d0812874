"""What a build refuses before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.tables import each_row
from tests.unit.tsqp.deploy.test_start import DIGEST, RUNNER
from tsqp.deploy.build import Recipe, build, command_line
from tsqp.deploy.image import MAX_COMMAND_LINE


def test_a_command_line_that_the_kernel_would_cut_is_refused() -> None:
    room = MAX_COMMAND_LINE - len(command_line(RUNNER, Recipe(arguments=[""])))
    assert len(command_line(RUNNER, Recipe(arguments=["x" * room]))) == MAX_COMMAND_LINE
    with pytest.raises(SettingsError, match="got 2048 characters, expected 2047 at most"):
        command_line(RUNNER, Recipe(arguments=["x" * (room + 1)]))


@each_row("digest", ["", "x", DIGEST[:-1], f"{DIGEST} init=/bin/sh", DIGEST.upper()])
def test_a_digest_is_one(digest: str) -> None:
    with pytest.raises(SettingsError, match="--manifest-digest"):
        command_line(RUNNER, Recipe(manifest_digest=digest))


def test_a_directory_that_exists_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SettingsError, match="expected a new directory"):
        build(RUNNER, tmp_path, tmp_path, Recipe(), lambda _: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SettingsError, match="expected root"):
        build(RUNNER, tmp_path, tmp_path / "new", Recipe(), lambda _: None)
