"""`--device`, and described accelerators: the formula, by hand, and every file that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_side.devices import NullDevice, parse_device
from gpu_side.profiles import PROFILES, DeviceProfile, find_profile
from protocol.errors import SettingsError
from tests.kit.rows import each_row

# 10^12 operations, 2 * 10^12 int8 ones, 10^11 and 10^10 bytes a second, in microseconds.
ROUND = DeviceProfile(
    name="round", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)
# Whole numbers will do.
FILE = """
name = "round"
tflops = 1.0
int8_tops = 2
gb_per_s = 100.0
launch_us = 3.0
pcie_gb_per_s = 10.0
"""
MOVED = 1000 * 4000 + 1000 + 4000


@each_row(
    ("found_us", "expected_us"),
    [
        # Few rows take as long as reading the weight, many as the arithmetic.
        (ROUND.linear_us(1, 1000, 4000, 2), 3 + 2 * MOVED / 1e5),
        (ROUND.linear_us(512, 1000, 4000, 2), 3 + 2 * 512 * 1000 * 4000 / 1e6),
        # float32 has half the rate, and twice the bytes.
        (ROUND.linear_us(512, 1000, 4000, 4), 3 + 4 * 512 * 1000 * 4000 / 1e6),
        (ROUND.linear_us(1, 1000, 4000, 4), 3 + 4 * MOVED / 1e5),
        # A product in the ring takes four of int8.
        (
            ROUND.linear_us(4096, 1000, 4000, 2, integer=True),
            13 * 3 + 4 * 2 * 4096 * 1000 * 4000 / 2e6,
        ),
        # Of one row a byte for each weight, and what digits and sums move.
        (
            ROUND.linear_us(1, 1000, 4000, 2, integer=True),
            13 * 3 + (1000 * 4000 + 1000 * 12 + 4000 * 36) / 1e5,
        ),
        # Every operand of a batch is moved.
        (ROUND.matmul_us(8, 1, 64, 100, 2), 3 + 2 * 8 * (1 * 64 + 64 * 100 + 1 * 100) / 1e5),
        (ROUND.matmul_us(8, 512, 64, 512, 2), 3 + 2 * 8 * 512 * 64 * 512 / 1e6),
        (ROUND.embedding_us(512, 1000, 2), 3 + 2 * 512 * 1000 * 2 / 1e5),
        (ROUND.transfer_us(10**6), 3 + 100),
    ],
)
def test_how_long_it_takes(found_us: float, expected_us: float) -> None:
    assert found_us == pytest.approx(expected_us)


def test_built_in_profiles_are_plausible() -> None:
    assert sorted(PROFILES) == ["a100", "h100", "h200", "l4", "rtx-4090"]
    for name, profile in PROFILES.items():
        assert find_profile(name) == profile
        # Dense int8 has twice the rate of bfloat16 on all of them, but for a consumer card's
        # halved accumulation in float32.
        ratio = 4 if name == "rtx-4090" else 2
        assert profile.int8_tops / profile.tflops == pytest.approx(ratio, 0.01), name
        assert 1 < profile.linear_us(1, 2048, 8192, 2) < profile.linear_us(4096, 2048, 8192, 2)
    # 67 MB at 3.35 TB/s: a unit that slipped would show.
    assert PROFILES["h100"].linear_us(1, 4096, 8192, 2) == pytest.approx(25, rel=0.01)


@each_row(
    ("old", "new", "text"),
    [
        ("tflops = 1.0\n", "", "tflops: got nothing, expected a value"),
        ("tflops = 1.0\n", "tflops = 0\n", "tflops: got 0, expected greater than 0"),
        ("tflops = 1.0\n", "tflops = nan\n", "tflops: got nan, expected"),
        ("tflops = 1.0\n", "tflops = inf\n", "tflops: got inf, expected"),
        ("tflops = 1.0\n", 'tflops = "1"\n', "tflops: got '1', expected a valid number"),
        ("tflops = 1.0\n", "tflops = true\n", "tflops: got True, expected"),
        ("launch_us = 3.0\n", "launch_us = -1.0\n", "launch_us: got -1.0, expected"),
        ("launch_us", "watts = 3.0\nlaunch_us", "watts: got 3.0, expected no such key"),
        ('"round"', '"a\\nb"', "name: got"),
        ("tflops = 1.0\n", "tflops = \n", "invalid TOML"),
        ("tflops = 1.0\n", "tflops = 1.0\ntflops = 2.0\n", "invalid TOML"),
        ("tflops", "\udcff\udcfe", "invalid TOML"),  # no UTF-8
    ],
)
def test_a_bad_file_is_refused_by_its_key(tmp_path: Path, old: str, new: str, text: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new), errors="surrogateescape")
    with pytest.raises(SettingsError) as caught:
        find_profile(str(path))
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_names_a_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    devices = {
        "cpu": torch.device("cpu"),
        "null": NullDevice(),
        "model:l4": NullDevice(PROFILES["l4"]),
        f"model:{path}": NullDevice(ROUND),
    }
    for name, device in devices.items():
        assert parse_device(name) == device
    assert [str(parse_device(name)) for name in ("null", "model:l4")] == ["null", "model:l4"]


@each_row(
    "name",
    [
        *("", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:999", "mps", "meta"),
        *("null:", "null:1", "model", "model:", "model:l5", "model:L4", "model:../l4", "model:/"),
        "model:/none.toml",
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_device(name)
    if name.startswith("model"):
        assert caught.value.expected.startswith("a100, h100, h200, l4, rtx-4090, or the path")
    else:
        assert caught.value.where == "--device"
