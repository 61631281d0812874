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
_NO_TREE = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


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
                # A number that is often a border; those of our headers and streams stand in front.
                form = self.pick(("<H", ">H", "<I", ">I", "<Q", ">Q"))
                at, size = self.pick((at, 0, 4, 12, 33, 35, 55)), struct.calcsize(form)
                if at + size <= len(changed):
                    number = self.pick(NUMBERS) & (256**size - 1)
                    struct.pack_into(form, changed, at, number)
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
            changed[self.pick(self.words)] = self._other(None, odd)
        else:
            changed[key] = self._at(value[key], rest, odd)
        return changed

    def _other(self, value: Any, odd: Sequence[Any]) -> Any:
        if type(value) is int and self.chance(0.25):
            return value + self.pick((-1, 1, 2, 256, -256))
        if isinstance(value, bytes) and self.chance(0.25):
            return self.bytes(value)
        others = (
            *(self.pick(NUMBERS), self.pick(self.words), self.pick(NUMBERS), self.pick(self.words)),
            *([value], {self.pick(self.words): value}, [self.pick(NUMBERS)] * self.below(6)),
            self.pick((None, True, False, *_FLOATS, *odd)),
        )
        return self.pick(others)

    def structured(self, data: bytes) -> bytes:
        """Change what a message, a JSON document or a header of tensors says; or else its bytes."""
        size = int.from_bytes(data[:8], "little")
        with suppress(*_NO_TREE):
            if data[:1] == b"{":
                return json.dumps(self.tree(self.tree(json.loads(data)))).encode()
            if data[8:9] == b"{":
                header = json.dumps(self.tree(json.loads(data[8 : 8 + size]))).encode()
                header += b" " * (-len(header) % 8 if self.chance(0.7) else 0)
                return len(header).to_bytes(8, "little") + header + data[8 + size :]
            fields = msgpack.unpackb(data, strict_map_key=False)
            if isinstance(fields, dict):
                return bytes(msgpack.packb(self.tree(self.tree(fields, _NO_JSON))))
        return self.bytes(data)


def _places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree, the tree itself among them."""
    yield ()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for path in _places(item):
                yield (key, *path)


def one(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change a case of one part: as a tree, or as text, with tokens of any parser and the other."""
    if mutator.chance(0.6):
        return (mutator.structured(case[0]),)
    return (mutator.bytes(case[0], (*_TOKENS, *other[0].split()[:50])),)


def parts(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change frames, or pieces of a stream: one of them, how many, or those of another case."""
    changed = list(case) or [b""]
    at, kind = mutator.below(len(changed)), mutator.below(20)
    if kind < 9:
        changed[0] = mutator.structured(changed[0])
    elif kind < 14:
        changed[at] = mutator.bytes(changed[at])
    elif kind < 16:
        middle = mutator.below(len(changed[at]) + 1)
        changed[at : at + 1] = [changed[at][:middle], changed[at][middle:]]
    elif kind < 18:
        changed.insert(at + mutator.below(2), mutator.pick(other or (b"",)))
    elif kind == 18 and len(changed) > 1:
        del changed[at]
    else:
        changed[1:] = other[1:]
    return tuple(changed[:8])
