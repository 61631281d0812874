"""Results are one JSON array, in a file or on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsqp.lab.bench.model import PingPong
from tsqp.lab.bench.output import write_results

RESULT = PingPong(
    transport="unix", payload_bytes=4096, kind="raw", p50_us=1.5, p90_us=2.5, round_trips=9
)


def test_results_go_to_the_file_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    write_results([RESULT, RESULT], path)
    assert json.loads(path.read_text(encoding="utf-8")) == [RESULT.model_dump()] * 2
    assert capsys.readouterr().out == ""


def test_results_are_printed_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_results([RESULT], None)
    assert json.loads(capsys.readouterr().out) == [RESULT.model_dump()]
