"""A process that ends when its parent does, however that ends; Linux only.

As a script, it becomes the program that it is given, which Linux then ends with the parent:
`python -I -S end_with_parent.py PARENT PROGRAM [ARGUMENT...]`. A process that is started that way
runs nothing of ours between fork and exec, where a lock of another thread might never be released.
"""

import ctypes
import os
import signal
import sys

# Nothing of ours and nothing installed is imported here: each child waits for this to start.

_PR_SET_PDEATHSIG = 1
# Python ignores them, a program that is started is not to; as subprocess does.
_RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)


def end_with(parent: int) -> None:
    """Have this process get SIGTERM when its parent ends, however it does.

    Linux means the parent's thread that started it: one that ends early takes the child with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # too late to be told
            os.kill(os.getpid(), signal.SIGTERM)


def _become(parent: str, program: str, *arguments: str) -> None:
    end_with(int(parent))
    for number in _RESTORED:
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        sys.exit(f"{program}: got {error.strerror}, expected a program")


if __name__ == "__main__":
    _become(*sys.argv[1:])
