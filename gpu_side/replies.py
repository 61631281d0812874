"""The result of a request: there at once, or while an accelerator still works on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from gpu_side.transport.listener import Incoming
from protocol.messages import Request, Response


class Working(Protocol):
    """What an accelerator was given; the host has other things to do meanwhile."""

    def ends_ns(self) -> int:
        """Return when it ends or ended (perf_counter_ns), or when to ask again.

        Raises RuntimeError where the device has failed.
        """
        ...


# A reply, and what has to end before its tensors may be read; None: nothing.
Result: TypeAlias = tuple[Response, Working | None]

# Computes requests that differ in the numbers of their tensors only. It gets the message that the
# request came in, too: in a slot of shared memory the result may be left where the reply goes.
Kernel: TypeAlias = Callable[[Request, Incoming | None], Result]
