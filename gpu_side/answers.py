"""What an operator answers: at once, or while an accelerator still works on it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from protocol.messages import Response


class Working(Protocol):
    """What an accelerator was given; the host has other things to do meanwhile."""

    def ends_ns(self) -> int:
        """Return when it ends or ended (perf_counter_ns), or when to ask again.

        Raises RuntimeError where the device has failed.
        """
        ...


class Answer(NamedTuple):
    """A reply. `work`: what has to end before its tensors may be read; None: nothing."""

    response: Response
    work: Working | None = None
