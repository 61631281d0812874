"""A million times the pads of an operator, with crashes and retries between them; none twice.

As `benchmarks.pad_draws` does with a bank alone, but as a run draws: two micro-batches, each by its
`PadLane`, a step with one draw for each operator. A step may fail between two of them and be done
again; an operator may be asked for again in the same step, as it is when another service is; a
request may be sent again, as it is (the same bytes: nothing is drawn); pads may run out in the
middle. Processes are killed, from outside and at their own system calls, and the bank is opened
again by the next. In the full form each of these has to have happened; in the short one a life ends
before most kills from outside come, and it depends on when one comes whether pads run out.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.pad_draws import BLOCKS, ENDS, Ledger, crash_and_draw, prepare_end
from protocol.errors import PadsExhaustedError
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.source import PadLane, Pads
from tests.kit import pads as tiny
from tests.soak.row import RowResult, is_full, note, progress

NAME = "pads"
TEST = "draws, crashes and retries between them"
PASS = "0 reused"
FULL = 1_000_000
SHORT = 4_000
MINUTES = 5

_SITES = tuple(site.number for site in tiny.LAYOUT.sites)
# More than eight are not read ahead.
_ROWS = (1, 1, 1, 2, 3, 9)
_INDICES_PER_DRAW = 10
OUT = "steps without pads"
# As `crash_and_draw` names them.
KILLS = tuple(f"killed: {end}" for end in ENDS if end != "abandoned")


class _Tally:
    """Counts in memory that outlives a killed child."""

    _NUMBERS = struct.Struct("=QQQ")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._NUMBERS.size)

    def add(self, failed: int = 0, repeated: int = 0, out: int = 0) -> None:
        counts = zip(self.totals(), (failed, repeated, out), strict=True)
        self._NUMBERS.pack_into(self._memory, 0, *(a + b for a, b in counts))

    def totals(self) -> tuple[int, int, int]:
        """Return failed steps, repeated operators and steps that found no pads."""
        failed, repeated, out = self._NUMBERS.unpack_from(self._memory)
        return failed, repeated, out


def _life(tally: _Tally, longest: int) -> Any:
    def live(folder: Path, ledger: Ledger, end: str, choose: random.Random, until: int) -> None:
        """Run one life to its end, in a process of its own."""
        last = min(until, ledger.totals()[0] + min(longest, prepare_end(end, choose)))
        bank = BankFile.open(tiny.place(folder), tiny.PURPOSE, block=choose.choice(BLOCKS))
        pads = Pads(Pad(), bank, None, "fail")
        lanes = [pads.lane(), pads.lane()]
        while ledger.totals()[0] < last:
            if bank.available < 12 and choose.random() < 0.9:
                with bank.begin(min(bank.room, choose.randint(100, 1000))) as batch:
                    tiny.put_all(batch)
                    batch.commit()
            try:
                _step(choose.choice(lanes), ledger, tally, choose)
            except PadsExhaustedError:
                tally.add(out=1)
                for lane in lanes:
                    lane.end_step()
        os._exit(0)

    return live


def _step(lane: PadLane, ledger: Ledger, tally: _Tally, choose: random.Random) -> None:
    rows = choose.choice(_ROWS)
    for position, number in enumerate(_SITES):
        again = 1
        while again:
            factors = lane.draw(number, rows)
            indices = lane._indices
            if factors is None or indices is None:
                os._exit(5)
            # One count for each index at each site.
            count = len(_SITES)
            ledger.add(
                range(count * indices.start + position, count * indices.stop + position, count)
            )
            if not torch.equal(factors.u, tiny.product(number, factors.r)):
                os._exit(3)
            again = choose.random() < 0.05
            tally.add(repeated=again)
        if choose.random() < 0.05:
            tally.add(failed=1)
            break
    # Whoever runs steps says when one has ended; a lane that draws again notices by itself.
    if choose.random() < 0.9:
        lane.end_step()


def not_met(crashes: dict[str, int], happened: dict[str, int], *, full: bool) -> list[str]:
    """Return what should have happened between draws and has not.

    `crashes`: how often lives ended in each way; `happened`: how often everything else was.
    """
    kills = {kind: crashes.get(kind, 0) for kind in KILLS}
    if full:
        return [what for what, times in {**kills, **happened}.items() if not times]
    happened = {what: times for what, times in happened.items() if what != OUT}
    return [
        what for what, times in {"a kill": sum(kills.values()), **happened}.items() if not times
    ]


def run(count: int) -> RowResult:
    """Draw so often."""
    began = time.monotonic()
    tally = _Tally()
    # The children are forks: a pool of threads would not be in them.
    with tempfile.TemporaryDirectory() as name:
        found = crash_and_draw(
            Path(name),
            count,
            seed=1,
            run_life=_life(tally, max(200, count // 20)),
            purpose=tiny.PURPOSE,
            indices_per_draw=_INDICES_PER_DRAW,
            on_progress=progress,
        )
    seconds = time.monotonic() - began
    failed, repeated, out = tally.totals()
    happened = {"failed steps": failed, "repeated operators": repeated, OUT: out}
    missing = not_met(found["crashes"], happened, full=is_full(FULL, count))
    if missing:
        note(f"got {found['crashes']} and {happened}, expected {', '.join(missing)}, too")
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "draws": found["draws"],
            "rows": found["tokens"],
            "crashes": found["crashes_total"],
            **happened,
            "reused": found["reused_indices"],
        },
        seconds,
        passed=found["reused_indices"] == 0 and found["draws"] >= count and not missing,
    )
