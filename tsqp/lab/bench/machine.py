"""On what a figure was measured, what a process has used, and the command line of scripts."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from protocol.errors import TsqpError
from tsqp.processes import ProcessError

R = TypeVar("R")


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


def write_results(results: object, path: Path | None) -> None:
    """Write results, documents among them, as JSON to a file, or to stdout where none is named."""
    text = json.dumps(results, indent=1, default=BaseModel.model_dump)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def script(
    about: str | None, measure: Callable[[Any], R], *arguments: str, **options: Any
) -> tuple[R, Path | None]:
    """Return what `measure` makes of a command line, and where to write it (`--json`).

    `arguments`: names of what must be given; `options`: each with its default, whose type is the
    option's. A list is a repeatable option, False one without a value; of numbers in a tuple more
    may be given, with commas, and of words one is chosen, by default the first. An error of ours is
    said in one line.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in arguments:
        parser.add_argument(name)
    for name, default in options.items():
        how: dict[str, Any] = {"default": default, "type": type(default)}
        match default:
            case bool():
                how = {"action": "store_true"}
            case list():
                how = {"default": default, "action": "append"}
            case (str() as first, *_):
                how = {"default": first, "choices": default}
            case tuple():
                how = {"default": default, "type": _numbers}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    parser.add_argument("--json", type=Path, help="write the result here instead of to stdout")
    given = parser.parse_args()
    try:
        return measure(given), given.json
    except TsqpError as error:
        sys.exit(f"{parser.prog}: error: {error}")


def _numbers(text: str) -> tuple[int, ...]:
    found = {int(part) for part in text.split(",")}
    if min(found) < 1:
        expected = "whole numbers from 1, with commas"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return tuple(sorted(found))
