"""Weights in memory, in the shape in which both sides multiply by them.

Modules that read the same input are stored as one matrix (q/k/v; gate/up), so that a fused call is
one product. A single module of the group is a view of some of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from protocol.messages import FUSED_MODULES, LinearOperator, ModuleName
from protocol.model.checkpoint import Checkpoint, module_name
from protocol.model.config import ModelConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One or several linear modules over the same input.

    `weight`: [sum of out_features, in_features]; `bias`: [sum of out_features] or None.
    `rows` says which rows belong to which module.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: dict[ModuleName, slice]

    @property
    def in_features(self) -> int:
        """Size of the last axis of the input."""
        return self.weight.shape[1]

    def __call__(
        self, hidden: torch.Tensor, modules: Sequence[ModuleName] | None = None
    ) -> torch.Tensor:
        """Return [..., sum of out_features] for `hidden` [..., in_features].

        `modules`: all of them (None), or one. Raises ValueError for anything between.
        """
        if modules is None or tuple(modules) == tuple(self.rows):
            return linear(hidden, self.weight, self.bias)
        (module,) = modules
        rows = self.rows[module]
        return linear(hidden, self.weight[rows], None if self.bias is None else self.bias[rows])


def load_linear(
    checkpoint: Checkpoint,
    config: ModelConfig,
    layer: int,
    operator: LinearOperator,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> FusedLinear:
    """Read a fused operator's modules straight into their rows of one matrix."""
    modules = FUSED_MODULES[operator]
    shapes = [config.module_shape(module) for module in modules]
    out_features, in_features = sum(shape[0] for shape in shapes), shapes[0][1]
    weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
    biased = any(module in config.biased_modules for module in modules)
    bias = torch.zeros(out_features, dtype=dtype, device=device) if biased else None
    rows: dict[ModuleName, slice] = {}
    start = 0
    for module, shape in zip(modules, shapes, strict=True):
        rows[module] = slice(start, start + shape[0])
        name = module_name(layer, module)
        checkpoint.copy_into(f"{name}.weight", weight[rows[module]])
        if bias is not None and module in config.biased_modules:
            checkpoint.copy_into(f"{name}.bias", bias[rows[module]])
        start += shape[0]
    return FusedLinear(weight, bias, rows)


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
