"""How a process may fail; a process of its own imports nothing else for it."""

from __future__ import annotations

import os
import signal
import sys

from protocol.errors import ModelError


def refuse() -> None:
    """Refuse as our code does."""
    raise ModelError("there", got="this", expected="that")


def fail() -> None:
    """Fail as a file does that is not there."""
    raise FileNotFoundError(2, "No such file or directory", "weights")


def crash() -> None:
    """End by an error that cannot be printed."""
    sys.stderr.close()
    raise ZeroDivisionError


def die() -> None:
    """End as by a kernel without memory."""
    os.kill(os.getpid(), signal.SIGKILL)
