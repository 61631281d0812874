"""Sessions on disk: encrypted, in files without a name, for as long as this process runs.

Encryption protects the disks, not against the service: someone who finds the disk or a backup of
it later can read nothing, while the process that holds the key sees every session in the clear.

AES-256-GCM (NIST SP 800-38D), with a key for each session that lives in this process's memory
alone. Nonces are a counter of the key's, which never goes back: a session that comes back and is
written again goes on with the next. What was written is bound to its client, session, layers and
sizes, and to its place in the file. A file that was changed is no session any more.

Writing holds up all clients, so one request has a limited number of bytes written; a session
beyond them is lost, and its client sends the tokens once more. Where there is no room, a client
that has more than half of it loses its own sessions first, then the least recently used of all go.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpu_side.event_log import log
from gpu_side.session_cache import SessionCache
from protocol.tensors import raw_bytes

_TAG_BYTES, _NONCE_BYTES = 16, 12

_PIECE_BYTES = 2**24

# Each has a file descriptor, and so has each connection.
MAX_FILES = 512


class SessionName(NamedTuple):
    """Whose session it is, its 128 bits, and the first and last layer of its segment."""

    client: bytes
    session: bytes
    first_layer: int
    last_layer: int


class SpillKey:
    """The key of one session, and how many nonces of it have been used. `used`: for tests."""

    def __init__(self, used: int = 0) -> None:
        self.cipher = AESGCM(AESGCM.generate_key(256))
        self._numbers = count(used)

    def next_nonce(self) -> bytes:
        """Return one that was never used. Raises OverflowError where there is none any more."""
        return next(self._numbers).to_bytes(_NONCE_BYTES, "big")


class SpilledSession:
    """One session in a file of `directory`, without a name. Raises OSError, OverflowError.

    `key`: the session's, which may have been used before.
    """

    def __init__(
        self, directory: Path, name: SessionName, cache: SessionCache, key: SpillKey
    ) -> None:
        self.name, self.key = name, key
        # Of the cache that it was, and will be.
        self.shape = cache.shape
        self._sizes = cache.length, cache.sinks, cache.dropped
        self._nonces: list[bytes] = []
        self.bytes = 0
        # Without a name from the beginning (O_TMPFILE) where the file system can, else unlinked at
        # once; readable by us alone.
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - close
        try:
            for tensor in cache.tensors:
                for piece in _pieces(raw_bytes(tensor[:, :, : cache.stored])):
                    self._write(piece)
        except BaseException:
            self.close()
            raise

    def _write(self, piece: memoryview) -> None:
        nonce = self.key.next_nonce()
        sealed = self.key.cipher.encrypt(nonce, piece, self._bound(len(self._nonces)))
        if self._file.write(sealed) != len(sealed):
            raise OSError("a disk without room")
        self._nonces.append(nonce)
        self.bytes += len(sealed)

    def read_into(self, cache: SessionCache) -> bool:
        """Fill a cache of the same shape; False where the file is not what was written.

        It has room (`tokens`), and what is in it is lost.
        """
        cache.length, cache.sinks, cache.dropped = self._sizes
        try:
            self._file.seek(0)
            nonces = enumerate(self._nonces)
            for tensor in cache.tensors:
                stored = tensor[:, :, : cache.stored]
                layer = bytearray(stored.numel() * stored.itemsize)
                for piece in _pieces(memoryview(layer)):
                    number, nonce = next(nonces)
                    sealed = self._file.read(len(piece) + _TAG_BYTES)
                    piece[:] = self.key.cipher.decrypt(nonce, sealed, self._bound(number))
                stored.copy_(torch.frombuffer(layer, dtype=tensor.dtype).view(stored.shape))
        except (InvalidTag, OSError, ValueError):
            return False
        return True

    @property
    def tokens(self) -> int:
        """Tokens that a cache must have room for to be filled."""
        length, _, dropped = self._sizes
        return length - dropped

    def close(self) -> None:
        """Forget it; without a name it is gone from the disk then."""
        self._file.close()

    def _bound(self, number: int) -> bytes:
        """Return what a piece is bound to, beside its key and nonce."""
        layers, heads, head_dim, dtype, _ = self.shape
        sizes = [layers, heads, head_dim, str(dtype), *self._sizes]
        bound: bytes = msgpack.packb([*self.name, sizes, number])
        return bound


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


@dataclass(slots=True)
class Account:
    """Sessions of one client, or of all of them: their bytes, and those of them that are at rest.

    `resting`: the least recently used first.
    """

    bytes: int = 0
    resting_bytes: int = 0
    resting: OrderedDict[SessionName, None] = field(default_factory=OrderedDict)

    @property
    def in_use(self) -> int:
        """Bytes of the sessions that are in use."""
        return self.bytes - self.resting_bytes

    @property
    def oldest(self) -> SessionName | None:
        """The session at rest that was used least recently."""
        return next(iter(self.resting), None)


class Ledger:
    """Sizes of sessions. One is in use by the running request from the beginning, or at rest.

    Each question takes the same time however many sessions there are: one request may name
    thousands. `all`: of all clients; `clients`: of each that has sessions.
    """

    def __init__(self) -> None:
        self.all = Account()
        self._sizes: dict[SessionName, int] = {}
        self.clients: dict[bytes, Account] = {}

    def of(self, client: bytes) -> Account:
        """Return the account of a client."""
        return self.clients.get(client) or Account()

    def resize(self, name: SessionName, size: int) -> None:
        """Take note of how many bytes a session in use has."""
        more = size - self._sizes.get(name, 0)
        self._sizes[name] = size
        for account in self._accounts(name):
            account.bytes += more

    def use(self, name: SessionName) -> None:
        """Take a session into use, if it is at rest."""
        if name in self.all.resting:
            for account in self._accounts(name):
                del account.resting[name]
                account.resting_bytes -= self._sizes[name]

    def rest(self, name: SessionName) -> None:
        """Put a session that is in use, and has a size, to rest: behind all others."""
        for account in self._accounts(name):
            account.resting[name] = None
            account.resting_bytes += self._sizes[name]

    def remove(self, name: SessionName) -> None:
        """Forget a session, if it is known."""
        if name in self._sizes:
            self.use(name)
            self.resize(name, 0)
            del self._sizes[name]
            if not self.clients[name.client].bytes:
                del self.clients[name.client]

    def _accounts(self, name: SessionName) -> tuple[Account, Account]:
        return self.all, self.clients.setdefault(name.client, Account())


# What a processor encrypts and writes in about a second.
REQUEST_BYTES = 2**28


class SessionFiles:
    """Sessions on disk, by name. `directory`: None keeps none; `most`: bytes of all."""

    def __init__(self, directory: Path | None, most: int) -> None:
        self._directory, self._most = directory, most
        self._files: dict[SessionName, tuple[SpilledSession, float]] = {}
        self._ledger = Ledger()
        self._left = 0

    @property
    def total_bytes(self) -> int:
        """Of those that are there."""
        return self._ledger.all.bytes

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[SessionName]:
        return iter(self._files)

    def begin_request(self) -> None:
        """Allow as many bytes to be written as one request may have."""
        self._left = REQUEST_BYTES

    def put(self, name: SessionName, cache: SessionCache, key: SpillKey, used_s: float) -> None:
        """Write a session that was used at `used_s`; it is lost where that cannot be."""
        size = cache.stored * cache.shape.token_bytes
        # To make a file takes its time, too: none more than there may be.
        cost = max(size, REQUEST_BYTES // MAX_FILES)
        if self._directory is None or not (cache.tensors and size) or cost > self._left:
            return
        self._left -= cost
        try:
            written = SpilledSession(self._directory, name, cache, key)
        except (OSError, OverflowError) as error:
            log.warning("not_spilled", detail=type(error).__name__)
            return
        self._files[name] = written, used_s
        self._ledger.resize(name, written.bytes)
        self._ledger.rest(name)
        while (oldest := self._oldest()) is not None and (
            self.total_bytes > self._most or len(self._files) > MAX_FILES
        ):
            self.forget(oldest)

    def take(self, name: SessionName) -> SpilledSession | None:
        """Return a session that is there, and is the caller's to close; else None."""
        found, _ = self._files.pop(name, (None, 0.0))
        self._ledger.remove(name)
        return found

    def touch(self, name: SessionName) -> None:
        """Let a session, if it is there, be the last to go."""
        if name in self._files:
            self._ledger.use(name)
            self._ledger.rest(name)

    def forget(self, name: SessionName) -> None:
        """Forget a session, if it is there."""
        if (found := self.take(name)) is not None:
            found.close()

    def forget_client(self, client: bytes) -> None:
        """Forget all sessions of a client."""
        for name in list(self._ledger.of(client).resting):
            self.forget(name)

    def expire(self, until_s: float) -> None:
        """Forget what was used last at `until_s` or before."""
        for name in [name for name, (_, used_s) in self._files.items() if used_s <= until_s]:
            self.forget(name)

    def oldest_s(self) -> float:
        """Return when the session was used that was used least recently; inf if there is none."""
        return min((used_s for _, used_s in self._files.values()), default=float("inf"))

    def _oldest(self) -> SessionName | None:
        """Return what goes first: of a client that has more than half, where there is one."""
        large = next(filter(self._is_large, self._ledger.clients.values()), self._ledger.all)
        return large.oldest

    def _is_large(self, account: Account) -> bool:
        return 2 * account.bytes > self._most or 2 * len(account.resting) > MAX_FILES
