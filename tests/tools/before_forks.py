"""Imported by the server that `tests.forked` forks from, before all else: see `tests.tools.proven`.

Whatever imports `check_kernels` in a process that is forked finds one that has passed.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from protocol import integer, native
from protocol.errors import KernelError
from tests.tools import proven

integer.check_kernels = proven.check_kernels
with suppress(KernelError):  # a program says so itself
    proven.check_kernels(torch.device("cpu"))
# As in one that has just started: nothing chosen, and no thread beside this one.
native._chosen = None
native._forget_pools()
