"""A run is checked before anything is made, and what it measured is reported whatever ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import TsqpError
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel
from tests.kit.report import some_case
from tsqp.lab.bench import services
from tsqp.lab.bench.job import Finished, Job, Measured, Plan
from tsqp.lab.bench.run import Bench
from tsqp.lab.bench.settings import BenchSettings
from tsqp.processes import ProcessError

Models = Callable[..., SavedModel]
PLAN = Plan(prefill=(4,), decode=((5, 1),), generation=None, repeats=1, decode_steps=3)
FINISHED = Finished(peak_bytes=7, kv_bytes=8, vocabulary_bytes=9)


@pytest.fixture
def model(saved_model: Models) -> Path:
    return saved_model().directory


def settings(model: Path | None, *policies: str, **changes: Any) -> BenchSettings:
    chosen = tuple((name, load_policy(name)) for name in policies or ("attention-in-tee",))
    return replace(BenchSettings("c", chosen, model=model, baselines=False, plan=PLAN), **changes)


@pytest.mark.parametrize(
    ("policies", "changes", "message"),
    [
        ([], {"device": "model:nothing"}, "accelerator profile: got 'nothing'"),
        (["two-server"], {"endpoints": ("tcp://h:1",)}, "two-server: got tcp://h:1, expected 2"),
        (
            ["two-server"],
            {"endpoints": ("tcp://h:1", "tcp://i:1"), "shares_in_the_clear": True},
            "--gpu: got tcp://h:1 without keys",
        ),
        (
            ["two-server"],
            {"endpoints": ("unix:///a", "unix:///b")},
            "on one machine, --shares-in-the-clear allows that",
        ),
        (["cloak"], {}, "policy cloak: got no --key"),
        (["cloak"], {"model": None, "shape": "llama-3.2-1b"}, "policy cloak: got --shape"),
        ([], {"shape": "llama-3.2-1b"}, "MODEL and --shape: got both"),
        ([], {"model": None, "shape": "llama-9"}, "--shape: got 'llama-9'"),
        ([], {"plan": PLAN.model_copy(update={"prefill": (256,)})}, "--prefill: got 256 tokens"),
    ],
)
def test_what_cannot_work_is_refused(
    model: Path, policies: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TsqpError) as refused:
        Bench(replace(settings(model, *policies), **changes), print)
    assert message in str(refused.value)


def test_an_interrupted_run_says_what_is_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ProcessError("w", got="a", expected="b")

    def broken(job: Job) -> Iterator[Any]:
        yield Measured(case=some_case(job.policy))
        if job.policy == "tsqp":
            raise error
        yield FINISHED

    # Workers that answer so, and services that are none.
    monkeypatch.setattr(Bench, "_answers", lambda _self, job: broken(job))
    monkeypatch.setattr(services, "start_service", lambda *_, **__: (2**30, "tcp://h:1"))
    names = ("attention-in-tee", "tsqp", "row-mix")
    made = Bench(settings(model, *names, baselines=True), print)
    with pytest.raises(ProcessError):
        made.run()
    report = made.report()
    assert [one.policy for one in report.policies] == ["attention-in-tee", "tsqp"]
    assert report.incomplete == (
        "w: got a, expected b; in part measured: tsqp; not measured: row-mix, tee-only,"
        " tee-only-int8; not all baselines measured"
    )
