"""What one draw of a pad takes; and draws with crashes between and inside them, for the scorecard.

    python -m benchmarks.pad_draws [--folder DIR] [--json FILE]

The folder should be on a real disk: on a memory-backed one fsync costs nothing.

`crash_and_draw` is what `make soak ONLY=pads` counts a million draws with: none may come twice.
Every life of the bank is a real process, which ends in one of these ways, chosen at random:

    abandoned     leaves without closing anything
    fsync, ...    kills itself (SIGKILL) right before or after its n-th system call of that name
    from outside  is killed (SIGKILL) at a moment that it does not know

What was drawn is counted in memory shared with this process, which outlives the kill. A kill keeps
what the kernel has: loss of power is simulated by tests/faults/test_pads.py.
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
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tee_side.protect.randomness import Keystream

CAPACITY = 8192
SYSTEM_CALLS = ("open", "write", "fsync", "replace", "pwrite")
ENDS = ("abandoned", "from outside", *SYSTEM_CALLS)
# A large block makes a million draws feasible, the default one is tested with them.
BLOCKS = (16, 256, 1024, 1024)
_TOTALS = struct.Struct("=QQ")  # as `Ledger.totals`


def place(folder: Path) -> BankPlace:
    """Return where the bank is: it protects nothing, and its files are beside each other."""
    return BankPlace.at(folder / "bank", beside_bank=True)


class Ledger:
    """Counts in memory that parent and children share: how often each index was drawn."""

    def __init__(self, draws: int, indices_per_draw: int) -> None:
        self._memory = mmap.mmap(-1, _TOTALS.size + draws * indices_per_draw + 2**20)

    def totals(self) -> tuple[int, int]:
        """Return draws and tokens."""
        draws, tokens = _TOTALS.unpack_from(self._memory)
        return draws, tokens

    def add(self, indices: range) -> None:
        """Count one draw."""
        draws, tokens = self.totals()
        for index in indices:
            position = _TOTALS.size + index
            self._memory[position] = min(255, self._memory[position] + 1)
        _TOTALS.pack_into(self._memory, 0, draws + 1, tokens + len(indices))

    def counts(self) -> torch.Tensor:
        """Return how often each index was drawn, uint8."""
        counts = torch.frombuffer(bytearray(self._memory), dtype=torch.uint8)
        return counts[_TOTALS.size :]


# A folder with the bank, what is counted, how the life ends, when and what to draw, and until when.
Life: TypeAlias = "Callable[[Path, Ledger, str, random.Random, int], None]"


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
    run_life: Life,
    purpose: Purpose,
    indices_per_draw: int,
) -> dict[str, Any]:
    """Draw `draws` times over as many lives as it takes; return what was counted.

    `run_life`: draws from the bank, of `purpose`, to its end. `indices_per_draw`: at most;
    lost tokens take an index, too, a block a life.
    """
    choose = random.Random(seed)  # noqa: S311 - when to crash, not what to hide
    BankFile.create(place(folder), purpose, capacity=CAPACITY).close()
    ledger = Ledger(draws, indices_per_draw)
    ends: Counter[str] = Counter()
    while ledger.totals()[0] < draws:
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
    total, tokens = ledger.totals()
    return {
        "draws": total,
        "tokens": tokens,
        "reused_indices": int((ledger.counts() > 1).sum()),
        "crashes": dict(sorted(ends.items())),
        "crashes_total": ends.total(),
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
    """Time one site."""
    with tempfile.TemporaryDirectory(dir=options.folder or None) as name:
        timed = time_one_site(Path(name), 2048, 8192)
    version = importlib.metadata.version("cryptography")
    return {"cryptography": version, "one_row_at_one_site": timed}, True


if __name__ == "__main__":
    main(__doc__, measure, folder="")
