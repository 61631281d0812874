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


def option(words: tuple[str, ...] | list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_they_measure_the_same_cases(
    saved_model: Callable[..., SavedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scripts that print sample results, and services that are none."""
    asked: dict[str, tuple[str, ...]] = {}
    started: list[list[str]] = []
    said: list[str] = []
    sample = recorded_report()

    def script(module: str, *arguments: str) -> str:
        asked[module] = arguments
        (found,) = sample.ping_pong[:1] if module == PING_PONG else sample.baselines[:1]
        return f"[{found.model_dump_json()}]"

    def start(_running: object, arguments: list[str], **_: Any) -> tuple[int, str]:
        started.append(arguments)
        return 2**30, "tcp://h:1"

    monkeypatch.setattr(module, "_script", script)
    monkeypatch.setattr(services, "start_service", start)
    model = saved_model().directory
    given = replace(
        BenchSettings("c", (("tsqp", load_policy("tsqp")),), model=model, plan=PLAN),
        threads=3,
        gpu_threads=2,
        transport="unix",
    )
    made = Baselines()
    made.measure(given, read_config(model), tmp_path, model, said.append)
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
    assert made.measured == sample.baselines[:1] * 2
    assert made.ping_pong == sample.ping_pong[:1]
    assert made.complete
    assert said == [
        "baseline: transformers",
        "baseline: the published client",
        "baseline: raw ping-pong",
    ]
