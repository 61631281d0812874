"""Weights in memory, in the shape in which both sides multiply by them.

Modules that read the same input are stored as one matrix (q/k/v; gate/up), so that a fused call is
one product. A single module of the group is a view of some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from protocol.messages import FUSED_MODULES, ModuleName, Projection
from protocol.model.checkpoint import Checkpoint, lm_head_name, module_name
from protocol.model.config import ModelConfig

CPU = torch.device("cpu")
_UNUSED = torch.empty(0)


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
class LayerNorms:
    """RMSNorm weights of one layer: [D]; `q_norm`, `k_norm`: [C], empty unless `qk_norm`.

    Where a mask has transformed them for a service, these may be [heads, C], one for each head.
    """

    input_layernorm: torch.Tensor
    post_attention_layernorm: torch.Tensor
    q_norm: torch.Tensor = _UNUSED
    k_norm: torch.Tensor = _UNUSED


def row_layout(
    config: ModelConfig, operator: Projection
) -> tuple[dict[ModuleName, slice], tuple[int, int]]:
    """Say which rows of a fused operator's matrix belong to which module, and the matrix's shape.

    The shape is (sum of out_features, in_features). The LM head has no modules.
    """
    if operator == "lm_head":
        return {}, (config.vocab_size, config.hidden_size)
    rows: dict[ModuleName, slice] = {}
    start = in_features = 0
    for module in FUSED_MODULES[operator]:
        out_features, in_features = config.module_shape(module)
        rows[module] = slice(start, start + out_features)
        start += out_features
    return rows, (start, in_features)


def weight_rows(config: ModelConfig, layer: int, operator: Projection) -> dict[str, slice]:
    """Return the tensors that a fused operator's matrix is made of, and which rows each gives."""
    if operator == "lm_head":
        return {lm_head_name(config): slice(0, config.vocab_size)}
    rows, _ = row_layout(config, operator)
    return {
        f"{module_name(config, layer, module)}.weight": its_rows
        for module, its_rows in rows.items()
    }


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
    rows, shape = row_layout(config, operator)
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
    rows, (out_features, _) = row_layout(config, operator)
    biased = [module for module in rows if module in config.biased_modules]
    if not biased:
        return None
    bias = torch.zeros(out_features, dtype=dtype, device=device)
    for module in biased:
        checkpoint.copy_into(f"{module_name(config, layer, module)}.bias", bias[rows[module]])
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
