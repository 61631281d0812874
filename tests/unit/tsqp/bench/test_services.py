"""A policy's services are started as the run says, each at an endpoint of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tee_side.policy.placement import load_policy
from tsqp.lab.bench import services
from tsqp.lab.bench.services import start_services
from tsqp.lab.bench.settings import BenchSettings

FOLDER, MODEL, SERVED = Path("/f"), Path("/m"), Path("/served")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    started: list[list[str]] = []

    def start(_running: object, arguments: list[str], **_: Any) -> tuple[int, str]:
        started.append(arguments)
        return len(started), arguments[arguments.index("--bind") + 1]

    monkeypatch.setattr(services, "start_service", start)
    return started


def start(policy: str, transport: str = "unix", **changes: Any) -> list[tuple[int, str]]:
    given = replace(BenchSettings("c", ()), **changes)
    with ExitStack() as running:
        return start_services(running, given, FOLDER, MODEL, load_policy(policy), transport)


def test_each_listens_at_an_endpoint_of_its_own(started: list[list[str]]) -> None:
    assert start("two-server") == [(1, "unix:///f/gpu-0.sock"), (2, "unix:///f/gpu-1.sock")]
    started.clear()
    assert start("attention-in-tee", "tcp") == [(1, "tcp://127.0.0.1:*")]
    started.clear()
    assert start("tee-only") == []
    assert started == []


def test_a_service_gets_the_settings_of_the_run(started: list[list[str]]) -> None:
    start("attention-in-tee", device="cpu", kernels="torch", gpu_threads=3, spin_us=5.0)
    start("shielded", dtype="bfloat16")
    plain, masked = started
    assert plain == [
        *("/m", "--device", "cpu", "--bind", "unix:///f/gpu-0.sock"),
        *("--kernels", "torch", "--threads", "3"),
        *("--arithmetic", "float", "--spin-us", "5.0"),
    ]
    assert masked[masked.index("--arithmetic") + 1] == "int8"
    assert masked[-2:] == ["--dtype", "bfloat16"]


def test_only_a_mask_that_needs_them_gets_transformed_weights(started: list[list[str]]) -> None:
    for policy in ("cloak", "attention-in-tee"):
        start(policy, server_model=SERVED)
    assert [arguments[0] for arguments in started] == [str(SERVED), str(MODEL)]


def test_given_services_are_not_started(started: list[list[str]]) -> None:
    given = ("tcp://h:1", "tcp://h:2", "tcp://h:3")
    assert start("two-server", endpoints=given) == [(0, "tcp://h:1"), (0, "tcp://h:2")]
    assert started == []
