"""Imported first by the server that `tests.kit.service` forks from: see `tests.kit.kernels`.

Whatever imports `check_kernels` in a process that is forked finds one that has passed.
"""

from contextlib import suppress

import torch

from protocol import integer, native
from protocol.errors import KernelError
from tests.kit import kernels

integer.check_kernels = kernels.check_kernels
with suppress(KernelError):  # a program says so itself
    kernels.check_kernels(torch.device("cpu"))
# As in one that has just started: nothing chosen, and no thread beside this one.
native._chosen = None
native._forget_pools()
