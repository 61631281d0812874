"""Linear operators as the forward pass calls them, over one fused product each."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.config import ModelConfig


class FusedOperators(ABC):
    """Splits what `linear` returns into the modules that share its input."""

    def __init__(self, config: ModelConfig) -> None:
        self._sizes = {
            operator: [config.module_shape(module)[0] for module in modules]
            for operator, modules in FUSED_MODULES.items()
        }
        self._widths = {operator: sum(sizes) for operator, sizes in self._sizes.items()}

    @abstractmethod
    async def linear(
        self, layer: int, operator: LinearOperator, x_TI: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs of an operator's modules side by side, biases included."""

    async def qkv_proj(self, layer: int, h_TD: torch.Tensor) -> torch.Tensor:
        """Return q, k and v side by side: all heads of q, of k, of v."""
        return await self.linear(layer, "qkv_proj", h_TD)

    async def o_proj(self, layer: int, out_TX: torch.Tensor) -> torch.Tensor:
        """Project the heads' outputs back to [T, D]."""
        return await self.linear(layer, "o_proj", out_TX)

    async def gate_up_proj(
        self, layer: int, h_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up as views of one product."""
        gate_up = await self.linear(layer, "gate_up_proj", h_TD)
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    async def down_proj(self, layer: int, a_TF: torch.Tensor) -> torch.Tensor:
        """Project back to [T, D]."""
        return await self.linear(layer, "down_proj", a_TF)
