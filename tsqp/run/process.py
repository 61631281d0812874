"""What a process of ours does before it works: private memory, and secrets that are its own."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

from protocol.errors import UnseededError

EXIT_FAILURE = 1
EXIT_REFUSED = 2
_PR_SET_DUMPABLE = 4  # of prctl(2)


def keep_memory_private(*, from_others: bool) -> None:
    """Write no core dump from now on; `from_others`: nor let a process of this user look inside.

    That is ptrace and /proc/PID/mem. It does not bind the kernel, nor a process with
    CAP_SYS_PTRACE. Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if from_others and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "prctl PR_SET_DUMPABLE")


def require_own_secrets() -> None:
    """Refuse to draw secrets that could be guessed, and begin to watch for a VM that is resumed.

    Raises UnseededError.
    """
    from tee_side.protect.resumption import watch

    try:
        os.getrandom(1, os.GRND_NONBLOCK)
    except BlockingIOError:
        where = "the operating system's random generator"
        raise UnseededError(where, got="no seed", expected="one (wait a moment)") from None
    watch()
