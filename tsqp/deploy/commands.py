"""Programs that a build runs, with an environment that is the same on every machine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from protocol.errors import SettingsError

# Every time in an image: 2026-01-01. A constant, as two builds of one lock must be identical.
EPOCH = 1_767_225_600

_FIXED = {
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "SOURCE_DATE_EPOCH": str(EPOCH),
    "TZ": "UTC",
}
_SHOWN_LINES = 8


def call(
    command: Sequence[str | Path],
    *,
    settings: Mapping[str, str] | None = None,
    content: bytes | None = None,
    directory: Path | None = None,
) -> bytes:
    """Run a program and return its stdout. Raises SettingsError with the end of its stderr.

    `settings`: variables on top of the fixed environment.
    """
    program = str(command[0])
    try:
        done = subprocess.run(
            [str(word) for word in command],
            env=_FIXED | dict(settings or {}),
            input=content,
            capture_output=True,
            cwd=directory,
            check=False,
        )
    except FileNotFoundError:
        raise SettingsError(program, got="no such program", expected="it installed") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        got = f"exit status {done.returncode}: {' | '.join(said)}"
        raise SettingsError(program, got=got, expected="exit status 0")
    return done.stdout


def call_inside(root: Path, command: Sequence[str], **settings: str) -> bytes:
    """Run a program of the directory `root` in it. Raises SettingsError."""
    return call(["chroot", root, *command], settings=settings)


def own_environment() -> dict[str, str]:
    """Return this process's environment: of programs that ask a network, by the user's settings."""
    return dict(os.environ) | {"LC_ALL": "C.UTF-8"}
