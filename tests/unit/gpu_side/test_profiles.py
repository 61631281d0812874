"""Tests of the described accelerators: the formula, by hand, and every file that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_side.profiles import PROFILES, DeviceProfile, find_profile
from protocol.errors import SettingsError
from tests.kit.rows import each_row

# 10^12 operations, 2 * 10^12 int8 ones, 10^11 and 10^10 bytes a second, in microseconds.
ROUND = DeviceProfile(
    name="round", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)
FILE = """
name = "round"
tflops = 1.0
int8_tops = 2
gb_per_s = 100.0
launch_us = 3.0
pcie_gb_per_s = 10.0
"""


def test_few_rows_take_as_long_as_reading_the_weight() -> None:
    moved = 1000 * 4000 + 1000 + 4000
    assert ROUND.linear_us(1, 1000, 4000, 2) == pytest.approx(3 + 2 * moved / 1e5)


def test_many_rows_take_as_long_as_the_arithmetic() -> None:
    assert ROUND.linear_us(512, 1000, 4000, 2) == pytest.approx(3 + 2 * 512 * 1000 * 4000 / 1e6)


def test_float32_has_half_the_rate_and_twice_the_bytes() -> None:
    assert ROUND.linear_us(512, 1000, 4000, 4) == pytest.approx(3 + 4 * 512 * 1000 * 4000 / 1e6)
    moved = 1000 * 4000 + 1000 + 4000
    assert ROUND.linear_us(1, 1000, 4000, 4) == pytest.approx(3 + 4 * moved / 1e5)


def test_a_product_in_the_ring_takes_four_of_int8() -> None:
    four = 4 * 2 * 4096 * 1000 * 4000 / 2e6
    assert ROUND.linear_us(4096, 1000, 4000, 2, integer=True) == pytest.approx(13 * 3 + four)
    one_row = ROUND.linear_us(1, 1000, 4000, 2, integer=True)
    # A byte for each weight, and little else.
    assert one_row == pytest.approx(13 * 3 + 1000 * 4000 / 1e5, rel=0.1)
    assert one_row > 13 * 3 + 1000 * 4000 / 1e5


def test_matmul_counts_every_operand_of_the_batch() -> None:
    moved = 2 * 8 * (1 * 64 + 64 * 100 + 1 * 100)
    assert ROUND.matmul_us(8, 1, 64, 100, 2) == pytest.approx(3 + moved / 1e5)
    many = 2 * 8 * 512 * 64 * 512 / 1e6
    assert ROUND.matmul_us(8, 512, 64, 512, 2) == pytest.approx(3 + many)


def test_embedding_reads_and_writes_its_rows() -> None:
    assert ROUND.embedding_us(512, 1000, 2) == pytest.approx(3 + 2 * 512 * 1000 * 2 / 1e5)


def test_a_transfer_is_launched_and_takes_one_direction_of_the_bus() -> None:
    assert ROUND.transfer_us(10**6) == pytest.approx(3 + 100)


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "l4", "rtx-4090"])
def test_built_in_profiles_are_found_and_plausible(name: str) -> None:
    profile = find_profile(name)
    assert profile.name == name
    # Dense int8 has twice the rate of bfloat16 on all of them, but for a consumer card's halved
    # accumulation in float32.
    assert profile.int8_tops / profile.tflops == pytest.approx(4 if name == "rtx-4090" else 2, 0.01)
    assert 1 < profile.linear_us(1, 2048, 8192, 2) < profile.linear_us(4096, 2048, 8192, 2)


def test_an_h100_reads_a_layer_of_bfloat16_at_its_bandwidth() -> None:
    """67 MB at 3.35 TB/s: a unit that slipped would show."""
    assert PROFILES["h100"].linear_us(1, 4096, 8192, 2) == pytest.approx(25, rel=0.01)


def test_a_file_is_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace("int8_tops = 2\n", "int8_tops = 2.0\n"))
    assert find_profile(str(path)) == ROUND


def test_whole_numbers_will_do(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    assert find_profile(str(path)) == ROUND


@pytest.mark.parametrize("name", ["", "h1000", "H100", "h100 ", "../h100"])
def test_an_unknown_name_lists_those_there_are(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        find_profile(name)
    assert caught.value.expected.startswith("a100, h100, h200, l4, rtx-4090, or the path")


def test_a_missing_file_lists_the_names_as_well(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file or directory") as caught:
        find_profile(str(tmp_path / "none.toml"))
    assert "rtx-4090" in caught.value.expected


def test_a_directory_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        find_profile(str(tmp_path))


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
    ],
)
def test_a_bad_file_is_refused_by_its_key(tmp_path: Path, old: str, new: str, text: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new))
    with pytest.raises(SettingsError) as caught:
        find_profile(str(path))
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="invalid TOML"):
        find_profile(str(path))
