"""Weights that a safetensors directory holds in few bits, and the floats that they stand for.

A method is known by the tensors that stand in place of a weight. All of them but MXFP4 say

    weight[o, i] = (number[o, i] - zero[o, i]) * scale[o, i]

with one scale, and one zero point, for a block of outputs and inputs. Layouts are those of the
libraries that write them: compressed-tensors, AutoAWQ, GPTQModel, and what transformers reads as
fp8. Rows of a weight are read some at a time, in float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from protocol.errors import ModelError, shown

Tensor: TypeAlias = torch.Tensor
# Some rows and columns of a tensor of the file, by its name, as stored.
Read: TypeAlias = Callable[[str, slice, slice], Tensor]
_ALL = slice(None)
# Where a word of AWQ has the outputs 0 to 7.
_AWQ_ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
# Floats of four bits: sign, two bits of exponent, one of mantissa; 32 of MXFP4 share a scale.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat((_E2M1, -_E2M1))
_MX_BLOCK = 32


@dataclass(frozen=True)
class Few:
    """A weight in few bits, `name` without `.weight`: what stands for it in a file.

    `shapes`: of all tensors there. `bits`: of a packed number; `block`: how many outputs and inputs
    share a scale, None where shapes say so; `less_one`: whether GPTQ's zero points are stored as
    one less.
    """

    name: str
    read: Read
    shapes: Mapping[str, tuple[int, ...]]
    bits: int = 4
    block: tuple[int, int] | None = None
    less_one: bool = True

    def has(self, part: str) -> bool:
        """Say whether a part is there."""
        return f"{self.name}.{part}" in self.shapes

    def shape_of(self, part: str) -> tuple[int, ...]:
        """Return the shape of a part. Raises ModelError where it is not there."""
        found = self.shapes.get(f"{self.name}.{part}")
        if found is None:
            raise ModelError(shown(f"{self.name}.{part}"), "no such tensor", "one, with its weight")
        return found

    def part(self, part: str, rows: slice = _ALL, columns: slice = _ALL) -> Tensor:
        """Return a part, or some of it. Raises ModelError where it is not there."""
        self.shape_of(part)
        return self.read(f"{self.name}.{part}", rows, columns)

    def require(self, part: str, got: object, expected: object) -> None:
        """Refuse a part of which something is not as its method has it. Raises ModelError."""
        ModelError.unless(
            got == expected, shown(f"{self.name}.{part}"), str(got), f"{expected}, for its weight"
        )


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned numbers of int32 words [n, w], lowest bits first: int64 [n, count].

    A number may begin in one word and end in the next.
    """
    begin = bits * torch.arange(count)
    wide, word = words.long() & 0xFFFF_FFFF, begin // 32
    both = wide[:, (word + 1).clamp(max=wide.shape[1] - 1)] << 32 | wide[:, word]
    return torch.bitwise_and(both >> begin % 32, 2**bits - 1)


def _words(count: int, bits: int) -> int:
    """Return how many words hold so many numbers."""
    return -(-count * bits // 32)


def _order(few: Few, part: str) -> Tensor | None:
    """Return which group each input has; None where they come in order.

    A library that has none to tell writes -1.
    """
    found = few.part(part).long() if few.has(part) else None
    return None if found is None or bool((found < 0).all()) else found


def _spread(
    few: Few, part: str, x: Tensor, rows: slice, size: tuple[int, int], at_I: Tensor | None = None
) -> Tensor:
    """Return what some rows of a weight of this size have of a scale or a zero point `x`.

    `at_I`: which column each input has. Raises ModelError for a shape that is none of the weight's.
    """
    if x.numel() == 1:
        return x.reshape(1, 1)
    x, (height, width) = x.reshape(len(x), -1), size
    high, wide = few.block or (1, -(-width // x.shape[1]))
    wide = width if x.shape[1] == 1 else wide
    few.require(part, tuple(x.shape), (-(-height // high), -(-width // wide)))
    if at_I is None:
        at_I = torch.arange(width) // wide
    few.require("g_idx", (len(at_I), bool(at_I.min() >= 0)), (width, True))
    few.require("g_idx", int(at_I.max()) < x.shape[1], True)
    return x[torch.arange(rows.start, rows.stop) // high][:, at_I]


def _scaled(few: Few, rows: slice) -> Tensor:
    """fp8 of all kinds, and int8 of compressed-tensors: a number for each element."""
    part = "weight_scale_inv" if few.has("weight_scale_inv") else "weight_scale"
    high, wide = few.shape_of("weight")
    found = few.part("weight", rows).float()
    if few.has("weight_zero_point"):
        zero = few.part("weight_zero_point").float()
        found -= _spread(few, "weight_zero_point", zero, rows, (high, wide))
    return torch.mul(found, _spread(few, part, few.part(part).float(), rows, (high, wide)))


def _packed(few: Few, rows: slice) -> Tensor:
    """compressed-tensors in words: rows of numbers side by side, half their range added."""
    if not few.has("weight_shape"):
        return _mxfp4(few, rows)
    high, wide = size = _packed_size(few)
    half = 2 ** (few.bits - 1)
    few.require("weight_packed", few.shape_of("weight_packed"), (high, _words(wide, few.bits)))
    at_I, scale = _order(few, "weight_g_idx"), few.part("weight_scale").float()
    found = unpacked(few.part("weight_packed", rows), few.bits, wide).float() - half
    if few.has("weight_zero_point"):
        words = few.part("weight_zero_point").t().contiguous()
        few.require("weight_zero_point", words.shape[1:], (_words(high, few.bits),))
        zero = unpacked(words, few.bits, high).t().float() - half
        found -= _spread(few, "weight_zero_point", zero, rows, size, at_I)
    return torch.mul(found, _spread(few, "weight_scale", scale, rows, size, at_I))


def _packed_size(few: Few) -> tuple[int, int]:
    if not few.has("weight_shape"):
        high, wide = few.shape_of("weight_packed")
        return high, 2 * wide
    high, wide = few.part("weight_shape").tolist()
    return high, wide


def _mxfp4(few: Few, rows: slice) -> Tensor:
    """MXFP4 of compressed-tensors: two floats of four bits in a byte; blocks share a power of two.

    The scale is that power, 127 added.
    """
    high, wide = _packed_size(few)
    few.require("weight_scale", few.shape_of("weight_scale"), (high, wide // _MX_BLOCK))
    scale = few.part("weight_scale", rows)
    few.require("weight_scale", scale.dtype, torch.uint8)
    pairs = few.part("weight_packed", rows).long()
    values = _E2M1[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)]
    powers = scale.int().unsqueeze(-1) - 127
    weight: Tensor = torch.ldexp(values.unflatten(1, (-1, _MX_BLOCK)), powers)
    return weight.flatten(1)


def _awq(few: Few, rows: slice) -> Tensor:
    """AWQ: words of eight outputs each, [I, O / 8]."""
    words = slice(rows.start // 8, -(-rows.stop // 8))
    inside = slice(rows.start - 8 * words.start, rows.stop - 8 * words.start)

    def numbers(part: str) -> Tensor:
        stored = few.part(part, columns=words).contiguous()
        found = unpacked(stored, 4, 8 * stored.shape[1])
        ordered: Tensor = found.unflatten(1, (-1, 8))[..., _AWQ_ORDER]
        return ordered.flatten(1)[:, inside].t().float()

    return _grouped(few, rows, numbers("qweight"), numbers("qzeros"), None)


def _gptq(few: Few, rows: slice) -> Tensor:
    """GPTQ: words of several inputs each, [n, O]; a group for each input, in any order."""
    high, wide = _words_size(few)
    found = few.part("qweight", columns=rows).t().contiguous()
    zero = unpacked(few.part("qzeros"), few.bits, high)[:, rows].t()
    zero = (zero + few.less_one) % 2**few.bits
    order = _order(few, "g_idx")
    return _grouped(few, rows, unpacked(found, few.bits, wide).float(), zero.float(), order)


def _grouped(few: Few, rows: slice, found: Tensor, zero: Tensor, at_I: Tensor | None) -> Tensor:
    """Take zero points [n, G] from numbers [n, I] and scale them, of which files have [G, O]."""
    size = rows.stop - rows.start, found.shape[1]
    every, scale = slice(0, size[0]), few.part("scales", columns=rows).t().float()
    found = found - _spread(few, "qzeros", zero, every, size, at_I)
    return torch.mul(found, _spread(few, "scales", scale, every, size, at_I))


def _words_size(few: Few) -> tuple[int, int]:
    high, wide = few.shape_of("qweight")
    return (8 * wide, high) if _is_awq(few) else (wide, high * 32 // few.bits)


def _is_awq(few: Few) -> bool:
    """Say which of the two it is that have `qweight`: AWQ has one scale for each output of it."""
    return few.shape_of("scales")[1] == 8 * few.shape_of("qweight")[1]


@dataclass(frozen=True)
class Method:
    """How weights are read that have a tensor of some name in their place.

    `shape`: of the weight; `rows`: some of it; `parts`: what belongs to it, besides `mark`.
    """

    mark: str
    shape: Callable[[Few], tuple[int, ...]]
    rows: Callable[[Few, slice], Tensor]
    parts: tuple[str, ...]


# Scales of what a layer reads and gives: for whoever computes in few bits.
_BESIDE = ("input_scale", "input_zero_point", "output_scale", "activation_scale")
_ZERO = ("weight_zero_point", *_BESIDE)
# By the mark, of which a weight has one.
METHODS: Mapping[str, Method] = {
    method.mark: method
    for method in (
        Method(
            "weight_packed",
            _packed_size,
            _packed,
            ("weight_scale", "weight_shape", "weight_g_idx", *_ZERO),
        ),
        Method(
            "qweight",
            _words_size,
            lambda few, rows: (_awq if _is_awq(few) else _gptq)(few, rows),
            ("qzeros", "scales", "g_idx"),
        ),
        *(
            Method(mark, lambda few: few.shape_of("weight"), _scaled, ("weight", *_ZERO))
            for mark in ("weight_scale_inv", "weight_scale")
        ),
    )
}
