"""Weights in memory, in the shape in which both sides multiply by them.

Modules that read the same input are stored as one matrix (q/k/v; gate/up), so that a fused call is
one product. A single module of the group is a view of some of its rows.

For products in the ring linear weights are int8 with one float scale per output:

    weight[j, k] ~ scale[j] * int8[j, k],  scale[j] = max_k |weight[j, k]| / 127

Both sides derive them from the same checkpoint with the same float32 operations, so that they hold
the same integers bit by bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import linear, softplus

from protocol.errors import ModelError
from protocol.integer import empty_weight
from protocol.messages import ModuleName, Projection
from protocol.model.architectures import NormName
from protocol.model.checkpoint import (
    FINAL_NORM,
    FINAL_NORM_BIAS,
    XIELU,
    Checkpoint,
    lm_head_name,
    module_name,
    norm_name,
    norm_tensors,
)
from protocol.model.config import ModelConfig

CPU = torch.device("cpu")
INT8_MAX = 127
_BLOCK_ELEMENTS = 2**21
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One or several linear modules over the same input.

    `weight`: [sum of out_features, in_features]; `bias`: [sum of out_features] or None.
    `rows` says which rows belong to which module.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: dict[ModuleName, slice]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [..., sum of out_features] for `hidden` [..., in_features]."""
        return linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class NormTensors:
    """Weight and bias of a norm: [D], of queries and keys [C] or [H * C]; no bias: None.

    Where a mask has transformed it for a service, it may be [heads, C], one for each head.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LightWeights:
    """What a layer has besides matrices.

    `xielu`: alpha_p, alpha_n, beta and eps of the activation of that name, float32 [4].
    """

    norms: Mapping[NormName, NormTensors]
    xielu: torch.Tensor | None = None


# Reads a tensor of a checked shape by its name.
Reader: TypeAlias = Callable[[str, tuple[int, ...]], torch.Tensor]


def load_light(config: ModelConfig, layer: int, read: Reader) -> LightWeights:
    """Read the light weights of a layer."""
    shapes = norm_tensors(config, layer)
    tensors = {name: read(name, shape) for name, shape in shapes.items()}
    norms = {
        norm: NormTensors(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        for norm in config.table.norms
        for name in [norm_name(layer, norm)]
    }
    xielu = None
    if config.activation == "xielu":
        own = (tensors[f"model.layers.{layer}.mlp.act_fn.{name}"] for name in XIELU)
        high, low, beta, eps = (one.to(torch.float32) for one in own)
        xielu = torch.cat((softplus(high), beta + softplus(low), beta, eps))
    return LightWeights(norms, xielu)


def load_final_norm(config: ModelConfig, read: Reader) -> NormTensors:
    """Read the norm before the LM head."""
    size = (config.hidden_size,)
    bias = read(FINAL_NORM_BIAS, size) if config.table.norm_bias else None
    return NormTensors(read(FINAL_NORM, size), bias)


def weight_rows(config: ModelConfig, layer: int, operator: Projection) -> dict[str, slice]:
    """Return the tensors that a fused operator's matrix is made of, and which rows each gives."""
    if operator == "lm_head":
        return {lm_head_name(config): slice(0, config.vocab_size)}
    rows, _ = config.row_layout(operator)
    return {f"{module_name(layer, module)}.weight": its_rows for module, its_rows in rows.items()}


def load_linear(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    operator: Projection,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> FusedLinear:
    """Read a fused operator's modules straight into their rows of one matrix."""
    rows, shape = config.row_layout(operator)
    weight = torch.empty(shape, dtype=dtype, device=device)
    for name, its_rows in weight_rows(config, layer, operator).items():
        checkpoint.copy_into(name, weight[its_rows])
    bias = load_bias(checkpoint, config, layer, operator, dtype=dtype, device=device)
    return FusedLinear(weight, bias, rows)


def load_bias(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    operator: Projection,
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> torch.Tensor | None:
    """Read a fused operator's bias, 0 for modules without one; None where no module has one."""
    rows, (out_features, _) = config.row_layout(operator)
    biased = [module for module in rows if module in config.biased_modules]
    if not biased:
        return None
    bias = torch.zeros(out_features, dtype=dtype, device=device)
    for module in biased:
        checkpoint.copy_into(f"{module_name(layer, module)}.bias", bias[rows[module]])
    return bias


def load_tensor(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Read one tensor of a checked shape into memory of its own, converted to `dtype`."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    checkpoint.copy_into(name, tensor)
    return tensor


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

    def max_row_sum(self) -> int:
        """Return the largest sum of magnitudes of a row of integers."""
        blocks = self.weight.split(max(1, _BLOCK_ELEMENTS // self.weight.shape[1]))
        return max(int(block.abs().sum(dim=1, dtype=torch.int32).max()) for block in blocks)


def quantize_rows(weight: torch.Tensor, where: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to int8 with a scale of its own, symmetric about zero.

    `weight`: float [n, K]. Returns int8 [n, K], -127 to 127, and float32 scales [n]; a row whose
    scale would be zero or subnormal is all zeros with scale 1. Computed in float32 from the stored
    dtype, halves to even. Raises ModelError, with `where`, for NaN and infinity.
    """
    exact = weight.to(torch.float32)
    largest = exact.abs().amax(dim=1)
    # amax passes NaN on.
    ModelError.unless(largest.isfinite().all(), where, "NaN or infinity", "finite weights")
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
    rows, (out_features, in_features) = config.row_layout(operator)
    scale = torch.empty(out_features, dtype=torch.float32, device=device)
    # In decode the TEE's own LM head meets one row of one digit, and that is twice as fast over
    # rows that lie in one piece.
    weight = (
        torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        if operator == "lm_head"
        else empty_weight(out_features, in_features, device)
    )
    # On the CPU, wherever the result goes: a division that another device rounds otherwise would
    # give other integers than the other side has.
    for name, its_rows in weight_rows(config, layer, operator).items():
        shape = (its_rows.stop - its_rows.start, in_features)
        for block, found in checkpoint.blocks(name, shape):
            integers, scales = quantize_rows(found, f"{checkpoint.directory}: {name}")
            weight[its_rows][block].copy_(integers)
            scale[its_rows][block].copy_(scales)
    return QuantizedLinear(weight, scale, rows)
