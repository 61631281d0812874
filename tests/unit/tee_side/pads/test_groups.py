"""Records of several tokens: each is decrypted once, ahead of its turn, and damaged as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import PadBankError
from tee_side.protect.pads.bank import BankFile
from tests.kit.pads import LAYOUT, fill, product, use
from tests.kit.pads import create as create_bank
from tests.kit.rows import each_row

GROUP = 4
FIRST, SECOND = LAYOUT.sites


def create(folder: Path, tokens: int = 16) -> BankFile:
    """Return a full bank."""
    bank = create_bank(folder, tokens, block=1, group=GROUP)
    fill(bank, tokens)
    return bank


@each_row(("rows", "at_once"), [(1, True), (2, True), (3, True), (GROUP, True), (1, False)])
def test_groups_are_decrypted_once_and_what_was_handed_out_stays(
    tmp_path: Path, rows: int, at_once: bool
) -> None:
    """Tokens that are read in turns share a record; the next one is decrypted ahead of its turn."""
    folder = tmp_path / f"{rows} {at_once}"
    folder.mkdir()
    with create(folder) as bank:
        opened, by, held = bank._open, [], []

        def noted(first: int, site: Any, u_GO: torch.Tensor) -> None:
            by.append((first, site.number))
            opened(first, site, u_GO)

        bank._open = noted  # type: ignore[method-assign]
        for _ in range(16 // rows):
            indices = bank.take(rows)
            held.append(bank.all_factors(indices) if at_once else {1: bank.factors(indices, 1)})
    for found in held:
        for site, (r, u) in found.items():
            assert torch.equal(u, product(site, r))
    assert len(by) == len(set(by))


def test_a_group_divides_the_capacity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a divisor of 10"):
        create(tmp_path, 10)
    assert not list(tmp_path.iterdir())


@each_row("way", ["factors", "all_factors", "start"])
def test_damage_ends_every_pad_of_its_record_and_no_other(tmp_path: Path, way: str) -> None:
    """Whether its site is read alone, ahead of its turn with all others, or by threads."""
    folder = tmp_path / way
    folder.mkdir()
    with create(folder) as bank:
        _, offset = bank._place(GROUP, SECOND)
        with bank._path.open("r+b") as file:
            file.seek(offset + 20)
            byte = file.read(1)[0]
            file.seek(offset + 20)
            file.write(bytes([byte ^ 1]))
        for _ in range(GROUP):
            use(bank, bank.take(1), at_once=way == "all_factors")
        refused = pytest.raises(PadBankError, match=f"pad {GROUP}, layer 1 qkv_proj")
        indices = bank.take(2 * GROUP if way == "start" else GROUP)
        if way == "start":
            draw = bank.start(indices, SECOND.number)
            with refused:
                draw()
        else:
            for index in indices:
                one = range(index, index + 1)
                with refused:
                    bank.all_factors(one) if way[0] == "a" else bank.factors(one, SECOND.number)
        for index in indices:
            with pytest.raises(RuntimeError, match=f"index {index}"):
                bank.factors(range(index, index + 1), SECOND.number)
        if way != "all_factors":
            bank.factors(indices, FIRST.number)
        use(bank, bank.take(GROUP))
