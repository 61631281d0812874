"""The release gate: `python -m tests.release`, which `make release` calls.

It runs every part, those that find most for their time first, and goes on after a failure. A part
of which a test was skipped, but for lack of another processor, has failed. After each part it
writes build/release.json: commit, and for each part command, result and seconds. What a part prints
is in build/release/PART.log. The exit status is 1 unless every part passed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "build/release.json"

# Name: what runs, as a user would type it. CONTRIBUTING.md says what each is for.
PARTS = {
    "check": "make check",
    "demo": "make demo",
    "slow-tests": "make test-slow",
    "kernels": "make test-kernels",
    "mutations": "make mutations",
    "sanitizers": "make sanitize",
    "wheel": "make wheel",
    "site": "make site",
    "benchmarks": "make bench-check",
    "real-model": "make real",
    "soak": "make soak SHARE=4",
    "guest-image": "make test-guest",
}


@dataclass(frozen=True)
class Outcome:
    """What came of a part. `result`: "passed", or "failed" with a status or what was skipped."""

    part: str
    command: str
    result: str
    seconds: float


def run_part(part: str, command: str, folder: Path) -> Outcome:
    """Run one command to its end, with all that it prints in a file of the folder."""
    begins = time.monotonic()
    # ONLY of `make release` names parts; that of a part would name something within it.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "ONLY")}
    log = folder / f"{part}.log"
    with log.open("wb") as output:
        status = subprocess.run(
            command.split(),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    # Without root, a browser, a compiler or an archive of packages, tests are skipped.
    said = log.read_text(encoding="utf-8", errors="replace")
    skipped = set(re.findall(r"^SKIPPED \[\d+\] \S+ (?!a processor with)(.+)", said, re.MULTILINE))
    wrong = [f"{status}"] if status else [f"skipped: {reason}" for reason in sorted(skipped)]
    result = f"failed ({'; '.join(wrong)})" if wrong else "passed"
    return Outcome(part, command, result, round(time.monotonic() - begins, 1))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, help="repeatable")
    chosen = parser.parse_args().only or list(PARTS)
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT)
    folder = RECORD.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in chosen:
        print(f"{part:12} {PARTS[part]} ...", end=" ", flush=True)  # noqa: T201
        outcomes.append(run_part(part, PARTS[part], folder))
        print(f"{outcomes[-1].result} in {outcomes[-1].seconds:,.0f} s", flush=True)  # noqa: T201
        content = {"commit": commit.decode().strip(), "parts": [asdict(o) for o in outcomes]}
        RECORD.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    failed = [outcome.part for outcome in outcomes if outcome.result != "passed"]
    seconds = sum(outcome.seconds for outcome in outcomes)
    said = f"failed: {', '.join(failed)}" if failed else "all passed"
    print(f"{len(outcomes)} parts in {seconds / 60:.0f} min, {said}; {RECORD.relative_to(ROOT)}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
