"""No pad twice: not after a crash between any two system calls, a power loss, or kill -9."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pad_draws import BLOCKS, ENDS, Ledger, crash_and_draw, prepare_end
from protocol.errors import PadBankError, PadsExhaustedError
from tee_side.protect.masks.pad import Pad
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import WITNESSES
from tee_side.protect.pads.source import PadLane, Pads
from tests.faults.row import Found, Row
from tests.kit import pads as tiny
from tests.kit.pads import Crash, Disk, create, fill, place, put_all, reopen, use
from tests.kit.rows import each_row

_SITES = tuple(site.number for site in tiny.LAYOUT.sites)
# As `crash_and_draw` names them.
KILLS = tuple(f"killed: {end}" for end in ENDS if end != "abandoned")


def _life(
    longest: int, folder: Path, ledger: Ledger, end: str, choose: random.Random, until: int
) -> None:
    """Run one life to its end, in a process of its own: two micro-batches draw in turns."""
    last = min(until, ledger.totals()[0] + min(longest, prepare_end(end, choose)))
    bank = BankFile.open(place(folder), tiny.PURPOSE, block=choose.choice(BLOCKS))
    pads = Pads(Pad(), bank, None, "fail")
    lanes = [pads.lane(), pads.lane()]
    while ledger.totals()[0] < last:
        if bank.available < 12 and choose.random() < 0.9:
            fill(bank, min(bank.room, choose.randint(100, 1000)))
        try:
            _step(choose.choice(lanes), ledger, choose)
        except PadsExhaustedError:  # a step without pads
            for lane in lanes:
                lane.end_step()
    os._exit(0)


def _step(lane: PadLane, ledger: Ledger, choose: random.Random) -> None:
    """Draw for each operator. A step may fail in the middle, and an operator be asked for again."""
    rows = choose.choice((1, 1, 1, 2, 3, 9))  # more than eight are not read ahead
    for position, number in enumerate(_SITES):
        again = True
        while again:
            factors, indices = lane.draw(number, rows), lane._indices
            if factors is None or indices is None:
                os._exit(5)
            # One count for each index at each site.
            start, stop = (len(_SITES) * end + position for end in (indices.start, indices.stop))
            ledger.add(range(start, stop, len(_SITES)))
            if not torch.equal(factors.u, tiny.product(number, factors.r)):
                os._exit(3)
            again = choose.random() < 0.05
        if choose.random() < 0.05:
            break
    # What runs steps says when one has ended; a lane that draws again notices by itself.
    if choose.random() < 0.9:
        lane.end_step()


@Row(
    "pads",
    "pads",
    "draws, crashes and retries between them",
    "0 reused",
    short=600,
    long=1_000_000,
    minutes=5,
)
def pads(count: int, full: bool) -> Found:
    """Draw so often. A request that is sent again draws nothing: it is the same bytes."""
    torch.set_num_threads(1)  # the children are forks: a pool of threads would not be in them
    with tempfile.TemporaryDirectory() as name:
        found = crash_and_draw(
            Path(name),
            count,
            seed=1,
            run_life=partial(_life, max(200, count // 20)),
            purpose=tiny.PURPOSE,
            indices_per_draw=10,
        )
    kills = [found["crashes"].get(kind, 0) for kind in KILLS]
    return Found(
        {
            "draws": found["draws"],
            "rows": found["tokens"],
            "crashes": found["crashes_total"],
            "reused": found["reused_indices"],
        },
        {
            "none reused": found["reused_indices"] == 0,
            "enough": found["draws"] >= count,
            "every kill" if full else "some kill": all(kills) if full else sum(kills) > 0,
        },
    )


CAPACITY = 24


def live(folder: Path, choose: random.Random, handed_out: list[int]) -> None:
    """Fill and draw, and keep every index that is handed out."""
    bank = reopen(folder, block=choose.choice((1, 4, 16)))
    try:
        for _ in range(4):
            if bank.available < 3 or (bank.room and choose.random() < 0.2):
                with bank.begin(choose.randint(1, bank.room)) as batch:
                    put_all(batch)
                    if choose.random() < 0.8:
                        batch.commit()
            if (count := choose.randint(1, 3)) <= bank.available:
                indices = bank.take(count)
                handed_out.extend(indices)
                if choose.random() < 0.8:
                    use(bank, indices)
                else:
                    bank.release(indices)
    finally:
        # The descriptors go, as they do with the process; `close` writes nothing.
        bank.close()


def test_crash_at_every_single_system_call(tmp_path: Path) -> None:
    """One short run, crashed at its first, second, third ... call, each time with power lost."""
    create(tmp_path, CAPACITY).close()
    handed_out, crash_at, crashed = list[int](), 0, True
    while crashed:
        crash_at, crashed = crash_at + 1, False
        disk = Disk(tmp_path, random.Random(crash_at), crash_at)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            try:
                live(tmp_path, random.Random(7), handed_out)  # the same run
            except Crash:
                crashed = True
        disk.lose_power()
    assert crash_at > 30
    assert len(handed_out) > 40
    assert handed_out == sorted(set(handed_out))


@each_row(
    ("name", "code"),
    [
        *(("fsync", errno.EIO), ("replace", errno.ENOSPC)),
        *(("pwrite", errno.ENOSPC), ("write", errno.EIO)),
    ],
)
def test_failing_system_calls_are_one_typed_error_and_the_bank_goes_on(
    name: str, code: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same process tries again: nothing that failed was handed out, nothing is repeated."""
    folder, choose, real = tmp_path_factory.mktemp("bank"), random.Random(1), getattr(os, name)
    bank = create(folder, CAPACITY, block=1)
    fill(bank, 8)
    messages, bounds, handed_out = list[str](), list[int](), list[int]()

    def flaky(*arguments: Any) -> Any:
        if choose.random() < 0.3:
            if name == "replace" and choose.random() < 0.5:
                real(*arguments)  # done, and reported as failed
            raise OSError(code, os.strerror(code))
        return None if name == "fsync" else real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, name, flaky)
        for _ in range(100):
            try:
                if bank.room:
                    fill(bank, min(2, bank.room))
                indices = bank.take(1)
            except PadBankError as error:
                messages.append(str(error))
            else:
                use(bank, indices)
                handed_out.extend(indices)
            bounds.append(read_bank_status(place(folder)).next_index)
    bank.close()
    assert len(messages) > 10
    # It names the bank's place, or its witness's.
    assert all(message.startswith((str(folder), str(WITNESSES))) for message in messages)
    assert bounds == sorted(bounds)
    with reopen(folder) as bank:
        indices = bank.take(bank.available)
        use(bank, indices)
    handed_out.extend(indices)
    assert handed_out == sorted(set(handed_out))
    assert len(handed_out) > 8
