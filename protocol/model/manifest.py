"""A manifest pins a model directory by digests, so that the disk need not be trusted.

It has the SHA-256 of every small file that is read, and for each tensor dtype, shape and the
SHA-256 of consecutive blocks of rows, so that any part of a tensor can be verified at the moment at
which it is read, in the memory in which it is used. With a manifest, a model directory is what the
manifest says: a file that it does not name is not there, and a byte that differs is refused. How
tensors are spread over files is not pinned, and need not be.

It may also pin files that decide what the TEE trusts: a policy, settings, keys of services, masks.
A run with a manifest uses such a file only if the manifest has its name and its content.

A manifest proves as much as the place that it comes from: `load` takes the digest of its own bytes.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PrivateAttr, model_validator

from protocol.errors import ManifestError, ModelError, shown
from protocol.messages import Digest
from protocol.model.files import (
    is_there,
    limit_structure,
    parse_object,
    read_bytes,
    rows_per_block,
)
from protocol.validation import Strict, validate_file

MANIFEST_FILE = "manifest.json"
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
    "chat_template.jinja",
    "calibration.safetensors",
]
PINNED_FILES: tuple[PinnedFile, ...] = get_args(PinnedFile)

_ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
_Size = Annotated[int, Field(ge=1, le=2**24)]
# What errors call a manifest that was made here, and read from no file.
_UNREAD = "the manifest"
# A manifest is often made too early.
_AFTER = {"calibration.safetensors": ", after tsqp calibrate"}


class TensorPin(Strict):
    """What is pinned of a tensor. `blocks`: SHA-256, in hex, of each block of rows as stored."""

    dtype: Literal["F32", "F16", "BF16"]
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[
        tuple[_Size, ...], Field(strict=False, min_length=1, max_length=2, fail_fast=True)
    ]
    blocks: Annotated[tuple[Digest, ...], Field(strict=False, fail_fast=True)]

    @model_validator(mode="after")
    def _complete(self) -> TensorPin:
        rows = rows_per_block(self.shape, math.prod(self.shape[1:]) * _ITEM_BYTES[self.dtype])
        expected = -(-self.shape[0] // rows)
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
        try:
            content = read_bytes(path, MAX_MANIFEST_BYTES, inside=False)
        except ModelError as error:
            raise ManifestError(error.where, error.got, error.expected) from None
        found = hashlib.sha256(content).hexdigest()
        wanted = found if digest is None else digest
        ManifestError.unless(
            found == wanted.lower(), f"{path}: SHA-256", found, f"{shown(wanted)}, as was asked for"
        )
        limit_structure(content, str(path), ManifestError, **_LIMITS)
        parsed = parse_object(content, str(path), ManifestError)
        manifest = validate_file(Manifest, parsed, str(path), ManifestError)
        manifest._source = f"{_UNREAD} {path}"
        return manifest

    def check_file(self, path: Path, content: bytes, name: str | None = None) -> None:
        """Check what was read from `path` against what is pinned as `name`; None: its own."""
        name = path.name if name is None else name
        pinned = self._pinned(name)
        if pinned is None:
            raise ManifestError(
                str(path),
                f"a file that {self._source} does not name",
                f"a manifest of {name}: run tsqp manifest again{_AFTER.get(name, '')}",
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
        if self._pinned(path.name) is None:
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
