"""A bank on disk: opens for its own key, model and layout, and notices every changed byte."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch

from protocol.errors import PadBankError, PadsExhaustedError
from tee_side.protect.pads import bank as bank_module
from tee_side.protect.pads import bank_format
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.bank_format import Purpose
from tee_side.protect.pads.layout import PadLayout, SiteShape
from tests.unit.tee_side.pads.tiny import (
    LAYOUT,
    MODEL_DIGEST,
    PURPOSE,
    create,
    fill,
    new_boot,
    place,
    product,
    put_all,
    reopen,
    use,
)


def _message(*parts: str) -> str:
    """Pattern: these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------ over restarts


def test_pads_outlive_the_process_and_stay_right(tmp_path: Path) -> None:
    with create(tmp_path, block=1) as bank:
        fill(bank, 5)
        used = use(bank, bank.take(2))
    with reopen(tmp_path, block=1) as bank:
        assert (bank.available, bank.capacity, bank.room) == (3, 8, 5)
        indices = bank.take(3)
        assert indices == range(2, 5)
        again = use(bank, indices)
    for before, after in zip(used, again, strict=True):
        assert not torch.equal(before, after[:2])


def test_the_rest_of_a_block_is_lost_and_never_repeated(tmp_path: Path) -> None:
    handed_out: list[int] = []
    lost = []
    with create(tmp_path, capacity=200) as bank:
        fill(bank, 200)
    for takes in (1, 1, 3, 20, 40):
        with reopen(tmp_path) as bank:
            available = bank.available
            for _ in range(takes):
                handed_out.extend(bank.take(1))
            assert bank.available == available - takes
        with reopen(tmp_path) as bank:
            lost.append(available - takes - bank.available)
    assert handed_out == sorted(set(handed_out))
    # A run loses no more than it used, and never a whole block.
    assert all(rest <= takes for rest, takes in zip(lost, (1, 1, 3, 20, 40), strict=True))
    assert max(lost) < 16
    assert lost[0] == 0


def test_one_write_of_the_index_serves_many_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = create(tmp_path, capacity=200)
    fill(bank, 200)
    writes = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (writes.append(names), replace(*names)))
    for _ in range(160):
        bank.take(1)
    # Each has its copy in memory: the witness.
    assert 20 <= len(writes) <= 30
    bank.close()


def test_index_is_on_disk_before_a_pad_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = create(tmp_path, block=1)
    fill(bank, 4)
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(descriptor: int) -> None:
        calls.append("fsync " + os.readlink(f"/proc/self/fd/{descriptor}"))
        real["fsync"](descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append(f"replace {source} {target}")
        real["replace"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    bank.take(2)
    index = f"{tmp_path}/bank.index"
    assert calls[:3] == [f"fsync {index}.new", f"replace {index}.new {index}", f"fsync {tmp_path}"]
    assert all("witness" in call or "/tsqp-" in call for call in calls[3:])
    assert read_bank_status(place(tmp_path)).next_index == 2
    bank.close()


def test_records_are_on_disk_before_they_are_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = create(tmp_path)
    synced: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if tmp_path in (path, path.parent):
            synced.append(path.name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    fill(bank, 2)
    # Nonces are counted before the first is drawn.
    counted = ["bank.index.new", tmp_path.name]
    assert synced == [*counted, "bank", "bank.index.new", tmp_path.name]
    bank.close()


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


def test_a_small_token_takes_no_more_than_it_needs(tmp_path: Path) -> None:
    create(tmp_path, capacity=1000).close()
    status = read_bank_status(place(tmp_path))
    # Per record 12 bytes of nonce and 16 of tag.
    assert status.token_bytes == LAYOUT.token_bytes + 2 * 28
    assert status.file_bytes == 4096 + 1000 * status.token_bytes
    assert status.allocated_bytes < status.file_bytes


# ------------------------------------------------------------------------------------ status


def test_status_while_open_and_from_outside(tmp_path: Path) -> None:
    with create(tmp_path, block=4) as bank:
        fill(bank, 6)
        use(bank, bank.take(1))
        bank.take(1)
        inside, outside = bank.available, read_bank_status(place(tmp_path))
    assert inside == 4
    assert (outside.header.capacity, outside.header.mask) == (8, "pad")
    assert (outside.header.model, outside.header.model_digest) == ("tiny", MODEL_DIGEST)
    assert outside.available + outside.next_index == 6
    assert outside.next_index >= 2
    assert re.fullmatch(r"[0-9a-f]{32}", outside.header.bank_id)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", outside.header.created)


def test_status_changes_nothing(tmp_path: Path) -> None:
    create(tmp_path).close()
    before = _snapshot(tmp_path)
    read_bank_status(place(tmp_path))
    assert _snapshot(tmp_path) == before


# ------------------------------------------------------------------------- create and open


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with create(tmp_path) as bank:
            fill(bank, 1)
            bank.take(1)
    finally:
        os.umask(umask)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bank", "bank.index", "bank.key"]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["bank", "bank.index", "bank.key"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_nothing_is_overwritten(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "file":
        (tmp_path / name).write_bytes(b"precious")
    else:
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/{name}", "got an existing file")):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_places_of_key_and_index_are_parameters(tmp_path: Path) -> None:
    for folder in ("data", "memory"):
        (tmp_path / folder).mkdir()
    files = (tmp_path / "data" / "bank", tmp_path / "memory" / "k", tmp_path / "memory" / "i")
    there = BankPlace.at(*files, beside_bank=True)
    with BankFile.create(there, PURPOSE, capacity=4, block=1) as bank:
        fill(bank, 2)
        bank.take(1)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["bank"]
    assert {path.name for path in (tmp_path / "memory").iterdir()} == {"k", "i"}
    with BankFile.open(there, PURPOSE) as bank:
        assert bank.take(1) == range(1, 2)
    assert read_bank_status(there).available == 0


def test_create_leaves_nothing_behind_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(PadBankError, match="Input/output error"):
        create(tmp_path)
    assert not list(tmp_path.iterdir())


def test_create_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/none", "No such file")):
        create(tmp_path / "none")


def test_bank_that_will_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=2048))
    needed = 4096 + 8 * (LAYOUT.token_bytes + 2 * 28)
    with pytest.raises(
        PadBankError, match=_message("got 4096 bytes available", f"expected {needed} bytes")
    ):
        create(tmp_path)
    assert not list(tmp_path.iterdir())


def test_disk_that_becomes_full_while_filling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = create(tmp_path)
    free = os.statvfs(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    needed = 3 * bank_format.record_bytes(LAYOUT.sites[0], 1)
    with (
        bank.begin(3) as batch,
        pytest.raises(
            PadBankError, match=rf"bank: got \d+ bytes available, expected {needed} bytes"
        ),
    ):
        put_all(batch)
    monkeypatch.undo()
    assert free.f_bavail > 0
    fill(bank, 8)
    use(bank, bank.take(8))
    bank.close()


def test_writes_that_end_early_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data)[:7], at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:5]))
    with create(tmp_path, block=1) as bank:
        fill(bank, 3)
        use(bank, bank.take(1))
    monkeypatch.undo()
    with reopen(tmp_path) as bank:
        use(bank, bank.take(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_digest": "c" * 64, "model": "other"},
            ("bank: model: got pads for tiny, expected pads for other: its own --bank",),
        ),
        ({"linear_digest": "d" * 64}, ("bank: model", "pads for tiny, whose files have changed")),
        ({"mask": "float-noise"}, ("bank: mask", "got pad", "expected float-noise")),
        # Another option, or a bank from when options were not written down.
        ({"mask": "pad bits=8"}, ("bank: mask", "got pad", "expected pad bits=8")),
        (
            {"layout": PadLayout((LAYOUT.sites[0], SiteShape(1, "qkv_proj", 2, 6)))},
            ("bank: layout, layer 1 qkv_proj", "got 2 -> 5", "expected 2 -> 6"),
        ),
        (
            {"layout": PadLayout(LAYOUT.sites[1:])},
            ("bank: layout, layer 0 o_proj", "got 3 -> 2", "expected no pads"),
        ),
        (
            {"layout": PadLayout((*LAYOUT.sites, SiteShape(1, "down_proj", 1, 1)))},
            ("bank: layout, layer 1 down_proj", "got no pads", "expected 1 -> 1"),
        ),
    ],
)
def test_bank_of_something_else_is_refused(
    change: dict[str, Any], message: tuple[str, ...], tmp_path: Path
) -> None:
    create(tmp_path).close()
    layout = change.pop("layout", LAYOUT)
    wanted = Purpose.of(layout, **PURPOSE.model_dump(exclude={"sites"}) | change)
    with pytest.raises(PadBankError, match=_message(*message)):
        BankFile.open(place(tmp_path), wanted)
    reopen(tmp_path).close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_key_that_others_can_reach_is_refused(mode: int, tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "bank.key").chmod(mode)
    with pytest.raises(PadBankError, match=_message("bank.key: mode", "expected -rw-------")):
        reopen(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ("got another file",)),
        (b"\xff\xfe\x00", ("got another file",)),
        (b"tsqp-pad-bank-key 2 " + b"0" * 64 + b"\n", ("another file", "-key 1 and 64 hex")),
        (b"tsqp-pad-bank-key 1 " + b"0" * 62 + b"\n", ("another file", "64 hex digits")),
        (b"tsqp-pad-bank-key 1 " + b"g" * 64 + b"\n", ("64 hex digits",)),
        (b"tsqp-pad-bank-key 1 " + b"0" * 64 + b"\n", ("bank: key id", "bank.key", "expected")),
    ],
)
def test_key_file_with_another_content_is_refused(
    content: bytes, message: tuple[str, ...], tmp_path: Path
) -> None:
    create(tmp_path).close()
    (tmp_path / "bank.key").write_bytes(content)
    with pytest.raises(
        PadBankError, match=_message("bank.key" if len(message) < 3 else "", *message)
    ):
        reopen(tmp_path)


@pytest.mark.parametrize("name", ["bank", "bank.index", "bank.key"])
def test_missing_file_is_named(name: str, tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / name).unlink()
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/{name}: ", "No such file")):
        reopen(tmp_path)
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/{name}: ", "No such file")):
        read_bank_status(place(tmp_path))


@pytest.mark.parametrize("name", ["bank", "bank.key"])
def test_pipes_and_folders_are_refused_without_waiting(name: str, tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name, 0o600)
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/{name}", "no regular file")):
        reopen(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(PadBankError, match=_message(f"{tmp_path}/{name}")):
        reopen(tmp_path)


def test_files_of_two_banks_do_not_mix(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        with create(folder) as bank:
            fill(bank, 2)
    for name, message in (
        ("bank", "key id"),
        ("bank.key", "key id"),
        ("bank.index", "the bank that it is used with"),
    ):
        own = (folders[0] / name).read_bytes()
        shutil.copy(folders[1] / name, folders[0] / name)
        with pytest.raises(PadBankError, match=_message(message)):
            reopen(folders[0])
        (folders[0] / name).write_bytes(own)
    reopen(folders[0]).close()


def test_two_banks_with_one_key_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_module.secrets, "token_bytes", bytes)
    bank_ids = iter((uuid4().hex, uuid4().hex))  # a witness outlives its bank
    monkeypatch.setattr(bank_module.secrets, "token_hex", lambda count: next(bank_ids))
    folders = [tmp_path / "one", tmp_path / "two"]
    drawn = []
    for folder in folders:
        folder.mkdir()
        with create(folder, block=1) as bank:
            fill(bank, 2)
            drawn.append(use(bank, bank.take(1)))
    for one, two in zip(*drawn, strict=True):
        assert not torch.equal(one, two)
    first, second = (bytearray((folder / "bank").read_bytes()) for folder in folders)
    assert first[:20] == second[:20]  # magic, version and key id
    assert first[4096:] != second[4096:]
    (folders[0] / "bank").write_bytes(first[:4096] + second[4096:])
    with reopen(folders[0]) as bank, pytest.raises(PadBankError, match="authentication tag"):
        use(bank, bank.take(1))
    shutil.copy(folders[1] / "bank.index", folders[0] / "bank.index")
    with pytest.raises(PadBankError, match="the bank that it is used with"):
        reopen(folders[0])


def test_each_purpose_has_a_key_of_its_own() -> None:
    keys = bank_format.Keys.derive(bytes(32), b"a header")
    assert len({keys.header_mac, keys.index_mac, keys.records, keys.pads}) == 4


def test_a_bound_that_was_written_once_never_moves_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index was written, and then its copy in memory could not be."""
    with create(tmp_path, block=2) as bank:
        fill(bank, 6)
        with monkeypatch.context() as patched:
            write = bank_module.replace

            def but_no_witness(path: Path, content: bytes) -> None:
                if path.suffix == ".witness":
                    raise OSError(errno.EIO, "")
                write(path, content)

            patched.setattr(bank_module, "replace", but_no_witness)
            with pytest.raises(PadBankError):
                bank.take(1)
        fill(bank, 1)
        assert read_bank_status(place(tmp_path)).next_index >= 1


# --------------------------------------------------------------------------------- tampering


def test_every_byte_of_header_and_index_counts(tmp_path: Path) -> None:
    with create(tmp_path, capacity=2) as bank:
        fill(bank, 2)
    for name, length in (("bank", 4096), ("bank.index", bank_format.STATE_BYTES)):
        path = tmp_path / name
        content = path.read_bytes()
        for position in range(length):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            with pytest.raises(PadBankError, match=_message(f"{tmp_path}/bank")):
                reopen(tmp_path)
        path.write_bytes(content)
    reopen(tmp_path).close()


def test_every_byte_of_a_record_counts(tmp_path: Path) -> None:
    with create(tmp_path, capacity=2, block=1) as bank:
        fill(bank, 2)
    path = tmp_path / "bank"
    files = _snapshot(tmp_path)
    first, second = (bank_format.record_bytes(site, 1) for site in LAYOUT.sites)
    for position in range(first + second):
        site = LAYOUT.sites[position >= first]
        other = LAYOUT.sites[position < first]
        changed = bytearray(files["bank"])
        changed[4096 + position] ^= 1 << position % 8
        path.write_bytes(changed)
        with reopen(tmp_path) as bank:
            indices = bank.take(1)
            with pytest.raises(PadBankError, match=_message(f"{path}: pad 0, {site}", "tag")):
                bank.factors(indices, site.number)
            # Damaged or not, the pair is used up.
            with pytest.raises(RuntimeError, match="index 0"):
                bank.factors(indices, site.number)
            r, u = bank.factors(indices, other.number)
            assert torch.equal(u, product(other.number, r))
            use(bank, bank.take(1))
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        new_boot(tmp_path)


def test_records_that_changed_places_do_not_open(tmp_path: Path) -> None:
    layout = PadLayout((SiteShape(0, "qkv_proj", 1, 3), SiteShape(0, "o_proj", 1, 3)))
    size = bank_format.record_bytes(layout.sites[0], 1)
    purpose = Purpose.of(layout, mask="pad", model_digest="a" * 64, linear_digest="b" * 64)
    made = BankFile.create(place(tmp_path), purpose, capacity=2, block=1)
    with made, made.begin(2) as batch:
        for site in (0, 1):
            batch.put(site, torch.zeros(2, 3, dtype=torch.int32))
        batch.commit()
    content = (tmp_path / "bank").read_bytes()
    records = [content[4096 + i * size : 4096 + (i + 1) * size] for i in range(4)]
    assert len(b"".join(records)) == len(content) - 4096
    copy = BankPlace.at(tmp_path / "copy", tmp_path / "bank.key", beside_bank=True)
    for other in (1, 2, 3):  # another site, another index, both
        swapped = list(records)
        swapped[0], swapped[other] = swapped[other], swapped[0]
        (tmp_path / "copy").write_bytes(content[:4096] + b"".join(swapped))
        shutil.copy(tmp_path / "bank.index", tmp_path / "copy.index")
        new_boot(tmp_path)
        with (
            BankFile.open(copy, purpose) as bank,
            pytest.raises(PadBankError, match="pad 0, layer 0 qkv_proj"),
        ):
            bank.factors(bank.take(1), 0)


def test_a_slots_earlier_record_does_not_open(tmp_path: Path) -> None:
    with create(tmp_path, capacity=2, block=1) as bank:
        fill(bank, 2)
        old = (tmp_path / "bank").read_bytes()
        use(bank, bank.take(2))
        fill(bank, 2)
    (tmp_path / "bank").write_bytes(old)
    with reopen(tmp_path) as bank, pytest.raises(PadBankError, match="pad 2"):
        use(bank, bank.take(1))


@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_file_of_another_length_is_refused(change: int, tmp_path: Path) -> None:
    create(tmp_path, capacity=100).close()
    size = (tmp_path / "bank").stat().st_size
    os.truncate(tmp_path / "bank", size + change)
    with pytest.raises(
        PadBankError, match=_message("bank: size", f"got {size + change}", f"expected {size}")
    ):
        reopen(tmp_path)
    os.truncate(tmp_path / "bank", 10)
    with pytest.raises(PadBankError, match="bank: got no magic bytes"):
        reopen(tmp_path)


def test_file_truncated_while_open(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 2)
        os.truncate(tmp_path / "bank", 4096 + 5)
        with pytest.raises(PadBankError, match=_message("pad 0", "got 5 bytes")):
            bank.factors(bank.take(1), 1)


def test_index_that_was_cut_or_grew_is_refused(tmp_path: Path) -> None:
    create(tmp_path).close()
    index = tmp_path / "bank.index"
    content = index.read_bytes()
    for wrong in (b"", content[:-1], content + b"\0"):
        index.write_bytes(wrong)
        with pytest.raises(PadBankError, match=_message(str(index))):
            reopen(tmp_path)


def test_what_a_crash_left_beside_the_index_does_no_harm(tmp_path: Path) -> None:
    beside = tmp_path / "bank.index.new"
    with create(tmp_path, block=1) as bank:
        beside.write_bytes(b"x" * 1000)
        fill(bank, 2)
        assert not beside.exists()
        assert read_bank_status(place(tmp_path)).available == 2
        beside.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PadBankError, match=_message("bank.index: got")):
            bank.take(1)
        assert not (tmp_path / "elsewhere").exists()
        beside.unlink()
        use(bank, bank.take(2))
    with reopen(tmp_path) as bank:
        assert bank.available == 0


def test_versions_are_checked_first(tmp_path: Path) -> None:
    create(tmp_path).close()
    for name in ("bank", "bank.index"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:11] + b"\x01" + content[12:])
        with pytest.raises(
            PadBankError, match=_message(f"{name}: version", "got 1, expected 3 (make a new bank")
        ):
            reopen(tmp_path)
        (tmp_path / name).write_bytes(content)


def _sealed(folder: Path) -> int:
    content = (folder / "bank.index").read_bytes()
    return int.from_bytes(content[: -bank_format._MAC_BYTES][-8:], "big")


def test_random_nonces_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_module, "MAX_RECORDS", 2 * len(LAYOUT.sites) + 1)
    with create(tmp_path) as bank:
        fill(bank, 2)
        before = _snapshot(tmp_path)
        with pytest.raises(
            PadBankError, match=_message("records ever encrypted", "got 6", "most 5", "a new bank")
        ):
            bank.begin(1)
        assert _snapshot(tmp_path) == before
        # What is there can still be used.
        use(bank, bank.take(2))


def test_nonces_of_batches_that_were_lost_count_as_well(
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
        with pytest.raises(PadBankError, match=_message("got 20", "at most 18")):
            bank.begin(2)
        fill(bank, 1)


def test_no_nonce_is_drawn_before_it_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(tmp_path) as bank:
        with monkeypatch.context() as patched:
            patched.setattr(bank_module.secrets, "token_bytes", lambda count: pytest.fail("drawn"))
            beside = tmp_path / "bank.index.new"
            beside.symlink_to(tmp_path / "elsewhere")
            with pytest.raises(PadBankError, match=_message("bank.index: got")):
                bank.begin(2)
            beside.unlink()
        fill(bank, 2)  # no batch was left open
    assert _sealed(tmp_path) == 8  # more than was drawn, never less


def test_index_without_the_count_of_nonces_is_refused(tmp_path: Path) -> None:
    """As it was before they were counted: eight bytes shorter."""
    create(tmp_path).close()
    index = tmp_path / "bank.index"
    content = index.read_bytes()
    index.write_bytes(content[:60] + content[68:])
    expected = f"expected an index of {len(content)} bytes"
    with pytest.raises(PadBankError, match=_message("index: got", f"{len(content) - 8}", expected)):
        reopen(tmp_path)


def test_keys_do_not_show_in_messages() -> None:
    keys = bank_format.Keys.derive(bytes(32), b"header")
    shown = repr(keys) + str(keys)
    for secret in (keys.header_mac, keys.index_mac, keys.records, keys.pads):
        assert repr(secret) not in shown
        assert secret.hex() not in shown
    assert repr(keys.header_hash) in shown  # guards the test


# --------------------------------------------------------------------------- one at a time


def test_second_opener_is_refused_and_told_who(tmp_path: Path) -> None:
    with create(tmp_path):
        with pytest.raises(
            PadBankError, match=_message(f"{tmp_path}/bank: got a bank in use")
        ) as caught:
            reopen(tmp_path)
        assert f"by process {os.getpid()}," in str(caught.value)
    reopen(tmp_path).close()


def test_another_process_is_refused_too(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from protocol.errors import PadBankError\n"
        "from tests.unit.tee_side.pads.tiny import reopen\n"
        "try: reopen(Path(sys.argv[1]))\n"
        "except PadBankError as error: print(error)\n"
    )
    with create(tmp_path):
        told = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
        ).stdout
    assert "a bank in use" in told


def test_a_copy_of_the_file_with_the_same_key_is_refused(tmp_path: Path) -> None:
    with create(tmp_path):
        for suffix in ("", ".index"):
            shutil.copy(tmp_path / f"bank{suffix}", tmp_path / f"copy{suffix}")
        copy = BankPlace.at(tmp_path / "copy", tmp_path / "bank.key", beside_bank=True)
        with pytest.raises(PadBankError, match=_message("bank.key: got a bank in use")):
            BankFile.open(copy, PURPOSE)


def test_files_stay_open_until_the_batch_has_ended(tmp_path: Path) -> None:
    bank = create(tmp_path)
    batch = bank.begin(1)
    bank.close()
    with pytest.raises(PadBankError, match="in use"):
        reopen(tmp_path)
    batch.abandon()
    with reopen(tmp_path) as bank:
        assert bank.room == 8


def test_bank_that_failed_to_open_is_not_left_locked(tmp_path: Path) -> None:
    create(tmp_path).close()
    gc.collect()  # what other tests left must not be closed meanwhile
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PadBankError, match="bank: model"):
            BankFile.open(place(tmp_path), PURPOSE.model_copy(update={"model_digest": "c" * 64}))
    assert len(os.listdir("/proc/self/fd")) == opened
    reopen(tmp_path).close()


def test_exhausted_bank_writes_nothing(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        fill(bank, 1)
        before = _snapshot(tmp_path)
        with pytest.raises(PadsExhaustedError):
            bank.take(2)
        assert _snapshot(tmp_path) == before
