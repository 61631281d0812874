"""The live status line of tee-runner: the terminal's last row, while text scrolls above it.

Plain VT100: the scroll region excludes the last row, and every update saves and restores the
cursor. Progress-bar libraries ask the terminal for the cursor's position at every update, which
waits for an answer and reads from standard input; generated text must not wait for that.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tee_side.generation import Generation, PadTotals, RpcTotals

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_INTERVAL_S = 0.1


class StatusLine:
    """Shows tokens, rate and traffic on stderr; silent where stderr is no terminal."""

    def __init__(self, policy: str, *, enabled: bool = True) -> None:
        self._policy = policy
        self._enabled = enabled and sys.stderr.isatty()
        self._size = shutil.get_terminal_size()
        self._drawn = 0.0
        self._started = time.perf_counter()

    def __enter__(self) -> StatusLine:
        if self._enabled:
            # A new line first, so that the row that is taken away was empty.
            try:
                self._write(f"\n\x1b[1A{_SAVE}\x1b[1;{self._size.lines - 1}r{_RESTORE}")
                self._draw(f"{self._policy}: prefill")
            except BaseException:
                # A signal at this moment: `__exit__` would not be called.
                self._give_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._give_back()

    def waiting(self, missing: int) -> None:
        """Say that the run waits for pads to be made."""
        if self._enabled:
            self._draw(f"{self._policy}: out of pads, making more ({missing} missing)")
            self._drawn = 0.0

    def update(self, generation: Generation) -> None:
        """Redraw after a token, ten times a second at most."""
        now = time.perf_counter()
        if not self._enabled or now - self._drawn < _INTERVAL_S:
            return
        self._drawn = now
        rate = generation.token_count / (now - self._started)
        tokens = f"tokens {generation.token_count}, {rate:.1f} a second"
        self._draw(f"{self._policy}: {tokens}{traffic(generation.rpc)}{pads_left(generation.pads)}")

    def _give_back(self) -> None:
        self._write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H\x1b[2K{_RESTORE}")

    def _draw(self, text: str) -> None:
        size = shutil.get_terminal_size()
        region = ""
        if size != self._size:
            self._size = size
            region = f"\x1b[1;{size.lines - 1}r"
        shown = text[: size.columns - 1]
        self._write(f"{_SAVE}{region}\x1b[{size.lines};1H\x1b[2K\x1b[7m{shown}\x1b[0m{_RESTORE}")

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
    out = [f"waited {_times(pads.waited)} for more"] if pads.waited else []
    out += [f"{pads.in_tee} steps in the TEE for lack of them"] if pads.in_tee else []
    return f", {pads.available} pads left{' (' + ', '.join(out) + ')' if out else ''}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def bytes_for_people(size: int) -> str:
    """Render a number of bytes: `12.3 kB`, `4.5 MB`."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
