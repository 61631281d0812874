"""Memory and CPU time are those of the process asked for, and a dead one has none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tsqp.lab.bench import procfs
from tsqp.lab.bench.procfs import cpu_ns, peak_bytes


def test_a_peak_remains_when_memory_is_given_back() -> None:
    code = "x = bytearray(300_000_000); del x; print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert 300_000_000 <= peak_bytes(process.pid) < 400_000_000
        finally:
            process.kill()


def test_linux_writes_kb_and_means_1024_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmPeak:\t   9000 kB\nVmHWM:\t    2000 kB\n", encoding="ascii")
    asked: list[str] = []
    monkeypatch.setattr(procfs, "Path", lambda path: asked.append(path) or status)
    assert peak_bytes(7) == 2000 * 1024
    assert asked == ["/proc/7/status"]


def test_cpu_time_counts_work_and_no_sleep() -> None:
    before = cpu_ns()
    until = time.process_time_ns() + 50_000_000
    while time.process_time_ns() < until:
        pass
    assert cpu_ns() - before >= 40_000_000
    assert cpu_ns("self") == pytest.approx(cpu_ns(os.getpid()), abs=50_000_000)


def test_a_zombie_and_nobody_are_refused() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        # Ended, and not waited for.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            peak_bytes(process.pid)
    with pytest.raises(OSError, match=str(process.pid)):
        peak_bytes(process.pid)
    with pytest.raises(OSError, match=str(process.pid)):
        cpu_ns(process.pid)
