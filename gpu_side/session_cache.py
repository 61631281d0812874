"""The KV cache of a session: in memory, or where it had to make room in a file.

The cache holds keys and values of a segment's layers, on the device. It grows in place: a step
writes its rows behind those that are there, and memory is asked for ahead of them. Positions are
absolute. Under a window of attention sinks (StreamingLLM, arXiv 2309.17453) what no later token can
attend to is dropped in blocks; that paper numbers positions anew within the window, which this does
not: a key keeps the rotation that it was written with.

On disk sessions are encrypted, in files without a name, for as long as this process runs.

Encryption protects the disks, not against the service: someone who finds the disk or a backup of
it later can read nothing, while the process that holds the key sees every session in the clear.

AES-256-GCM (NIST SP 800-38D), with a key for each session that lives in this process's memory
alone. Nonces are a counter of the key's, which never goes back: a session that comes back and is
written again goes on with the next. What was written is bound to its client, session, layers and
sizes, and to its place in the file. A file that was changed is no session any more.
"""

import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple, Self

import msgpack
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from protocol.tensors import raw_bytes

# Tokens by which a cache grows, and that are dropped at once at least.
GROWTH_TOKENS = 64
_DROPPED_TOKENS = 256

_TAG_BYTES, _NONCE_BYTES = 16, 12

_PIECE_BYTES = 2**24


class CacheShape(NamedTuple):
    """What a segment's cache holds of a token: two vectors a layer and key/value head.

    `device`: None where nothing is computed; then nothing is allocated either.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device | None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class Window(NamedTuple):
    """A token attends to `sinks` tokens at the beginning and to `recent` that end with itself.

    `recent` 0: to all before it.
    """

    sinks: int = 0
    recent: int = 0


class SpillKey:
    """The key of one session, and how many nonces of it have been used. `used`: for tests."""

    def __init__(self, used: int = 0) -> None:
        self.cipher = AESGCM(AESGCM.generate_key(256))
        self._numbers = count(used)

    def next_nonce(self) -> bytes:
        """Return one that was never used. Raises OverflowError where there is none any more."""
        return next(self._numbers).to_bytes(_NONCE_BYTES, "big")


class SessionCache:
    """Keys and values of one session, by layer: [2, K, capacity, C] in `tensors`.

    `length`: tokens that the session has. Those from `sinks` on, `dropped` of them, are not kept;
    what comes behind them is stored so much further to the front. `key`: of its files, None: one of
    its own. `used_s`: when it was used last.
    """

    def __init__(self, shape: CacheShape, key: SpillKey | None = None) -> None:
        self.shape, self.key = shape, key or SpillKey()
        self.used_s = 0.0
        layers, heads, head_dim, dtype, device = shape
        self.tensors = [
            torch.empty(2, heads, 0, head_dim, dtype=dtype, device=device)
            for _ in range(layers if device is not None else 0)
        ]
        self.capacity = self.length = self.sinks = self.dropped = 0

    @property
    def bytes(self) -> int:
        """Size of the memory that it takes."""
        return self.capacity * self.shape.token_bytes

    @property
    def stored(self) -> int:
        """Tokens that are kept."""
        return self.length - self.dropped

    def has(self, start: int, window: Window) -> bool:
        """Say whether all is here that tokens from `start` on attend to."""
        if start > self.length:
            return False
        if not self.dropped or start <= self.sinks:
            return True
        first_recent = start - window.recent + 1
        dropped_end = self.sinks + self.dropped
        return window.sinks <= self.sinks and window.recent > 0 and first_recent >= dropped_end

    def cut(self, start: int, window: Window) -> None:
        """Forget the tokens from `start` on, and those before that no later one attends to.

        Only what `has` has found.
        """
        self.length = start
        if start <= self.sinks:
            self.dropped = 0
        if not window.recent:
            return
        if not self.dropped:
            self.sinks = window.sinks
        # As far as `start` needs it, not as far as its rows do: the request may come once more.
        many = start - window.recent + 1 - self.sinks - self.dropped
        if many < max(_DROPPED_TOKENS, window.recent // 4):
            return
        kept = slice(self.sinks + many, self.stored)
        for tensor in self.tensors:
            moved = tensor[:, :, kept].clone()
            tensor[:, :, self.sinks : self.sinks + moved.shape[2]] = moved
        self.dropped += many

    def resize(self, capacity: int) -> None:
        """Take memory for so many tokens in place of what there is; what is stored stays."""
        self.capacity = min(self.capacity, capacity)
        # One layer after the other, so that little is there twice.
        for layer, had in enumerate(self.tensors):
            made = had.new_empty(2, self.shape.heads, capacity, self.shape.head_dim)
            made[:, :, : self.stored] = had[:, :, : self.stored]
            self.tensors[layer] = made
        self.capacity = capacity

    def take_over(self, other: Self, tokens: int) -> None:
        """Begin with the first tokens of another session, which has them (`has`).

        There is room for them (`resize`).
        """
        self.length, self.sinks = tokens, other.sinks
        self.dropped = 0 if tokens <= other.sinks else other.dropped
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[:, :, : self.stored] = theirs[:, :, : self.stored]


class SessionName(NamedTuple):
    """Whose session it is, its 128 bits, and the first and last layer of its segment."""

    client: bytes
    session: bytes
    first_layer: int
    last_layer: int


class SpilledSession:
    """One session in a file of `directory`, without a name. Raises OSError, OverflowError.

    Its key may have been used before.
    """

    def __init__(self, directory: Path, name: SessionName, cache: SessionCache) -> None:
        self.name, self.key, self.used_s = name, cache.key, cache.used_s
        # Of the cache that it was, and will be.
        self.shape = cache.shape
        self._sizes = cache.length, cache.sinks, cache.dropped
        # That a cache must have room for to be filled.
        self.tokens = cache.stored
        self._nonces: list[bytes] = []
        self.bytes = 0
        # Without a name from the beginning (O_TMPFILE) where the file system can, else unlinked at
        # once; readable by us alone.
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - close
        try:
            for tensor in cache.tensors:
                for piece in _pieces(raw_bytes(tensor[:, :, : cache.stored])):
                    nonce = self.key.next_nonce()
                    sealed = self.key.cipher.encrypt(nonce, piece, self._bound(len(self._nonces)))
                    if self._file.write(sealed) != len(sealed):
                        raise OSError("a disk without room")
                    self._nonces.append(nonce)
                    self.bytes += len(sealed)
        except BaseException:
            self.close()
            raise

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
    def oldest(self) -> SessionName:
        """The session at rest that was used least recently; there is one."""
        return next(iter(self.resting))


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
