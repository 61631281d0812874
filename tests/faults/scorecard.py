"""The rows of the scorecard in its order, what was found of them on disk, and as a page."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from tests.faults import (
    test_access,
    test_dealers,
    test_failover,
    test_heartbeats,
    test_load,
    test_malicious,
    test_messages,
    test_model_directories,
    test_pads,
    test_secrets,
    test_server,
)
from tests.faults.row import Found, Row, shown_all
from tsqp.lab.measure import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "reliability.md"

ROWS: tuple[Row, ...] = (
    test_failover.worker_killed,
    test_failover.only_worker_killed,
    test_dealers.dealer_faults,
    test_heartbeats.peer_stopped,
    test_load.slow_peer,
    test_malicious.malicious_service,
    test_malicious.malicious_shm,
    test_malicious.wrong_results,
    test_pads.pads,
    test_messages.fuzzing,
    test_model_directories.model_directories,
    test_load.load,
    test_server.serving,
    test_server.cancelled,
    test_server.overload,
    test_server.serving_faults,
    test_access.access,
    test_secrets.secrets,
)

# What is recorded, by the name of the row.
Results: TypeAlias = dict[str, dict[str, Any]]

_HEAD = """\
# Reliability

For operators and reviewers. Afterwards you know what happens when a service or a link fails, and
how often that was tried.

For every fault of the GPU side or of the wire: **the right token, or one typed error at most one
second after the deadline**. Never a hang, a silently wrong token, or a pad used twice; other
sessions go on. [threat-model.md](threat-model.md) says what policies promise against a service that
lies.

`make soak` makes the long run of every row and writes this page: about {minutes:.0f} minutes on two
otherwise idle cores. `make soak ONLY=ROW` repeats one row; its name and time are in the first
column. `make test` makes the short run of every row, in which no time is judged.
"""


def read_results() -> Results:
    found: Results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def record(results: Results, row: Row, found: Found, seconds: float) -> Results:
    """Return the results with those of a row's long run, in the order of names."""
    about = dict(describe_machine())
    first = f"{about.pop('processor')}, {about.pop('cores')} cores, {about.pop('memory_gib')} GiB"
    new = {
        "count": row.long,
        "measured": dict(found.measured),
        "seconds": seconds,
        "passed": not found.failed(timed=True),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": ", ".join([first, *(f"{name} {version}" for name, version in about.items())]),
    }
    return dict(sorted({**results, row.name: new}.items()))


def write_results(results: Results) -> None:
    """Write results.json, whole or not at all."""
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(RESULTS)


def commit() -> str:
    """Return the short commit that is checked out, with a plus where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    # What the last run wrote is no change of what is tested.
    written = [f":(exclude){path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    changed = git("status", "--porcelain", "--", ".", *written)
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def render(results: Results) -> str:
    lines = [["class", "test", "pass", "measured", "verdict", "when"], ["---"] * 6]
    machines: dict[str, None] = {}
    for row in ROWS:
        found, verdict, when = "", "not run", ""
        if row.name in results:
            of = results[row.name]
            found = shown_all(of["measured"])
            verdict = "pass" if of["passed"] else "FAIL"
            when = f"{of['date'][:10]}, {of['commit']}, {of['seconds'] / 60:.1f} min"
            machines[of["machine"]] = None
        about = f"{row.title} (`{row.name}`, {row.minutes:g} min)"
        lines.append([about, f"{row.test} ({row.long:,})", row.passes, found, verdict, when])
    table = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
    head = _HEAD.format(minutes=sum(row.minutes for row in ROWS))
    parts = [head, "## Scorecard", table]
    if machines:
        parts += ["Measured on:", "\n".join(f"- {machine}" for machine in machines)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
