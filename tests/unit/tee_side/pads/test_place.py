"""Where a bank's files may lie, and that an index which was put back is noticed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import PadBankError
from tee_side.protect.pads import bank_files
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace
from tests.kit.pads import PURPOSE, create, fill, new_boot, place, reopen, use
from tests.kit.rows import each_row


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tsqp-tests-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Path) -> None:
    """Whatever holds the temporary folder counts as a disk: tests may run in memory."""
    disk = tmp_path.stat().st_dev
    found = bank_files._in_memory
    assert memory.stat().st_dev != disk
    monkeypatch.setattr(bank_files, "_in_memory", lambda device: device != disk and found(device))


def _witness(folder: Path) -> Path:
    bank_id = read_bank_status(place(folder)).header.bank_id
    return place(folder).witness_file(bank_id)


def _create(where: BankPlace) -> None:
    BankFile.create(where, PURPOSE, capacity=4).close()


@each_row("beside", ["key", "index"])
def test_a_key_or_index_on_the_banks_own_file_system_is_refused(
    beside: str, tmp_path: Path, memory: Path, on_disk: None
) -> None:
    (tmp_path / beside).mkdir()
    files = {"key": memory / f"{beside}.k", "index": memory / f"{beside}.i"}
    files[beside] = tmp_path / beside / beside
    refused = BankPlace(tmp_path / beside / "bank", **files)
    with pytest.raises(PadBankError) as caught:
        _create(refused)
    assert caught.value.where == str(files[beside])
    assert not [*(tmp_path / beside).iterdir(), *memory.glob(f"{beside}*")]
    # Nor does such a bank open, whoever put the files there.
    _create(BankPlace(tmp_path / beside / "bank", **files, beside_bank=True))
    with pytest.raises(PadBankError, match="the file system of the bank"):
        BankFile.open(refused, PURPOSE)


@each_row("linked", ["bank", "key", "index"])
def test_links_do_not_hide_where_a_file_is(
    linked: str, tmp_path: Path, memory: Path, on_disk: None
) -> None:
    """A file that is named elsewhere, and lies beside the bank; or a bank that does so."""
    disk, shm = tmp_path / linked, memory / linked
    disk.mkdir()
    shm.mkdir()
    files = {"bank": disk / "bank", "key": shm / "k", "index": shm / "i"}
    _create(BankPlace(**files))
    BankFile.open(BankPlace(**files), PURPOSE).close()
    if linked == "bank":
        (shm / "bank").symlink_to(files["bank"])
        shutil.move(shm / "k", disk / "k")
        files |= {"bank": shm / "bank", "key": disk / "k"}
    else:
        moved = shutil.move(files[linked], disk / linked)
        files[linked].symlink_to(moved)
    with pytest.raises(PadBankError, match="the file system of the bank"):
        BankFile.open(BankPlace(**files), PURPOSE)


def test_a_file_system_that_is_not_known_is_none_in_memory() -> None:
    assert bank_files._in_memory(os.stat("/dev/shm").st_dev)
    assert not bank_files._in_memory(os.makedev(4000, 4000))
    assert not bank_files._in_memory(os.stat("/proc").st_dev)


def test_an_index_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    with create(tmp_path, block=1) as bank:
        fill(bank, 4)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        use(bank, bank.take(2))
    index = tmp_path / "bank.index"
    for also in (index, tmp_path / "bank"):  # the older bank with it changes nothing
        now = also.read_bytes()
        index.write_bytes(before[index])
        also.write_bytes(before[also])
        with pytest.raises(PadBankError, match=r"bank.index: an older copy, put back: got pads 0"):
            reopen(tmp_path)
        with pytest.raises(PadBankError, match="put back"):
            read_bank_status(place(tmp_path))
        also.write_bytes(now)
    # After a restart of the machine nothing in it can tell: what docs/limitations.md says.
    index.write_bytes(before[index])
    new_boot(tmp_path)
    with reopen(tmp_path) as bank:
        assert bank.take(1) == range(1)


def test_nonces_that_went_back_are_noticed_though_no_pad_was_used(tmp_path: Path) -> None:
    with create(tmp_path) as bank:
        before = (tmp_path / "bank.index").read_bytes()
        bank.begin(2).abandon()  # nonces were counted
    (tmp_path / "bank.index").write_bytes(before)
    with pytest.raises(PadBankError, match="put back"):
        reopen(tmp_path)


def test_a_witness_that_cannot_be_written_costs_its_pads_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed there leaves a bank that opens, too."""
    with create(tmp_path, block=1) as bank:
        fill(bank, 4)
        witness, index = _witness(tmp_path), tmp_path / "bank.index"
        assert bank.take(1) == range(1)
        assert witness.read_bytes() == index.read_bytes()
        replace = os.replace

        def failing(source: Path, target: Path) -> None:
            if Path(target) == witness:
                raise OSError(28, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(PadBankError, match=re.escape(str(witness))):
            bank.take(1)
        monkeypatch.undo()
        # What it might have handed out is not handed out again by another process, and a bound
        # that was written once never moves back.
        assert witness.read_bytes() != index.read_bytes()
        fill(bank, 1)
        assert read_bank_status(place(tmp_path)).next_index == 2
    with reopen(tmp_path) as bank:
        assert bank.take(1) == range(2, 3)


@each_row("kind", ["link", "pipe", "mode", "another bank's", "cut"])
def test_a_witness_that_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    ours, other = tmp_path / kind / "a", tmp_path / kind / "b"
    for folder in (ours, other):
        folder.mkdir(parents=True)
        create(folder).close()
    witness = _witness(ours)
    if kind == "mode":
        witness.chmod(0o644)
    elif kind == "cut":
        witness.write_bytes(witness.read_bytes()[:-1])
    elif kind == "another bank's":
        shutil.copy(_witness(other), witness)
    elif kind == "pipe":
        witness.unlink()
        os.mkfifo(witness, 0o600)
    else:  # but for the link it could be ours
        witness.symlink_to(shutil.move(witness, other / "elsewhere"))
    with pytest.raises(PadBankError, match=re.escape(str(witness))):
        reopen(ours)


def test_another_users_witness_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path).close()
    witness = _witness(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(PadBankError, match="user 4711"):
        bank_files.read_file(witness, 200, private=True)
    theirs = os.stat_result((0o40700, 0, 0, 1, 4712, *[0] * 5))
    monkeypatch.setattr(os, "lstat", lambda _: theirs)
    with pytest.raises(PadBankError, match="another user's"):
        bank_files._own(tmp_path)


def test_the_place_of_a_witness_is_one_that_only_this_user_writes_to(
    tmp_path: Path, memory: Path, on_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(witness: Path | None) -> BankPlace:
        return BankPlace.at(tmp_path / "bank", witness=witness, beside_bank=True)

    with BankFile.create(at(memory / "w"), PURPOSE, capacity=4) as bank:
        fill(bank, 1)
    assert (memory / "w").stat().st_mode & 0o777 == 0o600
    assert (memory / "w").read_bytes() == (tmp_path / "bank.index").read_bytes()
    own = "a directory of this user alone, as mkdir -m 700 makes it"
    for mode, witness, said in (
        (0o720, memory / "w", own),
        (0o702, memory / "w", own),
        (0o700, Path("/dev/shm/w"), f"/dev/shm: got drwxrwxrwt, expected {own}"),
        # It would witness nothing beside bank or index.
        (0o700, tmp_path / "w", r"--bank-witness .*could be put back"),
    ):
        memory.chmod(mode)
        with pytest.raises(PadBankError, match=said):
            BankFile.open(at(witness), PURPOSE)
