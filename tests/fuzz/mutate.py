"""Mutations: of bytes, of text, and of decoded trees (msgpack, JSON), so that most still parse.

A fuzzer that follows the coverage of Python does not see into msgpack and pydantic, where most of
the decoding is done. Here what tells a new behaviour from an old one is how it ends
(`tests.fuzz.engine`).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

INTERESTING = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63),
    *(2**64 - 1, -1, -2, -(2**31), -(2**63)),
)
NAMES = (
    *("version", "request_id", "timeout_ms", "method", "request", "response", "status", "error"),
    *("timing", "queue_us", "compute_us", "dtype", "shape", "frame", "hidden_states", "elements"),
    *("input_ids", "input_shape", "output", "a", "b", "a_buffer", "b_buffer", "a_shape", "b_shape"),
    *("layer_idx", "module_names", "module_name", "bias", "config", "num_layers", "norm_weights"),
    *(
        "weight",
        "eps",
        "inv_freq",
        "attention_scaling",
        "rotary_emb_params",
        "instance_id",
        "layers",
    ),
    *("rows", "columns", "seed", "seed_shape"),
    *("", "x", "__class__", "\n", "\x00", "\ud7ff"),
)
WORDS = (
    *(
        "Init",
        "Health",
        "Embedding",
        "Linear",
        "RingLinear",
        "Matmul",
        "LMHead",
        "RingLMHead",
        "SeededRingLinear",
        "linear",
        "Nothing",
    ),
    *(
        "float32",
        "float16",
        "bfloat16",
        "int32",
        "int64",
        "torch.float32",
        "torch.int64",
        "float64",
    ),
    *(
        "success",
        "error",
        "MALFORMED_MESSAGE",
        "INTERNAL",
        "q_proj",
        "k_proj",
        "v_proj",
        "down_proj",
    ),
    *("", "\n", "ready", "0" * 64, "f" * 32, "../x", "/dev/zero", "\x1b[31m", "x" * 300, "\u202e"),
)
# Words of one kind: one in the place of another is what a check may have forgotten.
_FAMILIES = (
    ("float32", "float16", "bfloat16", "int32", "int64"),
    (
        *("Init", "Health", "Embedding", "Linear", "RingLinear", "SeededRingLinear"),
        *("Matmul", "LMHead", "RingLMHead"),
    ),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("success", "error"),
    ("ready", "draining"),
)
_FAMILY_OF = {word: family for family in _FAMILIES for word in family}

# A piece of text that a parser of JSON or TOML may stumble over.
TEXTS = (
    *(b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"=", b"\n", b"#", b"\\u0000", b"\\ud800"),
    *(
        b"null",
        b"true",
        b"false",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"-0",
        b"1.5",
        b"0x1",
    ),
    *(
        b"9" * 19,
        b"9" * 30,
        b"9" * 5000,
        b"[" * 200,
        b'{"a":' * 200,
        b"\xff",
        b"\x00",
        b"\xef\xbb\xbf",
    ),
    *(b'"""', b"'''", b"inf", b"nan", b"1979-05-27T07:32:00Z", b"07:32:00", b"a.b.c = 1", b"[a]\n"),
    *(b"[[a]]\n", b"2147483648", b"18446744073709551616", b"\xf0\x9f\x98\x80", b"\r"),
)


class Mutator:
    """Changes cases at random; the same seed makes the same changes."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self._byte_changes: tuple[Callable[[bytearray], None], ...] = (
            self._flip_bit,
            self._flip_bit,
            self._set_byte,
            self._set_number,
            self._insert,
            self._remove,
            self._repeat,
            self._truncate,
        )

    def chance(self, probability: float) -> bool:
        """Say yes so often."""
        return self.choose.random() < probability

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1; quicker than `randrange`."""
        return int(self.choose.random() * count)

    def pick(self, values: Sequence[Any]) -> Any:
        """Return one of the values."""
        return values[int(self.choose.random() * len(values))]

    # ------------------------------------------------------------------------------ bytes

    def bytes(self, data: bytes, *, most: int = 4) -> bytes:
        """Change bytes in up to `most` places."""
        changed = bytearray(data)
        for _ in range(1 + self.below(most)):
            self.pick(self._byte_changes)(changed)
        return bytes(changed)

    def _flip_bit(self, data: bytearray) -> None:
        if data:
            data[self.below(len(data))] ^= 1 << self.below(8)

    def _set_byte(self, data: bytearray) -> None:
        if data:
            data[self.below(len(data))] = self.pick((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xD9, 0xFF))

    def _set_number(self, data: bytearray) -> None:
        form = self.pick(("<H", ">H", "<I", ">I", "<Q", ">Q"))
        size = struct.calcsize(form)
        if len(data) >= size:
            number = self.pick(INTERESTING) & (256**size - 1)
            struct.pack_into(form, data, self.below(len(data) - size + 1), number)

    def _insert(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        data[at:at] = self.choose.randbytes(1 + self.below(8))

    def _remove(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        del data[at : at + 1 + self.below(8)]

    def _repeat(self, data: bytearray) -> None:
        at = self.below(len(data) + 1)
        piece = data[at : at + 1 + self.below(32)]
        data[at:at] = piece * (1 + self.below(3))

    def _truncate(self, data: bytearray) -> None:
        if self.chance(0.5):
            del data[self.below(len(data) + 1) :]

    def text(self, data: bytes, words: Sequence[bytes] = ()) -> bytes:
        """Change text: tokens put in or over, lines moved, left out or repeated."""
        changed = data
        for _ in range(1 + self.below(3)):
            kind = self.below(6)
            if kind == 0:
                changed = self.bytes(changed, most=2)
            elif kind in (1, 2):
                at = self.below(len(changed) + 1)
                over = self.below(6) if kind == 1 else 0
                token = self.pick(words) if words and self.chance(0.4) else self.pick(TEXTS)
                changed = changed[:at] + token + changed[at + over :]
            else:
                lines = changed.split(b"\n")
                at, other = self.below(len(lines)), self.below(len(lines))
                if kind == 3:
                    lines[at], lines[other] = lines[other], lines[at]
                elif kind == 4:
                    lines.insert(other, lines[at])
                else:
                    del lines[at]
                changed = b"\n".join(lines)
        return changed

    # ------------------------------------------------------------------------------ trees

    def tree(self, value: Any, junk: Callable[[Mutator], Any]) -> Any:
        """Return a tree with one place changed; nothing of the given one is."""
        if self.chance(0.3):
            # All leaves alike; going down from the top, the deep ones are rarely met.
            paths = list(_leaves(value))
            if paths:
                return self._at(value, self.pick(paths), junk)
        if isinstance(value, dict) and value and self.chance(0.85):
            return self._map(value, junk)
        if isinstance(value, list) and value and self.chance(0.7):
            return self._list(value, junk)
        return self._leaf(value, junk)

    def _at(self, value: Any, path: tuple[Any, ...], junk: Callable[[Mutator], Any]) -> Any:
        if not path:
            return self._leaf(value, junk)
        changed = dict(value) if isinstance(value, dict) else list(value)
        changed[path[0]] = self._at(value[path[0]], path[1:], junk)
        return changed

    def _map(self, value: dict[Any, Any], junk: Callable[[Mutator], Any]) -> dict[Any, Any]:
        key = self.pick(list(value))
        kind = self.below(12)
        changed = dict(value)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[self.pick(NAMES)] = junk(self)
        elif kind == 2:
            new = self.pick(NAMES)
            changed = {(new if name == key else name): item for name, item in value.items()}
        elif kind == 3:
            other = self.pick(list(value))
            changed[key], changed[other] = value[other], value[key]
        else:
            changed[key] = self.tree(value[key], junk)
        return changed

    def _list(self, value: list[Any], junk: Callable[[Mutator], Any]) -> list[Any]:
        at = self.below(len(value))
        kind = self.below(5)
        changed = list(value)
        if kind == 0:
            del changed[at]
        elif kind == 1:
            changed.insert(at, junk(self))
        elif kind == 2:
            changed += [value[at]] * (1 + self.below(70 if self.chance(0.05) else 4))
        else:
            changed[at] = self.tree(value[at], junk)
        return changed

    def _leaf(self, value: Any, junk: Callable[[Mutator], Any]) -> Any:
        kind = self.below(4)
        if kind == 0:
            if type(value) is int:
                return value + self.pick((-1, 1, 2, 256, -256))
            if isinstance(value, bytes):
                return self.bytes(value, most=2)
            if isinstance(value, str):
                return self.pick(_FAMILY_OF.get(value, WORDS))
        if kind == 1 and type(value) is int:
            return self.pick(INTERESTING)
        if kind == 2:
            return [value] if self.chance(0.5) else {self.pick(NAMES): value}
        return junk(self)


def _leaves(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for path in _leaves(item):
                yield (key, *path)
    else:
        yield ()


def _deep(mutator: Mutator) -> Any:
    nested: Any = {}
    for _ in range(mutator.below(12)):
        nested = {mutator.pick(NAMES): nested}
    return nested


def _numbers(mutator: Mutator) -> list[int]:
    return [mutator.pick(INTERESTING) for _ in range(mutator.below(6))]


def _names(mutator: Mutator) -> dict[str, int]:
    return {mutator.pick(NAMES): mutator.pick(INTERESTING) for _ in range(mutator.below(4))}


# More often what is more often a mistake of the reader: numbers and words.
_FLOATS = (0.0, -1.5, 0.5, 1e-6, float("nan"), float("inf"), -float("inf"), 1e308)
_JUNK: tuple[Callable[[Mutator], Any], ...] = (
    lambda mutator: None,
    lambda mutator: mutator.chance(0.5),
    lambda mutator: mutator.pick(INTERESTING),
    lambda mutator: mutator.pick(INTERESTING),
    lambda mutator: mutator.pick(WORDS),
    lambda mutator: mutator.pick(WORDS),
    lambda mutator: mutator.pick(_FLOATS),
    _numbers,
    _names,
)
_NO_JSON = (
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 1), {1: 2}, {b"x": 1}),
    *([[]], [{}], [[], []], [None] * 65),
)
_MSGPACK_JUNK: tuple[Callable[[Mutator], Any], ...] = (
    *_JUNK,
    lambda mutator: mutator.choose.randbytes(mutator.below(40)),
    lambda mutator: mutator.pick(_NO_JSON),
    _deep,
)


def msgpack_junk(mutator: Mutator) -> Any:
    """Return anything that msgpack can say."""
    return mutator.pick(_MSGPACK_JUNK)(mutator)


def json_junk(mutator: Mutator) -> Any:
    """Return anything that JSON, as Python reads it, can say."""
    return mutator.pick(_JUNK)(mutator)
