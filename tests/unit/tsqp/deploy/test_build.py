"""What a build refuses before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tests.unit.tsqp.deploy.test_lock import SMALL
from tsqp.deploy.build import Recipe, build


def test_a_directory_that_exists_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SettingsError, match="expected a new directory"):
        build(SMALL, tmp_path, tmp_path, Recipe(), lambda _: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SettingsError, match="expected root"):
        build(SMALL, tmp_path, tmp_path / "new", Recipe(), lambda _: None)
