"""Pads in a file: made ahead of time, encrypted, and never handed out twice across crashes.

Three files: FILE holds u of every (token index, site), FILE.index says which indices were used,
FILE.key is the key. r is never stored; it is computed again from the key.

**Order on disk.** Filling: index file (how many nonces), records, fsync, index file. Taking: index
file, and only then are the indices handed out, a block at a time. The index file is replaced as a
whole (write beside, fsync, rename, fsync of the directory), so a crash leaves the old one or the
new one. The stored bounds never decrease: what a crash costs is the rest of a block and the batch
being filled.

**Records.** Each is AES-256-GCM under a random nonce, with the header's hash, index and site as
associated data, in slot index % capacity: a record that was moved, exchanged or left over from the
slot's earlier use does not open. After a crash the same indices are filled again, with the same r;
none of them had been handed out, so no pad is used twice. The nonce is random, rather than made of
index and site, because the second u need not be the first: float products depend on how many rows
were computed at once, and a machine can err. Two plaintexts under one nonce would give their
difference away and let records be forged; so nonces are counted, on disk, before they are drawn,
and a bank ends while equal ones are unlikely (`bank_format.MAX_RECORDS`).

**What this cannot do.** A host that puts back an older FILE.index makes the bank hand out pads
again, which gives the difference of two plaintexts away: that file alone is enough for pads whose
slots were not filled again since, and the older FILE with it for all. No software in the VM can
notice it: everything that it could compare with was put back too. A backup or a snapshot of the VM
that is started again does the same by accident. The remedies are storage that the host cannot turn
back, and a key that does not outlive it: keep key and index file on memory-backed file systems
inside the VM (both places are parameters), so that after a reboot the bank opens no more and has
to be made anew; never copy the files. The host also sees when pads are used, and how many.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypeAlias

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.errors import PadBankError
from tee_side.pads.bank_files import lock, open_file, refusal, replace, require_space, write_new
from tee_side.pads.bank_format import (
    MAX_RECORDS,
    NONCE_BYTES,
    Header,
    Keys,
    State,
    encode_header,
    encode_key,
    encode_state,
    read_header,
    read_key,
    read_state,
    segment_bytes,
)
from tee_side.pads.layout import WORD_BYTES, PadLayout, SiteShape
from tee_side.pads.store import DEFAULT_BLOCK, PadStore
from tee_side.randomness import KEY_BYTES

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class PadBankStatus:
    """What a person wants to know about a bank. `next_index`: the first that was not handed out.

    `file_bytes` is what the bank takes when it is full, `allocated_bytes` what it takes now.
    """

    path: Path
    bank_id: str
    created: str
    mask: str
    model_digest: str
    linear_digest: str
    capacity: int
    available: int
    next_index: int
    token_bytes: int
    file_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class _Files:
    bank: Path
    key: Path
    index: Path

    @classmethod
    def of(cls, path: Path, key_path: Path | None, index_path: Path | None) -> _Files:
        return cls(path, key_path or Path(f"{path}.key"), index_path or Path(f"{path}.index"))


class BankFile(PadStore):
    """A `PadStore` in a file; see the module. Made by `create` or `open`, never directly.

    One process at a time: FILE and FILE.key are locked (flock) while it is open.
    """

    def __init__(
        self, files: _Files, header: Header, keys: Keys, state: State, start: int, block: int
    ) -> None:
        layout = header.layout
        super().__init__(
            layout,
            header.capacity,
            keys.pads,
            first=state.reserved,
            filled=state.filled,
            block=block,
        )
        self._files = files
        self._header = header
        self._keys = keys
        # The highest bound that may be on disk, even if writing it seemed to fail.
        self._stored = state.reserved
        # Nonces that may have been drawn; changes under the lock.
        self._sealed = state.sealed
        # For the taking and for the filling thread.
        self._opener, self._sealer = AESGCM(keys.records), AESGCM(keys.records)
        self._start = start
        self._offsets, self._slot_bytes = _offsets(layout)
        self._descriptors: list[int] = []

    @classmethod
    def create(
        cls,
        path: Path,
        key_path: Path | None = None,
        *,
        layout: PadLayout,
        mask: str,
        model_digest: str,
        linear_digest: str,
        capacity: int,
        index_path: Path | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> Self:
        """Make an empty bank for `capacity` tokens and its key, and open it.

        `mask`: what u is made for, as `Mask.described`; digests as in `protocol.model.identity`,
        in hex. Raises PadBankError if one of the files exists, cannot be written, or will not fit.
        """
        files = _Files.of(path, key_path, index_path)
        header = Header(
            bank_id=secrets.token_hex(16),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            mask=mask,
            model_digest=model_digest,
            linear_digest=linear_digest,
            capacity=capacity,
            sites=tuple(
                (s.number, s.layer, s.operator, s.in_features, s.out_features) for s in layout.sites
            ),
        )
        key = secrets.token_bytes(KEY_BYTES)
        head, keys = encode_header(header, key)
        size = len(head) + capacity * _offsets(layout)[1]
        contents = {
            files.key: encode_key(key),
            files.bank: head,
            files.index: encode_state(State(0, 0, 0), keys),
        }
        for file in contents:
            if os.path.lexists(file):
                raise PadBankError(str(file), got="an existing file", expected="none")
        made: list[Path] = []
        try:
            require_space(path, size)
            for file, content in contents.items():
                write_new(file, content, size if file is files.bank else len(content), made)
        except BaseException as error:
            for file in made:
                file.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise PadBankError(
                    str(error.filename or path),
                    got=error.strerror or type(error).__name__,
                    expected="a new file of a bank",
                ) from None
            raise
        return cls.open(
            path,
            key_path,
            layout=layout,
            mask=mask,
            model_digest=model_digest,
            linear_digest=linear_digest,
            index_path=index_path,
            block=block,
        )

    @classmethod
    def open(
        cls,
        path: Path,
        key_path: Path | None = None,
        *,
        layout: PadLayout,
        mask: str,
        model_digest: str,
        linear_digest: str,
        index_path: Path | None = None,
        block: int = DEFAULT_BLOCK,
    ) -> Self:
        """Open an existing bank, made for this model and layout, and lock it.

        Raises PadBankError that names the file and both values: missing, in use, damaged or
        truncated, another key, a key that others may read, another mask, model or layout.
        """
        files = _Files.of(path, key_path, index_path)
        descriptors: list[int] = []
        try:
            descriptors.append(open_file(files.bank, os.O_RDWR))
            lock(descriptors[0], files.bank)
            descriptors.append(open_file(files.key, os.O_RDONLY))
            # A copy of FILE with the same key would use the same pads.
            lock(descriptors[1], files.key)
            header, keys, state, start = _load(files, *descriptors)
            for what, got, expected in (
                ("mask", header.mask, mask),
                ("model digest", header.model_digest, model_digest),
                ("digest of the linear weights", header.linear_digest, linear_digest),
            ):
                if got != expected:
                    raise PadBankError(f"{path}: {what}", got=got, expected=expected)
            _check_layout(path, header.layout, layout)
            bank = cls(files, header, keys, state, start, block)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        bank._descriptors = descriptors
        return bank

    def status(self) -> PadBankStatus:
        """Describe the bank; counts are this process's own."""
        with self._lock:
            self.check_usable()
            state = State(self._next, self._filled, self._sealed)
            return _status(self._files, self._header, state, os.fstat(self._descriptors[0]))

    def _persist(self, reserved: int, filled: int) -> None:
        self._stored = max(self._stored, reserved)
        content = encode_state(State(self._stored, filled, self._sealed), self._keys)
        try:
            replace(self._files.index, content)
        except OSError as error:
            raise refusal(self._files.index, error, len(content)) from error

    def _starting(self, indices: range) -> None:
        sealed = self._sealed + len(indices) * len(self._layout.sites)
        if sealed > MAX_RECORDS:
            raise PadBankError(
                f"{self._files.bank}: records ever encrypted",
                got=f"{sealed} with these",
                expected=f"at most {MAX_RECORDS}: a new bank (nonces of one key must not meet)",
            )
        # Counted even if writing the count fails: the next one that succeeds has it.
        self._sealed = sealed
        self._persist(self._reserved, self._filled)

    def _write(self, indices: range, site: SiteShape, u_NO: Tensor) -> None:
        rows = u_NO.numpy().data.cast("B")
        row_bytes = site.out_features * WORD_BYTES
        nonces = secrets.token_bytes(NONCE_BYTES * len(indices))
        for position, index in enumerate(indices):
            bound, offset = self._place(index, site)
            nonce = nonces[position * NONCE_BYTES : (position + 1) * NONCE_BYTES]
            row = rows[position * row_bytes : (position + 1) * row_bytes]
            content = self._sealer.encrypt(nonce, row, bound)
            sealed = memoryview(nonce + content)
            try:
                while sealed:
                    written = os.pwrite(self._descriptors[0], sealed, offset)
                    sealed, offset = sealed[written:], offset + written
            except OSError as error:
                needed = (len(indices) - position) * segment_bytes(site)
                raise refusal(self._files.bank, error, needed) from error

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptors[0])
        except OSError as error:
            raise refusal(self._files.bank, error, 0) from error

    def _read(self, indices: range, site: SiteShape) -> Tensor:
        u = torch.empty(len(indices), site.out_features, dtype=torch.int32)
        rows = u.numpy().data.cast("B")
        row_bytes = site.out_features * WORD_BYTES
        sealed = bytearray(segment_bytes(site))
        nonce, content = memoryview(sealed)[:NONCE_BYTES], memoryview(sealed)[NONCE_BYTES:]
        for position, index in enumerate(indices):
            bound, offset = self._place(index, site)
            try:
                read = os.preadv(self._descriptors[0], [sealed], offset)
            except OSError as error:
                raise refusal(self._files.bank, error, len(sealed)) from error
            if read != len(sealed):
                raise PadBankError(
                    self._where(index, site), got=f"{read} bytes", expected=f"{len(sealed)}"
                )
            try:
                row = self._opener.decrypt(nonce, content, bound)
            except InvalidTag:
                raise PadBankError(
                    self._where(index, site),
                    got="another record than was written",
                    expected="its authentication tag to match",
                ) from None
            rows[position * row_bytes : (position + 1) * row_bytes] = row
        return u

    def _let_go(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _where(self, index: int, site: SiteShape) -> str:
        return f"{self._files.bank}: pad {index}, {site}"

    def _place(self, index: int, site: SiteShape) -> tuple[bytes, int]:
        """Return what a record is bound to (associated data), and where it stands in FILE."""
        slot = self._start + index % self._capacity * self._slot_bytes
        bound = self._keys.header_hash + (index << 32 | site.number).to_bytes(12, "big")
        return bound, slot + self._offsets[site.number]


def read_bank_status(
    path: Path, key_path: Path | None = None, *, index_path: Path | None = None
) -> PadBankStatus:
    """Describe a bank that another process may be using; nothing is locked or changed.

    What that process has reserved counts as used. Raises PadBankError as `BankFile.open`.
    """
    files = _Files.of(path, key_path, index_path)
    descriptors: list[int] = []
    try:
        descriptors.append(open_file(files.bank, os.O_RDONLY))
        descriptors.append(open_file(files.key, os.O_RDONLY))
        header, _, state, _ = _load(files, *descriptors)
        return _status(files, header, state, os.fstat(descriptors[0]))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _load(files: _Files, bank: int, key: int) -> tuple[Header, Keys, State, int]:
    """Read and check everything but the records."""
    header, keys, start = read_header(bank, files.bank, read_key(key, files.key), files.key)
    expected = start + header.capacity * _offsets(header.layout)[1]
    if (size := os.fstat(bank).st_size) != expected:
        raise PadBankError(f"{files.bank}: size", got=f"{size} bytes", expected=f"{expected} bytes")
    return header, keys, read_state(files.index, header, keys), start


def _status(files: _Files, header: Header, state: State, file: os.stat_result) -> PadBankStatus:
    return PadBankStatus(
        path=files.bank,
        bank_id=header.bank_id,
        created=header.created,
        mask=header.mask,
        model_digest=header.model_digest,
        linear_digest=header.linear_digest,
        capacity=header.capacity,
        available=state.filled - state.reserved,
        next_index=state.reserved,
        token_bytes=_offsets(header.layout)[1],
        file_bytes=file.st_size,
        allocated_bytes=file.st_blocks * 512,
    )


def _offsets(layout: PadLayout) -> tuple[dict[int, int], int]:
    """Return where in a token's slot each site's record starts, and the slot's size."""
    offsets, end = {}, 0
    for site in layout.sites:
        offsets[site.number] = end
        end += segment_bytes(site)
    return offsets, end


def _check_layout(path: Path, got: PadLayout, expected: PadLayout) -> None:
    if got == expected:
        return
    differing = set(got.sites) ^ set(expected.sites)
    number = min(site.number for site in differing)
    first, second = got.by_number.get(number), expected.by_number.get(number)
    raise PadBankError(
        f"{path}: layout, {first or second}",
        got=f"{first.in_features} -> {first.out_features}" if first else "no pads",
        expected=f"{second.in_features} -> {second.out_features}" if second else "no pads",
    )
