"""No pad twice: not after a crash between any two system calls, a power loss, or kill -9."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import PadBankError
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import WITNESSES
from tests.kit.pads import create, fill, new_boot, place, put_all, reopen, use
from tests.kit.service import ENVIRONMENT, Forked

CAPACITY = 24
CALLS = ("fsync", "replace", "pwrite", "write", "open")


class Crash(BaseException):
    """The process is gone; nothing in the code under test may catch it."""


class Disk:
    """What a power loss leaves of the bank's folder: only what reached the disk by an fsync.

    Names are renamed on disk when their folder is synced, and contents written when the file is;
    everything else may or may not be there, as `choose` says. No real fsync is made. The
    `crash_at`-th system call raises `Crash`, before or after its effect.
    """

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self._folder = folder
        self._choose = choose
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}
        self._synced: dict[str, bytes] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }
        self._renamed: dict[str, bytes] = {}
        self._records: list[tuple[int, bytes]] = []
        self.calls = 0
        self.crash_at = -1
        self.log: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            self.log.append(name)
            crash, before = self.calls == self.crash_at, self._choose.random() < 0.5
            if crash and before:
                raise Crash
            result = getattr(self, f"_{name}", self._pass(name))(*arguments, **keywords)
            if crash:
                raise Crash
            return result

        return call

    def _pass(self, name: str) -> Callable[..., Any]:
        return self._real[name]

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._records.append((offset, os.pread(descriptor, len(data), offset)))
        return int(self._real["pwrite"](descriptor, data, offset))

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self._folder:
            self._synced.update(self._renamed)
            self._renamed.clear()
        elif path.parent != self._folder:
            pass  # of the witness: in memory, nothing is on disk
        elif path.name == "bank":
            self._records.clear()
        else:
            self._synced[path.name] = path.read_bytes()

    def _replace(self, source: Path, target: Path) -> None:
        self._real["replace"](source, target)
        if Path(target).parent != self._folder:
            return
        # Without an fsync before it, a rename may bring an empty file.
        self._renamed[Path(target).name] = self._synced.pop(Path(source).name, b"")

    def lose_power(self) -> None:
        """Put on disk what a machine would find there after it was switched off now.

        Memory is gone, with the witness in it.
        """
        new_boot(self._folder)
        index = self._folder / "bank.index"
        outcomes = [self._synced["bank.index"], *self._renamed.values()]
        index.write_bytes(self._choose.choice(outcomes))
        with (self._folder / "bank").open("r+b") as file:
            for offset, content in reversed(self._records):
                if self._choose.random() < 0.5:
                    file.seek(offset)
                    file.write(content)


class Life:
    """A run that fills and draws; keeps every index that was ever handed out."""

    def __init__(self, folder: Path, choose: random.Random) -> None:
        self._folder = folder
        self._choose = choose
        self.handed_out: list[int] = []
        self.bank: BankFile | None = None

    def run(self, steps: int) -> None:
        self.bank = bank = reopen(self._folder, block=self._choose.choice((1, 4, 16)))
        for _ in range(steps):
            if bank.available < 3 or (bank.room and self._choose.random() < 0.2):
                with bank.begin(self._choose.randint(1, bank.room)) as batch:
                    put_all(batch)
                    if self._choose.random() < 0.8:
                        batch.commit()
            count = self._choose.randint(1, 3)
            if count > bank.available:
                continue
            indices = bank.take(count)
            self.handed_out.extend(indices)
            if self._choose.random() < 0.8:
                use(bank, indices)
            else:
                bank.release(indices)

    def end(self) -> None:
        """The descriptors go, as they do with the process; `close` writes nothing."""
        if self.bank is not None:
            self.bank.close()
            self.bank = None


@pytest.mark.parametrize("seed", range(6))
def test_power_loss_at_any_moment_repeats_no_pad(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(seed)
    create(tmp_path, CAPACITY).close()
    life = Life(tmp_path, choose)
    crashed: set[str] = set()
    for _ in range(120):
        disk = Disk(tmp_path, choose)
        disk.crash_at = choose.randint(1, 150)
        with monkeypatch.context() as patched:
            disk.install(patched)
            try:
                life.run(steps=12)
            except Crash:
                crashed.add(disk.log[-1])
            finally:
                patched.undo()
                life.end()
        disk.lose_power()
    assert crashed == set(CALLS)
    assert len(life.handed_out) > 400
    assert len(set(life.handed_out)) == len(life.handed_out)
    assert life.handed_out == sorted(life.handed_out)


def test_crash_at_every_single_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One short run, crashed at its first, second, third ... call, each time with power lost."""
    create(tmp_path, CAPACITY).close()
    handed_out: list[int] = []
    crash_at = 0
    while True:
        crash_at += 1
        choose = random.Random(7)  # the same run each time
        life = Life(tmp_path, choose)
        disk = Disk(tmp_path, random.Random(crash_at))
        disk.crash_at = crash_at
        finished = False
        with monkeypatch.context() as patched:
            disk.install(patched)
            try:
                life.run(steps=4)
                finished = True
            except Crash:
                pass
            finally:
                patched.undo()
                life.end()
        disk.lose_power()
        handed_out += life.handed_out
        if finished:
            break
    assert crash_at > 30
    assert len(handed_out) > 40
    assert handed_out == sorted(set(handed_out))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["fsync", "replace", "pwrite", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failing_system_calls_are_one_typed_error_and_the_bank_goes_on(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process tries again: nothing that failed was handed out, nothing is repeated."""
    bank = create(tmp_path, CAPACITY, block=1)
    fill(bank, 8)
    choose = random.Random(1)
    real = getattr(os, name)
    messages: list[str] = []
    bounds: list[int] = []
    handed_out: list[int] = []

    def flaky(*arguments: Any) -> Any:
        if choose.random() < 0.3:
            if name == "replace" and choose.random() < 0.5:
                real(*arguments)  # done, and reported as failed
            raise OSError(code, os.strerror(code))
        return None if name == "fsync" else real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        patched.setattr(os, name, flaky)
        for _ in range(700):
            try:
                if bank.room:
                    fill(bank, min(2, bank.room))
                indices = bank.take(1)
            except PadBankError as error:
                messages.append(str(error))
            else:
                use(bank, indices)
                handed_out.extend(indices)
            bounds.append(read_bank_status(place(tmp_path)).next_index)
    bank.close()
    assert len(messages) > 20
    places = (str(tmp_path), str(WITNESSES))  # the bank's, and its witness's
    assert all(message.startswith(places) for message in messages)
    assert bounds == sorted(bounds)
    with reopen(tmp_path) as bank:
        indices = bank.take(bank.available)
        use(bank, indices)
    handed_out.extend(indices)
    assert handed_out == sorted(set(handed_out))
    assert len(handed_out) > 50


def test_lost_records_are_noticed_not_used(tmp_path: Path) -> None:
    """A disk that lies about fsync: the index is there, the records are not."""
    empty = None
    with create(tmp_path, CAPACITY) as bank:
        empty = (tmp_path / "bank").read_bytes()
        fill(bank, 4)
    (tmp_path / "bank").write_bytes(empty)
    with reopen(tmp_path) as bank, pytest.raises(PadBankError, match="authentication tag"):
        use(bank, bank.take(1))


CHILD = """
import sys
from pathlib import Path
from tests.kit.pads import fill, reopen, use
bank = reopen(Path(sys.argv[1]), block=4)
while True:
    if bank.available < 3:
        fill(bank, bank.room)
    indices = bank.take(2)
    use(bank, indices)
    print(indices.start, indices.stop, flush=True)
"""


def test_killed_processes_repeat_no_pad(tmp_path: Path) -> None:
    """A pad counts as used when the child said so; kill -9 may lose others, never repeat one."""
    create(tmp_path, CAPACITY).close()
    choose = random.Random(3)
    handed_out: list[int] = []
    for _ in range(4):
        read, write = os.pipe()
        child = Forked("tsqp", [str(tmp_path)], ENVIRONMENT, stdout=write, before=CHILD)
        os.close(write)
        with os.fdopen(read) as said:
            for _ in range(choose.randint(1, 60)):
                handed_out.extend(range(*map(int, said.readline().split())))
            child.kill()
            for line in said:
                if line.endswith("\n"):
                    handed_out.extend(range(*map(int, line.split())))
        assert child.returncode == -signal.SIGKILL
    with reopen(tmp_path) as bank:
        if not bank.available:
            fill(bank, 1)
        last = bank.take(bank.available)
        use(bank, last)
    handed_out.extend(last)
    assert handed_out == sorted(set(handed_out)), json.dumps(handed_out[-80:])
    assert len(handed_out) > 80
