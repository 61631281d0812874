"""Failover's cost: noise is what two plain channels differ by, and more than that is a miss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import failover_cost
from benchmarks.failover_cost import WAYS, Result, main, measure, noise_of, result_of
from protocol.errors import SettingsError
from tests.kit.model import SavedModel


def _table(again: float, two: float, rounds: int = 100) -> list[list[float]]:
    """Return microseconds of rounds; in three tenths of them the other plain one differs."""
    return [
        [100.0, 100.0 * (again if 20 <= number < 50 else 1.0), 101.0, two]
        for number in range(rounds)
    ]


def _result(two: float = 100.0) -> Result:
    return result_of("token", "unix", _table(1.03, two), 1)


def test_noise_is_the_distance_of_two_plain_channels_most_of_the_time() -> None:
    assert noise_of(_table(1.03, 100.0)) == pytest.approx(0.03)
    assert noise_of(_table(0.9, 100.0)) == pytest.approx(0.1)
    # What else runs for two blocks of ten is left out.
    busy = [[100.0, 900.0 if 20 <= n < 40 else 101.0, 0.0, 0.0] for n in range(100)]
    assert noise_of(busy) == pytest.approx(0.01)
    # Few rounds are one block: a single slow one is none of its median.
    assert noise_of([[1.0, 1.0], [1.0, 9.0], [1.0, 1.0]]) == 0.0


def test_a_machine_that_is_too_busy_to_tell_is_no_success() -> None:
    assert result_of("token", "unix", _table(1.19, 100.0), 1).ok
    assert not result_of("token", "unix", _table(1.21, 100.0), 1).ok


@pytest.mark.parametrize(
    ("two", "ok"), [(97.0, True), (102.9, True), (103.1, False), (200.0, False)]
)
def test_two_services_may_cost_as_much_as_noise(two: float, ok: bool) -> None:
    result = _result(two)
    assert result.two_to_again == pytest.approx(two / 100.0)
    assert result.ok is ok
    assert result.ratios == pytest.approx({"plain again": 1.0, "one": 1.01, "two": two / 100})


def test_measures_more_rounds_than_one_sequence_has_positions_for(
    saved_model: Callable[..., SavedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover_cost, "_WARM_UP", 1)
    # 8 of the prompt, one token of it, and four for each of 1 + 2 rounds.
    model = saved_model("llama", max_position_embeddings=8 + 1 + 4 * 3).directory
    results = measure(model, "unix", rounds=5, calls=2)
    assert [(one.work, one.transport, one.rounds) for one in results] == [
        ("small RPC", "unix", 5),
        ("token", "unix", 5),
    ]
    for one in results:
        assert tuple(one.us) == WAYS
        assert min(one.us.values()) > 0
        assert min(*one.ratios.values(), one.two_to_again) > 0
        assert one.noise >= 0


def test_a_model_with_too_few_positions_is_refused(saved_model: Callable[..., SavedModel]) -> None:
    model = saved_model("llama", max_position_embeddings=64).directory
    with pytest.raises(SettingsError, match="got 64 positions, expected at least 93"):
        measure(model, "unix", rounds=1, calls=1)


@pytest.mark.parametrize(
    ("two", "bookkeeping_us", "status"), [(100.0, 0.5, 0), (104.0, 0.5, 1), (100.0, 2.5, 1)]
)
def test_a_cost_is_a_miss_that_is_written_down(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    two: float,
    bookkeeping_us: float,
    status: int,
) -> None:
    monkeypatch.setattr(failover_cost, "measure", lambda *_: [_result(), _result(two)])
    monkeypatch.setattr(failover_cost, "bookkeeping_us", lambda: bookkeeping_us)
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as caught:
        main(["--transports", "unix", "--json", str(file)])
    assert caught.value.code == status
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["bookkeeping_us"] == bookkeeping_us
    assert [one["ok"] for one in found["results"]] == [True, two == 100.0]
    assert found["results"][0]["noise"] == pytest.approx(0.03)
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said].count("no") == status


def test_bookkeeping_is_measured_over_a_channel_that_answers_at_once() -> None:
    assert math.isfinite(failover_cost.bookkeeping_us(blocks=2, calls=50))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transports", "pigeon"], "--transports: got 'pigeon'"),
        (["--rounds", "0"], "--rounds: got 0"),
        (["--calls", "0"], "--calls: got 0"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"failover_cost: error: {message}"):
        main(arguments)
