"""What the forward pass itself holds: sizes, norms and RoPE, all from the TEE's own directory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.model.checkpoint import FINAL_NORM, Checkpoint, light_tensors, norm_names
from protocol.model.config import ModelConfig
from protocol.model.weights import load_tensor
from tee_side.rope import Rope

_UNUSED = torch.empty(0)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """RMSNorm weights of one layer: [D]; `q_norm`, `k_norm`: [C], empty unless `qk_norm`."""

    input_layernorm: torch.Tensor
    post_attention_layernorm: torch.Tensor
    q_norm: torch.Tensor = _UNUSED
    k_norm: torch.Tensor = _UNUSED


@dataclass(frozen=True, slots=True)
class TeeModel:
    """The part of a model that is needed whatever the placement is."""

    config: ModelConfig
    dtype: torch.dtype
    norms: list[LayerNorms]
    final_norm: torch.Tensor
    rope: Rope


def load_tee_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> TeeModel:
    """Read the norms; the checkpoint must have been checked for them. Raises ModelError."""
    shapes = light_tensors(config)

    def read(name: str) -> torch.Tensor:
        return load_tensor(checkpoint, name, shapes[name], dtype=dtype)

    norms = [
        LayerNorms(**{short: read(name) for short, name in norm_names(config, layer).items()})
        for layer in range(config.num_hidden_layers)
    ]
    return TeeModel(config, dtype, norms, read(FINAL_NORM), Rope(config))
