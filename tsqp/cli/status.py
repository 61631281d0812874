"""The live status line of tee-runner, at the bottom of the terminal while text scrolls above it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tee_side.runner import Generation


class StatusLine:
    """Shows tokens, rate and traffic on stderr; silent where stderr is no terminal."""

    def __init__(self, policy: str, *, enabled: bool = True) -> None:
        self._policy = policy
        self._manager: Any = None
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            import enlighten

            self._manager = enlighten.Manager(stream=sys.stderr)
            self._bar = self._manager.status_bar(f"{policy}: prefill", leave=False)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._manager is not None:
            self._manager.stop()

    def update(self, generation: Generation, started: float) -> None:
        """Redraw after a token."""
        if self._bar is None:
            return
        rate = generation.token_count / max(time.perf_counter() - started, 1e-9)
        rpc = generation.rpc
        self._bar.update(
            f"{self._policy}: {generation.token_count} tokens, {rate:.1f} tokens/s, "
            f"{rpc.count} RPCs, {megabytes(rpc.bytes_sent)} up, "
            f"{megabytes(rpc.bytes_received)} down"
        )


def megabytes(size: int) -> str:
    """Render a number of bytes for people."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
