"""Tests of `--device`, and of waiting for as long as a described accelerator takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_side.devices import NullDevice, parse_device
from gpu_side.profiles import PROFILES
from protocol.errors import SettingsError
from tests.kit.rows import each_row


def test_cpu_is_a_device() -> None:
    assert parse_device("cpu") == torch.device("cpu")


@each_row(
    "name",
    [
        "",
        "CPU",
        "cpu:0",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:999",
        "mps",
        "meta",
        "null:",
        "null:1",
    ],
)
def test_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="--device"):
        parse_device(name)


def test_null_devices() -> None:
    assert parse_device("null") == NullDevice()
    assert parse_device("model:l4") == NullDevice(PROFILES["l4"])
    assert [str(parse_device(name)) for name in ("null", "model:l4")] == ["null", "model:l4"]


def test_a_model_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    fields = PROFILES["l4"].model_dump() | {"name": "mine"}
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in fields.items()))
    device = parse_device(f"model:{path}")
    assert device == NullDevice(PROFILES["l4"].model_copy(update={"name": "mine"}))


@pytest.mark.parametrize("name", ["model", "model:", "model:l5"])
def test_a_model_of_nothing_known_lists_the_profiles(name: str) -> None:
    with pytest.raises(SettingsError, match="expected a100, h100, h200, l4, rtx-4090"):
        parse_device(name)
