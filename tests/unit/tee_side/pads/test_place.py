"""Where a bank's files may lie, and that an index which was put back is noticed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import PadBankError
from tee_side.protect.pads import bank_files
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace
from tests.unit.tee_side.pads.tiny import PURPOSE, create, fill, new_boot, place, reopen, use


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on a file system in memory."""
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


# ------------------------------------------------------------------------ key and index apart


@pytest.mark.parametrize("beside", ["key", "index", "both"])
def test_a_key_or_index_on_the_banks_own_file_system_is_refused(
    beside: str, tmp_path: Path, memory: Path, on_disk: None
) -> None:
    files = {"key": memory / "k", "index": memory / "i"}
    for name in files if beside == "both" else [beside]:
        files[name] = tmp_path / name
    refused = BankPlace(tmp_path / "bank", **files)
    with pytest.raises(PadBankError) as caught:
        BankFile.create(refused, PURPOSE, capacity=4)
    named = "key" if beside == "both" else beside
    assert caught.value.where == str(tmp_path / named)
    for part in (f"--bank-{named} FILE", "--bank-key-beside-bank", "recorded traffic"):
        assert part in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert not list(memory.iterdir())
    # Nor does such a bank open, whoever put the files there.
    allowed = BankPlace(tmp_path / "bank", **files, beside_bank=True)
    BankFile.create(allowed, PURPOSE, capacity=4).close()
    with pytest.raises(PadBankError, match="the file system of the bank"):
        BankFile.open(refused, PURPOSE)


def test_the_default_places_are_refused_on_a_disk(tmp_path: Path, on_disk: None) -> None:
    with pytest.raises(PadBankError, match=r"bank\.key: got the file system of the bank"):
        BankFile.create(BankPlace.at(tmp_path / "bank"), PURPOSE, capacity=4)


def test_files_in_memory_may_be_beside_each_other(memory: Path) -> None:
    BankFile.create(BankPlace.at(memory / "bank"), PURPOSE, capacity=4).close()
    BankFile.open(BankPlace.at(memory / "bank"), PURPOSE).close()


@pytest.mark.parametrize("linked", ["bank", "key", "index"])
def test_links_do_not_hide_where_a_file_is(
    linked: str, tmp_path: Path, memory: Path, on_disk: None
) -> None:
    """A file that is named elsewhere, and lies beside the bank; or a bank that does so."""
    files = {"bank": tmp_path / "bank", "key": memory / "k", "index": memory / "i"}
    BankFile.create(BankPlace(**files), PURPOSE, capacity=4).close()
    BankFile.open(BankPlace(**files), PURPOSE).close()
    if linked == "bank":
        (memory / "bank").symlink_to(files["bank"])
        files = {"bank": memory / "bank", "key": tmp_path / "k", "index": memory / "i"}
        shutil.move(memory / "k", tmp_path / "k")
    else:
        moved = shutil.move(files[linked], tmp_path / linked)
        files[linked].symlink_to(moved)
    with pytest.raises(PadBankError, match="the file system of the bank"):
        BankFile.open(BankPlace(**files), PURPOSE)


def test_a_file_system_that_is_not_known_is_none_in_memory() -> None:
    assert bank_files._in_memory(os.stat("/dev/shm").st_dev)
    assert not bank_files._in_memory(os.makedev(4000, 4000))
    assert not bank_files._in_memory(os.stat("/proc").st_dev)


# -------------------------------------------------------------------------------- the witness


def test_an_index_that_was_put_back_is_noticed(tmp_path: Path) -> None:
    with create(tmp_path, block=1) as bank:
        fill(bank, 4)
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        use(bank, bank.take(2))
    for name in ("bank", "bank.index"):  # the older bank with it changes nothing
        now = (tmp_path / name).read_bytes()
        for file, content in before.items():
            if file in (name, "bank.index"):
                (tmp_path / file).write_bytes(content)
        with pytest.raises(PadBankError, match=r"bank.index: an older copy, put back: got pads 0"):
            reopen(tmp_path)
        with pytest.raises(PadBankError, match="put back"):
            read_bank_status(place(tmp_path))
        (tmp_path / name).write_bytes(now)
    # After a restart of the machine nothing in it can tell: what docs/limitations.md says.
    (tmp_path / "bank.index").write_bytes(before["bank.index"])
    new_boot(tmp_path)
    with reopen(tmp_path) as bank:
        assert bank.take(1) == range(1)


@pytest.mark.parametrize("filled", [0, 2])
def test_nonces_that_went_back_are_noticed_though_no_pad_was_used(
    filled: int, tmp_path: Path
) -> None:
    with create(tmp_path) as bank:
        before = (tmp_path / "bank.index").read_bytes()
        batch = bank.begin(2)
        batch.abandon()  # nonces were counted
        if filled:
            fill(bank, filled)
    (tmp_path / "bank.index").write_bytes(before)
    with pytest.raises(PadBankError, match="put back"):
        reopen(tmp_path)


def test_the_witness_is_written_after_the_index_and_before_a_pad_is_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = create(tmp_path, block=1)
    fill(bank, 4)
    calls: list[Path] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        calls.append(Path(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    bank.take(1)
    assert calls == [tmp_path / "bank.index", _witness(tmp_path)]
    assert calls[1].read_bytes() == calls[0].read_bytes()

    def failing(source: Path, target: Path) -> None:
        if Path(target) == calls[1]:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PadBankError, match=re.escape(str(calls[1]))):
        bank.take(1)
    monkeypatch.undo()
    # What it might have handed out is not handed out again.
    assert bank.take(1) == range(1, 2)
    bank.close()
    with reopen(tmp_path) as bank:
        assert bank.take(1) == range(2, 3)


def test_a_process_that_is_killed_before_the_witness_leaves_a_bank_that_opens(
    tmp_path: Path,
) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tests.unit.tee_side.pads.tiny import fill, reopen\n"
        "real = os.replace\n"
        "def replace(source, target):\n"
        "    if str(target).endswith('.witness'): os._exit(9)\n"
        "    real(source, target)\n"
        "bank = reopen(Path(sys.argv[1]), block=1)\n"
        "os.replace = replace\n"
        "bank.take(1)\n"
    )
    with create(tmp_path, block=1) as bank:
        fill(bank, 3)
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert killed.returncode == 9
    with reopen(tmp_path) as bank:
        assert bank.take(1) == range(1, 2)


def test_status_beside_a_process_that_uses_the_bank_reports_no_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the witness before the index, which may move on in between."""
    with create(tmp_path, block=1) as bank:
        fill(bank, 4)
        read = bank_files.read_file

        def slow(path: Path, most: int, *, private: bool) -> bytes:
            found = read(path, most, private=private)
            if path.suffix == ".witness":
                bank.take(1)
            return found

        monkeypatch.setattr("tee_side.protect.pads.bank.read_file", slow)
        assert read_bank_status(place(tmp_path)).next_index == 1


@pytest.mark.parametrize("kind", ["link", "folder", "mode", "another bank's", "cut"])
def test_a_witness_that_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    create(tmp_path / "a").close()
    witness = _witness(tmp_path / "a")
    content = witness.read_bytes()
    if kind == "mode":
        witness.chmod(0o644)
    elif kind == "cut":
        witness.write_bytes(content[:-1])
    else:
        witness.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        witness.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        witness.mkdir()
    elif kind == "another bank's":
        (tmp_path / "b").mkdir()
        create(tmp_path / "b").close()
        shutil.copy(_witness(tmp_path / "b"), witness)
    with pytest.raises(PadBankError, match=re.escape(str(witness))):
        reopen(tmp_path / "a")
    if kind == "folder":
        witness.rmdir()


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


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_witness_where_others_could_replace_it_is_refused(
    mode: int, tmp_path: Path, memory: Path
) -> None:
    memory.chmod(mode)
    where = BankPlace.at(tmp_path / "bank", witness=memory / "w", beside_bank=True)
    with pytest.raises(PadBankError, match="a directory of this user alone, as mkdir -m 700"):
        BankFile.create(where, PURPOSE, capacity=4)


def test_a_witness_directly_in_a_shared_directory_is_told_to_have_one_of_its_own(
    tmp_path: Path,
) -> None:
    where = BankPlace.at(tmp_path / "bank", witness=Path("/dev/shm/w"), beside_bank=True)
    with pytest.raises(PadBankError) as caught:
        BankFile.create(where, PURPOSE, capacity=4)
    assert caught.value.where == "/dev/shm"
    assert caught.value.got == "drwxrwxrwt"
    assert caught.value.expected == "a directory of this user alone, as mkdir -m 700 makes it"


def test_the_place_of_the_witness_is_a_parameter(tmp_path: Path, memory: Path) -> None:
    where = BankPlace.at(tmp_path / "bank", witness=memory / "w", beside_bank=True)
    with BankFile.create(where, PURPOSE, capacity=4) as bank:
        fill(bank, 1)
    assert (memory / "w").stat().st_mode & 0o777 == 0o600
    assert (memory / "w").read_bytes() == (tmp_path / "bank.index").read_bytes()


def test_a_witness_beside_bank_or_index_would_witness_nothing(
    tmp_path: Path, on_disk: None
) -> None:
    where = BankPlace.at(tmp_path / "bank", witness=tmp_path / "w", beside_bank=True)
    with pytest.raises(PadBankError, match=r"--bank-witness .*could be put back"):
        BankFile.create(where, PURPOSE, capacity=4)


def test_without_memory_a_place_for_the_witness_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_files, "_in_memory", lambda device: False)
    with pytest.raises(PadBankError, match="--bank-witness: got no file system in memory"):
        create(tmp_path)


def test_what_is_left_is_what_another_process_would_find(tmp_path: Path) -> None:
    """Not what this one still has of its block: that is lost when it ends."""
    with create(tmp_path, block=4) as bank:
        fill(bank, 8)
        for _ in range(5):
            bank.take(1)
        left = bank.left
        assert read_bank_status(place(tmp_path)).available == left < bank.available
    assert read_bank_status(place(tmp_path)).available == left
