"""What a policy costs, out of a report of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from tsqp.lab.leak.cost import cost_in, read_report

RECORDED = Path(__file__).parents[4] / "benchmarks" / "results" / "bench_null_tcp.json"


def recorded(tmp_path: Path) -> Path:
    """Return a report of `tsqp bench`: a recorded one has more around it."""
    import json

    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content.get("report", content)), encoding="utf-8")
    return path


def test_the_decoded_token_of_one_sequence_counts(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    report = read_report(path, "llama-3.2-1b")
    cost = cost_in(report, "shielded")
    (run,) = (run for run in report.policies if run.policy == "shielded")
    cases = [case for case in run.cases if (case.phase, case.batch) == ("decode", 1)]
    assert cost is not None
    assert cost.context == min(case.tokens for case in cases)
    assert cost.rpcs == 4 * 16 + 1
    assert cost_in(report, "nobody") is None


def test_a_report_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"got the cost of llama-3\.2-1b, expected that of demo"
    ):
        read_report(recorded(tmp_path), "demo")


@pytest.mark.parametrize("content", ["", "{}", "no json"])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SettingsError, match="expected a report of tsqp bench --json"):
        read_report(path, "demo")
    with pytest.raises(SettingsError, match="No such file"):
        read_report(tmp_path / "none", "demo")
