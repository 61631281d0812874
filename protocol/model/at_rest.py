"""A model directory on a disk that need not be trusted: pinned by a manifest, or sealed, or both.

**Manifest.** It has the SHA-256 of every small file that is read, and for each tensor dtype, shape
and the SHA-256 of consecutive blocks of rows, so that any part of a tensor can be verified at the
moment at which it is read, in the memory in which it is used. With a manifest, a model directory is
what the manifest says: a file that it does not name is not there, and a byte that differs is
refused. How tensors are spread over files is not pinned, and need not be.

It may also pin files that decide what the TEE trusts: a policy, settings, keys of services, masks.
A run with a manifest uses such a file only if the manifest has its name and its content.

A manifest proves as much as the place that it comes from: `load` takes the digest of its own bytes.

**Seal.** Each file is encrypted under its own name, and an index binds them.

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

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, PrivateAttr, model_validator

from protocol.errors import InputError, ManifestError, ModelError, SealError, shown
from protocol.messages import Digest
from protocol.model.files import (
    SEALED_MAGIC,
    OpenFile,
    Seal,
    is_there,
    limit_structure,
    opened,
    parse_object,
    read_bytes,
    rows_per_block,
)
from protocol.validation import Strict, validate_file

MANIFEST_VERSION = 1
# A model of 400 billion parameters has one of 14 MB.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
# That one has 3414 lists and objects, 4557 keys and 197,571 items.
_LIMITS = {"lists": 20_000, "items": 300_000, "keys": 20_000}

# Everything that the trusted side reads but tensors and the index, which says only where they are.
PinnedFile = Literal[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "modules.json",
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
]

_ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
_Size = Annotated[int, Field(ge=1, le=2**24)]
# What errors call a manifest that was made here, and read from no file.
_UNREAD = "the manifest"

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


class TensorPin(Strict):
    """What is pinned of a tensor. `blocks`: SHA-256, in hex, of each block of rows as stored."""

    dtype: Literal["F32", "F16", "BF16"]
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[tuple[_Size, ...], Field(strict=False, max_length=2, fail_fast=True)]
    blocks: Annotated[tuple[Digest, ...], Field(strict=False, fail_fast=True)]

    @model_validator(mode="after")
    def _complete(self) -> TensorPin:
        rows = rows_per_block(self.shape, math.prod(self.shape[1:]) * _ITEM_BYTES[self.dtype])
        expected = -(-math.prod(self.shape[:1]) // rows)
        if len(self.blocks) != expected:
            raise ValueError(f"{expected} blocks, not {len(self.blocks)}")
        return self


class FilePin(Strict):
    """What is pinned of a file outside the model directory. `size`: in bytes."""

    sha256: Digest
    size: Annotated[int, Field(ge=0, lt=2**63)]

    @staticmethod
    def of(content: bytes) -> FilePin:
        """Pin this content."""
        return FilePin(sha256=hashlib.sha256(content).hexdigest(), size=len(content))

    def __str__(self) -> str:
        return f"{self.size} bytes of SHA-256 {self.sha256}"


def _name_of(path: Path) -> str:
    """Return the name under which a file is pinned: with a folder, of the files that have one."""
    inner = f"{path.parent.name}/{path.name}"
    return inner if inner in get_args(PinnedFile) else path.name


class Manifest(Strict):
    """What a model directory must hold. `also`: by file name, what is pinned beside the model.

    Every method raises ManifestError that names the file, and the manifest where it was loaded.
    """

    version: Annotated[int, Field(ge=MANIFEST_VERSION, le=MANIFEST_VERSION)]
    files: dict[PinnedFile, Digest]
    tensors: dict[str, TensorPin]
    also: dict[Annotated[str, Field(min_length=1, max_length=255)], FilePin] = Field(
        default_factory=dict
    )
    # What errors call it. Of two manifests that differ in it alone, the content is the same.
    _source: str = PrivateAttr(_UNREAD)

    @model_validator(mode="after")
    def _usable(self) -> Manifest:
        if "config.json" not in self.files:
            raise ValueError("a digest of config.json")
        return self

    def to_bytes(self) -> bytes:
        """Return the file's content: the same bytes for the same model."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @staticmethod
    def load(path: Path, digest: str | None = None) -> Manifest:
        """Read a manifest. `digest`: SHA-256, in hex, that the file itself must have.

        Raises ManifestError that names file and field: missing, malformed, not that digest.
        """
        with _refused_as(ManifestError):
            content = read_bytes(path, MAX_MANIFEST_BYTES, inside=False)
        found = hashlib.sha256(content).hexdigest()
        wanted = found if digest is None else digest
        ManifestError.unless(
            found == wanted.lower(), f"{path}: SHA-256", found, f"{shown(wanted)}, as was asked for"
        )
        limit_structure(content, str(path), _LIMITS, ManifestError)
        parsed = parse_object(content, str(path), ManifestError)
        manifest = validate_file(Manifest, parsed, str(path), ManifestError)
        manifest._source = f"{_UNREAD} {path}"
        return manifest

    def check_file(self, path: Path, content: bytes) -> None:
        """Check what was read from `path` against what is pinned under its name."""
        pinned = self._pinned(_name_of(path))
        if pinned is None:
            raise ManifestError(
                str(path),
                f"a file that {self._source} does not name",
                f"a manifest of {_name_of(path)}: run tsqp manifest again",
            )
        self._compare(str(path), _sha256(content), pinned)

    def check_also(self, option: str, path: Path, content: bytes) -> None:
        """Check a file that `option` led to, by its name and the bytes that will be used."""
        pin, found = self.also.get(path.name), FilePin.of(content)
        ManifestError.unless(
            pin == found,
            f"{option}: {path}",
            f"a file that {self._source} does not pin" if pin is None else str(found),
            f"{pin or 'a pinned one'}: tsqp manifest MODEL --also {path} pins it",
        )

    def check_tensor(self, where: str, name: str, dtype: str, shape: tuple[int, ...]) -> TensorPin:
        """Check that a tensor is pinned with this dtype and shape, and return its pin."""
        pin = self.tensors.get(name)
        if pin is None:
            raise ManifestError(
                where, f"a tensor that {self._source} does not name", "a manifest of this model"
            )
        self._compare(where, f"{dtype} {list(shape)}", f"{pin.dtype} {list(pin.shape)}")
        return pin

    def check_block(self, pin: TensorPin, where: str, block: int, content: memoryview) -> None:
        """Check the bytes of a block of rows against its tensor's pin."""
        self._compare(f"{where}: block {block}", _sha256(content), f"SHA-256 {pin.blocks[block]}")

    def find(self, path: Path) -> Path | None:
        """Return the path of a file that is pinned and there; None for one that is not pinned."""
        if self._pinned(_name_of(path)) is None:
            return None
        if not is_there(path):
            self._compare(str(path), "no such file", "one")
        return path

    def _pinned(self, name: str) -> str | None:
        digest = dict[str, str](self.files.items()).get(name)
        return None if digest is None else f"SHA-256 {digest}"

    def _compare(self, where: str, found: str, pinned: str) -> None:
        expected = f"{pinned}, as in {self._source}, or the manifest of this model"
        ManifestError.unless(found == pinned, where, found, expected)


def _sha256(content: bytes | memoryview) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()}"


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
        kdf = HKDF(SHA256(), KEY_BYTES, header[len(SEALED_MAGIC) :], b"tsqp sealed file 1")
        self._cipher = AESGCM(kdf.derive(content_key))

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
            with _refused_as(SealError, _AS_SEALED):
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
    with _refused_as(SealError, _AS_SEALED):
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
    with _refused_as(SealError, _AS_SEALED), opened(path, inside=False, stored=True) as stored:
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
def _refused_as(kind: type[InputError], expected: str | None = None) -> Iterator[None]:
    """Have a file that cannot be read refused by an error of this kind; `expected`: instead."""
    try:
        yield
    except ModelError as error:
        raise kind(error.where, error.got, expected or error.expected) from None
