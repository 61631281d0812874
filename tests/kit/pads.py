"""Pads of a layout of two sites, weights for it, and what is right: u = r W mod 2^32."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tee_side.protect.pads.store import Batch, PadStore

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
    exact = (r.to(torch.int64) @ weight) % 2**32
    return torch.where(exact >= 2**31, exact - 2**32, exact).to(torch.int32)


def put_all(batch: Batch) -> None:
    for site in LAYOUT.sites:
        batch.put(site.number, product(site.number, batch.r(site.number)))


def fill(store: PadStore, count: int) -> None:
    with store.begin(count) as batch:
        put_all(batch)
        batch.commit()


def use(store: PadStore, indices: range, *, at_once: bool = False) -> list[torch.Tensor]:
    """Read every site and check it; return r of all of them."""
    drawn = []
    every = store.all_factors(indices) if at_once else {}
    for site in LAYOUT.sites:
        r, u = every[site.number] if at_once else store.factors(indices, site.number)
        assert r.shape == (len(indices), site.in_features)
        assert r.dtype == u.dtype == torch.int32
        assert torch.equal(u, product(site.number, r))
        drawn.append(r)
    return drawn


def create(folder: Path, capacity: int = 8, block: int = 16, group: int = 1) -> BankFile:
    return BankFile.create(place(folder), PURPOSE, capacity=capacity, block=block, group=group)


def reopen(folder: Path, block: int = 16) -> BankFile:
    return BankFile.open(place(folder), PURPOSE, block=block)
