"""Processes side by side find what one process finds, and none outlives a failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tee_side.policy import load_policy
from tests.support import SavedModel, token_ids
from tests.unit.tsqp.leak.leaks import Models, tiny
from tsqp.leak.laboratory import Laboratory
from tsqp.leak.model import Rate, Report
from tsqp.leak.registry import find_attacks
from tsqp.leak.settings import LeakSettings, Watch
from tsqp.leak.workers import Job, tasks_of
from tsqp.processes import ProcessError

PROMPTS = tuple(tuple(token_ids(6, seed)) for seed in range(3))
ATTACK = """
import os
import signal

from protocol.errors import ModelError
from tsqp.leak.attack import Attack


class Mine(Attack):
    name = "mine"
    reads = "nothing"
    source = "this test"
    control = "attention-in-tee"
    published = 0.9

    def refuses(self, view):
        return None

    def read(self, view, work):
        {what}
        yield
"""


@pytest.fixture
def model(saved_model: Models) -> SavedModel:
    return tiny(saved_model)


def settings_of(model: SavedModel, *attacks: str, **changed: Any) -> LeakSettings:
    settings: dict[str, Any] = {
        "command": "tsqp leak",
        "model": model.directory,
        "policies": tuple(
            (name, load_policy(name)) for name in ("attention-in-tee", "float-noise", "stip")
        ),
        "attacks": tuple(found for name in attacks for found in find_attacks(name)),
        "attack_names": attacks,
        "prompts": PROMPTS,
        "new_tokens": 5,
        "curves": (0.5, 64.0),
        "workers": 2,
    }
    return LeakSettings(**{**settings, **changed})


def run(settings: LeakSettings, folder: Path, watch: Watch | None = None) -> Report:
    folder.mkdir()
    laboratory = Laboratory(settings, folder, watch)
    laboratory.run()
    return laboratory.report()


def rates(report: Report) -> list[tuple[str, str, str, Rate]]:
    return [
        (policy.policy, run.attack, score.where, score.top1)
        for policy in report.policies
        for run in policy.runs
        for score in run.scores
    ]


def test_two_find_what_one_finds_each_thing_once(model: SavedModel, tmp_path: Path) -> None:
    """In the order of the settings, whoever is done first. Noise is drawn anew, and is high."""
    doing: list[str] = []
    totals: list[int] = []
    steps: list[int] = []
    watch = Watch(total=totals.append, doing=doing.append, step=steps.append)
    settings = settings_of(model, "nearest-embedding", "vocabulary-features")
    two = run(settings, tmp_path / "two", watch)
    settings = settings_of(model, "nearest-embedding", "vocabulary-features", workers=1)
    one = run(settings, tmp_path / "one")
    assert [policy.policy for policy in two.policies] == ["attention-in-tee", "float-noise", "stip"]
    clear = {"attention-in-tee", "stip"}
    assert [found for found in rates(two) if found[0] in clear] == [
        found for found in rates(one) if found[0] in clear
    ]
    assert any(rate == Rate(hits=30, n=30) for *_, rate in rates(two))
    (curve,) = two.curves
    assert [point.sigma for point in curve.points] == [0.5, 64.0]
    assert curve.plain_perplexity == one.curves[0].plain_perplexity
    assert totals == [sum(steps)] == [sum(task.steps for task in tasks_of(settings))]
    recorded = [line for line in doing if line.endswith(": recording")]
    assert sorted(recorded) == [f"{name}: recording" for name in sorted([*clear, "float-noise"])]
    # A worker is a folder with its recordings; both had something to do.
    assert len(list((tmp_path / "two").glob("worker-*"))) == 2


@pytest.mark.parametrize(
    ("what", "message", "traced"),
    [
        ("raise ValueError('of mine')", "a worker: got ValueError: of mine", True),
        ("raise ModelError('x', got='y', expected='z')", "x: got y, expected z", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", "a process killed by SIGKILL", False),
    ],
)
def test_the_first_failure_ends_all_and_says_why(
    model: SavedModel, tmp_path: Path, what: str, message: str, traced: bool
) -> None:
    """An attack of one's own is loaded by its path in each process; its traceback is shown."""
    path = tmp_path / "mine.py"
    path.write_text(ATTACK.format(what=what), encoding="utf-8")
    said: list[str] = []
    with pytest.raises(ProcessError, match=message):
        run(settings_of(model, str(path)), tmp_path / "run", Watch(say=said.append))
    assert any("mine.py" in text and "Traceback" in text for text in said) == traced
    for folder in (tmp_path / "run").glob("worker-*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(folder.name.removeprefix("worker-")), 0)


def test_a_job_says_all_that_settings_do(model: SavedModel, tmp_path: Path) -> None:
    """Who starts the workers keeps the command, the cost and how many there are."""
    settings = settings_of(
        model,
        "nearest-embedding",
        public=model.directory,
        dtype="bfloat16",
        temperature=0.5,
        seed=7,
        search_sessions=3,
        search_tokens=5,
        search_candidates=9,
        threads=2,
    )
    job = Job.model_validate_json(Job.of(settings, tmp_path).model_dump_json())
    again = job.settings()
    kept = {"command", "margin", "cost", "workers", "attack_names"}
    for name in set(vars(settings)) - kept:
        assert getattr(again, name) == getattr(settings, name), name
