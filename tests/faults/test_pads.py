"""No pad twice: not after a crash between any two system calls, a power loss, or kill -9."""

import errno
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import PadBankError, PadsExhaustedError
from tee_side.protect.masks.mask import Pad
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import WITNESSES
from tee_side.protect.pads.source import PadLane, Pads
from tests.faults.row import Found, Row
from tests.kit import pads as tiny
from tests.kit.pads import Crash, Disk, create, fill, place, put_all, reopen, use
from tests.kit.rows import each_row

_SITES = tuple(site.number for site in tiny.LAYOUT.sites)
# How a life of a bank ends: it leaves without closing anything, it is killed (SIGKILL) at a moment
# that it does not know, or kills itself before or after its n-th system call of a name.
SYSTEM_CALLS = ("open", "write", "fsync", "replace", "pwrite")
ENDS = ("abandoned", "from outside", *SYSTEM_CALLS)
# A large block makes a million draws feasible, the default one is tested with them.
BLOCKS = (16, 256, 1024, 1024)
# As `crash_and_draw` names them.
KILLS = tuple(f"killed: {end}" for end in ENDS if end != "abandoned")


class Ledger:
    """Counts in memory that parent and children share: how often each index was drawn."""

    def __init__(self, draws: int) -> None:
        # Lost tokens take an index, too, a block a life.
        self.counts = torch.zeros(draws * 10 + 2**20, dtype=torch.uint8).share_memory_()
        self.totals = torch.zeros(2, dtype=torch.int64).share_memory_()  # draws, and tokens

    def add(self, indices: range) -> None:
        """Count one draw."""
        self.counts[indices.start : indices.stop : indices.step] += 1
        self.totals += torch.tensor([1, len(indices)])


def prepare_end(end: str, choose: random.Random) -> int:
    """See to it that a life ends so; return after how many draws it should leave by itself."""
    if end == "from outside":
        return 2**62
    if end not in SYSTEM_CALLS:
        return choose.randint(1, 6000)
    # Records are written one by one, everything else a few times a block.
    countdown = choose.randint(1, 2000 if end == "pwrite" else 60)
    _kill_at(end, countdown, after=choose.random() < 0.5)
    return 6000


def _kill_at(name: str, countdown: int, *, after: bool) -> None:
    real: Callable[..., Any] = getattr(os, name)
    left = countdown

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **keywords)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, name, call)


def _life(
    longest: int, folder: Path, ledger: Ledger, end: str, choose: random.Random, until: int
) -> None:
    """Run one life to its end, in a process of its own: two micro-batches draw in turns."""
    last = min(until, int(ledger.totals[0]) + min(longest, prepare_end(end, choose)))
    bank = BankFile.open(place(folder), tiny.PURPOSE, block=choose.choice(BLOCKS))
    pads = Pads(Pad(), bank, lambda _: None, "fail")
    lanes = [PadLane(pads), PadLane(pads)]
    while int(ledger.totals[0]) < last:
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
            if factors is None or not indices:
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


def crash_and_draw(folder: Path, draws: int, longest: int) -> tuple[Ledger, Counter[str]]:
    """Draw so often over as many lives as it takes; return what was counted, and how they ended.

    Every life is a real process. What it drew is counted in memory that it shares with this one,
    which outlives a kill. A kill keeps what the kernel has: a loss of power is simulated below.
    """
    choose = random.Random(1)
    BankFile.create(place(folder), tiny.PURPOSE, capacity=8192).close()
    ledger, ends = Ledger(draws), Counter[str]()
    while int(ledger.totals[0]) < draws:
        end, life = choose.choice(ENDS), random.Random(choose.random())
        delay_s = choose.uniform(0, 2)
        child = os.fork()
        if child == 0:
            try:
                _life(longest, folder, ledger, end, life, draws)
            finally:
                os._exit(4)  # an error; it was printed
        if end == "from outside":
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"a life that ended with {end}: status {status}"
        ends[f"killed: {end}" if status else "abandoned"] += 1
    return ledger, ends


@Row(
    "pads",
    "pads",
    "draws, crashes and retries between them",
    "0 reused",
    short=600,
    long=1_000_000,
    minutes=15,
)
def pads(count: int, full: bool) -> Found:
    """Draw so often. A request that is sent again draws nothing: it is the same bytes."""
    torch.set_num_threads(1)  # the children are forks: a pool of threads would not be in them
    with tempfile.TemporaryDirectory() as name:
        ledger, ends = crash_and_draw(Path(name), count, max(200, count // 20))
    (draws, rows), reused = ledger.totals.tolist(), int((ledger.counts > 1).sum())
    kills = [ends[kind] for kind in KILLS]
    return Found(
        {"draws": draws, "rows": rows, "crashes": ends.total(), "reused": reused},
        {
            "none reused": reused == 0,
            "enough": draws >= count,
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
            bounds.append(read_bank_status(place(folder))[1].reserved)
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
