"""Linear weights as int8 with one float scale per output, for products in the ring.

    weight[j, k] ~ scale[j] * int8[j, k],  scale[j] = max_k |weight[j, k]| / 127

Both sides derive them from the same checkpoint with the same float32 operations, so that they hold
the same integers bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from protocol.errors import ModelError
from protocol.integer import empty_weight
from protocol.messages import ModuleName, Projection
from protocol.model.checkpoint import Checkpoint, lm_head_name
from protocol.model.config import ModelConfig
from protocol.model.weights import CPU, row_layout, weight_rows

INT8_MAX = 127

_BLOCK_ELEMENTS = 2**21
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """One or several linear modules over the same input, in integers.

    `weight`: int8 [sum of out_features, in_features], -127 to 127, in the layout of
    `empty_weight`; `scale`: float32 [sum of out_features], on the same device. `rows` says which
    rows belong to which module. Biases are not here: they are float.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    rows: dict[ModuleName, slice]

    def max_row_norm(self) -> float:
        """Return the largest Euclidean norm of a row of integers, rounded to nearest.

        The sum of squares is exact; the one rounding is that of the float64 square root.
        """
        largest = 0
        for block in self.weight.split(max(1, _BLOCK_ELEMENTS // self.weight.shape[1])):
            # Sums of squares of int8 stay far below 2^53, where float64 stops being exact.
            squares = block.to(torch.float64).square_().sum(dim=1)
            largest = max(largest, int(squares.max()))
        return math.sqrt(largest)


def quantize_rows(weight: torch.Tensor, where: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to int8 with a scale of its own, symmetric about zero.

    `weight`: float [n, K]. Returns int8 [n, K], -127 to 127, and float32 scales [n]; a row whose
    scale would be zero or subnormal is all zeros with scale 1. Computed in float32 from the stored
    dtype, halves to even. Raises ModelError, with `where`, for NaN and infinity.
    """
    exact = weight.to(torch.float32)
    largest = exact.abs().amax(dim=1)
    if not bool(torch.isfinite(largest).all()):  # amax passes NaN on
        raise ModelError(where, "NaN or infinity", "finite weights")
    scale = largest / INT8_MAX
    scale = torch.where(scale < _SMALLEST_SCALE, torch.ones_like(scale), scale)
    rounded = (exact / scale[:, None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return rounded.to(torch.int8), scale


def load_quantized(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    operator: Projection,
    device: torch.device = CPU,
) -> QuantizedLinear:
    """Read a fused operator's modules, or the LM head, and quantise a block of rows at a time.

    Raises ModelError that names the tensor.
    """
    rows, (out_features, in_features) = row_layout(config, operator)
    scale = torch.empty(out_features, dtype=torch.float32, device=device)
    # In decode the TEE's own LM head meets one row of one digit, and that is twice as fast over
    # rows that lie in one piece.
    weight = (
        torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        if operator == "lm_head"
        else empty_weight(out_features, in_features, device)
    )
    for name, its_rows in weight_rows(config, layer, operator).items():
        _fill(checkpoint, name, weight[its_rows], scale[its_rows])
    return QuantizedLinear(weight, scale, rows)


def load_head_scale(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor:
    """Return the scales of the LM head's outputs alone, float32 [V], without keeping its integers.

    Raises ModelError that names the tensor.
    """
    name = lm_head_name(config)
    blocks = checkpoint.blocks(name, row_layout(config, "lm_head")[1])
    where = f"{checkpoint.directory}: {name}"
    return torch.cat([quantize_rows(block, where)[1] for _, block in blocks])


def _fill(checkpoint: Checkpoint, name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantise a tensor of the checkpoint into place, a block of rows at a time.

    On the CPU, wherever the result goes: a division that another device rounds otherwise would
    give other integers than the other side has.
    """
    where = f"{checkpoint.directory}: {name}"
    for rows, found in checkpoint.blocks(name, tuple(weight.shape)):
        integers, scales = quantize_rows(found, where)
        weight[rows].copy_(integers)
        scale[rows].copy_(scales)
