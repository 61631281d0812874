"""Progress of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class TrainingProgress(Protocol):
    """What a training run tells about itself, as a context manager."""

    def __enter__(self) -> Self:
        """Begin to show progress."""

    def __exit__(self, *_: object) -> None:
        """Stop showing progress."""

    def update(self, step: int, steps: int, tokens: int, loss: float) -> None:
        """Tell that a step is done, how many tokens were seen, and the step's loss."""


class _Shown:
    def __init__(self) -> None:
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        return self

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)


class LineProgress(_Shown):
    """Prints a line to stderr every so many steps."""

    def __init__(self, every: int = 50) -> None:
        """Print each ``every`` steps, and at the last."""
        super().__init__()
        self._every = every

    def __exit__(self, *_: object) -> None:
        """Do nothing: lines need no clearing up."""

    def update(self, step: int, steps: int, tokens: int, loss: float) -> None:
        """Print the step's line if it is due."""
        if step % self._every and step != steps:
            return
        seconds = self._seconds()
        remaining = seconds / step * (steps - step)
        sys.stderr.write(
            f"step {step}/{steps} loss {loss:.4f} {tokens / seconds:.0f} tokens/s "
            f"ETA {remaining:.0f} s\n"
        )
        sys.stderr.flush()


class BarProgress(_Shown):
    """Shows a rich progress bar on stderr."""

    def __init__(self) -> None:
        """Lay the bar out; it appears when the context is entered."""
        super().__init__()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("training", total=None, loss=float("nan"), rate=0.0)

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def update(self, step: int, steps: int, tokens: int, loss: float) -> None:
        """Move the bar to the step."""
        self._bar.update(
            self._task, completed=step, total=steps, loss=loss, rate=tokens / self._seconds()
        )


def default_progress() -> TrainingProgress:
    """Return a bar if stderr is a terminal, else plain lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()
