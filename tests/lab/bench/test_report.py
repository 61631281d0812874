"""The figures of one real report are in the terminal, and on a page that needs nothing else."""

from __future__ import annotations

import re

import pytest

from tests.kit.report import recorded_report
from tsqp.lab.bench.html import render_html
from tsqp.lab.bench.model import Span, Timeline
from tsqp.lab.bench.summary import by_operator, case_stages, sustained_ms
from tsqp.lab.bench.table import render
from tsqp.lab.bench.trace import perfetto
from tsqp.lab.bench.units import figures


def test_figures_are_in_the_terminal_and_on_the_page() -> None:
    # The recorded timelines are left out of the file.
    span = Span(lane=0, operator="o_proj", layer=3, stage="tee", start_us=0, duration_us=10)
    spans = (span, span.model_copy(update={"lane": 1, "stage": "mask", "start_us": 12}))
    timelines = (Timeline(phase="decode", tokens=9, batch=1, spans=spans),)
    report = recorded_report()
    runs = [one.model_copy(update={"timelines": timelines}) for one in report.policies[:2]]
    drawn = report.model_copy(update={"policies": tuple(runs)})
    text, page = render(drawn, width=200, details=True), render_html(drawn)
    for run in drawn.policies:
        for case in run.cases:
            assert figures(case.step_ms.median) in text, (run.policy, case.tokens)
        for shown in (text, page):
            assert run.policy in shown
    assert page.count("<img") >= 4
    outside = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"://|@import|url\(|<script|<link|<iframe", outside)
    events = perfetto(drawn)["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans) * len(drawn.policies)


def test_sums_are_those_of_the_parts() -> None:
    for run in recorded_report().policies:
        for case in run.cases:
            parts = sum(total.stages.total_us for total in by_operator(case))
            assert parts == pytest.approx(case_stages(case).total_us)
            pads = run.pads is not None and case.phase in run.pads.phases
            assert (sustained_ms(run, case) > case.step_ms.median) == pads
