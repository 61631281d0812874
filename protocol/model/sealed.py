"""A sealed model directory: each file encrypted under its own name, and an index that binds them.

    FILE          magic (8) | salt (32) | chunk ...
    chunk         AES-256-GCM of 1 MiB of the plain file, the last one of the rest; tag at the end
    sealed.tsqp   tsqp-sealed-model 1 <id of a key> <nonce> <content key, wrapped by that key>
                  {"files": {FILE: {"size": of the plain file, "header": SHA-256 of magic, salt}}}

- The key of a file comes from the content key and the file's salt by HKDF-SHA256. A chunk's nonce
  is its index. Bound to it as associated data: the SHA-256 of the header, the index, and whether it
  is the last one. So a file that was cut is noticed, and a chunk that was moved or replaced.
- The content key is wrapped by AES-256-GCM. Bound to it: the SHA-256 of what follows the first
  line, so that names, sizes and headers are those of one seal. That SHA-256 is the seal's digest.
  To change the key, the content key is wrapped in a new first line, and the digest stays.
- The host can put an older seal back, or another model's for the same key: only a comparison of the
  digest with a noted one shows that.

A chunk is checked before a byte of it is used. Plain bytes are in memory alone.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field

from protocol.errors import ModelError, SealError, shown
from protocol.messages import Digest
from protocol.model.files import SEALED_MAGIC, OpenFile, Seal, opened, parse_object, read_bytes
from protocol.validation import Strict, validate_file

SEAL_FILE = "sealed.tsqp"
KEY_BYTES = 32
CHUNK_BYTES = 1024 * 1024
TAG_BYTES = 16
SALT_BYTES = 32
HEADER_BYTES = len(SEALED_MAGIC) + SALT_BYTES
_NONCE_BYTES = 12
# Of a thousand files; a model has some hundred.
_MAX_INDEX_BYTES = 256 * 1024
_LINE = "tsqp-sealed-model 1"
_FIRST_LINE = re.compile(f"{_LINE} ([0-9a-f]{{16}}) ([0-9a-f]{{24}}) ([0-9a-f]{{96}})".encode())
_CHANGED, _AS_SEALED = "other bytes than were sealed", "the file as tsqp seal wrote it"


class FileSeal(Strict):
    """What the index says of a file. `size`: of the plain one, in bytes; `header`: its SHA-256."""

    size: Annotated[int, Field(ge=0, lt=2**63)]
    header: Digest


class SealIndex(Strict):
    """What follows the first line of `sealed.tsqp`."""

    files: dict[str, FileSeal]


class ChunkCipher:
    """Seals and opens the chunks of one file of `size` bytes."""

    def __init__(self, content_key: bytes, header: bytes, size: int) -> None:
        self.size = size
        self.chunks = -(-size // CHUNK_BYTES)
        self._header = hashlib.sha256(header).digest()
        salt = header[len(SEALED_MAGIC) :]
        derived = HKDF(SHA256(), KEY_BYTES, salt, b"tsqp sealed file 1").derive(content_key)
        self._cipher = AESGCM(derived)

    def seal(self, chunk: int, plain: bytes | bytearray | memoryview) -> bytes:
        """Encrypt a chunk, once: its nonce is its index."""
        return self._cipher.encrypt(chunk.to_bytes(_NONCE_BYTES), plain, self._bound(chunk))

    def open(self, chunk: int, sealed: bytearray) -> bytes:
        """Decrypt a chunk. Raises InvalidTag."""
        return self._cipher.decrypt(chunk.to_bytes(_NONCE_BYTES), sealed, self._bound(chunk))

    def _bound(self, chunk: int) -> bytes:
        return self._header + chunk.to_bytes(8) + bytes([chunk == self.chunks - 1])


class SealedModel:
    """A sealed directory, its index and headers checked.

    `key`: 32 bytes. `digest`: SHA-256, in hex, that the seal must have; None: any seal for this key
    will do. `files`: for `protocol.model.files.use_seal`. Raises SealError that names the file:
    missing, cut, changed, of another seal, or sealed for another key; chunks are checked when they
    are read.
    """

    def __init__(self, directory: Path, key: bytes, digest: str | None = None) -> None:
        path = directory / SEAL_FILE
        content_key, body = unwrap(read_index(path), key, str(path))
        self.digest = hashlib.sha256(body).hexdigest()
        wanted = self.digest if digest is None else digest
        where = f"{path}: SHA-256 of the seal"
        same = self.digest == wanted.lower()
        expected = f"{shown(wanted)}, as was asked for: another seal, or an older one"
        SealError.unless(same, where, self.digest, expected)
        parsed = parse_object(body, str(path), SealError)
        index = validate_file(SealIndex, parsed, str(path), SealError)
        self.files: Seal = {
            name: partial(_SealedFile, cipher=_checked(directory / name, file, content_key))
            for name, file in index.files.items()
        }


class _SealedFile(OpenFile):
    """An open file as it was before it was sealed; of `stored`, which lies on the disk."""

    def __init__(self, stored: OpenFile, cipher: ChunkCipher) -> None:
        self.path, self.size, self.stamp = stored.path, cipher.size, stored.stamp
        self._stored, self._cipher = stored, cipher

    def start(self, limit: int) -> bytes:
        content = bytearray(min(limit, self.size))
        self.fill(memoryview(content), 0)
        return bytes(content)

    def fill(self, buffer: memoryview, offset: int) -> None:
        stop = offset + len(buffer)
        ModelError.unless(stop <= self.size, str(self.path), f"{self.size} bytes", f"{stop}")
        for chunk in range(offset // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            first = chunk * CHUNK_BYTES
            sealed = bytearray(min(CHUNK_BYTES, self.size - first) + TAG_BYTES)
            with _as_seal_error():
                self._stored.fill(memoryview(sealed), HEADER_BYTES + first + chunk * TAG_BYTES)
            with SealError.instead_of(
                InvalidTag, f"{self.path}: chunk {chunk}", _CHANGED, _AS_SEALED
            ):
                plain = self._cipher.open(chunk, sealed)
            wanted = memoryview(plain)[max(0, offset - first) : stop - first]
            place = max(0, first - offset)
            buffer[place : place + len(wanted)] = wanted


def read_index(path: Path) -> bytes:
    """Read `sealed.tsqp`. Raises SealError."""
    with _as_seal_error():
        return read_bytes(path, _MAX_INDEX_BYTES, inside=False)


def wrap(content_key: bytes, key: bytes, body: bytes) -> bytes:
    """Return an index for a key. `body`: what follows the first line."""
    nonce = os.urandom(_NONCE_BYTES)
    wrapped = AESGCM(key).encrypt(nonce, content_key, hashlib.sha256(body).digest())
    return f"{_LINE} {key_id(key)} {nonce.hex()} {wrapped.hex()}\n".encode() + body


def unwrap(content: bytes, key: bytes, where: str) -> tuple[bytes, bytes]:
    """Return the content key of an index, and what follows the first line. Raises SealError."""
    line, _, body = content.partition(b"\n")
    if (found := _FIRST_LINE.fullmatch(line)) is None:
        raise SealError(where, "another first line", f"'{_LINE} ...'")
    sealed_for, nonce, wrapped = (part.decode() for part in found.groups())
    got = f"a seal for key {sealed_for}"
    expected = f"one for the key that was given, {key_id(key)}"
    SealError.unless(sealed_for == key_id(key), where, got, expected)
    with SealError.instead_of(InvalidTag, where, _CHANGED, _AS_SEALED):
        bound = hashlib.sha256(body).digest()
        return AESGCM(key).decrypt(bytes.fromhex(nonce), bytes.fromhex(wrapped), bound), body


def key_id(key: bytes) -> str:
    """Return by what people tell keys apart, 16 hexadecimal digits; no secret."""
    return hashlib.sha256(b"tsqp seal key id" + key).hexdigest()[:16]


def _checked(path: Path, file: FileSeal, content_key: bytes) -> ChunkCipher:
    """Check size and header of a file. Raises SealError that names it."""
    header = bytearray(HEADER_BYTES)
    with _as_seal_error(), opened(path, inside=False, stored=True) as stored:
        stored.fill(memoryview(header), 0)
    same = hashlib.sha256(header).hexdigest() == file.header
    SealError.unless(same, str(path), "the header of another file, or of another seal", _AS_SEALED)
    cipher = ChunkCipher(content_key, bytes(header), file.size)
    wanted = HEADER_BYTES + file.size + cipher.chunks * TAG_BYTES
    SealError.unless(
        stored.size == wanted, str(path), f"{stored.size} bytes", f"{wanted}, as were sealed"
    )
    return cipher


@contextmanager
def _as_seal_error() -> Iterator[None]:
    """Have a file that cannot be read refused as one of a seal."""
    try:
        yield
    except ModelError as error:
        raise SealError(error.where, error.got, _AS_SEALED) from None
