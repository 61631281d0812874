"""Pads of a layout of two sites, weights for it, and what is right: u = r W mod 2^32."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace, Purpose
from tee_side.protect.pads.store import MadePads, PadStore
from tee_side.protect.sites import PadLayout, SiteShape
from tests.kit.masks import wrapped

LAYOUT = PadLayout((SiteShape(0, "o_proj", 3, 2), SiteShape(1, "qkv_proj", 2, 5)))
PURPOSE = Purpose.of(
    LAYOUT, mask="pad", model="tiny", model_digest="a" * 64, linear_digest="b" * 64
)


def place(folder: Path) -> BankPlace:
    """All files of a bank in one folder; the witness is in memory, by the bank's id."""
    return BankPlace.at(folder / "bank", beside_bank=True)


def new_boot(folder: Path) -> None:
    """Forget what the machine's memory has noted of a bank: its witness."""
    found = re.search(rb'"bank_id":"([0-9a-f]{32})"', (folder / "bank").read_bytes())
    assert found is not None
    place(folder).witness_file(found[1].decode()).unlink(missing_ok=True)


def product(site: int, r: torch.Tensor) -> torch.Tensor:
    """Return r W mod 2^32 as int32, for the fixed weights of a site."""
    shape = LAYOUT.by_number[site]
    count = shape.in_features * shape.out_features
    weight = (torch.arange(count) * 37 % 255 - 127).reshape(shape.in_features, shape.out_features)
    return wrapped(r.to(torch.int64) @ weight)


def put_all(batch: MadePads) -> None:
    """Put every second site by the store's own memory."""
    for site in LAYOUT.sites:
        u = product(site.number, batch.r(site.number))
        if site.number % 2:
            u = batch.buffer(site.number).copy_(u)
        batch.put(site.number, u)


def fill(store: PadStore, count: int) -> None:
    with store.begin(count) as batch:
        put_all(batch)
        batch.commit()


def use(store: PadStore, indices: range, *, at_once: bool = False) -> list[torch.Tensor]:
    """Read every site and check it, and release them; return r of all."""
    drawn = []
    every = store.all_factors(indices) if at_once else {}
    for site in LAYOUT.sites:
        pad, u = every[site.number] if at_once else store.start(indices, site.number)()
        r = pad.elements()
        assert r.shape == (len(indices), site.in_features)
        assert r.dtype == u.dtype == torch.int32
        assert torch.equal(u, product(site.number, r))
        drawn.append(r)
    store.release(indices)
    return drawn


def create(folder: Path, capacity: int = 8, block: int = 16, group: int = 1) -> BankFile:
    return BankFile.create(place(folder), PURPOSE, capacity=capacity, block=block, group=group)


def reopen(folder: Path, block: int = 16) -> BankFile:
    return BankFile.open(place(folder), PURPOSE, block=block)


CALLS = ("fsync", "replace", "pwrite", "write", "open")


class Crash(BaseException):
    """The process is gone; nothing in the code under test may catch it."""


class Disk:
    """What a power loss leaves of the bank's folder: only what reached the disk by an fsync.

    Names are renamed on disk when their folder is synced, and contents written when the file is;
    everything else may or may not be there, as `choose` says. No real fsync is made. The
    `crash_at`-th system call raises `Crash`, before or after its effect.
    """

    def __init__(self, folder: Path, choose: random.Random, crash_at: int) -> None:
        self._folder, self._choose, self._crash_at = folder, choose, crash_at
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}
        self._synced = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self._renamed: dict[str, bytes] = {}
        self._records: list[tuple[int, bytes]] = []
        self.log: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.log.append(name)
            crash, before = len(self.log) == self._crash_at, self._choose.random() < 0.5
            if crash and before:
                raise Crash
            result = getattr(self, f"_{name}", self._real[name])(*arguments, **keywords)
            if crash:
                raise Crash
            return result

        return call

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._records.append((offset, os.pread(descriptor, len(data), offset)))
        return int(self._real["pwrite"](descriptor, data, offset))

    def _fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self._folder:
            self._synced.update(self._renamed)
            self._renamed.clear()
        elif path.parent == self._folder and path.name == "bank":
            self._records.clear()
        elif path.parent == self._folder:  # the witness is in memory, nothing of it on disk
            self._synced[path.name] = path.read_bytes()

    def _replace(self, source: Path, target: Path) -> None:
        self._real["replace"](source, target)
        if Path(target).parent == self._folder:
            # Without an fsync before it, a rename may bring an empty file.
            self._renamed[Path(target).name] = self._synced.pop(Path(source).name, b"")

    def lose_power(self) -> None:
        """Put on disk what a machine would find there after it was switched off now.

        Memory is gone, with the witness in it.
        """
        new_boot(self._folder)
        outcomes = [self._synced["bank.index"], *self._renamed.values()]
        (self._folder / "bank.index").write_bytes(self._choose.choice(outcomes))
        with (self._folder / "bank").open("r+b") as file:
            for offset, content in reversed(self._records):
                if self._choose.random() < 0.5:
                    file.seek(offset)
                    file.write(content)
