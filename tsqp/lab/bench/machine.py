"""On what a figure was measured, what a process has used, and where results go."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from tsqp.processes import ProcessError


def describe_machine() -> dict[str, str | int]:
    """Return processor, cores, memory and versions; nothing that names the machine itself."""
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("model name"):
            processor = line.split(":", 1)[1].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    packages = ("torch", "transformers", "pyzmq", "msgpack", "numpy", "safetensors")
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident set that a living process ever had. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:  # a zombie: it has ended, and its memory is gone
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(pid))
    return int(found[1]) * 1024


def cpu_ns(pid: int | str = "self") -> int:
    """Return the CPU time of all threads of a process so far. Raises ProcessError if it has ended.

    From the scheduler: `times` counts in hundredths of a second, which is two decoded tokens.
    """
    total = 0
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise ProcessError(f"process {pid}", got="its end", expected="it to run") from None
    for task in tasks:
        try:
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except OSError:
            continue  # a thread that has ended meanwhile
    return total


def write_results(results: Iterable[BaseModel], path: Path | None) -> None:
    """Write results as a JSON array to a file, or to stdout where none is named (None)."""
    text = json.dumps([result.model_dump() for result in results], indent=1)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")
