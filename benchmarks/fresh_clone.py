"""How long a newcomer waits: clone, `make demo` (installation included), `make test`.

    python -m benchmarks.fresh_clone [--json FILE]

Clones this checkout's last commit into a temporary folder. Downloads are part of the time, so the
figure depends on the package registry, on pip's cache and on where torch comes from; all are left
as they are. The result says which settings of pip were in force (by name) and whether pip had a
local folder of wheels.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.harness import Found, Options, Place, main


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Run a command to its successful end; return seconds and what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    started = time.monotonic()
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")
    return time.monotonic() - started, result.stdout


def measure(_options: Options, place: Place) -> Found:
    """Clone, and run the three commands of a newcomer."""
    source = Path(__file__).resolve().parent.parent
    clone = place.folder / "tsqp"
    cloning, _ = timed(["git", "clone", "--quiet", str(source), str(clone)], source)
    first, story = timed(["make", "demo"], clone)
    second, _ = timed(["make", "demo"], clone)
    testing, report = timed(["make", "test"], clone)
    settings = sorted(name for name in os.environ if name.startswith("PIP_"))
    return {
        "pip_settings": " ".join(settings) or "none",
        "local_folder_of_wheels": "PIP_FIND_LINKS" in settings,
        "clone_s": round(cloning, 1),
        "make_demo_first_s": round(first, 1),
        "make_demo_again_s": round(second, 1),
        "make_test_s": round(testing, 1),
        "verdict": story.strip().splitlines()[-1],
        "tests": report.strip().splitlines()[-1],
    }, True


if __name__ == "__main__":
    main(__doc__, measure)
