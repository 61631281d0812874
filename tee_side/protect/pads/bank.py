"""Pads in a file: made ahead of time, encrypted, and never handed out twice across crashes.

Three files: FILE holds u of every (token index, site), FILE.index says which indices were used,
FILE.key is the key (`BankPlace` says where each is). r is never stored; it is computed again from
the key.

**Order on disk.** Filling: index file (how many nonces), records, fsync, index file. Taking: index
file, its witness, and only then are the indices handed out, a block at a time. The index file is
replaced as a whole (write beside, fsync, rename, fsync of the directory), so a crash leaves the old
one or the new one. What is stored as handed out never decreases: a crash costs the rest of a block
and the batch being filled.

**Records.** One holds u of a site for a group of consecutive indices: calls cost as much as data
where it is one index. What the reading of one token decrypts for the next ones waits in memory.
Each is AES-256-GCM under a random nonce, with the header's hash, its first index and site as
associated data, in a slot of index % capacity: a record that was moved, exchanged or left over
from the slot's earlier use does not open. After a crash the same indices are filled again, with the
same r; none of them had been handed out, so no pad is used twice. The nonce is random, rather than
made of index and site, because the second u need not be the first: float products depend on how
many rows were computed at once, and a machine can err. Two plaintexts under one nonce would give
their difference away and let records be forged; so nonces are counted, on disk, before they are
drawn, and a bank ends while equal ones are unlikely (`bank_files.MAX_RECORDS`).

**Places.** Key and index are refused on the bank's own file system (`BankPlace.check_apart`). A
*witness*, a copy of the index in memory, is written after every write of the index and compared
when the bank is opened: an index that was put back since the machine started is a PadBankError.

**What this cannot do.** A host that puts back an older FILE.index while the machine is off makes
the bank hand out pads again, which gives the difference of two plaintexts away: that file alone is
enough for pads whose slots were not filled again since, and the older FILE with it for all. A
backup or a snapshot of the VM that is started again does the same by accident: the witness is
turned back with the memory. The remedies are storage that the host cannot turn back, and a key that
does not outlive it: keep key and index file on memory-backed file systems inside the VM, so that
after a reboot the bank opens no more and has to be made anew; never copy the files. The host also
sees when pads are used, and how many.
"""

import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, starmap
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import PadBankError
from tee_side.protect.pads.bank_files import (
    KEY_LINE,
    MAX_RECORDS,
    NEW_FILE,
    NONCE_BYTES,
    STATE_BYTES,
    BankHeader,
    BankPlace,
    Keys,
    Purpose,
    State,
    encode_header,
    free_bytes,
    lock,
    open_file,
    read_file,
    read_header,
    read_key,
    record_bytes,
    refusal,
    refusing,
    replace,
    slot_bytes,
    sync_directory,
    write_out,
)
from tee_side.protect.pads.store import DEFAULT_BLOCK, PadStore, reading_threads
from tee_side.protect.randomness import KEY_BYTES
from tee_side.protect.sites import SiteShape

# From here on what is written of a site is synced at once, while the next one is computed: the
# kernel would begin with it at the commit.
_SYNCED_BYTES = 4 * 1024 * 1024


# Of each site at most one record, decrypted: its first index, and its u [group, O].
Begun: TypeAlias = dict[int, tuple[int, torch.Tensor]]
_NONE_BEGUN = (-1, torch.empty(0, 0, dtype=torch.int32))


@dataclass(frozen=True)
class _Opened:
    """The files of a bank, read and checked, but for the records, which start at `start`."""

    place: BankPlace
    descriptor: int
    header: BankHeader
    keys: Keys
    witness: Path
    state: State
    start: int


class BankFile(PadStore):
    """A `PadStore` in a file; see the module. Made by `create` or `open`, never directly.

    One process at a time: FILE and FILE.key are locked (flock) while it is open.
    """

    def __init__(self, opened: _Opened, files: ExitStack, block: int) -> None:
        layout, keys, state = opened.header.layout, opened.keys, opened.state
        super().__init__(
            layout,
            opened.header.capacity,
            keys.pads,
            first=state.reserved,
            filled=state.filled,
            block=block,
            group=opened.header.group,
            dealers=opened.header.dealers,
        )
        self._opened = opened
        self._path = opened.place.bank
        self._files = files
        # The highest bound that may be on disk, even if writing it seemed to fail, and the nonces
        # that may have been drawn; changes under the lock.
        self._state = state
        # For the taking and for the filling thread.
        self._opener, self._sealer = AESGCM(keys.records), AESGCM(keys.records)
        # Where each site's record stands in FILE, in slot 0.
        sizes = [record_bytes(site, self.group) for site in layout.sites]
        starts = accumulate(sizes, initial=opened.start)
        self._offsets = dict(zip(layout.by_number, starts, strict=False))
        self._slot_bytes = sum(sizes)
        # What tokens are read of, and what another thread decrypts meanwhile: the group behind it.
        # Their memory serves all groups in turns: fresh pages cost as much as decrypting.
        self._begun: Begun = {}
        self._following: Begun = {}
        self._ahead: tuple[int, Future[None]] | None = None
        self._threads = reading_threads()
        self._pool = ThreadPoolExecutor(self._threads, "pads ahead")
        # What the threads may still be reading.
        self._parts: list[Future[Any]] = []
        # Records on their way, in memory that is used again, too. One for each thread of the store,
        # and for the one that has the lock.
        self._reading = [bytearray(max(sizes)) for _ in range(self._threads + 1)]
        self._writing = bytearray(max(sizes))

    @classmethod
    def create(
        cls,
        place: BankPlace,
        purpose: Purpose,
        *,
        capacity: int,
        group: int = 1,
        block: int = DEFAULT_BLOCK,
    ) -> Self:
        """Make an empty bank for `capacity` tokens, filled by groups, and its key, and open it.

        Raises ValueError for a group that does not divide the capacity, and PadBankError if one of
        the files exists, cannot be written, will not fit, or may not lie where it would.
        """
        if capacity % group:
            raise ValueError(f"pad bank: got groups of {group}, expected a divisor of {capacity}")
        place.check_apart()
        header = BankHeader(
            **purpose.model_dump(),
            bank_id=secrets.token_hex(16),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            capacity=capacity,
            group=group,
        )
        key = secrets.token_bytes(KEY_BYTES)
        head, keys = encode_header(header, key)
        size = len(head) + capacity // group * slot_bytes(header.layout, group)
        contents = {
            place.key: f"{KEY_LINE}{key.hex()}\n".encode(),
            place.bank: head,
            place.index: State(0, 0, 0).encode(keys),
        }
        for file in contents:
            PadBankError.unless(not os.path.lexists(file), str(file), "an existing file", "none")
        with refusing(place.bank):
            free = free_bytes(place.bank)
        PadBankError.unless(
            free >= size, str(place.bank), f"{free} bytes available", f"{size} bytes"
        )
        with ExitStack() as made:
            for file, content in contents.items():
                with (
                    refusing(file),
                    PadBankError.instead_of(FileExistsError, str(file), "an existing file", "none"),
                ):
                    descriptor = os.open(file, os.O_EXCL | NEW_FILE, 0o600)
                    made.callback(file.unlink)
                    write_out(descriptor, content, size if file is place.bank else len(content))
                    sync_directory(file)
            made.pop_all()
        return cls.open(place, purpose, block=block)

    @classmethod
    def open(cls, place: BankPlace, purpose: Purpose, *, block: int = DEFAULT_BLOCK) -> Self:
        """Open an existing bank, made for this purpose, and lock it.

        Raises PadBankError that names the file and both values: missing, in use, damaged or
        truncated, put back, a key that is another or that others may read, a place where it may not
        lie, pads for another mask, model or layout.
        """
        place.check_apart()
        with ExitStack() as files:
            opened = _load(place, files, locked=True)
            check_purpose(place.bank, opened.header, purpose)
            with refusing(opened.witness):
                replace(opened.witness, opened.state.encode(opened.keys))
            return cls(opened, files.pop_all(), block)

    def _persist(self, reserved: int, filled: int) -> None:
        self._state = State(max(self._state.reserved, reserved), filled, self._state.sealed)
        content = self._state.encode(self._opened.keys)
        # In this order: a witness that is ahead would refuse an honest index after a crash.
        for file in (self._opened.place.index, self._opened.witness):
            with refusing(file, len(content)):
                replace(file, content)

    def _starting(self, indices: range) -> None:
        wait(self._parts)  # some may be reading what is filled again
        sealed = self._state.sealed + len(indices) // self.group * len(self.layout.sites)
        PadBankError.unless(
            sealed <= MAX_RECORDS,
            f"{self._path}: records ever encrypted",
            f"{sealed} with these",
            f"at most {MAX_RECORDS}: a new bank (nonces of one key must not meet)",
        )
        # Counted even if writing the count fails: the next one that succeeds has it.
        self._state = self._state._replace(sealed=sealed)
        self._persist(self._reserved, self._filled)

    def _write(self, indices: range, site: SiteShape, u_NO: torch.Tensor) -> None:
        sealed = memoryview(self._writing)[: record_bytes(site, self.group)]
        for first, u_GO in zip(indices[:: self.group], u_NO.split(self.group), strict=True):
            bound, offset = self._place(first, site)
            nonce = secrets.token_bytes(NONCE_BYTES)
            sealed[:NONCE_BYTES] = nonce
            self._sealer.encrypt_into(
                nonce, u_GO.numpy().data.cast("B"), bound, sealed[NONCE_BYTES:]
            )
            left = sealed
            with refusing(self._path, (indices.stop - first) // self.group * len(sealed)):
                while left:
                    written = os.pwrite(self._opened.descriptor, left, offset)
                    left, offset = left[written:], offset + written
        if u_NO.nbytes >= _SYNCED_BYTES:
            with refusing(self._path):
                os.fdatasync(self._opened.descriptor)

    def _sync(self) -> None:
        with refusing(self._path):
            os.fsync(self._opened.descriptor)

    def _start_reading(self, indices: range, site: SiteShape) -> Callable[[], torch.Tensor]:
        # numpy asks the kernel for huge pages: the faults of small ones take longer than reading.
        u_TO = torch.from_numpy(numpy.empty((len(indices), site.out_features), numpy.int32))
        whole, group = [], self.group
        for first in range(indices.start - indices.start % group, indices.stop, group):
            start, stop = max(indices.start, first), min(indices.stop, first + group)
            rows = u_TO[start - indices.start : stop - indices.start]
            if stop - start == group:
                whole.append((first, site, rows))
            else:  # kept for the tokens that share it
                rows.copy_(self._begin(first, site, self._begun)[start - first : stop - first])
        shares = [whole[n :: self._threads] for n in range(self._threads)]
        parts = [self._pool.submit(list, starmap(self._open, one)) for one in shares if one]
        self._parts = [part for part in self._parts if not part.done()] + parts

        def result() -> torch.Tensor:
            for part in parts:
                part.result()
            return u_TO

        return result

    def _read_all(self, indices: range) -> dict[int, torch.Tensor]:
        parts: list[dict[int, torch.Tensor]] = []
        for first in range(indices.start - indices.start % self.group, indices.stop, self.group):
            # Without a comprehension here and below, which is a call of a function for each token.
            if [*map(itemgetter(0), self._begun.values())] != [first] * len(self._sites):
                self._advance(first)
            start, stop = max(indices.start - first, 0), min(indices.stop - first, self.group)
            if len(indices) == self.group == stop - start:  # not read again: the caller has it
                begun, self._begun = self._begun, {}
                return {number: u_GO for number, (_, u_GO) in begun.items()}
            # Copies: the next group but one is decrypted into the same memory.
            parts.append({})
            for at, (_, u_GO) in self._begun.items():
                parts[-1][at] = u_GO[start:stop].clone()
        if len(parts) == 1:
            return parts[0]
        return {number: torch.cat([part[number] for part in parts]) for number in self._sites}

    def _advance(self, first: int) -> None:
        """Begin a group at every site, and have the one behind it decrypted meanwhile.

        Decrypting a group takes as long as a token does at a fast service; the thread that works
        on tokens would wait for it at every first one. What is decrypted ahead and never used is
        gone with this process, as pads are that were not decrypted.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == first:
            ahead[1].result()
            self._begun, self._following = self._following, self._begun
        elif ahead is not None:
            ahead[1].exception()  # pads that others took; the thread ends with it
        self._begin_all(first, self._begun)
        following = first + self.group
        if following < self._filled:
            self._ahead = following, self._pool.submit(self._begin_all, following, self._following)

    def _begin_all(self, first: int, begun: Begun) -> None:
        for site in self._sites.values():
            self._begin(first, site, begun)

    def _begin(self, first: int, site: SiteShape, begun: Begun) -> torch.Tensor:
        """Return u of a group that is not read as a whole, decrypted once for all its tokens."""
        was, u_GO = begun.pop(site.number, _NONE_BEGUN)
        if was < 0:
            u_GO = torch.empty(self.group, site.out_features, dtype=torch.int32)
        if was != first:
            self._open(first, site, u_GO)  # not begun where it is not authentic
        begun[site.number] = first, u_GO
        return u_GO

    def _open(self, first: int, site: SiteShape, u_GO: torch.Tensor) -> None:
        """Read the record of a group, and decrypt it into place."""
        bound, offset = self._place(first, site)
        reading = self._reading.pop()
        sealed = memoryview(reading)[: record_bytes(site, self.group)]
        try:
            read = os.preadv(self._opened.descriptor, [sealed], offset)
            if read != len(sealed):
                raise PadBankError(
                    f"{self._path}: pad {first}, {site}", f"{read} bytes", f"{len(sealed)}"
                )
            plain = u_GO.numpy().data.cast("B")
            self._opener.decrypt_into(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound, plain)
        except OSError as error:
            raise refusal(self._path, error, len(sealed)) from error
        except InvalidTag:
            raise PadBankError(
                f"{self._path}: pad {first}, {site}",
                "another record than was written",
                "its authentication tag to match",
            ) from None
        finally:
            self._reading.append(reading)

    def _let_go(self) -> None:
        self._pool.shutdown()
        self._files.close()

    def _place(self, index: int, site: SiteShape) -> tuple[bytes, int]:
        """Return what the record from an index on is bound to, and where it stands in FILE."""
        slot = index % self.capacity // self.group
        offset = self._offsets[site.number] + slot * self._slot_bytes
        bound = self._opened.keys.header_hash + (index << 32 | site.number).to_bytes(12, "big")
        return bound, offset


def read_bank_status(place: BankPlace) -> tuple[BankHeader, State]:
    """Return what a bank says, which another process may be using; nothing is locked or changed.

    What that process has reserved counts as used. Raises PadBankError as `BankFile.open`, but for
    where the files lie and what they are for.
    """
    with ExitStack() as files:
        opened = _load(place, files, locked=False)
        return opened.header, opened.state


def _load(place: BankPlace, files: ExitStack, *, locked: bool) -> _Opened:
    """Read and check everything but the records; FILE and FILE.key stay open as long as `files`."""
    descriptors = []
    # FILE.key as well: a copy of FILE with the same key would use the same pads.
    for path, flags in (
        (place.bank, os.O_RDWR if locked else os.O_RDONLY),
        (place.key, os.O_RDONLY),
    ):
        descriptors.append(open_file(path, flags))
        files.callback(os.close, descriptors[-1])
        if locked:
            lock(descriptors[-1], path)
    bank, key = descriptors
    header, keys, start = read_header(bank, place.bank, read_key(key, place.key), place.key)
    expected = start + header.capacity // header.group * slot_bytes(header.layout, header.group)
    size = os.fstat(bank).st_size
    PadBankError.unless(
        size == expected, f"{place.bank}: size", f"{size} bytes", f"{expected} bytes"
    )

    def state_in(file: Path, *, private: bool = False) -> State:
        content = read_file(file, STATE_BYTES + 1, private=private)
        return State.decode(content, file, header.capacity, keys)

    witness = place.witness_file(header.bank_id)
    # First what is written last, or a process that uses the bank would seem to put it back.
    seen = state_in(witness, private=True) if os.path.lexists(witness) else State(0, 0, 0)
    state = state_in(place.index)
    # `filled` may go back: a batch whose last write failed is made again.
    PadBankError.unless(
        state.reserved >= seen.reserved and state.sealed >= seen.sealed,
        f"{place.index}: an older copy, put back",
        f"pads {state.reserved} .. {state.filled}",
        f"from {seen.reserved} on, as {witness} says: pads would be used"
        " twice; delete the bank and make another",
    )
    return _Opened(place, bank, header, keys, witness, state, start)


def check_purpose(path: Path, made_for: BankHeader, wanted: Purpose) -> None:
    """Raise PadBankError, which says what differs, for a bank that was made for something else."""
    got, expected = ((p.model_digest, p.linear_digest) for p in (made_for, wanted))
    changed = ", whose files have changed since" if made_for.model == wanted.model else ""
    PadBankError.unless(
        got == expected,
        f"{path}: model",
        f"pads for {made_for.model or 'another model'}{changed}",
        f"pads for {wanted.model}: its own --bank, or a new one by pads make",
    )
    PadBankError.unless(made_for.mask == wanted.mask, f"{path}: mask", made_for.mask, wanted.mask)
    owners = [" and ".join(one.dealers) or "none" for one in (made_for, wanted)]
    PadBankError.unless(owners[0] == owners[1], f"{path}: dealers", *owners)
    found, needed = made_for.layout, wanted.layout
    if differing := set(found.sites) ^ set(needed.sites):
        site = min(differing, key=lambda site: site.number)
        shapes = (layout.by_number.get(site.number) for layout in (found, needed))
        said = [f"{s.in_features} -> {s.out_features}" if s else "no pads" for s in shapes]
        raise PadBankError(f"{path}: layout, {site}", said[0], said[1])
