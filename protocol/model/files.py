"""Files of a model directory, opened so that whatever stands there can be refused in time.

A model directory is not trusted: a name in it may be a link out of it, a pipe without a
writer, a device without an end. Nothing is mapped into memory: a mapping ends the process when
the file is cut, and changes under the code that has just checked it.

Files of a directory that is sealed (`protocol.model.sealed`) are read here as what was sealed: code
above sees names, sizes and bytes of the plain model.

A manifest pins a model directory by digests, so that the disk need not be trusted. It has the
SHA-256 of every small file that is read, and for each tensor dtype, shape and the SHA-256 of
consecutive blocks of rows, so that any part of a tensor can be verified at the moment at which it
is read, in the memory in which it is used. With a manifest, a model directory is what the manifest
says: a file that it does not name is not there, and a byte that differs is refused. How tensors are
spread over files is not pinned, and need not be.

It may also pin files that decide what the TEE trusts: a policy, settings, keys of services, masks.
A run with a manifest uses such a file only if the manifest has its name and its content. A manifest
proves as much as the place that it comes from: `Manifest.load` takes the digest of its own bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, PrivateAttr, model_validator

from protocol.errors import InputError, ManifestError, ModelError, SealError, describe, shown
from protocol.messages import Digest
from protocol.validation import Strict, validate_file

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# What a parser takes a hundred times the bytes of, by the characters that it is counted by.
_STRUCTURE = {"lists": (b"[", b"{"), "items": (b",",), "keys": (b":",)}
# How every sealed file begins.
SEALED_MAGIC = b"TSQPSEA1"
# An index names some thousand tensors. Parsed, the worst JSON takes thirty times its size.
MAX_JSON_BYTES = 2 * 1024 * 1024

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

PinnedDtype = Literal["F32", "F16", "BF16"]
_ITEM_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
_Size = Annotated[int, Field(ge=1, le=2**24)]
# Of a tensor, as it is read and pinned.
BLOCK_BYTES = 4 * 1024 * 1024
# What errors call a manifest that was made here, and read from no file.
_UNREAD = "the manifest"
# A manifest is often made too early.
_AFTER = {"calibration.safetensors": ", after tsqp calibrate"}


class OpenFile:
    """A regular file that is open for reading, and its bytes as they lie on the disk.

    `size`: in bytes; `stamp`: differs once the file was replaced, or rewritten without hiding it.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        found = os.fstat(descriptor)
        self.path, self.size = path, found.st_size
        self.stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        self._descriptor = descriptor

    def start(self, limit: int) -> bytes:
        """Read up to `limit` bytes, whatever size the file claims.

        Raises ModelError, and SealError for a sealed file of which `use_seal` was not told.
        """
        with _readable(self.path), os.fdopen(self._descriptor, "rb", closefd=False) as file:
            start = file.read(limit)
        plain = not start.startswith(SEALED_MAGIC)
        expected = "a plain one, or its key"
        SealError.unless(
            plain, str(self.path), "a sealed file", f"{expected} (tee-runner --seal-key)"
        )
        return start

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from a place in the file. Raises ModelError."""
        done = 0
        with _readable(self.path):
            while done < len(buffer) and (
                n := os.preadv(self._descriptor, [buffer[done:]], offset + done)
            ):
                done += n
        ModelError.unless(
            done == len(buffer), str(self.path), f"{offset + done} bytes", f"{offset + len(buffer)}"
        )


# Of a sealed directory: by its name, what turns each open file into the file that was sealed, whose
# methods raise SealError too.
Seal: TypeAlias = Mapping[str, Callable[[OpenFile], OpenFile]]

# By directory, as a path without links followed: whoever owns the disk can change links.
_seals: dict[str, Seal] = {}


def use_seal(directory: Path, seal: Seal | None) -> None:
    """Have the files of a directory read through a seal from now on, in this process. None: plain.

    While there is a seal, nothing in the directory is read that it does not name.
    """
    _seals.pop(os.path.abspath(directory), None)
    if seal is not None:
        _seals[os.path.abspath(directory)] = seal


def _seal_of(path: Path) -> Seal | None:
    return _seals.get(os.path.abspath(path.parent))


def is_there(path: Path) -> bool:
    """Say whether anything has this name, be it a link that leads nowhere."""
    if (seal := _seal_of(path)) is not None:
        return path.name in seal
    return os.path.lexists(path)


def require_inside(path: Path) -> Path:
    """Return where a file of a model directory really is. Raises ModelError if that is outside.

    The links of a Hugging Face cache, from `snapshots/<revision>` to `blobs` beside it, are inside.
    So is every file of a sealed directory: wherever a link leads, it has to be what was sealed.
    """
    if _seal_of(path) is not None:
        return path
    root, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    in_cache = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    inside = in_cache or target.is_relative_to(root)
    ModelError.unless(
        inside, str(path), "a link that leads out of the directory", "a file in it, or a copy"
    )
    return target


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a file into a ModelError that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        # A ValueError is of a name that no file can have.
        reason = getattr(error, "strerror", None) or "no name of a file"
        raise ModelError(
            str(path),
            "no such file" if isinstance(error, FileNotFoundError) else reason,
            "a readable file",
        ) from None


@contextmanager
def opened(path: Path, *, inside: bool = True, stored: bool = False) -> Iterator[OpenFile]:
    """Open a regular file for reading; never waits.

    `inside`: refuse a link out of the file's directory, unless it is sealed: see `require_inside`.
    `stored`: read what is on the disk, sealed or not. Raises ModelError that names the file, and
    SealError.
    """
    seal = _seal_of(path)
    inside = inside and seal is None
    target = require_inside(path) if inside else path
    # Not following, because `target` is where the last link led. Not blocking, because of pipes.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if inside else 0)
    with _readable(path):
        descriptor = os.open(target, flags)
    try:
        mode = os.fstat(descriptor).st_mode
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        ModelError.unless(stat.S_ISREG(mode), str(path), kind, "a regular file")
        file = OpenFile(descriptor, path)
        if seal is not None and not stored:
            known = path.name in seal
            SealError.unless(known, str(path), "a file that was not sealed", "one that was")
            file = seal[path.name](file)
        yield file
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int, *, inside: bool = True) -> bytes:
    """Read a whole file of at most `limit` bytes. Raises ModelError, SealError, which name it."""
    with opened(path, inside=inside) as file:
        content = b"" if file.size > limit else file.start(limit + 1)
    if (size := max(file.size, len(content))) > limit:
        raise ModelError(str(path), f"{size} bytes", f"at most {limit}")
    return content


def limit_structure(
    content: bytes, where: str, error: type[InputError] = ModelError, **limits: int
) -> None:
    """Refuse JSON with more `lists` (objects among them), `items` or `keys`, before it is parsed.

    What stands within texts counts too. Raises `error` that names `where`.
    """
    for what, most in limits.items():
        count = sum(map(content.count, _STRUCTURE[what]))
        error.unless(count <= most, where, f"{count} {what}", f"at most {most}")


def parse_object(
    content: bytes, where: str, error: type[InputError] = ModelError
) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises `error` that names `where`, and a key twice in one."""

    def without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):  # two readers may take different ones
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: {shown(key)}", "this key twice", "it once")
        return found

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as wrong:
        deep = isinstance(wrong, RecursionError)
        raise error(
            where,
            "nested too deeply" if deep else f"{type(wrong).__name__}: {wrong}"[:120],
            "a JSON object",
        ) from None
    if not isinstance(value, dict):
        raise error(where, describe(value), "a JSON object")
    return value


def rows_per_block(shape: tuple[int, ...], row_bytes: int) -> int:
    """Return how many rows a block has: those of about 4 MiB; a vector's rows are elements."""
    return max(1, min(shape[0] if shape else 1, BLOCK_BYTES // max(1, row_bytes)))


class TensorPin(Strict):
    """What is pinned of a tensor. `blocks`: SHA-256, in hex, of each block of rows as stored."""

    dtype: PinnedDtype
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


def find_file(directory: Path, name: str, manifest: Manifest | None) -> Path | None:
    """Return the path of a file that may be missing, or None.

    With a manifest, what it does not name is missing. Raises ManifestError for what it names and
    that is gone.
    """
    path = directory / name
    if manifest is not None:
        return manifest.find(path)
    return path if is_there(path) else None


def read_file(path: Path, limit: int, manifest: Manifest | None) -> bytes:
    """Read a file of a model directory, verified. Raises ModelError, ManifestError."""
    if manifest is not None:
        manifest.find(path)
    content = read_bytes(path, limit)
    if manifest is not None:
        manifest.check_file(path, content)
    return content


def read_json(path: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError that names the file, ManifestError if it differs."""
    return parse_object(read_file(path, MAX_JSON_BYTES, manifest), str(path))
