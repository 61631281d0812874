"""How a process may fail; a process of its own imports nothing else for it."""

from __future__ import annotations

import os
import signal


def die() -> None:
    """End as by a kernel without memory."""
    os.kill(os.getpid(), signal.SIGKILL)
