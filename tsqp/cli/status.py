"""The live status line of tee-runner: the terminal's last row, while text scrolls above it.

Plain VT100: the scroll region excludes the last row, and every update saves and restores the
cursor. Progress-bar libraries ask the terminal for the cursor's position at every update, which
waits for an answer and reads from standard input; generated text must not wait for that.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tee_side.engine.generation import Generation, PadTotals, RpcTotals

_SAVE, _RESTORE = "\x1b7", "\x1b8"


class StatusLine:
    """Shows tokens, rate and traffic on stderr; silent where stderr is no terminal."""

    def __init__(
        self, policy: str, generation: Generation | None = None, *, enabled: bool = True
    ) -> None:
        self._policy = policy
        self._generation = generation
        # A machine's console says that it is one which scrolls alone.
        plain = os.environ.get("TERM") == "dumb"
        self._enabled = enabled and sys.stderr.isatty() and not plain
        self._size = shutil.get_terminal_size()
        self._started = time.perf_counter()
        # Tokens there were when the run began to wait for pads, and what it waits for.
        self._waiting: tuple[int, str] = (-1, "")

    def __enter__(self) -> StatusLine:
        if self._enabled:
            # A new line first, so that the row that is taken away was empty.
            try:
                self._write(f"\n\x1b[1A{_SAVE}\x1b[1;{self._size.lines - 1}r{_RESTORE}")
                self.draw()
            except BaseException:
                # A signal at this moment: `__exit__` would not be called.
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H\x1b[2K{_RESTORE}")

    def waiting(self, missing: int) -> None:
        """Note that the run waits for pads to be made, until the next token."""
        self._waiting = self._tokens(), f"out of pads, making more ({missing} missing)"

    def draw(self) -> None:
        """Draw what there is to say."""
        if not self._enabled:
            return
        generation, tokens = self._generation, self._tokens()
        text = "prefill"
        if self._waiting[0] == tokens:
            text = self._waiting[1]
        elif generation is not None and tokens:
            rate = tokens / (time.perf_counter() - self._started)
            text = f"tokens {tokens}, {rate:.1f} a second{traffic(generation.rpc)}"
            text += pads_left(generation.pads)
        size = shutil.get_terminal_size()
        region = "" if size == self._size else f"\x1b[1;{size.lines - 1}r"
        self._size = size
        shown = f"{self._policy}: {text}"[: size.columns - 1]
        self._write(f"{_SAVE}{region}\x1b[{size.lines};1H\x1b[2K\x1b[7m{shown}\x1b[0m{_RESTORE}")

    def _tokens(self) -> int:
        return 0 if self._generation is None else self._generation.token_count

    @staticmethod
    def _write(codes: str) -> None:
        sys.stderr.write(codes)
        sys.stderr.flush()


def traffic(rpc: RpcTotals) -> str:
    """Render what left the TEE and came back; nothing where nothing did."""
    if rpc.count == 0:
        return ""
    sent, received = bytes_for_people(rpc.bytes_sent), bytes_for_people(rpc.bytes_received)
    return f", {rpc.count} RPCs, {sent} up, {received} down"


def pads_left(pads: PadTotals | None) -> str:
    """Render how the pads stand; nothing for policies that need none."""
    if pads is None:
        return ""
    times = "once" if pads.waited == 1 else f"{pads.waited} times"
    out = [f"waited {times} for more"] if pads.waited else []
    out += [f"{pads.in_tee} steps in the TEE for lack of them"] if pads.in_tee else []
    return f", {pads.available} pads left{' (' + ', '.join(out) + ')' if out else ''}"


def bytes_for_people(size: int) -> str:
    """Render a number of bytes: `12.3 kB`, `4.5 MB`."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
