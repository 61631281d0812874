"""A bank on disk: opens for its own key, model and layout, and notices every changed byte."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from protocol.errors import PadBankError
from tee_side.protect.pads import bank as bank_module
from tee_side.protect.pads import bank_format
from tee_side.protect.pads.bank import BankFile
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Keys, Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tests.kit.pads import (
    LAYOUT,
    PURPOSE,
    create,
    fill,
    new_boot,
    place,
    put_all,
    reopen,
    use,
)
from tests.kit.rows import each_row

NAMES = ("bank", "bank.index", "bank.key")


def _message(*parts: str) -> str:
    return ".*".join(re.escape(part) for part in parts)


def _refused(folder: Path, *parts: str) -> None:
    with pytest.raises(PadBankError, match=_message(*parts)):
        reopen(folder)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    create(tmp_path).close()
    os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(NAMES, 0o600)


@each_row("name", NAMES)
def test_nothing_is_overwritten(name: str, tmp_path: Path) -> None:
    """Not even a link that dangles."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / name).symlink_to(folder / "nowhere")
    with pytest.raises(PadBankError, match=_message(f"{folder}/{name}", "an existing file")):
        create(folder)
    assert [path.name for path in folder.iterdir()] == [name]


@each_row(
    ("change", "said"),
    [
        ({"model_digest": "c" * 64, "model": "other"}, "bank: model: got pads for tiny, expected"),
        ({"linear_digest": "d" * 64}, "bank: model: got pads for tiny, whose files have changed"),
        ({"mask": "pad bits=8"}, "bank: mask: got pad, expected pad bits=8"),
        (
            {"sites": (LAYOUT.sites[0], SiteShape(1, "qkv_proj", 2, 6))},
            "bank: layout, layer 1 qkv_proj: got 2 -> 5, expected 2 -> 6",
        ),
    ],
)
def test_a_bank_of_something_else_is_refused_and_not_left_locked(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if not list(tmp_path.iterdir()):
        create(tmp_path).close()
    fields = {**PURPOSE.model_dump(), "sites": LAYOUT.sites, **change}
    wanted = Purpose.of(PadLayout(fields.pop("sites")), **fields)
    with pytest.raises(PadBankError, match=re.escape(said)):
        BankFile.open(place(tmp_path), wanted)
    reopen(tmp_path).close()


@each_row(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", ("bank.key: got another file",)),
        (b"tsqp-pad-bank-key 2 " + b"0" * 64 + b"\n", ("another file", "-key 1 and 64 hex")),
        (b"tsqp-pad-bank-key 1 " + b"g" * 64 + b"\n", ("64 hex digits",)),
        (b"tsqp-pad-bank-key 1 " + b"0" * 64 + b"\n", ("bank: key id", "bank.key", "expected")),
    ],
)
def test_a_key_that_is_another_or_that_others_can_reach_is_refused(
    content: bytes, message: tuple[str, ...], tmp_path: Path
) -> None:
    key = tmp_path / "bank.key"
    if not key.exists():
        create(tmp_path).close()
    key.write_bytes(content)
    _refused(tmp_path, *message)
    for mode in (0o640, 0o604, 0o620, 0o601):
        key.chmod(mode)
        _refused(tmp_path, "bank.key: mode", "expected -rw-------")
    key.chmod(0o600)


def test_two_banks_with_one_key_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_module.secrets, "token_bytes", bytes)
    bank_ids = iter((uuid4().hex, uuid4().hex))  # a witness outlives its bank
    monkeypatch.setattr(bank_module.secrets, "token_hex", lambda count: next(bank_ids))
    one, two, drawn = tmp_path / "one", tmp_path / "two", []
    for folder in (one, two):
        folder.mkdir()
        with create(folder, block=1) as bank:
            fill(bank, 2)
            drawn.append(use(bank, bank.take(1)))
    assert not any(map(torch.equal, *drawn))
    first, second = ((folder / "bank").read_bytes() for folder in (one, two))
    assert first[:20] == second[:20]  # magic, version and key id
    (one / "bank").write_bytes(first[:4096] + second[4096:])
    with reopen(one) as bank, pytest.raises(PadBankError, match="authentication tag"):
        use(bank, bank.take(1))
    shutil.copy(two / "bank.index", one / "bank.index")
    _refused(one, "the bank that it is used with")


def test_each_purpose_has_a_key_of_its_own_and_none_shows_in_messages() -> None:
    keys = Keys.derive(bytes(32), b"a header")
    secret = (keys.header_mac, keys.index_mac, keys.records, keys.pads)
    assert len(set(secret)) == 4
    shown = repr(keys) + str(keys)
    assert repr(keys.header_hash) in shown  # guards the test
    assert not any(repr(key) in shown or key.hex() in shown for key in secret)


def test_every_byte_of_header_and_index_counts(tmp_path: Path) -> None:
    with create(tmp_path, capacity=2) as bank:
        fill(bank, 2)
    unnoticed = []
    for name in ("bank", "bank.index"):
        path = tmp_path / name
        content = path.read_bytes()
        written = content[:4096].rstrip(b"\0")
        # Behind the header are zeros up to a page.
        zeros = range(len(written), min(4096, len(content)), 61)
        for position in (*range(64), *range(64, len(written), 3), *zeros):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            with suppress(PadBankError):
                reopen(tmp_path).close()
                unnoticed.append((name, position))
        path.write_bytes(content)
    assert unnoticed == []
    reopen(tmp_path).close()


def test_records_that_changed_places_do_not_open(tmp_path: Path) -> None:
    layout = PadLayout((SiteShape(0, "qkv_proj", 1, 3), SiteShape(0, "o_proj", 1, 3)))
    size = bank_format.record_bytes(layout.sites[0], 1)
    purpose = Purpose.of(layout, mask="pad", model_digest="a" * 64, linear_digest="b" * 64)
    made = BankFile.create(place(tmp_path), purpose, capacity=2, block=1)
    with made, made.begin(2) as batch:
        for site in (0, 1):
            batch.put(site, torch.zeros(2, 3, dtype=torch.int32))
        batch.commit()
    path, index = tmp_path / "bank", tmp_path / "bank.index"
    content, state = path.read_bytes(), index.read_bytes()
    records = [content[4096 + i * size : 4096 + (i + 1) * size] for i in range(4)]
    for other in (1, 2, 3):  # another site, another index, both
        swapped = list(records)
        swapped[0], swapped[other] = swapped[other], swapped[0]
        path.write_bytes(content[:4096] + b"".join(swapped))
        index.write_bytes(state)
        new_boot(tmp_path)
        with (
            BankFile.open(place(tmp_path), purpose) as bank,
            pytest.raises(PadBankError, match="pad 0, layer 0 qkv_proj"),
        ):
            bank.factors(bank.take(1), 0)


@each_row("way", ["factors", "all_factors", "start"])
def test_damage_ends_every_pad_of_its_record_and_no_other(tmp_path: Path, way: str) -> None:
    """Whether its site is read alone, ahead of its turn with all others, or by threads."""
    folder, group, (first, second) = tmp_path / way, 4, LAYOUT.sites
    folder.mkdir()
    with create(folder, 16, block=1, group=group) as bank:
        fill(bank, 16)
        _, offset = bank._place(group, second)
        with bank._path.open("r+b") as file:
            file.seek(offset + 20)
            byte = file.read(1)[0]
            file.seek(offset + 20)
            file.write(bytes([byte ^ 1]))
        for _ in range(group):
            use(bank, bank.take(1), at_once=way == "all_factors")
        refused = pytest.raises(PadBankError, match=f"pad {group}, layer 1 qkv_proj")
        indices = bank.take(2 * group if way == "start" else group)
        if way == "start":
            draw = bank.start(indices, second.number)
            with refused:
                draw()
        else:
            for index in indices:
                one = range(index, index + 1)
                with refused:
                    bank.all_factors(one) if way[0] == "a" else bank.factors(one, second.number)
        for index in indices:
            with pytest.raises(RuntimeError, match=f"index {index}"):
                bank.factors(range(index, index + 1), second.number)
        if way != "all_factors":
            bank.factors(indices, first.number)
        use(bank, bank.take(group))


def test_files_of_another_length_or_version_are_refused(tmp_path: Path) -> None:
    with create(tmp_path, capacity=100) as bank:
        fill(bank, 1)
    path, index = tmp_path / "bank", tmp_path / "bank.index"
    content, state = path.read_bytes(), index.read_bytes()
    for change in (-1, 1, -4096):
        os.truncate(path, len(content) + change)
        _refused(tmp_path, "bank: size", f"expected {len(content)}")
    os.truncate(path, 10)
    _refused(tmp_path, "bank: got no magic bytes")
    path.write_bytes(content[:11] + b"\x01" + content[12:])
    _refused(tmp_path, "bank: version", "got 1, expected 3 (make a new bank")
    path.write_bytes(content)
    for wrong in (b"", state[:-1], state + b"\0"):
        index.write_bytes(wrong)
        _refused(tmp_path, f"{index}: got", f"expected an index of {len(state)} bytes")
    index.write_bytes(state)
    with reopen(tmp_path) as bank:
        os.truncate(path, 4096 + 5)
        with pytest.raises(PadBankError, match=_message("pad 0", "got 5 bytes")):
            bank.factors(bank.take(1), 1)


def _sealed(folder: Path) -> int:
    content = (folder / "bank.index").read_bytes()
    return int.from_bytes(content[: -bank_format._MAC_BYTES][-8:], "big")


def test_records_are_encrypted_and_never_equal(tmp_path: Path) -> None:
    """The same u for every pad, and again after an abandoned batch: no two records alike."""
    with create(tmp_path) as bank:
        size = bank_format.record_bytes(LAYOUT.sites[1], 1)
        token = sum(bank_format.record_bytes(site, 1) for site in LAYOUT.sites)
        same = torch.full((8, 5), 0x41414141, dtype=torch.int32)
        seen: set[bytes] = set()
        for filled in (8, 16):
            with bank.begin(8) as batch:
                batch.put(LAYOUT.sites[1].number, same)
            content = (tmp_path / "bank").read_bytes()
            assert b"AAAA" not in content
            ends = range(len(content), len(content) - 8 * token, -token)
            seen |= {content[end - size : end] for end in ends}
            assert len({record[:12] for record in seen}) == filled
            assert len({record[12:] for record in seen}) == filled


def test_random_nonces_have_a_limit_and_those_of_lost_batches_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abandoned, or ended by a crash: the same indices again take new nonces of the same key."""
    with create(tmp_path) as bank, bank.begin(3) as batch:
        put_all(batch)
    assert _sealed(tmp_path) == 6
    crashed = reopen(tmp_path)
    put_all(crashed.begin(3))
    # The process is gone: nothing is closed, and descriptors go with it.
    crashed._let_go()
    assert _sealed(tmp_path) == 12
    monkeypatch.setattr(bank_module, "MAX_RECORDS", 18)
    with reopen(tmp_path) as bank:
        assert bank.available == 0
        fill(bank, 2)
        bank.take(1)
        before = [path.read_bytes() for path in tmp_path.iterdir()]
        refused = _message("records ever encrypted", "got 20", "at most 18", "a new bank")
        with pytest.raises(PadBankError, match=refused):
            bank.begin(2)
        assert [path.read_bytes() for path in tmp_path.iterdir()] == before
        fill(bank, 1)
        use(bank, bank.take(2))


def test_one_process_has_a_bank_at_a_time_until_its_batch_has_ended(tmp_path: Path) -> None:
    bank = create(tmp_path)
    # A copy of the file would use the same pads.
    for suffix in ("", ".index"):
        shutil.copy(tmp_path / f"bank{suffix}", tmp_path / f"copy{suffix}")
    copy = BankPlace.at(tmp_path / "copy", tmp_path / "bank.key", beside_bank=True)
    with pytest.raises(PadBankError, match=_message("bank.key: got a bank in use")):
        BankFile.open(copy, PURPOSE)
    batch = bank.begin(1)
    bank.close()
    _refused(tmp_path, "in use")
    batch.abandon()
    with reopen(tmp_path) as bank:
        assert bank.room == 8
