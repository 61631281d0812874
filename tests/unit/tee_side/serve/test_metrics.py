"""Tests of the metrics' names, types, labels and numbers."""

from __future__ import annotations

from dataclasses import fields

import prometheus_client
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tee_side.engine.stats import EngineStats
from tee_side.serve import metrics as metrics_module
from tee_side.serve.metrics import FINISHED_REASONS, Metrics
from tests.kit.serve import Clock, Stats


@pytest.fixture
def stats() -> Stats:
    return Stats()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(stats: Stats, clock: Clock) -> Metrics:
    return Metrics("demo", lambda: stats, lambda: (18, 19), clock)


def scrape(metrics: Metrics) -> dict[str, Metric]:
    body, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(metrics: Metrics, name: str) -> float:
    (sample,) = scrape(metrics)[name].samples
    return sample.value


def test_the_engine_as_it_is_at_the_scrape(metrics: Metrics, stats: Stats) -> None:
    found = scrape(metrics)
    assert {
        (family.type, sample.name, sample.value)
        for family in found.values()
        for sample in family.samples
        if not sample.name.endswith("_created")
        and family.type != "histogram"
        and "finished_reason" not in sample.labels
    } == {
        ("gauge", "vllm:num_requests_running", 1),
        ("gauge", "vllm:num_requests_waiting", 2),
        ("gauge", "vllm:kv_cache_usage_perc", 0.25),
        ("counter", "vllm:prompt_tokens_total", 3),
        ("counter", "vllm:generation_tokens_total", 4),
        ("counter", "tsqp:steps_total", 5),
        ("counter", "vllm:prefix_cache_queries_total", 6),
        ("counter", "vllm:prefix_cache_hits_total", 7),
        ("counter", "tsqp:draft_tokens_total", 8),
        ("counter", "tsqp:accepted_tokens_total", 9),
        ("gauge", "tsqp:pads_ready", 10),
        ("counter", "tsqp:pads_made_total", 0),
        ("counter", "tsqp:pads_used_total", 11),
        ("gauge", "tsqp:pads_made_per_second", 0),
        ("counter", "tsqp:pads_waited_total", 12),
        ("counter", "tsqp:pads_in_tee_total", 13),
        ("counter", "tsqp:round_trips_total", 14),
        ("counter", "tsqp:bytes_sent_total", 15),
        ("counter", "tsqp:bytes_received_total", 16),
        ("gauge", "tsqp:services", 17),
        ("counter", "tsqp:audit_errors_total", 18),
        ("counter", "tsqp:audit_lost_total", 19),
    }
    stats.running = 20
    assert value(metrics, "vllm:num_requests_running") == 20


def test_the_served_model_is_on_every_sample(metrics: Metrics) -> None:
    metrics.first_token(0.1)
    for family in scrape(metrics).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            assert sample.labels.keys() <= {"model_name", "le", "finished_reason"}


def test_without_pads_and_log_they_are_left_out(stats: Stats, clock: Clock) -> None:
    stats.pads_ready = None
    found = scrape(Metrics("demo", lambda: stats, clock=clock))
    assert "tsqp:pads_ready" not in found
    assert not any("audit" in name for name in found)


def test_times_of_requests(metrics: Metrics) -> None:
    for seconds in (0.03, 0.04, 0.3, 100.0):
        metrics.first_token(seconds)
        metrics.between_tokens(seconds)
        metrics.request(seconds)
    found = scrape(metrics)
    for name, bound, below in (
        ("vllm:time_to_first_token_seconds", "0.04", 2),
        ("vllm:inter_token_latency_seconds", "0.05", 2),
        ("vllm:e2e_request_latency_seconds", "0.3", 3),
    ):
        family = found[name]
        assert family.type == "histogram"
        values = {(s.name, s.labels.get("le")): s.value for s in family.samples}
        assert values[f"{name}_bucket", bound] == below
        assert values[f"{name}_bucket", "+Inf"] == values[f"{name}_count", None] == 4
        assert values[f"{name}_sum", None] == pytest.approx(100.37)


def test_requests_that_ended(metrics: Metrics) -> None:
    for number, reason in enumerate(FINISHED_REASONS):
        for _ in range(number):
            metrics.ended(reason)
    assert {
        sample.labels["finished_reason"]: sample.value
        for sample in scrape(metrics)["vllm:request_success"].samples
        if sample.name == "vllm:request_success_total"
    } == {"stop": 0, "length": 1, "abort": 2, "error": 3}
    with pytest.raises(KeyError):
        metrics.ended("a text")


def test_pads_made_per_second_of_the_last_minute(
    metrics: Metrics, stats: Stats, clock: Clock
) -> None:
    def rate(step_s: float, made: int) -> float:
        clock.wait(step_s)
        stats.pads_made += made
        return value(metrics, "tsqp:pads_made_per_second")

    assert rate(0, 0) == 0
    assert rate(10, 100) == 10  # since the start
    assert rate(0, 0) == 10
    assert rate(20, 0) == pytest.approx(100 / 30)
    assert rate(30, 200) == pytest.approx(300 / 60)
    # What was made in the first 10 s is more than a minute ago.
    assert rate(10, 0) == pytest.approx(200 / 60)
    assert rate(300, 600) == 2  # scrapes that are rare: since the last one
    assert rate(60, 0) == 0


def test_quick_scrapes_keep_one_number_a_second(
    metrics: Metrics, stats: Stats, clock: Clock
) -> None:
    for _ in range(800):
        clock.wait(0.125)
        stats.pads_made += 1
        metrics.page()
    assert value(metrics, "tsqp:pads_made_per_second") == pytest.approx(8)
    (collector,) = (c for c in metrics._registry._collector_to_names if hasattr(c, "_made"))
    assert len(collector._made) <= 62


def test_two_servers_in_one_process_share_nothing(stats: Stats) -> None:
    first, second = Metrics("a", lambda: stats), Metrics("b", lambda: stats)
    first.ended("stop")
    assert b'{finished_reason="stop",model_name="b"} 0.0' in second.page()[0]
    assert not any(
        name.startswith(("vllm", "tsqp"))
        for name in prometheus_client.REGISTRY._names_to_collectors
    )


def test_a_scraper_may_ask_for_openmetrics(metrics: Metrics) -> None:
    body, content_type = metrics.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_every_number_of_the_engine_is_a_metric() -> None:
    known = {*metrics_module._GAUGES, *metrics_module._COUNTERS}
    assert known == {field.name for field in fields(EngineStats)}
    assert known == {field.name for field in fields(Stats)}
