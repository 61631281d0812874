"""Tests of `--device`, and of waiting for as long as a described accelerator takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from gpu_side.devices import NullDevice, parse_device, wait_until
from gpu_side.profiles import PROFILES
from protocol.errors import SettingsError


def test_cpu_is_a_device() -> None:
    assert parse_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
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


class Clock:
    """Time that passes by sleeping, and a microsecond at every look."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now, self.slept_ns, self.late_ns = 10**9, 0, late_ns

    def __call__(self) -> int:
        self.now += 1000
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_ns += int(seconds * 1e9)
        self.now += int(seconds * 1e9) + self.late_ns


@pytest.mark.parametrize("late_ns", [0, 60_000])
@pytest.mark.parametrize("duration_ns", [0, 5_000, 100_000, 250_000, 5_000_000])
def test_a_wait_ends_at_its_time_and_is_slept_but_for_the_end(
    duration_ns: int, late_ns: int
) -> None:
    clock = Clock(late_ns)
    deadline_ns = clock.now + duration_ns
    wait_until(deadline_ns, clock, clock.sleep)
    assert deadline_ns <= clock.now <= deadline_ns + 2000
    assert clock.slept_ns >= duration_ns - 130_000


def test_a_time_that_has_passed_is_not_waited_for() -> None:
    clock = Clock()
    wait_until(clock.now - 10**9, clock, clock.sleep)
    assert clock.slept_ns == 0


def test_the_real_clock_is_never_early() -> None:
    deadline_ns = time.perf_counter_ns() + 300_000
    wait_until(deadline_ns)
    assert time.perf_counter_ns() >= deadline_ns
