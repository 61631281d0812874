"""What accounts for a request, in limits, log and metrics: once, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tee_side.serve.audit_log import AuditLog, AuditReader, open_log
from tee_side.serve.keys import ApiKey
from tee_side.serve.limits import Limits, RateLimitError
from tee_side.serve.metrics import FINISHED_REASONS, Metrics
from tee_side.serve.watch import Watch
from tests.kit.rows import each_row
from tests.kit.serve import Clock, engine_stats

KEY = bytes(32)
LIMITS = {"requests_per_minute": 6, "tokens_per_minute": 100, "concurrent": 2}


def scrape(metrics: Metrics) -> dict[str, Metric]:
    body, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(metrics: Metrics, name: str) -> float:
    (sample,) = scrape(metrics)[name].samples
    return sample.value


class World:
    """A watch with all that it tells."""

    def __init__(self, path: Path) -> None:
        self.clock, self.path = Clock(), path
        key = ApiKey(name="alice", sha256="0" * 64, **LIMITS)
        self.limits = Limits({"alice": key}.get, self.clock)
        self.metrics = Metrics("demo", engine_stats)
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
        return {
            sample.labels.get("finished_reason", sample.name.partition(":")[2]): sample.value
            for family in scrape(self.metrics).values()
            for sample in family.samples
            if sample.value and sample.name.endswith(("success_total", "_seconds_count", "_sum"))
        }


@contextmanager
def a_world(path: Path) -> Iterator[World]:
    made = World(path)
    yield made
    made.audit.close()
    # However it ended, nothing of it runs on.
    assert made.limits.running("alice") == 0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path / "audit.log") as made:
        yield made


def test_an_answer(world: World) -> None:
    one = world.watch.request()
    world.clock.wait(0.5)
    one.begin("alice", 10, 20)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "70"
    assert world.limits.running("alice") == 1
    one.token(0)  # a step that read a part of the prompt
    for seconds, count in ((1.5, 1), (0.25, 1), (0.25, 3)):
        world.clock.wait(seconds)
        one.token(count)
    one.end("length", 10, 5)
    said = {"key": "alice", "policy": "shielded", "outcome": "ok"}
    counts = {"prompt_tokens": 10, "completion_tokens": 5, "duration_s": 2.5}
    assert world.records() == [said | counts]
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
        *((text, "error", "error") for text in ("error", "", "My password is", "password")),
        ("A" * 65, "error", "error"),
    ],
)
def test_an_end_counts_once_and_no_text_of_it_is_in_the_log(
    tmp_path_factory: pytest.TempPathFactory, outcome: str, recorded: str, counted: str
) -> None:
    with a_world(tmp_path_factory.mktemp("log") / "audit.log") as world:
        one = world.watch.request()
        one.end("length", 1, 1)  # it has not begun
        one.begin("alice", 1, 1)
        one.end(outcome, 1, 0)
        one.end("length", 1, 1)
    assert [record["outcome"] for record in world.records()] == [recorded]
    assert {name: n for name, n in world.told().items() if name in FINISHED_REASONS} == {counted: 1}


def test_a_refusal_is_accounted_for_at_once(world: World) -> None:
    first, second = world.watch.request(), world.watch.request()
    with pytest.raises(RateLimitError):
        first.begin("alice", 90, 11)
    first.end("RateLimitError", 90, 0)
    second.precheck("alice")
    assert len(world.records()) == 1
    # Before its prompt is read as well.
    held = world.limits.begin("alice", 90, 10)
    with pytest.raises(RateLimitError):
        second.precheck("alice")
    second.end("RateLimitError", 0, 0)
    held.end(0)
    names = ("key", "outcome", "prompt_tokens", "completion_tokens")
    assert [tuple(record[name] for name in names) for record in world.records()] == [
        ("alice", "RateLimitError", 90, 0),
        ("alice", "RateLimitError", 0, 0),
    ]
    assert world.told()["error"] == 2


def test_without_keys_and_without_a_log(world: World) -> None:
    watch = Watch(Limits(lambda _: None), world.metrics, None, "tee-only")
    one = watch.request()
    one.begin("", 1, 10**6)
    assert one.headers() == {}
    one.end("stop", 1, 1)
    assert (world.told()["stop"], world.records()) == (1, [])


# The names of vLLM; others are ours.
VLLM = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_queries": "prefix_cache_queries",
    "prefix_hits": "prefix_cache_hits",
}
GAUGES = {"running", "waiting", "kv_usage", "pads_ready", "services"}


def test_every_number_of_the_engine_is_told_as_it_is_at_the_scrape() -> None:
    told = [engine_stats(running=100), engine_stats()]
    metrics = Metrics("demo", told.pop, lambda: (18, 19))
    scrape(metrics)
    (stats,) = told
    found = scrape(metrics)
    for name, number in asdict(stats).items():
        family = found.pop(f"vllm:{VLLM[name]}" if name in VLLM else f"tsqp:{name}")
        assert family.type == ("gauge" if name in GAUGES else "counter")
        assert [sample.value for sample in family.samples] == [number], name
    assert found.pop("tsqp:audit_errors").samples[0].value == 18
    assert found.pop("tsqp:audit_lost").samples[0].value == 19
    # Nothing that a client can choose, and nothing by key, is a label.
    labels = {"model_name", "le", "finished_reason"}
    told.append(stats)
    samples = [sample for family in scrape(metrics).values() for sample in family.samples]
    assert all(sample.labels.keys() <= labels for sample in samples)
    assert {sample.labels["model_name"] for sample in samples} == {"demo"}
    with pytest.raises(KeyError):
        metrics.ended("a text")
    # What there is not is left out.
    page = Metrics("other", lambda: engine_stats(pads_ready=None)).page()[0]
    assert not any(name in page for name in (b"pads_ready", b"audit", b"demo"))
    known = prometheus_client.REGISTRY._names_to_collectors
    assert not any(name.startswith(("vllm", "tsqp")) for name in known)


def test_pads_made_per_second_of_the_last_minute() -> None:
    total, clock = 0, Clock()
    metrics = Metrics("demo", lambda: engine_stats(pads_made=total), clock=clock)
    for step_s, made, rate in (
        (0, 0, 0.0),
        (10, 100, 10),  # since the start
        (0, 0, 10),
        (20, 0, 100 / 30),
        (30, 200, 300 / 60),
        # What was made in the first 10 s is more than a minute ago.
        (10, 0, 200 / 60),
        (300, 600, 2),  # scrapes that are rare: since the last one
        (60, 0, 0),
    ):
        clock.wait(step_s)
        total += made
        assert value(metrics, "tsqp:pads_made_per_second") == pytest.approx(rate)
