"""Tests of what accounts for a request: one record, one count and no leak, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tee_side.serve.audit_log import AuditLog, AuditReader, open_log
from tee_side.serve.keys import ApiKey
from tee_side.serve.limits import Limits, RateLimitError
from tee_side.serve.metrics import Metrics
from tee_side.serve.watch import Watch
from tests.kit.rows import each_row
from tests.kit.serve import Clock, Stats

KEY = bytes(32)
LIMITS = {"requests_per_minute": 6, "tokens_per_minute": 100, "concurrent": 2}


class World:
    """A watch with all that it tells."""

    def __init__(self, path: Path) -> None:
        self.clock, self.path = Clock(), path
        key = ApiKey(name="alice", sha256="0" * 64, **LIMITS)
        self.limits = Limits({"alice": key}.get, self.clock)
        self.metrics = Metrics("demo", Stats)
        self.audit = AuditLog(path, KEY)
        self.watch = Watch(self.limits, self.metrics, self.audit, "shielded", self.clock)

    def records(self) -> list[dict[str, Any]]:
        with open_log(self.path) as file:
            found = list(AuditReader(file, KEY, "log"))
        for record in found:
            assert record.pop("kind") == "request"
            assert record.pop("time")
        return found

    def told(self) -> dict[str, float]:
        """Return what a scrape says of requests: counts by outcome, counts and sums of times."""
        page = self.metrics.page()[0].decode()
        return {
            sample.labels.get("finished_reason", sample.name.partition(":")[2]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.value and sample.name.endswith(("success_total", "_seconds_count", "_sum"))
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "audit.log")
    yield made
    made.audit.close()


def test_an_answer(world: World) -> None:
    one = world.watch.request()
    world.clock.wait(0.5)
    one.begin("alice", 10, 20)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert world.limits.running("alice") == 1
    one.token(0)  # a step that read a part of the prompt
    world.clock.wait(1.5)
    one.token(1)
    for seconds, count in ((0.25, 1), (0.25, 3)):
        world.clock.wait(seconds)
        one.token(count)
    one.end("length", 10, 5)
    assert world.limits.running("alice") == 0
    assert world.records() == [
        {
            "key": "alice",
            "policy": "shielded",
            "outcome": "ok",
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "duration_s": 2.5,
        }
    ]
    assert world.told() == {
        "length": 1,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 2.0,
        "inter_token_latency_seconds_count": 2,
        "inter_token_latency_seconds_sum": 0.5,
        "e2e_request_latency_seconds_count": 1,
        "e2e_request_latency_seconds_sum": 2.5,
    }
    world.clock.wait(60)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "100"


@each_row(
    ("outcome", "recorded", "counted"),
    [
        ("ok", "ok", "stop"),
        ("stop", "ok", "stop"),
        ("length", "ok", "length"),
        ("cancelled", "cancelled", "abort"),
        ("PadsExhaustedError", "PadsExhaustedError", "error"),
        ("error", "error", "error"),
        ("", "error", "error"),
        ("My password is", "error", "error"),
        ("password", "error", "error"),
        ("A" * 65, "error", "error"),
    ],
)
def test_outcomes(
    tmp_path_factory: pytest.TempPathFactory, outcome: str, recorded: str, counted: str
) -> None:
    world = World(tmp_path_factory.mktemp("log") / "audit.log")
    one = world.watch.request()
    one.begin("alice", 1, 1)
    one.end(outcome, 1, 0)
    world.audit.close()
    assert [record["outcome"] for record in world.records()] == [recorded]
    assert world.told()[counted] == 1


def test_an_end_counts_once(world: World) -> None:
    one = world.watch.request()
    one.end("ok", 1, 1)  # it has not begun
    one.begin("alice", 1, 1)
    one.end("cancelled", 1, 0)
    one.end("ok", 1, 1)
    assert [record["outcome"] for record in world.records()] == ["cancelled"]
    assert world.told()["abort"] == 1
    assert "stop" not in world.told()
    assert world.limits.running("alice") == 0


def test_a_refusal_is_accounted_for_at_once(world: World) -> None:
    one = world.watch.request()
    with pytest.raises(RateLimitError):
        one.begin("alice", 90, 11)
    one.end("RateLimitError", 90, 0)
    (record,) = world.records()
    assert (record["key"], record["outcome"]) == ("alice", "RateLimitError")
    assert (record["prompt_tokens"], record["completion_tokens"]) == (90, 0)
    assert world.told()["error"] == 1
    assert world.limits.running("alice") == 0


def test_a_refusal_before_the_prompt_is_read_is_accounted_for(world: World) -> None:
    one = world.watch.request()
    one.precheck("alice")
    assert not world.records()
    world.watch.limits.begin("alice", 90, 10)
    with pytest.raises(RateLimitError):
        one.precheck("alice")
    one.end("RateLimitError", 0, 0)
    (record,) = world.records()
    assert (record["key"], record["outcome"], record["prompt_tokens"]) == (
        "alice",
        "RateLimitError",
        0,
    )
    assert world.told()["error"] == 1


def test_cancelled_requests_leave_nothing_behind(world: World) -> None:
    for _ in range(200):
        one = world.watch.request()
        one.begin("alice", 10, 90)
        one.end("cancelled", 0, 0)
        world.clock.wait(10)
    assert world.limits.running("alice") == 0
    assert one.headers()["x-ratelimit-remaining-tokens"] == "100"
    assert len(world.records()) == world.told()["abort"] == 200


def test_without_keys_and_without_a_log(world: World) -> None:
    watch = Watch(Limits(lambda _: None), world.metrics, None, "tee-only")
    one = watch.request()
    one.begin("", 1, 10**6)
    assert one.headers() == {}
    one.end("stop", 1, 1)
    assert world.told()["stop"] == 1
    assert world.records() == []
