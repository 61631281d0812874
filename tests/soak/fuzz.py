"""Every reader of bytes that somebody else may have written, fuzzed (`tests.fuzz`)."""

from __future__ import annotations

import time

from tests.fuzz.engine import BATCH, MAX_BYTES, MAX_SECONDS, Fuzzer, Report
from tests.fuzz.targets import (
    TARGETS,
    count_executions,
    fuzz,
    merge,
    read_executions,
    shares,
)
from tests.soak.row import RowResult, is_full, note, progress

NAME = "frame fuzzing"
TEST = "executions of every decoder, in both directions"
PASS = (
    "valid message or ProtocolError only (files: InputError; evidence: EvidenceError; handshake"
    " also: ReplyError, ServiceError, ModelMismatchError); <= 50 ms; <= 64 MiB"
)
FULL = 10_000_000
SHORT = 5_000
MINUTES = 11

_PROCESSES = 2


def run(count: int) -> RowResult:
    """Execute `count` cases; the full form also adds to the corpus and to the sum of all runs."""
    began = time.monotonic()
    report = Report()
    full = is_full(FULL, count)
    if full:
        # Another seed each time: what was executed before is.
        for report in fuzz(count, _PROCESSES, sum(read_executions().values())):
            progress(min(count, sum(report.executions.values())))
        cumulative = count_executions(report)
    else:
        for name, share in shares(count).items():
            (target,) = (target for target in TARGETS if target.name == name)
            fuzzer = Fuzzer(target, 3, timed=False)
            for start in range(0, share, BATCH):
                fuzzer.run(min(BATCH, share - start))
            merge(report, fuzzer.report)
            progress(min(count, sum(report.executions.values())))
        cumulative = sum(read_executions().values())
    seconds = time.monotonic() - began
    for finding in report.findings:
        note(finding)
    executions = sum(report.executions.values())
    # The sum of all runs may be spread over many; every run executes every target.
    everything = all(report.executions.get(target.name, 0) > 0 for target in TARGETS)
    enough = executions >= count and (not full or cumulative >= FULL)
    in_time = not full or report.slowest_s <= MAX_SECONDS
    in_memory = max(report.largest_bytes, report.peak_bytes) <= MAX_BYTES
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "executions": executions,
            "cumulative": cumulative,
            "per second": executions / seconds,
            "decoders": len(TARGETS),
            "kept": sum(len(target.found()) for target in TARGETS),
            "wrong": len(report.findings),
            "slowest ms": report.slowest_s * 1000,
            "largest KiB": report.largest_bytes // 1024,
        },
        seconds,
        passed=not report.findings and everything and enough and in_time and in_memory,
    )
