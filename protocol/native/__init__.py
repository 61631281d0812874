"""The compiled kernels of both sides, and which instruction set they use.

`pip install` compiles them where there is a C++ compiler. Without one, torch computes the same:
integers bit for bit, floats within a few units in their last place. The best *variant* that this
processor has is used, once it has given what the portable one gives (`protocol.native.proof`).

Kernels take addresses. `protocol.integer`, `tee_side.native` and `tee_side.protect.masking` check
what they pass.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protocol.errors import KernelError
from protocol.native.proof import differs

log = logging.getLogger("protocol")

AUTO, TORCH = "auto", "torch"

# How long a thread that helped looks for more to do before it sleeps: less than it takes to wake
# one up, so that it costs little where the service computes on the same processor.
SPIN_US = 20

# Types of activations that kernels are compiled for, by their numbers in kernels.h.
FLOATS = {torch.float32: 0, torch.bfloat16: 1}


def load(name: str) -> tuple[Any, str]:
    """Import a compiled module by its name: itself and "", or None and what is wrong with it.

    None and "" where there is none.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None, ""
    try:
        if not _is_whole(Path(found.origin)):
            return None, "cut short, or no library"
        return importlib.import_module(name), ""
    except OSError:
        return None, "cannot be read"
    except ImportError:  # its text is the system's: a loader that quotes the file
        return None, "built for another processor or system"


def _is_whole(path: Path) -> bool:
    """Say whether an ELF file is as long as its header says: one cut short kills its process."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02"):
        return False
    sections, size, count = struct.unpack_from("=40xQ10x2H", head)
    return bool(path.stat().st_size >= sections + size * count)


# `unusable`: what is wrong with a library that is there; "" for nothing, or none.
library: Any
library, unusable = load("protocol.native._native")


@dataclass(frozen=True)
class Choice:
    """Which kernels run. `variant`: "torch", or an instruction set.

    `refused`: variants that this processor has and that gave other results than the portable one.
    `built`: whether there is a compiled library that loads.
    """

    variant: str
    refused: tuple[str, ...]
    built: bool

    @property
    def compiled(self) -> bool:
        """Whether compiled kernels run."""
        return self.variant != TORCH


_chosen: Choice | None = None


def use(kernels: str = AUTO) -> Choice:
    """Choose which kernels run: "auto" for the best there are, "torch", or an instruction set.

    Takes some 50 ms, to try them. Raises KernelError for what this process cannot use.
    """
    global _chosen  # noqa: PLW0603 - one for the process, as the processor is
    _chosen = _choose(kernels)
    if not _chosen.built:
        fields = {"uses": "torch, which is slower", **({"library": unusable} if unusable else {})}
        log.warning("no_compiled_kernels", extra={"fields": fields})
    return _chosen


def choice() -> Choice:
    """Return which kernels run: what `use` chose, or else the best there are."""
    return _chosen or use()


def _choose(wanted: str) -> Choice:
    found: list[str] = [] if library is None else library.variants()
    if wanted == TORCH or (wanted == AUTO and not found):
        return Choice(TORCH, (), library is not None)
    if wanted != AUTO and wanted not in found:
        raise KernelError("kernels", repr(wanted), f"one of {', '.join([AUTO, TORCH, *found])}")
    refused: list[str] = []
    for name in reversed(found) if wanted == AUTO else [wanted]:
        if not _differs(library, name):
            library.use(name)
            return Choice(name, tuple(refused), True)
        refused.append(name)
    raise KernelError(f"kernels {wanted}", "wrong results", "those of the portable ones")


# A processor does not change its mind: found out once.
_differs = functools.cache(differs)


def compiled_for(dtype: torch.dtype) -> bool:
    """Say whether compiled kernels run for activations of a dtype."""
    return dtype in FLOATS and choice().compiled


class _Pool(int):
    """The address of threads that share the kernels of one thread; freed in its own process.

    Whatever becomes of the thread's attribute, it lives as long as the call that it was passed to.
    """

    process: int

    def __del__(self) -> None:
        # In a forked child none of its threads runs, and to wait for them would never end. At the
        # interpreter's end there is no `os` any more.
        if os and self.process == os.getpid():
            library.pool_free(self)


class _Own(threading.local):
    """What a thread has to itself: `pool`, made when it is first asked for."""

    def __getattr__(self, name: str) -> _Pool:
        if name != "pool":
            raise AttributeError(name)
        self.pool = _Pool(library.pool_new(_threads, SPIN_US))
        self.pool.process = os.getpid()
        return self.pool


def set_up(kernels: str | None, threads: int | None) -> None:
    """Choose this process's kernels and their threads, torch's too; None: as it is.

    Raises KernelError as `use` does.
    """
    if kernels is not None:
        use(kernels)
    if threads is not None:
        torch.set_num_threads(threads)
        set_threads(threads)


def threads() -> int:
    """Return how many threads share the kernels of one thread, itself included."""
    return _threads


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def set_threads(count: int) -> None:
    """Let every thread's kernels use so many threads, itself included, from now on."""
    global _threads, own
    if count != _threads:
        _threads, own = count, _Own()


_threads = usable_cores()
own = _Own()


def _forget_pools() -> None:
    """In a forked child none of their threads runs: make others."""
    global own  # noqa: PLW0603
    own = _Own()


os.register_at_fork(after_in_child=_forget_pools)
