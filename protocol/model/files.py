"""Files of a model directory, opened so that whatever stands there can be refused in time.

A model directory may come from anybody: a name in it may be a link out of it, a pipe that nobody
writes to, a device without an end. Nothing is mapped into memory: a mapping ends the process when
the file is cut, and changes under whoever has just checked it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import InputError, ModelError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_SHOWN = 120


class _RepeatedKeyError(Exception):
    """A JSON object with one key twice: two readers may take different ones."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def shown(name: str) -> str:
    """Return a name from a file as it can stand in a message: short, and printable."""
    if len(name) <= _SHOWN and name.isprintable():
        return name
    return f"{name[: _SHOWN // 2]!r}..."


def is_there(path: Path) -> bool:
    """Say whether anything has this name, be it a link that leads nowhere."""
    return os.path.lexists(path)


def require_inside(path: Path) -> Path:
    """Return where a file of a model directory really is. Raises ModelError if that is outside.

    The links of a Hugging Face cache, from `snapshots/<revision>` to `blobs` beside it, are inside.
    """
    root, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    if target.is_relative_to(root):
        return target
    if root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs":
        return target
    raise ModelError(
        str(path), got="a link that leads out of the directory", expected="a file in it, or a copy"
    )


@contextmanager
def opened(path: Path, *, inside: bool = True) -> Iterator[int]:
    """Open a regular file for reading and give its descriptor; never waits.

    `inside`: refuse a link out of the file's directory. Raises ModelError that names the file.
    """
    target = require_inside(path) if inside else path
    # Not following, because `target` is where the last link led. Not blocking, because of pipes.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if inside else 0)
    try:
        descriptor = os.open(target, flags)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        got = "no such file" if isinstance(error, FileNotFoundError) else reason
        raise ModelError(
            str(path), got=got or "no name of a file", expected="a readable file"
        ) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
            raise ModelError(str(path), got=kind, expected="a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int, *, inside: bool = True) -> bytes:
    """Read a whole file of at most `limit` bytes. Raises ModelError that names the file."""
    with opened(path, inside=inside) as descriptor:
        size = os.fstat(descriptor).st_size
        if size <= limit:
            try:
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    content = file.read(limit + 1)  # a file may grow, and say that it is empty
            except OSError as error:
                raise ModelError(
                    str(path), got=error.strerror or "an error", expected="a readable file"
                ) from None
            size = max(size, len(content))
    if size > limit:
        raise ModelError(str(path), got=f"{size} bytes", expected=f"at most {limit}")
    return content


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a place in a file; return how many bytes there were."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def limit_structure(
    content: bytes,
    where: str,
    *,
    max_lists: int,
    max_items: int,
    max_keys: int | None = None,
    error: type[InputError] = ModelError,
) -> None:
    """Refuse JSON with too many lists and objects, items of them, or keys, before it is parsed.

    A parser takes a hundred times the bytes of each. What stands within texts counts too. Raises
    `error` that names `where`.
    """
    lists, items = content.count(b"[") + content.count(b"{"), content.count(b",")
    if lists > max_lists or items > max_items:
        raise error(
            where,
            got=f"{lists} lists of {items} items",
            expected=f"at most {max_lists} and {max_items}",
        )
    if max_keys is not None and (keys := content.count(b":")) > max_keys:
        raise error(where, got=f"{keys} keys", expected=f"at most {max_keys}")


def parse_json(content: bytes, where: str, error: type[InputError] = ModelError) -> object:
    """Parse UTF-8 JSON. Raises ValueError, and `error` that names a key twice in one object."""
    try:
        value: object = json.loads(content.decode("utf-8"), object_pairs_hook=_without_repeats)
    except _RepeatedKeyError as repeated:
        raise error(
            f"{where}: {shown(repeated.key)}", got="this key twice", expected="it once"
        ) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RepeatedKeyError(key)
            seen.add(key)
    return found
