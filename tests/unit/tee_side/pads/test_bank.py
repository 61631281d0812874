"""A bank on disk: opens for its own key, model and layout, in its place; no change goes unseen."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from protocol.errors import PadBankError
from tee_side.protect.pads import bank as bank_module
from tee_side.protect.pads import bank_files
from tee_side.protect.pads.bank import BankFile, read_bank_status
from tee_side.protect.pads.bank_files import BankPlace, Keys, Purpose
from tee_side.protect.sites import PadLayout, SiteShape
from tests.kit.pads import LAYOUT, PURPOSE, create, fill, new_boot, place, put_all, reopen, use
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


def test_a_bank_that_will_not_fit_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bank_module, "free_bytes", lambda _: 4096)
        with pytest.raises(PadBankError, match="got 4096 bytes available"):
            create(tmp_path)
        with pytest.raises(ValueError, match="got groups of 3, expected a divisor of 10"):
            create(tmp_path, 10, group=3)
        for sites in ((), LAYOUT.sites[::-1], LAYOUT.sites[:1] * 2):
            with pytest.raises(ValueError, match="expected ascending numbers"):
                PadLayout(sites)
    assert not list(tmp_path.iterdir())


@each_row(
    ("change", "said"),
    [
        ({"model_digest": "c" * 64, "model": "other"}, "bank: model: got pads for tiny, expected"),
        ({"linear_digest": "d" * 64}, "bank: model: got pads for tiny, whose files have changed"),
        ({"mask": "pad bits=8"}, "bank: mask: got pad, expected pad bits=8"),
        ({"dealers": ("a", "b")}, "bank: dealers: got none, expected a and b"),
        (
            {"sites": (LAYOUT.sites[0], SiteShape(1, "qkv_proj", 2, 6))},
            "bank: layout, layer 1 qkv_proj: got 2 -> 5, expected 2 -> 6",
        ),
        (
            {"sites": (*LAYOUT.sites, SiteShape(1, "down_proj", 2, 6))},
            "bank: layout, layer 1 down_proj: got no pads, expected 2 -> 6",
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
    size = bank_files.record_bytes(layout.sites[0], 1)
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
            bank.start(bank.take(1), 0)()


def _damage(bank: BankFile, first: int, site: SiteShape) -> None:
    _, offset = bank._place(first, site)
    with bank._path.open("r+b") as file:
        file.seek(offset + 20)
        byte = file.read(1)[0]
        file.seek(offset + 20)
        file.write(bytes([byte ^ 1]))


def test_what_did_not_open_ahead_of_its_turn_is_refused_when_it_comes(tmp_path: Path) -> None:
    with create(tmp_path, 16, block=1, group=4) as bank:
        fill(bank, 16)
        _damage(bank, 4, LAYOUT.sites[1])
        use(bank, bank.take(1), at_once=True)
        assert isinstance(bank._ahead[1].exception(), PadBankError)
        _damage(bank, 4, LAYOUT.sites[1])  # put back by who changed it
        use(bank, bank.take(3), at_once=True)
        with pytest.raises(PadBankError, match="pad 4, layer 1 qkv_proj"):
            bank.all_factors(bank.take(1))
        use(bank, bank.take(1), at_once=True)


@each_row("way", ["factors", "all_factors", "start"])
def test_damage_ends_every_pad_of_its_record_and_no_other(tmp_path: Path, way: str) -> None:
    """Whether its site is read alone, ahead of its turn with all others, or by threads."""
    folder, group, (first, second) = tmp_path / way, 4, LAYOUT.sites
    folder.mkdir()
    with create(folder, 16, block=1, group=group) as bank:
        fill(bank, 16)
        _damage(bank, group, second)
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
                    bank.all_factors(one) if way[0] == "a" else bank.start(one, second.number)()
        for index in indices:
            with pytest.raises(RuntimeError, match=f"index {index}"):
                bank.start(range(index, index + 1), second.number)()
        if way != "all_factors":
            bank.start(indices, first.number)()
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
            bank.start(bank.take(1), 1)()


def _sealed(folder: Path) -> int:
    content = (folder / "bank.index").read_bytes()
    return int.from_bytes(content[: -bank_files._MAC_BYTES][-8:], "big")


def test_records_are_encrypted_and_never_equal(tmp_path: Path) -> None:
    """The same u for every pad, and again after an abandoned batch: no two records alike."""
    with create(tmp_path) as bank:
        size = bank_files.record_bytes(LAYOUT.sites[1], 1)
        token = sum(bank_files.record_bytes(site, 1) for site in LAYOUT.sites)
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
    return place(folder).witness_file(read_bank_status(place(folder))[0].bank_id)


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
    # Nor where a file is to be that is not there yet.
    (shm / "later").symlink_to(disk / "later")
    with pytest.raises(PadBankError, match="the file system of the bank"):
        _create(BankPlace(disk / "another", shm / "later", shm / "another"))


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
        # Nor do nonces go back, though no pad was used.
        older = index.read_bytes()
        bank.begin(2).abandon()
    index.write_bytes(older)
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
        assert read_bank_status(place(tmp_path))[1].reserved == 2
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
    monkeypatch.setattr(bank_files, "WITNESSES", tmp_path)
    own = "a directory of this user alone, as mkdir -m 700 makes it"
    for mode, witness, said in (
        (0o720, memory / "w", own),
        (0o702, memory / "w", own),
        (0o700, Path("/dev/shm/w"), f"/dev/shm: got drwxrwxrwt, expected {own}"),
        # It would witness nothing beside bank or index.
        (0o700, tmp_path / "w", r"--bank-witness .*could be put back"),
        (0o700, None, "--bank-witness: got no file system in memory"),
    ):
        memory.chmod(mode)
        with pytest.raises(PadBankError, match=said):
            BankFile.open(at(witness), PURPOSE)
