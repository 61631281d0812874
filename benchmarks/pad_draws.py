"""A million draws from a pad bank with crashes between and inside them; none may come twice.

    python -m benchmarks.pad_draws [--draws N] [--folder DIR] [--json FILE]

Every life of the bank is a real process that opens it, fills it, draws 1 to 3 tokens at a time and
checks u = r W. It ends in one of these ways, chosen at random:

    abandoned     leaves without closing anything
    fsync, ...    kills itself (SIGKILL) right before or after its n-th system call of that name
    from outside  is killed (SIGKILL) at a moment that it does not know

What was drawn is counted in memory shared with this process, which outlives the kill. A kill keeps
what the kernel has: loss of power is simulated by tests/faults/test_pads.py.

The folder should be on a real disk: on a memory-backed one fsync costs nothing.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import random
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.harness import Found, elapsed_us, main
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tee_side.protect.randomness import Keystream

CAPACITY = 8192
WEIGHT = 12345
LAYOUT = PadLayout((SiteShape(0, "qkv_proj", 1, 1),))
PURPOSE = Purpose.of(LAYOUT, mask="pad", model_digest="0" * 64, linear_digest="1" * 64)
SYSTEM_CALLS = ("open", "write", "fsync", "replace", "pwrite")
ENDS = ("abandoned", "from outside", *SYSTEM_CALLS)
# A large block makes a million draws feasible, the default one is tested with them.
BLOCKS = (16, 256, 1024, 1024)
_TOTALS = struct.Struct("=QQQQ")  # as `Ledger.totals`
# Lost tokens take an index too, a block a life at most.
INDICES_PER_DRAW = 4


def place(folder: Path) -> BankPlace:
    """Return where the bank is: it protects nothing, and its files are beside each other."""
    return BankPlace.at(folder / "bank", beside_bank=True)


class Ledger:
    """Counts in memory that parent and children share: how often each index was drawn."""

    def __init__(self, draws: int, indices_per_draw: int = INDICES_PER_DRAW) -> None:
        self._memory = mmap.mmap(-1, _TOTALS.size + draws * indices_per_draw + 2**20)

    def totals(self) -> tuple[int, int, int, int]:
        """Return draws, tokens, draws that went backwards, and where the last one ended."""
        draws, tokens, backwards, end = _TOTALS.unpack_from(self._memory)
        return draws, tokens, backwards, end

    def add(self, indices: range) -> None:
        """Count one draw."""
        draws, tokens, backwards, end = self.totals()
        backwards += indices.start < end
        for index in indices:
            position = _TOTALS.size + index
            self._memory[position] = min(255, self._memory[position] + 1)
        totals = (draws + 1, tokens + len(indices), backwards, indices.stop)
        _TOTALS.pack_into(self._memory, 0, *totals)

    def counts(self) -> torch.Tensor:
        """Return how often each index was drawn, uint8."""
        counts = torch.frombuffer(bytearray(self._memory), dtype=torch.uint8)
        return counts[_TOTALS.size :]


# A folder with the bank, what is counted, how the life ends, when and what to draw, and until when.
Life: TypeAlias = "Callable[[Path, Ledger, str, random.Random, int], None]"


def live(folder: Path, ledger: Ledger, end: str, choose: random.Random, until: int) -> None:
    """Run one life to its end, in a process of its own."""
    draws = prepare_end(end, choose)
    bank = BankFile.open(place(folder), PURPOSE, block=choose.choice(BLOCKS))
    for _ in range(draws):
        if ledger.totals()[0] >= until:
            break
        if bank.available < 3:
            with bank.begin(min(bank.room, choose.randint(500, 2000))) as batch:
                batch.put(0, batch.r(0) * WEIGHT)
                batch.commit()
        indices = bank.take(choose.randint(1, 3))
        ledger.add(indices)
        r, u = bank.factors(indices, 0)
        if not torch.equal(u, r * WEIGHT):
            os._exit(3)
    os._exit(0)


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


def crash_and_draw(
    folder: Path,
    draws: int,
    seed: int,
    *,
    run_life: Life = live,
    purpose: Purpose = PURPOSE,
    indices_per_draw: int = INDICES_PER_DRAW,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Draw `draws` times over as many lives as it takes; return what was counted.

    `run_life`, `purpose`: another way to draw, from another bank.
    """
    choose = random.Random(seed)  # noqa: S311 - when to crash, not what to hide
    BankFile.create(place(folder), purpose, capacity=CAPACITY).close()
    ledger = Ledger(draws, indices_per_draw)
    ends: Counter[str] = Counter()
    started = time.monotonic()
    while ledger.totals()[0] < draws:
        if on_progress is not None:
            on_progress(ledger.totals()[0])
        end, life = choose.choice(ENDS), random.Random(choose.random())  # noqa: S311
        delay_s = choose.uniform(0, 2)
        child = os.fork()
        if child == 0:
            try:
                run_life(folder, ledger, end, life, draws)
            finally:
                os._exit(4)  # an error; it was printed
        if end == "from outside":
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -signal.SIGKILL):
            raise SystemExit(f"a life that ended with {end} failed with status {status}")
        ends[f"killed: {end}" if status else "abandoned"] += 1
    elapsed_s = time.monotonic() - started
    counts = ledger.counts()
    total, tokens, backwards, _ = ledger.totals()
    used = read_bank_status(place(folder)).next_index
    return {
        "draws": total,
        "tokens": tokens,
        "reused_indices": int((counts > 1).sum()),
        "draws_that_went_backwards": backwards,
        "crashes": dict(sorted(ends.items())),
        "crashes_total": ends.total(),
        "tokens_lost": used - int((counts > 0).sum()),
        "elapsed_s": round(elapsed_s, 1),
        "draws_per_s": round(total / elapsed_s),
    }


def time_one_site(folder: Path, in_features: int, out_features: int) -> dict[str, Any]:
    """Return microseconds of one row's draw at a site, and of the cryptography in it alone."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

    layout = PadLayout((SiteShape(0, "qkv_proj", in_features, out_features),))
    repeats = 500
    purpose = Purpose.of(layout, mask="pad", model_digest="0" * 64, linear_digest="1" * 64)
    timed = BankPlace.at(folder / "timed", beside_bank=True)
    made = BankFile.create(timed, purpose, capacity=repeats, block=16)
    with made as bank:
        with bank.begin(repeats) as batch:
            words = torch.zeros(repeats, out_features, dtype=torch.int32)
            put_us = elapsed_us(partial(batch.put, 0, words))
            fill_us = (put_us + elapsed_us(batch.commit)) / repeats
        takes, draws = [], []
        for _ in range(repeats):
            started_ns = time.perf_counter_ns()
            indices = bank.take(1)
            takes.append((time.perf_counter_ns() - started_ns) / 1e3)
            draws.append(elapsed_us(partial(bank.factors, indices, 0)))
    stream, sealer = Keystream(bytes(32)), AESGCM(bytes(32))
    sealed, nonce = sealer.encrypt(bytes(12), bytes(4 * out_features), None), bytes(12)
    return {
        "in_features": in_features,
        "out_features": out_features,
        "factors_us_median": round(sorted(draws)[repeats // 2], 1),
        "aes_ctr_and_gcm_alone_us": round(
            _median_us(lambda: stream.bytes(5, 0, 4 * in_features))
            + _median_us(lambda: sealer.decrypt(nonce, sealed, None)),
            1,
        ),
        "take_us_median": round(sorted(takes)[repeats // 2], 1),
        "take_us_mean_with_fsync": round(sum(takes) / repeats, 1),
        "fill_us_with_fsync": round(fill_us, 1),
    }


def _median_us(call: Callable[[], object], repeats: int = 2000) -> float:
    return sorted(elapsed_us(call) for _ in range(repeats))[repeats // 2]


def measure(options: Any) -> Found:
    """Count, and time one site."""
    torch.set_num_threads(1)  # the children are forks: a pool of threads would not be in them
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        folder = Path(name)
        timed = time_one_site(folder, 2048, 8192)
        counted = crash_and_draw(folder, options.draws, options.seed)
    version = importlib.metadata.version("cryptography")
    reused = counted["reused_indices"] or counted["draws_that_went_backwards"]
    return {"cryptography": version, **counted, "one_row_at_one_site": timed}, not reused


if __name__ == "__main__":
    main(__doc__, measure, draws=1_000_000, seed=1, folder="")
