"""Says on what a figure was measured; every recorded result carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


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
