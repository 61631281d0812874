"""Sessions on disk: encrypted, in files without a name, for as long as this process runs.

It protects disks, not against the service: what is written can be read by nobody who finds the disk
later, or a backup of it, while the process that holds the key sees every session in the clear.

AES-256-GCM (NIST SP 800-38D), with a key for each session that lives in this process's memory
alone. Nonces are a counter of the key's, which never goes back: a session that comes back and is
written again goes on with the next. What was written is bound to its client, session, layers and
sizes, and to its place in the file. A file that was changed is no session any more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgpack
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpu_side.session_cache import CacheShape, SessionCache
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
        self._shape = cache.shape
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

    @property
    def shape(self) -> CacheShape:
        """Of the cache that it was, and will be."""
        return self._shape

    def close(self) -> None:
        """Forget it; without a name it is gone from the disk then."""
        self._file.close()

    def _bound(self, number: int) -> bytes:
        """Return what a piece is bound to, beside its key and nonce."""
        layers, heads, head_dim, dtype, _ = self._shape
        sizes = [layers, heads, head_dim, str(dtype), *self._sizes]
        bound: bytes = msgpack.packb([*self.name, sizes, number])
        return bound


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
