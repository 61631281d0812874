"""Repeat what docs/benchmarks.md quotes, and record it in benchmarks/results.

    python -m benchmarks.record [--only NAME ...] [--results DIR]

Each recording is a process of its own with its own file, `NAME.json`. One that fails leaves its old
file as it was and does not stop the others; the exit status is then 1. `make bench` does all of
them and writes the page anew; let the machine do nothing else meanwhile.

Recorded files are small: of what `tsqp bench` reports, the operators of all layers are added up,
and timelines are left out. Numbers have six figures.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError, TsqpError
from tsqp.lab.bench.results import Report
from tsqp.lab.bench.summary import by_operator
from tsqp.lab.measure import describe_machine
from tsqp.processes import ProcessError, program

RESULTS = Path(__file__).parent / "results"
MOST_BYTES = 200_000
# The exit status of a measurement that has a result, and misses a target.
_MISSED = 1

LEFT_OUT = (
    "operators are sums over all layers (layer null); timelines are left out; fields that are zero"
    " or empty are left out"
)


def with_machine(document: Any) -> dict[str, Any]:
    """Put the machine beside what does not say on what it was measured."""
    return {"machine": describe_machine(), "results": document}


def shortened(document: Any) -> dict[str, Any]:
    """Shorten a report of `tsqp bench`; what is left is still a `Report`."""
    report = Report.model_validate(document)
    short = report.model_dump(mode="json", exclude_defaults=True)
    for run, kept in zip(report.policies, short["policies"], strict=True):
        kept["timelines"] = []
        for case, shown in zip(run.cases, kept["cases"], strict=True):
            shown["operators"] = [
                # Where layers differ, part of the work leaves the TEE.
                total.model_dump(mode="json", exclude_defaults=True)
                | {"place": "tee" if total.place == "tee" else "gpu"}
                for total in by_operator(case)
            ]
    return {"left_out": LEFT_OUT, "report": short}


def complete(document: Any) -> dict[str, Any]:
    """Shorten a report. Raises SettingsError if it is incomplete."""
    why = Report.model_validate(document).incomplete
    SettingsError.unless(not why, "tsqp bench", str(why), "a complete report")
    return shortened(document)


@dataclass(frozen=True)
class ResultFile:
    """One file of results. `command`: without `--json FILE`."""

    name: str
    command: tuple[str, ...]
    shorten: Callable[[Any], dict[str, Any]] = dict
    limit_s: float = 1200.0

    @property
    def shown(self) -> str:
        """The command as a user would type it."""
        return shlex.join(self.command)


def _bench(name: str, *options: str) -> ResultFile:
    return ResultFile(
        name,
        ("tsqp", "bench", "--shape", "llama-3.2-1b", *options),
        complete,
    )


def _script(name: str, *options: str, module: str = "", **how: Any) -> ResultFile:
    return ResultFile(name, ("python", "-m", module or f"benchmarks.{name}", *options), **how)


_PING_PONG = "tsqp.lab.bench.ping_pong"
# Both sides look for a message for a while before they sleep: where the service answers at once,
# being woken up is most of a round trip.
_SPIN = ("--spin-us", "300")
_ONE = ("--policy", "attention-in-tee")
_NULL = ("--device", "null", *_SPIN, *_ONE, "--policy", "shielded")
_CPU = ("--device", "cpu", *_ONE, "--prefill", "128,512", "--batch", "1")

RECORDINGS: tuple[ResultFile, ...] = (
    _bench("bench_null_tcp", *_NULL),
    # docs/leakage.md has what every operator of the published policy costs.
    _bench("bench_null_unix", *_NULL, "--policy", "published", "--transport", "unix"),
    _bench("bench_null_shm", *_NULL, "--transport", "shm"),
    _bench("bench_cpu_unix", *_CPU, "--transport", "unix"),
    _script("sustained", limit_s=2400.0),
    _script("peer"),
    _script("calls", module="tests.kit.calls", shorten=with_machine),
    _script("ping_pong", module=_PING_PONG, shorten=with_machine),
    _script("ping_pong_spin", *_SPIN, module=_PING_PONG, shorten=with_machine),
    _script("overlap"),
    _script("serving"),
    _script("growth"),
    _script("plan", module="benchmarks.plan_check"),
    _script("memory"),
    _script("verify_cost"),
    _script("failover_cost"),
    _script("attestation"),
    _script("segments"),
    _script("tensor_parallel", "--rows", "1,4,16"),
)


def record(recording: ResultFile, results: Path) -> int:
    """Measure, and write the file; return the exit status of what measured.

    Raises ProcessError without a result, SettingsError for one that cannot be kept, OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tsqp-record-") as folder:
        file = Path(folder) / "result.json"
        load, started, created = os.getloadavg()[0], time.monotonic(), datetime.now(UTC)
        first, *rest = recording.command
        path = sys.executable if first == "python" else program(first)
        limited = (recording.shown, f"no end in {recording.limit_s:.0f} s", "a result")
        with ProcessError.instead_of(subprocess.TimeoutExpired, *limited):
            # Its own children end with it.
            status = subprocess.run(
                [path, *rest, "--json", str(file)],
                stdout=subprocess.DEVNULL,
                check=False,
                timeout=recording.limit_s,
            ).returncode
        elapsed_s = time.monotonic() - started
        ProcessError.unless(
            file.exists() and file.stat().st_size and status in (0, _MISSED),
            recording.shown,
            f"exit status {status}",
            f"0, or {_MISSED} for a missed target, and a result",
        )
        document = recording.shorten(json.loads(file.read_text(encoding="utf-8")))
    about = {
        "command": recording.shown,
        "created": created.isoformat(timespec="seconds"),
        "elapsed_s": round(elapsed_s),
        "exit_status": status,
        # Of the minute before: what else the machine was doing.
        "load_before": load,
    }
    text = json.dumps(six_figures({"recorded": about, **document}), indent=1) + "\n"
    SettingsError.unless(
        len(text) <= MOST_BYTES,
        recording.name,
        f"{len(text)} bytes",
        f"at most {MOST_BYTES} to record",
    )
    target = results / f"{recording.name}.json"
    part = target.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(target)
    return status


def six_figures(value: Any) -> Any:
    """Return a JSON value with its floats rounded to six significant figures."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))


def record_all(recordings: Sequence[ResultFile], results: Path) -> list[str]:
    """Record one after the other; return the names of those that failed."""
    failed = []
    for number, recording in enumerate(recordings, start=1):
        _say(f"{number} of {len(recordings)}: {recording.name}: {recording.shown}")
        started = time.monotonic()
        try:
            status = record(recording, results)
        except (TsqpError, OSError, TypeError, ValueError) as error:
            _say(f"{recording.name}: error: {error}")
            failed.append(recording.name)
            continue
        if status:
            _say(f"{recording.name}: exit status {status}: recorded, and a target missed")
            failed.append(recording.name)
        _say(f"{recording.name}: {time.monotonic() - started:.0f} s")
    return failed


def _say(line: str) -> None:
    print(f"record: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [recording.name for recording in RECORDINGS]
    parser.add_argument("--only", action="append", choices=names, help="repeatable")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    options = parser.parse_args(arguments)
    if not options.results.is_dir():
        sys.exit(f"record: error: {options.results}: got no directory, expected one")
    chosen = [one for one in RECORDINGS if not options.only or one.name in options.only]
    failed = record_all(chosen, options.results)
    _say(f"failed: {', '.join(failed)}" if failed else "all recorded")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
