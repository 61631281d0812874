"""A manifest pins a model directory by digests, so that the disk need not be trusted.

It has the SHA-256 of every small file that is read, and for each tensor dtype, shape and the
SHA-256 of consecutive blocks of rows, so that any part of a tensor can be verified at the moment at
which it is read, in the memory in which it is used. With a manifest, a model directory is what the
manifest says: a file that it does not name is not there, and a byte that differs is refused. How
tensors are spread over files is not pinned, and need not be.

A manifest proves as much as the place that it comes from: `load` takes the digest of its own bytes.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from protocol.errors import ManifestError, ModelError
from protocol.messages import Digest
from protocol.model.files import is_there, limit_structure, parse_json, read_bytes, shown
from protocol.validation import validate_file

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
# A model of 400 billion parameters has one of 14 MB.
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
# That one has 3414 lists and objects, 4557 keys and 197,571 items.
_MAX_LISTS = 20_000
_MAX_KEYS = 20_000
_MAX_ITEMS = 300_000
BLOCK_BYTES = 4 * 1024 * 1024

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

PinnedDtype = Literal["F32", "F16", "BF16"]
_ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
_Size = Annotated[int, Field(ge=1, le=2**24)]
# What errors call a manifest that was made here, and read from no file.
_UNREAD = "the manifest"
_OR_ANOTHER = ", or the manifest of this model"
# A manifest is often made too early.
_AFTER = {"calibration.safetensors": ", after tsqp calibrate"}


def rows_per_block(shape: tuple[int, ...], row_bytes: int) -> int:
    """Return how many rows a block has: those of about 4 MiB; a vector's rows are elements."""
    return max(1, min(shape[0] if shape else 1, BLOCK_BYTES // max(1, row_bytes)))


class TensorPin(BaseModel):
    """What is pinned of a tensor. `blocks`: SHA-256, in hex, of each block of rows as stored."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dtype: PinnedDtype
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    shape: Annotated[
        tuple[_Size, ...], Field(strict=False, min_length=1, max_length=2, fail_fast=True)
    ]
    blocks: Annotated[tuple[Digest, ...], Field(strict=False, fail_fast=True)]
    # As its manifest's.
    _source: str = PrivateAttr(_UNREAD)

    @model_validator(mode="after")
    def _complete(self) -> TensorPin:
        rows = rows_per_block(self.shape, math.prod(self.shape[1:]) * _ITEM_BYTES[self.dtype])
        expected = -(-self.shape[0] // rows)
        if len(self.blocks) != expected:
            raise ValueError(f"{expected} blocks, not {len(self.blocks)}")
        return self


class Manifest(BaseModel):
    """What a model directory must hold.

    Every method raises ManifestError that names the file, and the manifest where it was loaded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Annotated[int, Field(ge=MANIFEST_VERSION, le=MANIFEST_VERSION)]
    files: dict[PinnedFile, Digest]
    tensors: dict[str, TensorPin]
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
            raise ManifestError(error.where, got=error.got, expected=error.expected) from None
        found = hashlib.sha256(content).hexdigest()
        if digest is not None and found != digest.lower():
            raise ManifestError(
                f"{path}: SHA-256", got=found, expected=f"{shown(digest)}, as was asked for"
            )
        limit_structure(
            content,
            str(path),
            max_lists=_MAX_LISTS,
            max_items=_MAX_ITEMS,
            max_keys=_MAX_KEYS,
            error=ManifestError,
        )
        try:
            parsed = parse_json(content, str(path), ManifestError)
        except ValueError as error:
            raise ManifestError(str(path), got=f"{error}"[:120], expected="JSON") from None
        manifest = validate_file(Manifest, parsed, str(path), ManifestError)
        manifest._source = f"{_UNREAD} {path}"
        for pin in manifest.tensors.values():
            pin._source = manifest._source
        return manifest

    def check_file(self, path: Path, content: bytes) -> None:
        """Check a file's content, by the file's name."""
        self.check_content(path, path.name, content)

    def check_content(self, path: Path, name: str, content: bytes) -> None:
        """Check what was read from `path` against the file that is pinned under `name`."""
        pinned: str | None = dict[str, str](self.files.items()).get(name)
        if pinned is None:
            raise ManifestError(
                str(path),
                got=f"a file that {self._source} does not name",
                expected=f"a manifest of {name}: run tsqp manifest again{_AFTER.get(name, '')}",
            )
        found = hashlib.sha256(content).hexdigest()
        if found != pinned:
            raise ManifestError(
                str(path),
                got=f"SHA-256 {found}",
                expected=f"{pinned}, as in {self._source}{_OR_ANOTHER}",
            )

    def check_there(self, path: Path) -> None:
        """Check that a file that is pinned is there."""
        if self.names(path.name) and not is_there(path):
            raise ManifestError(
                str(path), got="no such file", expected=f"one, as in {self._source}{_OR_ANOTHER}"
            )

    def names(self, name: str) -> bool:
        """Say whether a file is pinned: one that is not counts as absent."""
        return name in self.files

    def check_tensor(self, where: str, name: str, dtype: str, shape: tuple[int, ...]) -> TensorPin:
        """Check that a tensor is pinned with this dtype and shape, and return its pin."""
        pin = self.tensors.get(name)
        if pin is None:
            raise ManifestError(
                where,
                got=f"a tensor that {self._source} does not name",
                expected="a manifest of this model",
            )
        if (pin.dtype, pin.shape) != (dtype, shape):
            raise ManifestError(
                where,
                got=f"{dtype} {list(shape)}",
                expected=f"{pin.dtype} {list(pin.shape)}, as in {self._source}{_OR_ANOTHER}",
            )
        return pin


def check_block(pin: TensorPin, where: str, block: int, content: memoryview) -> None:
    """Check the bytes of a block of rows against its pin. Raises ManifestError."""
    found = hashlib.sha256(content).hexdigest()
    if found != pin.blocks[block]:
        raise ManifestError(
            f"{where}: block {block}",
            got=f"SHA-256 {found}",
            expected=f"{pin.blocks[block]}, as in {pin._source}{_OR_ANOTHER}",
        )


def find_file(directory: Path, name: str, manifest: Manifest | None) -> Path | None:
    """Return the path of a file that may be missing, or None.

    With a manifest, what it names is there, or `read_file` says that it is gone.
    """
    path = directory / name
    there = is_there(path) if manifest is None else manifest.names(name)
    return path if there else None


def read_file(path: Path, limit: int, manifest: Manifest | None) -> bytes:
    """Read a file of a model directory, verified. Raises ModelError, ManifestError."""
    if manifest is not None:
        manifest.check_there(path)
    content = read_bytes(path, limit)
    if manifest is not None:
        manifest.check_file(path, content)
    return content
