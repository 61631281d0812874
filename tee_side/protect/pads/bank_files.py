"""The files of a pad bank: where they may lie, their bytes, how they are opened and replaced.

FILE        magic | version | key id | length | JSON | HMAC | zeros up to a page | records
FILE.index  magic | version | SHA-256 of the header | reserved | filled | sealed | HMAC
FILE.key    one line of text: a name, a version, 32 bytes in hex

All numbers are unsigned and big endian. Every subkey comes from the key by HKDF-SHA256 with the
header's hash in it, and every header has a random bank id: no record, header or index of one bank
passes in another, even if two banks were given one key. The header is authentic and not encrypted:
who reads FILE learns the model's digests and the name of its directory.

Every error is a PadBankError that names file and both values.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field

from protocol.errors import PadBankError
from protocol.keystream import WORD_BYTES
from protocol.messages import Digest, Projection
from tee_side.protect.randomness import KEY_BYTES, derive_key
from tee_side.protect.sites import PadLayout, SiteShape

# Version 1 had a record for every index, 2 other numbers of sites, as it knew no LM head.
VERSION = 3
NONCE_BYTES = 12
_TAG_BYTES = 16
# Random nonces of one AES-GCM key: among n of 96 bits two are equal with probability n^2 / 2^97 at
# most, here 2^-33 (NIST SP 800-38D, section 8.3). Every one that may have been drawn counts, also
# for batches that a crash ended and that were made again.
MAX_RECORDS = 2**32
_MAC_BYTES = 32
# Indices of a record: making writes them at half the cost of one alone, and a token that is read
# alone does not wait for much more than it needs.
MAX_GROUP = 8
_PREAMBLE = struct.Struct(">8sI8sI")
_MAGIC = b"TSQPPADS"
_MAX_HEADER_BYTES = 4 * 1024 * 1024
_PAGE = 4096
_STATE = struct.Struct(">8sI32sQQQ")
_STATE_MAGIC = b"TSQPPIDX"
STATE_BYTES = _STATE.size + _MAC_BYTES
KEY_LINE = "tsqp-pad-bank-key 1 "
# Indices stay below, so that sums of them cannot leave 64 bits.
_MAX_INDEX = 2**62

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Size = Annotated[int, Field(ge=1, lt=2**31)]

_OPEN = os.O_CLOEXEC | os.O_NOCTTY
NEW_FILE = os.O_WRONLY | os.O_CREAT | _OPEN
WITNESSES = Path("/dev/shm")  # noqa: S108 - the directory within it is this user's own


@dataclass(frozen=True)
class BankPlace:
    """Where the files of a bank are.

    `witness`: None for a file named by the bank's id, in this user's own directory within
    /dev/shm. `beside_bank`: key and index may lie on the bank's own file system.
    """

    bank: Path
    key: Path
    index: Path
    witness: Path | None = None
    beside_bank: bool = False

    @classmethod
    def at(
        cls,
        bank: Path,
        key: Path | None = None,
        index: Path | None = None,
        witness: Path | None = None,
        *,
        beside_bank: bool = False,
    ) -> BankPlace:
        """Fill in what was not given: the bank's name with `.key` and `.index`."""
        key, index = key or Path(f"{bank}.key"), index or Path(f"{bank}.index")
        return cls(bank, key, index, witness, beside_bank)

    def check_apart(self) -> None:
        """Refuse a key or index on the bank's own file system, one in memory excepted.

        A copy of that file system would hold all that decrypts recorded traffic.
        """
        if self.beside_bank:
            return
        for option, path in (("--bank-key", self.key), ("--bank-index", self.index)):
            with refusing(path):
                shared = _devices(path) & _devices(self.bank)
                PadBankError.unless(
                    all(map(_in_memory, shared)),
                    str(path),
                    f"the file system of the bank {self.bank}: a copy of it, with recorded"
                    " traffic, gives every row away",
                    f"another, best one in memory: {option} FILE, as in /dev/shm"
                    " (--bank-key-beside-bank allows this one)",
                )

    def witness_file(self, bank_id: str) -> Path:
        """Return where the witness of a bank is; its directory is this user's own."""
        if self.witness is not None:
            with refusing(self.witness):
                folder = self.witness.parent.resolve(strict=True)
                found = folder.stat().st_dev
                PadBankError.unless(
                    found not in _devices(self.bank) | _devices(self.index) or _in_memory(found),
                    f"--bank-witness {self.witness}",
                    "the file system of bank or index, with which it could be put back",
                    "another, best one in memory",
                )
                return _own(folder) / self.witness.name
        # One place whatever the environment is: two runs of one boot must find the same witness.
        PadBankError.unless(
            WITNESSES.is_dir() and _in_memory(WITNESSES.stat().st_dev),
            "--bank-witness",
            f"no file system in memory at {WITNESSES}",
            "FILE on one, or on a disk that neither bank nor index is on",
        )
        folder = WITNESSES / f"tsqp-{os.geteuid()}"
        with refusing(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        return _own(folder) / f"{bank_id}.witness"


def _devices(path: Path) -> set[int]:
    """Return the file systems of a file and its directory, as named and as links lead to it.

    A file may be a mount of its own, from another directory of the same disk.
    """
    places = {path.parent, path.resolve().parent, *([path] if path.exists() else [])}
    return {place.stat().st_dev for place in places}


def _in_memory(device: int) -> bool:
    """Whether a file system is in memory, as /proc/self/mountinfo says; False if it does not."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in ("tmpfs", "ramfs")
    return False


def _own(folder: Path) -> Path:
    """Return a directory that no other user can write to."""
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())
    PadBankError.unless(ours, str(folder), "a link or another user's", "a directory")
    PadBankError.unless(
        not found.st_mode & 0o022,
        str(folder),
        stat.filemode(found.st_mode),
        "a directory of this user alone, as mkdir -m 700 makes it",
    )
    return folder


def open_file(path: Path, flags: int) -> int:
    """Open a file for this process alone. Raises PadBankError."""
    with PadBankError.for_os(str(path), "a file of a pad bank"):
        # Not blocking: a pipe would let us wait for ever. Files do not know the difference.
        descriptor = os.open(path, flags | os.O_NONBLOCK | _OPEN)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PadBankError(str(path), "no regular file", "a file of a pad bank")
    return descriptor


def read_file(path: Path, most: int, *, private: bool = False) -> bytes:
    """Return the first `most` bytes of a file. Raises PadBankError.

    `private`: the file has to be this user's alone, and no link.
    """
    descriptor = open_file(path, os.O_RDONLY | (os.O_NOFOLLOW if private else 0))
    with refusing(path), os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        PadBankError.unless(
            not private or (found.st_uid == os.geteuid() and not found.st_mode & 0o077),
            f"{path}: owner and mode",
            f"user {found.st_uid}, {stat.filemode(found.st_mode)}",
            f"user {os.geteuid()}, -rw-------",
        )
        return file.read(most)


def lock(descriptor: int, path: Path) -> None:
    """Lock a file until its descriptor is closed. Raises PadBankError if another holds it."""
    with refusing(path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            got = f"a bank in use{_holder(descriptor)}"
            raise PadBankError(str(path), got, "one process at a time") from None


def _holder(descriptor: int) -> str:
    """Say which process holds the lock, if the kernel tells us."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError):
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        for fields in map(str.split, locks):
            # "1: FLOCK ADVISORY WRITE 4711 fd:00:131073 0 EOF"; a waiting one has "->" in between.
            if len(fields) == 8 and fields[1] == "FLOCK" and fields[5].endswith(inode):
                return f" by process {fields[4]}" if int(fields[4]) > 0 else ""
    return ""


def free_bytes(path: Path) -> int:
    """Return how much fits into the directory of a file. Raises OSError."""
    volume = os.statvfs(path.parent)
    return volume.f_bavail * volume.f_frsize


def refusal(path: Path, error: OSError, needed: int) -> PadBankError:
    """Say what the operating system refused; `needed`: bytes that were still to be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return PadBankError(str(path), f"{free_bytes(path)} bytes available", f"{needed} bytes")
    reason = error.strerror or type(error).__name__
    return PadBankError(str(path), reason, "to read and write it")


@contextmanager
def refusing(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise what the operating system refuses in the block as `refusal` says it."""
    try:
        yield
    except OSError as error:
        raise refusal(path, error, needed) from error


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole; when this returns, the new content outlives a crash."""
    beside = Path(f"{path}.new")
    descriptor = os.open(beside, os.O_TRUNC | os.O_NOFOLLOW | NEW_FILE, 0o600)
    write_out(descriptor, content, len(content))
    os.replace(beside, path)
    sync_directory(path)


def write_out(descriptor: int, content: bytes, size: int) -> None:
    """Write a new file, up to `size` with a hole, sync and close it."""
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make a file's name outlive a crash."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Purpose(BaseModel, frozen=True, extra="forbid"):
    """What pads are made for. A bank opens for the purpose that it was created with.

    `mask`: as `Mask.described`, with all options: they change u. `model`: the name of the model's
    directory, for messages; empty in banks that were made before it was kept. Digests as in
    `protocol.model.checkpoint`. `sites`: number, layer, operator, in_features, out_features.
    `dealers`: who multiplied, none where the TEE did.
    """

    mask: Annotated[str, Field(min_length=1, max_length=4096)]
    model: Annotated[str, Field(max_length=255)] = ""
    model_digest: Digest
    linear_digest: Digest
    sites: tuple[tuple[_Count, _Count, Projection, _Size, _Size], ...]
    dealers: tuple[Annotated[str, Field(max_length=4096)], ...] = ()

    @classmethod
    def of(cls, layout: PadLayout, **fields: Any) -> Purpose:
        """Make one from a layout and all other fields but `sites`."""
        sites = tuple(
            (s.number, s.layer, s.operator, s.in_features, s.out_features) for s in layout.sites
        )
        return cls(sites=sites, **fields)

    @property
    def layout(self) -> PadLayout:
        """The sites as a layout. Raises ValueError if they are none."""
        return PadLayout(tuple(SiteShape(*site[1:]) for site in self.sites))


class BankHeader(Purpose):
    """What a bank is for; never changes after it was created.

    `created`: UTC, ISO 8601. `group`: consecutive indices that share a record at each site; divides
    `capacity`.
    """

    bank_id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    created: Annotated[str, Field(max_length=40)]
    capacity: Annotated[int, Field(ge=1, lt=_MAX_INDEX)]
    group: Annotated[int, Field(ge=1, le=MAX_GROUP)]


@dataclass(frozen=True)
class Keys:
    """What is derived from a bank's key for one header; the header's hash is no secret."""

    header_hash: bytes
    header_mac: bytes = field(repr=False)
    index_mac: bytes = field(repr=False)
    records: bytes = field(repr=False)
    pads: bytes = field(repr=False)

    @classmethod
    def derive(cls, key: bytes, header: bytes) -> Keys:
        """Derive from the 32 bytes of the key file, for the header's bytes without their MAC."""
        digest = hashlib.sha256(header).digest()
        purposes = ("header", "index", "records", "pads")
        infos = [f"tsqp pad bank {purpose} ".encode() + digest for purpose in purposes]
        return cls(digest, *(derive_key(key, info) for info in infos))


class State(NamedTuple):
    """The bounds on disk: below `reserved` nothing may be handed out, below `filled` all is.

    `sealed`: how many records may have been encrypted, those of lost batches included. `reserved`
    and `sealed` never decrease.
    """

    reserved: int
    filled: int
    sealed: int

    def encode(self, keys: Keys) -> bytes:
        """Return the content of the index file, and of its witness."""
        body = _STATE.pack(_STATE_MAGIC, VERSION, keys.header_hash, *self)
        return body + hmac.digest(keys.index_mac, body, "sha256")

    @classmethod
    def decode(cls, content: bytes, path: Path, capacity: int, keys: Keys) -> State:
        """Check the content of an index file. Raises PadBankError that names it."""
        got, expected = f"{len(content)} bytes", f"an index of {STATE_BYTES} bytes"
        PadBankError.unless(len(content) == STATE_BYTES, str(path), got, expected)
        # Magic and version are compared with what would be written, as all else is.
        _, _, header_hash, *numbers = _STATE.unpack_from(content)
        PadBankError.unless(
            header_hash == keys.header_hash,
            f"{path}: bank",
            header_hash.hex()[:16],
            f"{keys.header_hash.hex()[:16]}, the bank that it is used with",
        )
        state = cls(*numbers)
        _check_written(str(path), content, state.encode(keys))
        PadBankError.unless(
            state.reserved <= state.filled <= min(state.reserved + capacity, _MAX_INDEX),
            str(path),
            f"pads {state.reserved} .. {state.filled}",
            f"at most {capacity} pads",
        )
        return state


def encode_header(header: BankHeader, key: bytes) -> tuple[bytes, Keys]:
    """Return everything that stands before the records, and the keys."""
    text = header.model_dump_json().encode()
    body = _PREAMBLE.pack(_MAGIC, VERSION, _key_id(key), len(text)) + text
    keys = Keys.derive(key, body)
    return _whole_pages(body, keys), keys


def read_header(file: int, path: Path, key: bytes, key_path: Path) -> tuple[BankHeader, Keys, int]:
    """Return header, keys and where the records start. Raises PadBankError that names the file."""
    preamble = os.pread(file, _PREAMBLE.size, 0)
    whole = len(preamble) == _PREAMBLE.size and preamble.startswith(_MAGIC)
    PadBankError.unless(whole, str(path), "no magic bytes", "a pad bank")
    _, version, key_id, length = _PREAMBLE.unpack(preamble)
    remedy = f"{VERSION} (make a new bank: tee-runner pads make)"
    PadBankError.unless(version == VERSION, f"{path}: version", f"{version}", remedy)
    PadBankError.unless(
        key_id == _key_id(key),
        f"{path}: key id",
        f"{_key_id(key).hex()} from {key_path}",
        f"{key_id.hex()}, the key that this bank was created with",
    )
    fits, limit = 0 < length <= _MAX_HEADER_BYTES, f"1 .. {_MAX_HEADER_BYTES}"
    PadBankError.unless(fits, f"{path}: header", f"{length} bytes", limit)
    body = os.pread(file, _PREAMBLE.size + length, 0)
    keys = Keys.derive(key, body)
    written = _whole_pages(body, keys)
    _check_written(f"{path}: header", os.pread(file, len(written), 0), written)
    got, expected = "others", f"the fields of version {VERSION}"
    with PadBankError.instead_of(ValueError, f"{path}: header", got, expected):
        header = BankHeader.model_validate_json(body[_PREAMBLE.size :])
        header.layout  # noqa: B018 - raises if it is none
    return header, keys, len(written)


def read_key(file: int, path: Path) -> bytes:
    """Read a key from an open file. Raises PadBankError: others may read it, or it is no key."""
    status = os.fstat(file)
    PadBankError.unless(
        not status.st_mode & 0o077,
        f"{path}: mode",
        stat.filemode(status.st_mode),
        "-rw------- (a key is for its owner alone)",
    )
    line = os.pread(file, 256, 0).decode("ascii", "replace")
    found = re.fullmatch(f"{KEY_LINE}([0-9a-f]{{{2 * KEY_BYTES}}})\n", line)
    if found is None:
        # Never quoted: what stands in a wrong place may be the key.
        raise PadBankError(str(path), "another file", f"{KEY_LINE}and {2 * KEY_BYTES} hex digits")
    return bytes.fromhex(found[1])


def record_bytes(site: SiteShape, group: int) -> int:
    """Return the size of one sealed record: nonce, u of a group of tokens, tag."""
    return NONCE_BYTES + group * site.out_features * WORD_BYTES + _TAG_BYTES


def slot_bytes(layout: PadLayout, group: int) -> int:
    """Return what a group of tokens takes in FILE."""
    return sum(record_bytes(site, group) for site in layout.sites)


def _key_id(key: bytes) -> bytes:
    """Return what tells keys apart and says nothing about them."""
    return derive_key(key, b"tsqp pad bank key id")[:8]


def _whole_pages(body: bytes, keys: Keys) -> bytes:
    """Return the header's bytes as they stand in FILE: with their HMAC, and zeros up to a page."""
    sealed = body + hmac.digest(keys.header_mac, body, "sha256")
    return sealed + bytes(-len(sealed) % _PAGE)


def _check_written(where: str, found: bytes, written: bytes) -> None:
    same = hmac.compare_digest(found, written)
    PadBankError.unless(same, where, "another content than was written", "its HMAC to match")
