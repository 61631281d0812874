"""`tsqp leak` as its users run it, once with everything that it writes; and bad input."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

from protocol.errors import TsqpError
from tests.kit.rows import each_row
from tests.kit.service import call
from tsqp.cli.main import command
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.model import Report

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "my_attack.py"
RECORDED = ROOT / "benchmarks" / "results" / "bench_null_tcp.json"


@pytest.mark.slow
def test_what_is_read_is_printed_written_and_judged(tmp_path: Path) -> None:
    """A file's attacks join those that are named; a pad passes, and rows in the clear do not."""
    report, page, picture = (tmp_path / name for name in ("r.json", "p.html", "p.svg"))
    policies = ("attention-in-tee", "float-noise", "shielded", "tee-only")
    done = call(
        *("tsqp", "leak", "demo", "--threads", "1", "--workers", "1", "--details"),
        *("--prompts", "6", "--prompt-tokens", "12", "--new-tokens", "8", "--curves"),
        *(part for name in policies for part in ("--policy", name)),
        *("--attack", str(EXAMPLE), "--attack", "nearest-embedding", "--sigma", "64,0.05"),
        *("--json", str(report), "--html", str(page), "--picture", str(picture)),
        *("--fail-above", "0.25"),
    )
    assert done.returncode == 1, done.stderr
    found = Report.model_validate_json(report.read_bytes())
    clear, noise, shielded, nothing = found.policies
    assert [one.policy for one in found.policies] == list(policies)
    assert [run.attack for run in clear.runs] == ["nearest-embedding", "largest-features"]
    assert clear.runs[0].scores[0].top1.value == 1.0
    assert (shielded.sent_prompt, shielded.sent_answer, shielded.above_chance) == (0, 42, False)
    assert nothing.nothing == "nothing leaves the TEE"
    # A curve begins with the weakest noise, under which no search runs each candidate.
    (curve,) = found.curves
    assert (curve.policy, curve.search_candidates) == (noise.policy, 256)
    weak, strong = curve.points
    assert (weak.sigma, strong.sigma, weak.rate.value) == (0.05, 64.0, 1.0)
    assert strong.rate.hits < weak.rate.hits
    assert strong.output_error > weak.output_error > 0
    # Each policy that fails is a line, with what is read, where, and of how many.
    failed = [
        line for line in done.stderr.splitlines() if "expected at most 0.25 above chance" in line
    ]
    assert [line.split(":")[1] for line in failed] == [
        " policy attention-in-tee",
        " policy float-noise",
    ]
    n = clear.runs[0].scores[0].top1.n
    assert f"{n} of {n} tokens read by nearest-embedding at layer 0 qkv_proj" in failed[0]
    assert all(name in done.stdout for name in (*policies, "largest-features"))
    ET.parse(picture)
    assert "<script src" not in page.read_text(encoding="utf-8")


@each_row(
    ("arguments", "message"),
    [
        ("demo --margin 0.005 --prompts 4", f"expected at least {needed(0.005, 1 / 1024)}"),
        ("demo --attack nobody", "expected one of"),
        ("demo --plot x.svg", "--cost measure"),
        (f"demo --cost {EXAMPLE}", "expected a report of tsqp bench --json"),
        (f"demo --cost {RECORDED}", "got the cost of llama-3.2-1b, expected that of demo"),
        ("demo --sigma 1,2", "got no --curves"),
        ("demo --curves --policy tsqp", "whose mask has noise"),
        ("demo --text no-such-text", "no-such-text: got FileNotFoundError"),
    ],
)
def test_bad_input_is_refused(arguments: str, message: str) -> None:
    done = CliRunner().invoke(command, ["leak", *arguments.split()])
    assert isinstance(done.exception, TsqpError)
    assert (message in str(done.exception), done.output) == (True, "")
