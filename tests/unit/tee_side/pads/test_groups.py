"""Records of several tokens: right for one token and for many, each pad once, filled by groups."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.errors import PadBankError
from tee_side.protect.pads import bank_format, store
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.randomness import Keystream
from tests.unit.tee_side.pads.tiny import LAYOUT, PURPOSE, fill, place, product, reopen, use

GROUP = 4
RECORDS = [bank_format.record_bytes(site, GROUP) for site in LAYOUT.sites]


def create(folder: Path, capacity: int = 16) -> BankFile:
    return BankFile.create(place(folder), PURPOSE, capacity=capacity, group=GROUP, block=1)


@pytest.mark.parametrize("counts", [(1,) * 16, (3, 2, 6, 1, 4), (16,), (5, 11), (4, 8, 4)])
@pytest.mark.parametrize("at_once", [False, True])
def test_any_rows_get_their_own_pads(
    tmp_path: Path, counts: tuple[int, ...], at_once: bool
) -> None:
    with create(tmp_path) as bank:
        fill(bank, 16)
        drawn = [use(bank, bank.take(count), at_once=at_once)[0] for count in counts]
    assert torch.cat(drawn).unique(dim=0).shape[0] == 16


def test_tokens_in_turns_share_a_record(tmp_path: Path) -> None:
    """Two micro-batches, each with its own tokens of one group, site by site."""
    with create(tmp_path) as bank:
        fill(bank, 8)
        lanes = [bank.take(2), bank.take(1), bank.take(3)]
        for site in LAYOUT.sites:
            for indices in lanes:
                r, u = bank.factors(indices, site.number)
                assert (r.shape[0], u.shape[0]) == (len(indices), len(indices))
        with pytest.raises(RuntimeError, match="index 2"):
            bank.factors(lanes[1], LAYOUT.sites[0].number)


def test_one_token_is_read_from_disk_once_for_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(tmp_path) as bank:
        fill(bank, 8)
        read = []
        opened = bank._open
        monkeypatch.setattr(bank, "_open", lambda *record: (read.append(record), opened(*record)))
        for number in range(6):
            use(bank, bank.take(1), at_once=number % 2 == 1)
    assert len(read) == 2 * len(LAYOUT.sites)


def test_the_group_behind_is_decrypted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(tmp_path) as bank:
        fill(bank, 16)
        opened, by = bank._open, []

        def noted(first: int, *record: Any) -> None:
            by.append((first, threading.current_thread() is threading.main_thread()))
            opened(first, *record)

        monkeypatch.setattr(bank, "_open", noted)
        drawn = [use(bank, bank.take(1), at_once=True)[0] for _ in range(16)]
    assert torch.cat(drawn).unique(dim=0).shape[0] == 16
    # Nothing is decrypted ahead of the first group, and nothing behind what is filled.
    assert sorted(set(by)) == [(0, True)] + [(first, False) for first in range(GROUP, 16, GROUP)]
    assert len(by) == 16 // GROUP * len(LAYOUT.sites)


def test_pads_that_are_held_stay_while_later_groups_are_read(tmp_path: Path) -> None:
    """One micro-batch may be behind another by more than a group."""
    with create(tmp_path) as bank:
        fill(bank, 16)
        held = [bank.all_factors(bank.take(count)) for count in (1, 2, 1, 2, 6)]
        use(bank, bank.take(4), at_once=True)
    for found in held:
        for site, (r, u) in found.items():
            assert torch.equal(u, product(site, r))


def test_tokens_that_others_took_are_not_waited_for(tmp_path: Path) -> None:
    """The group ahead is used up site by site, or partly; later groups are right all the same."""
    with create(tmp_path) as bank:
        fill(bank, 16)
        use(bank, bank.take(1), at_once=True)
        use(bank, bank.take(GROUP + 1))
        use(bank, bank.take(1), at_once=True)
        use(bank, bank.take(GROUP), at_once=True)  # of two groups
        use(bank, bank.take(1), at_once=True)


def test_a_damaged_group_ahead_is_refused_when_its_turn_comes(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 16)
        _, offset = bank._place(GROUP, LAYOUT.sites[1])
        with (tmp_path / "bank").open("r+b") as file:
            file.seek(offset + 20)
            byte = file.read(1)[0]
            file.seek(offset + 20)
            file.write(bytes([byte ^ 1]))
        for _ in range(GROUP):
            use(bank, bank.take(1), at_once=True)
        for _ in range(2):
            with pytest.raises(PadBankError, match=f"pad {GROUP}, layer 1 qkv_proj"):
                bank.all_factors(bank.take(1))
        bank.take(GROUP - 2)
        use(bank, bank.take(1), at_once=True)


@pytest.mark.parametrize("rows", [1, 2, 3, GROUP])
def test_no_group_is_decrypted_twice_whatever_a_step_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    with create(tmp_path) as bank:
        fill(bank, 16)
        opened, by = bank._open, []
        monkeypatch.setattr(bank, "_open", lambda *one: (by.append(one[:2]), opened(*one)))
        drawn = [use(bank, bank.take(rows), at_once=True)[0] for _ in range(16 // rows)]
    assert torch.cat(drawn).unique(dim=0).shape[0] == 16 // rows * rows
    assert len(by) == len(set(by))


def test_a_group_begun_by_another_process_goes_on(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 8)
        before = use(bank, bank.take(1))
    with reopen(tmp_path, block=1) as bank:
        assert bank.take(1) == range(1, 2)
        after = use(bank, bank.take(5))
    assert not torch.equal(before[0], after[0][:1])


def test_space_is_given_back_by_the_group(tmp_path: Path) -> None:
    with create(tmp_path, capacity=8) as bank:
        fill(bank, 8)
        for count in (2, 1):
            use(bank, bank.take(count))
            assert bank.room == 0
        use(bank, bank.take(1))
        assert bank.room == GROUP
        for count in (1, GROUP - 1, 2 * GROUP):
            with pytest.raises(ValueError, match=r"expected 4 \.\. 4, by 4"):
                bank.begin(count)
        fill(bank, GROUP)
        for _ in range(8):
            use(bank, bank.take(1))


def test_a_group_divides_the_capacity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a divisor of 10"):
        create(tmp_path, capacity=10)
    assert not list(tmp_path.iterdir())


def test_damage_ends_every_pad_of_its_record_and_no_other(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 8)
    content = bytearray((tmp_path / "bank").read_bytes())
    content[4096 + 20] ^= 1
    (tmp_path / "bank").write_bytes(content)
    site, other = LAYOUT.sites
    with reopen(tmp_path, block=1) as bank:
        for index in range(GROUP):
            indices = bank.take(1)
            with pytest.raises(PadBankError, match="pad 0, layer 0"):
                bank.factors(indices, site.number)
            with pytest.raises(RuntimeError, match=f"index {index}"):
                bank.factors(indices, site.number)
            bank.factors(indices, other.number)
        use(bank, bank.take(4))


@pytest.mark.parametrize("counts", [(16,), (1, 2, 13), (5, 11), (3, 10, 3), (2, 1, 6, 7)])
def test_threads_read_groups_and_those_that_others_share(
    tmp_path: Path, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "reading_threads", lambda: 3)
    with create(tmp_path) as bank:
        fill(bank, 16)
        for indices in [bank.take(count) for count in counts]:
            for site in LAYOUT.sites:
                r, u = bank.start(indices, site.number)()
                assert torch.equal(
                    r, Keystream(bank._key).rows(indices, site.number, site.in_features)
                )
                assert torch.equal(u, product(site.number, r))


def test_a_damaged_group_that_threads_read_is_refused_and_used_up(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 16)
        site, other = LAYOUT.sites
        _, offset = bank._place(GROUP, site)
        content = bytearray((tmp_path / "bank").read_bytes())
        content[offset + 20] ^= 1
        (tmp_path / "bank").write_bytes(content)
        indices = bank.take(16)
        draw = bank.start(indices, site.number)
        with pytest.raises(PadBankError, match=f"pad {GROUP}, layer 0 o_proj"):
            draw()
        for index in indices:
            with pytest.raises(RuntimeError, match=f"index {index}"):
                bank.factors(range(index, index + 1), site.number)
        r, u = bank.start(indices, other.number)()
        assert torch.equal(u, product(other.number, r))


def test_records_of_groups_that_changed_places_do_not_open(tmp_path: Path) -> None:
    with create(tmp_path, capacity=8) as bank:
        fill(bank, 8)
    content = (tmp_path / "bank").read_bytes()
    half = (len(content) - 4096) // 2
    assert half == sum(RECORDS)
    (tmp_path / "bank").write_bytes(content[:4096] + content[4096 + half :] + content[4096:][:half])
    with reopen(tmp_path, block=1) as bank:
        indices = bank.take(1)
        for site in LAYOUT.sites:
            with pytest.raises(PadBankError, match="pad 0"):
                bank.factors(indices, site.number)


def test_nonces_are_counted_by_records(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 8)
        assert bank._state.sealed == 2 * len(LAYOUT.sites)
