"""`tsqp leak` as its users run it: a quick form of what docs/leakage.md has in full."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.kit.service import run
from tsqp.lab.leak.interval import needed
from tsqp.lab.leak.model import PolicyLeak, Report

pytestmark = pytest.mark.timeout(300)
# Small enough for a minute, and long enough that every attack but one works on its control.
QUICK = (
    *("--prompts", "6", "--prompt-tokens", "16", "--new-tokens", "6"),
    *("--search-prompts", "1", "--threads", "1"),
)
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "my_attack.py"


DONE = re.compile(r"tsqp leak: (.+): done, (\d+) of (\d+)")
BLIND = """
from tsqp.lab.leak.attack import Attack, Reading


class Blind(Attack):
    name = "blind"
    reads = "nothing"
    source = "this test"
    control = "attention-in-tee"
    published = 0.9

    def refuses(self, view):
        return None

    def read(self, view, work):
        print("looking at", view.policy.name)
        for session, trace in enumerate(view.traces):
            yield Reading("layer 0 qkv_proj", session, range(trace.tokens), {})
"""


def leak(*arguments: str) -> tuple[int, str, str]:
    done = run("tsqp", "leak", *arguments, timeout_s=240)
    return done.returncode, done.stdout, done.stderr


def by_name(path: Path) -> dict[str, PolicyLeak]:
    report = Report.model_validate_json(path.read_bytes())
    return {policy.policy: policy for policy in report.policies}


def done(err: str) -> set[str]:
    """Return the policies that stderr says are done, counted; it says nothing else."""
    found = [DONE.fullmatch(line) for line in err.splitlines()]
    lines = [line.groups() for line in found if line is not None]
    assert len(lines) == len(found), err
    names = {name for name, *_ in lines}
    assert sorted(lines, key=lambda line: int(line[1])) == [
        (name, str(number), str(len(names))) for number, (name, *_) in enumerate(lines, start=1)
    ]
    return names


def test_broken_schemes_are_read_and_the_pad_is_not(tmp_path: Path) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    picture = tmp_path / "picture.svg"
    names = ("row-rotation", "cloak", "cloak-segment", "shielded", "tee-only")
    status, out, err = leak(
        "demo",
        *QUICK,
        *(part for name in names for part in ("--policy", name)),
        *("--json", str(report), "--html", str(page), "--picture", str(picture)),
    )
    assert (status, done(err)) == (0, set(names))
    found = by_name(report)
    assert list(found) == list(names)
    for name in ("row-rotation", "cloak", "cloak-segment"):
        best = found[name].best
        assert best is not None
        assert best[1].top1.value == 1.0
        scores = [score for run in found[name].runs for score in run.meaningful]
        assert any(score.prompt.n and score.prompt.value == 1.0 for score in scores)
        assert any(score.answer.n and score.answer.value == 1.0 for score in scores)
    # Its sessions' files are tried as well, and are read where they are not encrypted alone.
    (disk,) = (run for run in found["cloak-segment"].runs if run.attack == "cache-at-rest")
    assert disk.control is not None
    assert disk.control.worked
    (score,) = disk.scores
    assert score.top1.hits <= 0.05 * score.top1.n
    shielded = found["shielded"]
    assert not shielded.above_chance
    assert (shielded.sent_prompt, shielded.sent_answer) == (0, 30)
    assert found["tee-only"].nothing is not None
    # A low rate is shown with what it rests on.
    assert "of n that the best attack tried" in out
    assert "6 of 6" in out
    ET.parse(picture)
    assert "<script src" not in page.read_text(encoding="utf-8")


def test_an_attack_of_ones_own_and_the_verdict_of_a_ci(tmp_path: Path) -> None:
    """A file joins the attacks that names select."""
    report = tmp_path / "report.json"
    status, _, err = leak(
        "demo",
        *("--prompts", "6", "--prompt-tokens", "16", "--new-tokens", "16", "--threads", "1"),
        *("--policy", "attention-in-tee", "--policy", "quantized-clear"),
        *("--attack", str(EXAMPLE), "--attack", "nearest-embedding"),
        *("--fail-above", "0.2", "--json", str(report)),
    )
    assert status == 1
    found = by_name(report)["attention-in-tee"]
    assert [one.attack for one in found.runs] == ["nearest-embedding", "largest-features"]
    (score,) = found.runs[1].scores
    assert score.top1.value is not None
    assert score.top1.value >= 0.9
    # It says what is read, where, and of how many.
    (line,) = [one for one in err.splitlines() if "policy attention-in-tee" in one]
    n = found.runs[0].scores[0].top1.n
    assert f"of {n} tokens read by " in line
    assert " at layer " in line
    assert line.endswith("above chance, expected at most 0.2 above chance")


def test_a_file_alone_joins_all_that_are_built_in(tmp_path: Path) -> None:
    """So that one which has the name of such a one is refused."""
    path = tmp_path / "again.py"
    path.write_text(BLIND.replace('"blind"', '"token-ids"'), encoding="utf-8")
    status, _, err = leak("demo", *QUICK, "--policy", "tee-only", "--attack", str(path))
    assert (status, err) == (
        2,
        "tsqp: error: --attack: got two of one name, expected a name for each\n",
    )


def test_the_verdict_of_a_ci_names_what_failed_and_what_nobody_tried(tmp_path: Path) -> None:
    """No attack of these looks at the rows. What one prints is seen."""
    path = tmp_path / "blind.py"
    path.write_text(BLIND, encoding="utf-8")
    status, _, err = leak(
        "demo",
        *("--prompts", "6", "--prompt-tokens", "16", "--new-tokens", "16", "--workers", "2"),
        *("--policy", "attention-in-tee", "--policy", "row-rotation", "--fail-above", "0.2"),
        *("--attack", "token-ids", "--attack", str(path)),
    )
    assert status == 1
    lines = err.splitlines()
    assert "tsqp leak: looking at row-rotation" in lines
    (line,) = [one for one in lines if "policy row-rotation" in one]
    assert "got attacks that did not work on their control (blind) and places that" in line
    assert "no attack tried (" in line
    assert "layer 0 qkv_proj (row-rotation" in line
    assert "1.0000" not in err
    assert "0 of" not in line


def test_what_reads_nothing_passes(tmp_path: Path) -> None:
    """Whatever luck there is: so many tokens are asked for that it ends below the share."""
    report = tmp_path / "report.json"
    tokens = -(-needed(0.05, 1 / 1024) // 12) + 1
    status, out, err = leak(
        "demo",
        *("--prompts", "12", "--prompt-tokens", "24", "--new-tokens", str(tokens)),
        *("--policy", "shielded", "--attack", "nearest-embedding", "--fail-above", "0.05"),
        *("--threads", "1", "--json", str(report)),
    )
    assert (status, done(err)) == (0, {"shielded"})
    assert "nearest-embedding" in out
    found = by_name(report)["shielded"]
    assert not found.above_chance
    assert found.excess_high is not None
    assert found.excess_high <= 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("demo", "--margin", "0.005", "--prompts", "4"),
            f"expected at least {needed(0.005, 1 / 1024)}",
        ),
        (("demo", "--policy", "nobody"), "nobody"),
        (("demo", "--attack", "nobody"), "expected one of"),
        (("demo", "--plot", "x.svg"), "--cost measure"),
        (("demo", "--prompts", "100000"), "different ones"),
        (("demo", "--cost", "no-such-file"), "no-such-file"),
        (("demo", "--sigma", "1,2"), "got no --curves"),
        (("demo", "--curves", "--policy", "tsqp"), "whose mask has noise"),
        ((), "expected one of them"),
        (("demo", "--shape", "llama-3.2-1b"), "got both"),
        (("demo", "--public", "no-such-folder"), "no-such-folder"),
        (("demo", "--text", "no-such-text"), "no-such-text"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    status, out, err = leak(*arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_the_document_says_what_it_needs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    status, _, _ = leak(
        "demo",
        *QUICK,
        *("--policy", "tee-only", "--attack", "token-ids", "--json", str(report)),
    )
    assert status == 0
    read = json.loads(report.read_text(encoding="utf-8"))
    assert read["setup"]["sessions"] == 6
    assert read["policies"][0]["nothing"] == "nothing leaves the TEE"
