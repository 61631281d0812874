"""Baselines measure what the policies measure; those that cannot be measured are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.model.config import read_config
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel
from tests.kit.report import recorded_report
from tsqp.lab.bench import baselines as module
from tsqp.lab.bench import services
from tsqp.lab.bench.baselines import Baselines
from tsqp.lab.bench.job import Plan
from tsqp.lab.bench.settings import BenchSettings

PLAN = Plan(
    prefill=(3, 4), decode=((6, 1), (5, 1), (5, 8)), generation=None, repeats=2, decode_steps=3
)
TRANSFORMERS, PUBLISHED, PING_PONG = (
    f"tsqp.lab.bench.{name}" for name in ("transformers_baseline", "published_client", "ping_pong")
)


@pytest.fixture
def model(saved_model: Callable[..., SavedModel]) -> Path:
    return saved_model().directory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Have scripts print sample results; return with what each was run, as soon as it is."""
    asked: dict[str, tuple[str, ...]] = {}

    def script(module: str, *arguments: str) -> str:
        asked[module] = arguments
        found = (
            recorded_report().ping_pong[:1]
            if module == PING_PONG
            else recorded_report().baselines[:1]
        )
        return f"[{','.join(one.model_dump_json() for one in found)}]"

    monkeypatch.setattr(module, "_script", script)
    return asked


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Start no services; return the arguments of those that would have been."""
    started: list[list[str]] = []

    def start(_running: object, arguments: list[str], **_: Any) -> tuple[int, str]:
        started.append(arguments)
        return 2**30, "tcp://h:1"

    monkeypatch.setattr(services, "start_service", start)
    return started


def settings(model: Path, **changes: Any) -> BenchSettings:
    policies = (("tsqp", load_policy("tsqp")),)
    return replace(BenchSettings("c", policies, model=model, plan=PLAN), **changes)


def measure(given: BenchSettings, folder: Path, said: list[str] | None = None) -> Baselines:
    made = Baselines()
    model = given.model or Path()
    say = (said if said is not None else []).append
    made.measure(given, read_config(model), folder, model, say)
    return made


def option(words: tuple[str, ...] | list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_they_measure_the_same_cases(
    model: Path, tmp_path: Path, asked: dict[str, tuple[str, ...]], started: list[list[str]]
) -> None:
    said: list[str] = []
    made = measure(settings(model, threads=3, gpu_threads=2, transport="unix"), tmp_path, said)
    assert asked[TRANSFORMERS][0] == str(model)
    for name, value in (
        ("--tokens", "3,4"),
        ("--context", "5,6"),
        ("--new-tokens", "3"),
        ("--repeats", "2"),
        ("--threads", "3"),
        ("--dtype", "float32"),
    ):
        assert option(asked[TRANSFORMERS], name) == value
    assert asked[PUBLISHED][0] == "tcp://h:1"
    for name, value in (("--tokens", "3,4"), ("--threads", "3"), ("--against", "null")):
        assert option(asked[PUBLISHED], name) == value
    (service,) = started
    assert service[0] == str(model)
    # Its socket is ZeroMQ's, though policies are measured over another.
    for name, value in (("--bind", "tcp://127.0.0.1:*"), ("--threads", "2"), ("--device", "null")):
        assert option(service, name) == value
    assert made.measured == recorded_report().baselines[:1] * 2
    assert made.ping_pong == recorded_report().ping_pong[:1]
    assert made.complete
    assert said == [
        "baseline: transformers",
        "baseline: the published client",
        "baseline: raw ping-pong",
    ]
