"""The marker of transformed weights: there, not there, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from gpu_side.provision import (
    PROVISION_FILE,
    Holds,
    Provision,
    read_provision,
    write_provision,
)
from protocol.errors import ModelError
from tests.kit.rows import each_row

GOOD = {"version": 1, "mask": "feature-rotation", "provision_id": "0f" * 32}


def _write(directory: Path, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / PROVISION_FILE).write_text(text)


def test_a_directory_without_a_marker_is_a_models_own(tmp_path: Path) -> None:
    assert read_provision(tmp_path) is None


def test_the_marker_is_read(tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    assert read_provision(tmp_path) == Provision(mask="feature-rotation", provision_id="0f" * 32)
    for holds in get_args(Holds):
        _write(tmp_path, GOOD | {"holds": holds})
        found = read_provision(tmp_path)
        assert found is not None
        assert found.holds == holds


def test_what_is_written_is_read_and_never_overwritten(tmp_path: Path) -> None:
    provision = Provision(mask="feature-permutation", provision_id="ab" * 32)
    write_provision(tmp_path, provision)
    assert read_provision(tmp_path) == provision
    assert provision.holds == "linears"
    with pytest.raises(FileExistsError):
        write_provision(tmp_path, Provision(mask="x", provision_id="cd" * 32))
    assert read_provision(tmp_path) == provision


@each_row(
    ("value", "field"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ("null", ""),
        ({}, "version"),
        ({key: GOOD[key] for key in ("mask", "provision_id")}, "version"),
        (GOOD | {"version": 2}, "version"),
        (GOOD | {"version": True}, "version"),
        (GOOD | {"version": "1"}, "version"),
        (GOOD | {"version": 1.0}, "version"),
        ({key: GOOD[key] for key in ("version", "provision_id")}, "mask"),
        (GOOD | {"mask": ""}, "mask"),
        (GOOD | {"mask": "a b"}, "mask"),
        (GOOD | {"mask": None}, "mask"),
        ({key: GOOD[key] for key in ("version", "mask")}, "provision_id"),
        (GOOD | {"provision_id": "0F" * 32}, "provision_id"),
        (GOOD | {"provision_id": "0f" * 31}, "provision_id"),
        (GOOD | {"provision_id": 5}, "provision_id"),
        (GOOD | {"holds": "everything"}, "holds"),
        (GOOD | {"holds": None}, "holds"),
        (GOOD | {"key": "canary"}, "key"),
    ],
)
def test_a_damaged_marker_is_refused(tmp_path: Path, value: Any, field: str) -> None:
    _write(tmp_path, value)
    with pytest.raises(ModelError) as info:
        read_provision(tmp_path)
    path = str(tmp_path / PROVISION_FILE)
    assert info.value.where == (f"{path}: {field}" if field else path)


def test_a_marker_that_points_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROVISION_FILE).symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such file"):
        read_provision(tmp_path)
