"""Files of a model directory, opened so that whatever stands there can be refused in time.

A model directory is not trusted: a name in it may be a link out of it, a pipe without a
writer, a device without an end. Nothing is mapped into memory: a mapping ends the process when
the file is cut, and changes under the code that has just checked it.

Files of a directory that is sealed (`protocol.model.at_rest`) are read here as what was sealed:
code above sees names, sizes and bytes of the plain model.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from protocol.errors import InputError, ModelError, SealError, describe, shown

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
# Of settings. Parsed, the worst JSON takes thirty times its size.
MAX_JSON_BYTES = 2 * 1024 * 1024
# Of what names each tensor of a model, of which those with experts have 100,000; and what may be in
# it, three lists or objects and eleven items for each.
MAX_TENSORS_BYTES = 32 * 1024 * 1024
TENSORS_LIMITS = {"lists": 400_000, "items": 1_200_000, "keys": 800_000}
# Of a tensor, as it is read and pinned (`protocol.model.at_rest`).
BLOCK_BYTES = 4 * 1024 * 1024


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
            file.seek(0)
            # As much memory as there is file: one that is longer than it said is read on.
            start = file.read(most := min(limit, self.size + 1))
            start += file.read(limit - most) if len(start) == most else b""
        plain = not start.startswith(SEALED_MAGIC)
        expected = "a plain one, or its key (tee-runner --seal-key)"
        SealError.unless(plain, str(self.path), "a sealed file", expected)
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


def _sealed(path: Path) -> tuple[Seal | None, str]:
    """Return the seal of a file's directory, or of the one above, and its name there."""
    for folder in path.parents[:2]:
        if (seal := _seals.get(os.path.abspath(folder))) is not None:
            return seal, path.relative_to(folder).as_posix()
    return None, path.name


def is_there(path: Path) -> bool:
    """Say whether anything has this name, be it a link that leads nowhere."""
    seal, name = _sealed(path)
    return os.path.lexists(path) if seal is None else name in seal


def require_inside(path: Path) -> Path:
    """Return where a file of a model directory really is. Raises ModelError if that is outside.

    The links of a Hugging Face cache, from `snapshots/<revision>` to `blobs` beside it, are inside.
    So is every file of a sealed directory: wherever a link leads, it has to be what was sealed.
    """
    if _sealed(path)[0] is not None:
        return path
    root, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    # Of a file in a folder of the model, the directory above is the revision.
    in_cache = any(
        folder.name == "snapshots" and target.parent == folder.parent / "blobs"
        for folder in root.parents[:2]
    )
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
    seal, name = _sealed(path)
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
            SealError.unless(name in seal, str(path), "a file that was not sealed", "one that was")
            file = seal[name](file)
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
    content: bytes,
    where: str,
    limits: Mapping[str, int],
    error: type[InputError] = ModelError,
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


class Pins(Protocol):
    """Says which files there are, and what is in them: a `protocol.model.at_rest.Manifest`."""

    def find(self, path: Path) -> Path | None:
        """Return the path of a file that is named, None for another."""

    def check_file(self, path: Path, content: bytes) -> None:
        """Check the content of a file."""


def find_file(directory: Path, name: str, manifest: Pins | None) -> Path | None:
    """Return the path of a file that may be missing, or None.

    With a manifest, what it does not name is missing. Raises ManifestError for what it names and
    that is gone.
    """
    path = directory / name
    if manifest is not None:
        return manifest.find(path)
    return path if is_there(path) else None


def read_file(path: Path, limit: int, manifest: Pins | None) -> bytes:
    """Read a file of a model directory, verified. Raises ModelError, ManifestError."""
    if manifest is not None:
        manifest.find(path)
    content = read_bytes(path, limit)
    if manifest is not None:
        manifest.check_file(path, content)
    return content


def read_json(
    path: Path, manifest: Pins | None = None, limit: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError that names the file, ManifestError if it differs."""
    content = read_file(path, limit, manifest)
    limit_structure(content, str(path), TENSORS_LIMITS)
    return parse_object(content, str(path))
