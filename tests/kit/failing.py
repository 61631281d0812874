"""How a process may fail; a process of its own imports nothing else for it."""

from __future__ import annotations

import os
import signal
import sys

from protocol.errors import ModelError


def refuse() -> None:
    raise ModelError("there", got="this", expected="that")


def fail() -> None:
    raise FileNotFoundError(2, "No such file or directory", "weights")


def crash() -> None:
    sys.stderr.close()
    raise ZeroDivisionError


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
