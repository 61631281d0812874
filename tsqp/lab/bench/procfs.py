"""CPU time and memory of a process, from Linux's own counters."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_KIB = 1024


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident set that a living process ever had. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:  # a zombie: it has ended, and its memory is gone
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(pid))
    return int(found[1]) * _KIB


def cpu_ns(pid: int | str = "self") -> int:
    """Return the CPU time of all threads of a process so far. Raises OSError.

    From the scheduler: `times` counts in hundredths of a second, which is two decoded tokens.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except OSError:
            continue  # a thread that has ended meanwhile
    return total
