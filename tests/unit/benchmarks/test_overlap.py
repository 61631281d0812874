"""Overlap: the modelled accelerator takes as long as the TEE, and contenders take turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap
from benchmarks.overlap import Case, Contender, gpu_us, in_turns, main, matching_profile, measure
from gpu_side.kernels import request_us
from gpu_side.profiles import PROFILES
from gpu_side.tasks import LinearWork, Task
from protocol.errors import SettingsError
from protocol.messages import FUSED_MODULES
from tests.kit.model import SavedModel
from tsqp.lab.bench.shapes import find_shape

CONFIG = find_shape("llama-3.2-1b").config()


@pytest.mark.parametrize("bound", ["arithmetic", "memory"])
@pytest.mark.parametrize(("rows", "target_us"), [(512, 543_000.0), (8, 71_000.0), (1, 12_000.0)])
def test_the_profile_takes_as_long_as_it_is_to(bound: Any, rows: int, target_us: float) -> None:
    profile = matching_profile(CONFIG, rows, target_us, bound)
    assert gpu_us(profile, CONFIG, rows) == pytest.approx(target_us, rel=1e-6)


def test_half_the_rows_cost_half_the_arithmetic_and_all_of_the_weights() -> None:
    arithmetic = matching_profile(CONFIG, 8, 70_000.0, "arithmetic")
    assert gpu_us(arithmetic, CONFIG, 4) == pytest.approx(35_000.0, rel=1e-3)
    memory = matching_profile(CONFIG, 8, 70_000.0, "memory")
    assert gpu_us(memory, CONFIG, 4) == pytest.approx(70_000.0, rel=1e-2)


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_it_is_what_the_service_takes_for_its_requests(rows: int) -> None:
    products = [(2048, 2048 + 2 * 512), (2048, 2048), (2048, 2 * 8192), (8192, 2048)]
    plans = [
        Task((rows, height), "bfloat16", LinearWork(rows, width, height, False), rows * width * 2)
        for width, height in products
    ]
    profile = PROFILES["l4"]
    layer_us = sum(request_us(profile, plan, 2) for plan in plans)
    assert gpu_us(profile, CONFIG, rows) == pytest.approx(16 * layer_us)


def test_a_time_that_no_rate_gives_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"overlap: got a TEE time of 0\.000 us"):
        matching_profile(CONFIG, 8, 0.0, "arithmetic")


@pytest.mark.parametrize(
    ("case", "transport"),
    [
        (Case("p", "prefill", 16, 1, "arithmetic"), "unix"),
        (Case("d", "decode", 5, 8, "memory"), "tcp"),
    ],
)
def test_measures_a_case(
    saved_model: Callable[..., SavedModel], case: Case, transport: str
) -> None:
    found = measure(saved_model().directory, case, transport, repeats=2, threads=1)
    assert (found.case, found.phase, found.transport, found.runs) == (
        case.name,
        case.phase,
        transport,
        2,
    )
    assert found.ratio == found.serial_ms / found.overlapped_ms
    assert found.null_ms / (1 + found.balance) == pytest.approx(found.gpu_ms[0], rel=1e-6)
    if case.bound == "arithmetic":
        assert found.gpu_ms[1] == pytest.approx(found.gpu_ms[0], rel=0.01)
    # A service is never early.
    assert found.serial_ms >= found.gpu_ms[0]
    assert found.overlapped_ms >= found.gpu_ms[1]
    # Of every request of a step with all of its rows, in whole microseconds.
    requests = saved_model().reference.config.num_hidden_layers * len(FUSED_MODULES)
    for claimed_ms, gpu_ms, parts in zip(found.gpu_claimed_ms, found.gpu_ms, (1, 2), strict=True):
        assert claimed_ms >= gpu_ms - parts * requests / 1e3
    assert min(found.vocabulary_ms) > 0


@pytest.mark.parametrize(
    ("case", "repeats"),
    [
        (Case("p", "prefill", 256, 1, "arithmetic"), 1),
        (Case("d", "decode", 5, 8, "memory"), 1000),
    ],
)
def test_a_sequence_that_would_end_before_it_is_measured_is_refused(
    saved_model: Callable[..., SavedModel], case: Case, repeats: int
) -> None:
    with pytest.raises(SettingsError, match=rf"^{case.name}: got \d+ positions"):
        measure(saved_model().directory, case, "unix", repeats=repeats, threads=1)


def test_too_few_positions_are_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("made weights, expected a refusal")

    monkeypatch.setattr("benchmarks.overlap.prepare.random_model", made)
    with pytest.raises(SystemExit, match=r"^overlap: error: decode-8: got 131072 positions"):
        main(["--decode-steps", "100000"])


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_WARM_UP", 1)
    turns: list[str] = []

    class Fake(Contender):
        def __init__(self, name: str, times_ms: list[float]) -> None:
            self.name, self.times_ms = name, iter(times_ms)
            self.step = lambda: turns.append(name.upper())

        def timed_ms(self) -> float:
            turns.append(self.name)
            return next(self.times_ms)

    medians = in_turns([Fake("a", [5.0, 1.0, 2.0]), Fake("b", [7.0, 9.0, 8.0])], 3)
    assert medians == [2.0, 8.0]
    assert turns == ["A", "B", "a", "b", "a", "b", "a", "b"]


def test_writes_json(
    saved_model: Callable[..., SavedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def random_model(directory: Path, shape: str, *, linear: bool) -> None:
        assert (shape, linear) == ("llama-3.2-1b", False)
        for file in saved_model().directory.iterdir():
            (directory / file.name).hardlink_to(file)

    monkeypatch.setattr("benchmarks.overlap.prepare.random_model", random_model)
    monkeypatch.setattr(overlap, "CASES", (Case("d", "decode", 5, 8, "arithmetic"),))
    file = tmp_path / "out.json"
    main(["--decode-steps", "1", "--transports", "unix", "--threads", "1", "--json", str(file)])
    found = json.loads(file.read_text(encoding="utf-8"))
    (result,) = found["results"]
    assert (found["tee_threads"], found["policy"]) == (1, "attention-in-tee")
    assert (result["case"], result["batch"], result["runs"]) == ("d", 8, 1)
    assert result["profile"]["launch_us"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transports", "pigeon"], "--transports: got 'pigeon'"),
        (["--shape", "camel"], "--shape: got 'camel'"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"overlap: error: {message}"):
        main(arguments)
