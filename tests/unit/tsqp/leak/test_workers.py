"""Processes side by side find what one process finds, and none outlives a failure."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from pydantic import BaseModel

from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel, token_ids
from tsqp.lab.leak import workers
from tsqp.lab.leak.laboratory import Laboratory
from tsqp.lab.leak.model import Rate, Report
from tsqp.lab.leak.registry import find_attacks
from tsqp.lab.leak.settings import LeakSettings, Watch
from tsqp.lab.leak.workers import Job, tasks_of
from tsqp.processes import ProcessError, StderrReader, worker

PROMPTS = tuple(tuple(token_ids(6, seed)) for seed in range(3))
ATTACK = """
import os
import signal
import sys

from protocol.errors import ModelError
from tsqp.lab.leak.attack import Attack


class Mine(Attack):
    name = "mine"
    reads = "nothing"
    source = "this test"
    control = "attention-in-tee"
    published = 0.9

    def refuses(self, view):
        return None

    def read(self, view, work):
        if view.policy.name == "float-noise":
            {what}
        yield from ()
"""


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
    """In the order of the settings, whoever is done first. Masks and noise are drawn anew."""
    doing: list[str] = []
    totals: list[int] = []
    steps: list[int] = []
    watch = Watch(total=totals.append, doing=doing.append, step=steps.append)
    settings = settings_of(model, "nearest-embedding", "vocabulary-features")
    two = run(settings, tmp_path / "two", watch)
    settings = settings_of(model, "nearest-embedding", "vocabulary-features", workers=1)
    one = run(settings, tmp_path / "one")
    assert [policy.policy for policy in two.policies] == ["attention-in-tee", "float-noise", "stip"]
    assert [found for found in rates(two) if found[0] == "attention-in-tee"] == [
        found for found in rates(one) if found[0] == "attention-in-tee"
    ]
    assert any(rate == Rate(hits=30, n=30) for *_, rate in rates(two))
    (curve,) = two.curves
    assert [point.sigma for point in curve.points] == [0.5, 64.0]
    assert curve.plain_perplexity == one.curves[0].plain_perplexity
    assert totals == [sum(steps)] == [sum(task.steps for task in tasks_of(settings))]
    recorded = [line.partition(":")[0] for line in doing if line.endswith(": recording")]
    assert sorted(recorded) == sorted(policy.policy for policy in one.policies)
    # A worker is a folder with its recordings; both had something to do.
    assert len(list((tmp_path / "two").glob("worker-*"))) == 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a run starts."""
    found: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def noted(
        module: str, job: BaseModel
    ) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], StderrReader]]:
        with worker(module, job) as one:
            found.append(one[0])
            yield one

    monkeypatch.setattr(workers, "worker", noted)
    return found


def written(folder: Path, what: str) -> str:
    path = folder / "mine.py"
    path.write_text(ATTACK.format(what=what), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("what", "message", "traced"),
    [
        (
            "raise ValueError('of mine')",
            "a worker: got ValueError: of mine, expected no error (its traceback is above)",
            True,
        ),
        ("raise ModelError('x', got='y', expected='z')", "x: got y, expected z", False),
    ],
)
def test_a_policy_that_fails_leaves_the_others(
    model: SavedModel, tmp_path: Path, what: str, message: str, traced: bool
) -> None:
    """An attack of one's own is loaded by its path in each process; its traceback is shown."""
    said: list[str] = []
    done: list[str] = []
    (tmp_path / "run").mkdir()
    settings = settings_of(model, "nearest-embedding", written(tmp_path, what))
    laboratory = Laboratory(settings, tmp_path / "run", Watch(say=said.append, done=done.append))
    with pytest.raises(ProcessError) as caught:
        laboratory.run()
    assert str(caught.value) == message
    report = laboratory.report()
    assert [policy.policy for policy in report.policies] == ["attention-in-tee", "stip"]
    assert report.incomplete == (f"{message}; not attacked: float-noise, curve of float-noise")
    for lost in ("float-noise", "curve of float-noise"):
        assert f"{lost}: {message}" in said
    assert any("mine.py" in text and "Traceback" in text for text in said) == traced
    assert sorted(line.split(":")[0] for line in done) == ["attention-in-tee", "stip"]


def test_a_worker_that_is_killed_ends_all(
    model: SavedModel, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    path = written(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ProcessError, match="a process killed by SIGKILL"):
        run(settings_of(model, path), tmp_path / "run")
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize("what", ["raise ValueError('of mine')", "pass"])
def test_no_worker_outlives_a_run(
    model: SavedModel, tmp_path: Path, what: str, started: list[subprocess.Popen[bytes]]
) -> None:
    """The file fails where it is loaded, in the workers alone; or nothing fails."""
    path = tmp_path / "mine.py"
    written(tmp_path, "pass")
    settings = settings_of(model, str(path), curves=())
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n{what}\n", encoding="utf-8")
    if what == "pass":
        run(settings, tmp_path / "run")
    else:
        with pytest.raises(ProcessError, match="ValueError: of mine"):
            run(settings, tmp_path / "run")
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("print('of', 'mine\\nin two'); print('open', end='')", ["of mine", "in two", "open"]),
        ("print('name \\udcff')", ["name ?"]),
        ("os.write(1, b'below Python\\n')", []),
        ("os.system('echo of a child')", []),
    ],
)
def test_what_an_attack_prints_is_told_and_no_answer(
    model: SavedModel, tmp_path: Path, what: str, expected: list[str]
) -> None:
    said: list[str] = []
    settings = settings_of(model, written(tmp_path, what), curves=())
    report = run(settings, tmp_path / "run", Watch(say=said.append))
    assert [policy.policy for policy in report.policies] == [
        "attention-in-tee",
        "float-noise",
        "stip",
    ]
    assert said == expected


def test_workers_that_could_not_find_the_attacks_are_refused(
    model: SavedModel, tmp_path: Path
) -> None:
    """They would attack nothing, and find nothing."""
    settings = settings_of(model, "nearest-embedding", attack_names=())
    with pytest.raises(SettingsError, match="workers: got 2, and no names of attacks"):
        Laboratory(settings, tmp_path)


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
