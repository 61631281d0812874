"""The trace is what ui.perfetto.dev reads: named threads, complete events, microseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsqp.lab.bench.model import Report, Span, Timeline
from tsqp.lab.bench.trace import perfetto, perfetto_json, rows

from .sample_report import partial_reports, policy_run, sample_report

PARTIAL = partial_reports()


def span(start: float, length: float, **changes: Any) -> Span:
    made = Span(lane=0, operator="o_proj", layer=3, stage="tee", start_us=start, duration_us=length)
    return made.model_copy(update=changes)


def with_spans(*spans: Span) -> Report:
    run = policy_run("shielded", layers=1).model_copy(
        update={"timelines": (Timeline(phase="decode", tokens=9, batch=1, spans=spans),)}
    )
    return sample_report((), layers=1).model_copy(update={"policies": (run,)})


def complete_events(report: Report) -> list[dict[str, Any]]:
    return [event for event in perfetto(report)["traceEvents"] if event["ph"] == "X"]


def test_a_span_becomes_a_complete_event_in_microseconds() -> None:
    (event,) = complete_events(with_spans(span(40.25, 7.5, lane=2, stage="mask")))
    assert event == {
        "name": "o_proj mask",
        "cat": "mask",
        "ph": "X",
        "ts": 40.25,
        "dur": 7.5,
        "pid": 1,
        "tid": 1,
        "args": {"operator": "o_proj", "stage": "mask", "micro_batch": 2, "layer": 3},
    }


def test_what_has_no_layer_names_none() -> None:
    (event,) = complete_events(with_spans(span(0, 1, layer=None)))
    assert event["name"] == "o_proj"
    assert "layer" not in event["args"]


def test_every_process_and_thread_has_a_name() -> None:
    report = sample_report(("tsqp", "shielded"), layers=2)
    events = perfetto(report)["traceEvents"]
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    processes = [args["name"] for (what, _, _), args in named.items() if what == "process_name"]
    assert processes == [
        f"{policy}, {step}"
        for policy in ("tsqp", "shielded")
        for step in ("prefill 512", "decode at 128", "decode 8 at 128")
    ]
    for event in events:
        if event["ph"] == "X":
            assert ("process_name", event["pid"], 0) in named
            assert ("thread_name", event["pid"], event["tid"]) in named
    threads = [
        args["name"] for (what, pid, _), args in named.items() if (what, pid) == ("thread_name", 3)
    ]
    assert threads == [
        f"{busy}, micro-batch {lane}" for busy in ("TEE", "wire", "GPU") for lane in (0, 1)
    ]


def test_all_time_is_in_the_trace() -> None:
    report = sample_report(layers=2)
    spans = [s for run in report.policies for t in run.timelines for s in t.spans]
    events = complete_events(report)
    assert len(events) == len(spans)
    total = sum(event["dur"] for event in events)
    assert total == pytest.approx(sum(s.duration_us for s in spans), rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 100)), max_size=30))
def test_events_of_a_thread_do_not_overlap(found: list[tuple[float, float]]) -> None:
    report = with_spans(*(span(start, length) for start, length in found))
    events = complete_events(report)
    assert len(events) == len(found)
    threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for placed in threads.values():
        placed.sort()
        for (_, end), (start, _) in pairwise(placed):
            assert start >= end - 1e-6


def test_requests_in_flight_together_get_threads_of_their_own() -> None:
    made = rows([span(0, 10), span(2, 10), span(11, 5), span(12.5, 1)])
    assert [[s.start_us for s in row] for row in made] == [[0, 11], [2, 12.5]]


def test_spans_that_touch_stay_together() -> None:
    made = rows([span(0, 10), span(9.5, 10)])
    assert [[(s.start_us, s.duration_us) for s in row] for row in made] == [[(0, 10), (10, 9.5)]]


@pytest.mark.parametrize("name", list(PARTIAL))
def test_partial_reports_give_valid_traces(name: str) -> None:
    read = json.loads(perfetto_json(PARTIAL[name]))
    assert read == perfetto(PARTIAL[name])
    assert read["displayTimeUnit"] == "ms"
    spans = sum(len(t.spans) for run in PARTIAL[name].policies for t in run.timelines)
    assert sum(event["ph"] == "X" for event in read["traceEvents"]) == spans
