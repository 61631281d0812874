"""Changes of bytes, of text, and of decoded trees (msgpack, JSON), so that most still parse.

A fuzzer that follows the coverage of Python does not see into msgpack and pydantic, where most of
the decoding is done. Here what tells a new behaviour from an old one is how it ends
(`tests.fuzz.engine`).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgpack

# What a target reads: frames, pieces of a stream, or one file.
Case: TypeAlias = tuple[bytes, ...]
Change: TypeAlias = "Callable[[Mutator, Case, Case], Case]"

_POWERS = [2**n for n in (0, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 40, 53, 62, 63, 64)]
NUMBERS = [*(n + d for n in _POWERS for d in (-1, 0, 1)), -1, -2, -(2**31), -(2**63)]
# What a parser of JSON, of TOML, or of lines may stumble over.
_TOKENS = (
    *b"{ } [ ] , : = # ' null true false NaN Infinity -Infinity 1e400 -0 1.5 0x1 inf nan".split(),
    *b'" """ \\u0000 \\ud800 1979-05-27T07:32:00Z 07:32:00 a.b.c=1 [a] [[a]] \xff'.split(),
    *(b"\n", b"\r", b"\0", b" ", b"9" * 19, b"9" * 5000, b"[" * 200, b'{"a":' * 200),
)
_ODD_WORDS = ("", "x", "\n", "\0", "\ud7ff", "\x1b[31m", "\u202e", "x" * 300, "../x", "/dev/zero")
_FLOATS = (0.0, -1.5, 0.5, 1e-6, float("nan"), float("inf"), -float("inf"), 1e308)
# What JSON cannot say.
_NO_JSON = (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 1), {1: 2}, {b"x": 1}, [[]], [{}], b"xy")


class Mutator(random.Random):
    """Changes cases at random; the same seed makes the same changes. `words`: of the target."""

    def __init__(self, seed: int, words: Sequence[str] = ()) -> None:
        super().__init__(seed)
        self.words = [*words, *_ODD_WORDS]

    def chance(self, probability: float) -> bool:
        """Say yes so often."""
        return self.random() < probability

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1; quicker than `randrange`."""
        return int(self.random() * count)

    def pick(self, values: Sequence[Any]) -> Any:
        """Return one of the values."""
        return values[int(self.random() * len(values))]

    def bytes(self, data: bytes, tokens: Sequence[bytes] = ()) -> bytes:
        """Change bytes in up to four places, or put tokens there."""
        changed = bytearray(data)
        for _ in range(1 + self.below(4)):
            at, kind = self.below(len(changed) + 1), self.below(12 if tokens else 8)
            if kind < 2 and at < len(changed):
                changed[at] ^= 1 << self.below(8)
            elif kind == 2:
                changed[at : at + 1] = self.pick((b"\0", b"\1", b"\x7f", b"\x80", b"\xc1", b"\xff"))
            elif kind == 3:
                self.number(changed, at, self.pick(("<H", ">H", "<I", ">I", "<Q", ">Q")))
            elif kind == 4:
                changed[at:at] = self.randbytes(1 + self.below(8))
            elif kind == 5:
                del changed[at : at + 1 + self.below(8)]
            elif kind == 6:
                changed[at:at] = changed[at : at + 1 + self.below(32)] * (1 + self.below(3))
            elif kind == 7 and self.chance(0.3):
                del changed[at:]
            elif kind > 7:
                changed[at : at + self.pick((0, 0, 1, 5))] = self.pick(tokens)
        return bytes(changed)

    def number(self, data: bytearray, at: int, form: str) -> None:
        """Write a number that is often a border over some bytes."""
        size = struct.calcsize(form)
        if at + size <= len(data):
            struct.pack_into(form, data, at, self.pick(NUMBERS) & (256**size - 1))

    def tree(self, value: Any, odd: Sequence[Any] = ()) -> Any:
        """Return a tree with one place changed; nothing of the given one is. `odd`: more to say."""
        path = max(self.choices(list(_places(value)), k=2), key=len)  # most checks are deep
        return self._at(value, path, odd)

    def _at(self, value: Any, path: Sequence[Any], odd: Sequence[Any]) -> Any:
        if not path:
            return self._other(value, odd)
        key, *rest = path
        changed: Any = dict(value) if isinstance(value, dict) else list(value)
        kind = 9 if rest else self.below(10)
        if kind == 0:
            del changed[key]
        elif kind == 1 and isinstance(changed, dict):
            changed[self.pick(self.words)] = changed.pop(key)
        elif kind == 1:
            changed += [value[key]] * (1 + self.below(70 if self.chance(0.05) else 4))
        elif kind == 2 and isinstance(changed, dict):
            changed[self.pick(self.words)] = self._junk(odd)
        elif kind == 3:
            other = self.pick(list(changed) if isinstance(changed, dict) else range(len(changed)))
            changed[key], changed[other] = changed[other], changed[key]
        else:
            changed[key] = self._at(value[key], rest, odd)
        return changed

    def _other(self, value: Any, odd: Sequence[Any]) -> Any:
        kind = self.below(4)
        if kind == 0 and isinstance(value, bytes):
            return self.bytes(value)
        if kind == 0 and isinstance(value, str):
            return self.pick(self.words)
        if kind == 0 and type(value) is int:
            return value + self.pick((-1, 1, 2, 256, -256))
        if kind == 1:
            return [value] if self.chance(0.5) else {self.pick(self.words): value}
        return self._junk(odd)

    def _junk(self, odd: Sequence[Any]) -> Any:
        kind = self.below(8)
        if kind < 2:
            return self.pick(NUMBERS)
        if kind < 4:
            return self.pick(self.words)
        if kind == 4:
            return [self.pick(NUMBERS) for _ in range(self.below(6))]
        if kind == 5:
            return {self.pick(self.words): self.pick(NUMBERS) for _ in range(self.below(4))}
        return self.pick([None, True, False, *_FLOATS, *odd])


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree, the tree itself among them."""
    yield ()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for path in _places(item):
                yield (key, *path)


# --------------------------------------------------------------------------------- whole cases


def raw(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change bytes of the first part."""
    return (mutator.bytes(case[0]), *case[1:])


def text(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change text: tokens of any parser, and of the other case."""
    return (mutator.bytes(case[0], (*_TOKENS, *other[0].split()[:50])),)


def json_file(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change a JSON document, decoded or as text."""
    if mutator.chance(0.6):
        with suppress(ValueError, RecursionError):
            return (json.dumps(mutator.tree(mutator.tree(json.loads(case[0])))).encode(),)
    return text(mutator, case, other)


def safetensors(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change the header of a file of tensors, its length, or any bytes."""
    content = case[0]
    if mutator.chance(0.25) or len(content) < 10:
        return raw(mutator, case, other)
    size = int.from_bytes(content[:8], "little")
    (header,) = json_file(mutator, (content[8 : 8 + size],), (b"",))
    header += b" " * (-len(header) % 8 if mutator.chance(0.7) else 0)
    claimed = len(header) if mutator.chance(0.95) else mutator.pick((0, 2**40, 2**63, 10**8))
    return (claimed.to_bytes(8, "little") + header + content[8 + size :],)


def frames(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change the header of a message, its frames, or both; or give it those of another."""
    header, *rest = case or (b"",)
    kind = mutator.below(20)
    if kind < 11:
        with suppress(ValueError, TypeError, OverflowError, msgpack.UnpackException):
            fields = msgpack.unpackb(header, strict_map_key=False)
            return (msgpack.packb(mutator.tree(mutator.tree(fields, _NO_JSON))), *rest)
    if kind < 14:
        header = mutator.bytes(header)
    elif kind == 14 and header:
        # A pair more in the outermost map: one that it has already.
        header = bytes([(header[0] + 1) & 0xFF]) + header[1:] + header[1 : mutator.below(60)]
    elif kind == 15:
        # The numbers of our own headers stand in the same places.
        numbers = bytearray(header)
        for at in mutator.pick(((12, 33), (12, 35, 55))):
            mutator.number(numbers, at, ">Q")
        header = bytes(numbers)
    elif kind == 16 or not rest:
        rest = list(other[1:])
    elif (at := mutator.below(len(rest) + 1)) < len(rest) and mutator.chance(0.7):
        rest[at] = mutator.bytes(rest[at])
    else:
        rest[at : at + mutator.below(2)] = [bytes(mutator.below(33))] * mutator.below(3)
    return (header, *rest)


def stream(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change a stream, and cut it into pieces, none larger than a socket takes at once."""
    data, kind = bytearray(b"".join(case)), mutator.below(10)
    if kind < 3:
        mutator.number(data, *mutator.pick(((0, "<I"), (4, "<Q"), (12, "<Q"))))
    elif kind < 6:
        data = bytearray(mutator.bytes(bytes(data)))
    elif kind < 8:
        data += b"".join(other)
    cut, at = [], 0
    while at < min(len(data), 600_000):
        most = mutator.pick((1, 7, 64, 1000, 60_000)) if len(cut) < 6 else 60_000
        size = 1 + mutator.below(most)
        cut.append(bytes(data[at : at + size]))
        at += size
    return tuple(cut)


def pieces(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change one piece of several, leave it out, cut it in two, or put one of another before it."""
    changed = list(case)
    at, kind = mutator.below(len(changed)), mutator.below(4)
    middle = mutator.below(len(changed[at]) + 1)
    if kind == 0:
        changed[at : at + 1] = [changed[at][:middle], changed[at][middle:]]
    elif kind == 1:
        changed.insert(at, mutator.pick(other))
    elif kind == 2 and len(changed) > 1:
        del changed[at]
    else:
        changed[at] = mutator.bytes(changed[at])
    return tuple(changed[:8])
