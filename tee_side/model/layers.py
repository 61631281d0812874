"""What the forward pass itself holds: sizes, norms and RoPE, all from the TEE's own directory.

A `Layer` has the local operators of one layer, bound to its norms. Nothing of it leaves the TEE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from protocol.model.checkpoint import FINAL_NORM, Checkpoint, light_tensors, norm_names
from protocol.model.config import ModelConfig
from protocol.model.weights import load_tensor
from protocol.native import compiled_for
from tee_side.model import local_ops
from tee_side.model.batch import Chunk
from tee_side.model.rope import Rope
from tee_side.native import local_ops as compiled_ops
from tee_side.observer import Observer, timed

Tensor: TypeAlias = torch.Tensor
Norm: TypeAlias = Callable[[Tensor], Tensor]

_UNUSED = torch.empty(0)


def _ops_for(dtype: torch.dtype) -> Any:
    """Return the local operators for activations of a dtype, compiled or torch's: a module."""
    return compiled_ops if compiled_for(dtype) else local_ops


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """RMSNorm weights of one layer: [D]; `q_norm`, `k_norm`: [C], empty unless `qk_norm`."""

    input_layernorm: Tensor
    post_attention_layernorm: Tensor
    q_norm: Tensor = _UNUSED
    k_norm: Tensor = _UNUSED


@dataclass(frozen=True, slots=True)
class Layer:
    """The local operators of one layer, timed where there is an observer.

    `kv_cache`: writes a chunk's keys and values, and returns those of its whole context [K, S, C].
    Others: see `tee_side.model.local_ops`.
    """

    index: int
    input_layernorm: Norm
    post_attention_layernorm: Norm
    q_norm: Norm
    k_norm: Norm
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    kv_cache: Callable[[Chunk, Tensor, Tensor], tuple[Tensor, Tensor]]
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor], Tensor]
    window: int | None

    @staticmethod
    def of(index: int, norms: LayerNorms, config: ModelConfig, observer: Observer | None) -> Layer:
        """Bind the local operators of a layer."""
        ops = _ops_for(norms.input_layernorm.dtype)
        window = config.sliding_windows[index]

        def norm(weight: Tensor) -> Norm:
            bound = partial(ops.rms_norm, weight=weight, eps=config.rms_norm_eps)
            return timed(bound, observer, "rms_norm", index)

        def kv_cache(chunk: Chunk, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
            return chunk.cache.append(index, k_TKC, v_TKC, behind=chunk.behind)

        def attention(q_THC: Tensor, k_KSC: Tensor, v_KSC: Tensor) -> Tensor:
            out: Tensor = ops.attention(q_THC, k_KSC, v_KSC, window)
            return out

        return Layer(
            index,
            norm(norms.input_layernorm),
            norm(norms.post_attention_layernorm),
            norm(norms.q_norm),
            norm(norms.k_norm),
            timed(ops.apply_rope, observer, "rope", index),
            timed(kv_cache, observer, "kv_cache", index),
            timed(attention, observer, "attention", index),
            timed(ops.silu_mul, observer, "silu_mul", index),
            timed(ops.residual, observer, "residual", index),
            window,
        )


@dataclass(eq=False)
class TeeModel:
    """The part of a model that is needed whatever the placement is.

    `norms`, `final_norm`: the weights; `layers`, `norm`: what the forward pass calls.
    """

    config: ModelConfig
    dtype: torch.dtype
    norms: list[LayerNorms]
    final_norm: Tensor
    rope: Rope
    observer: Observer | None = None
    layers: tuple[Layer, ...] = field(init=False)
    norm: Norm = field(init=False)

    def __post_init__(self) -> None:
        config, observer, every = self.config, self.observer, enumerate(self.norms)
        self.layers = tuple(Layer.of(index, norms, config, observer) for index, norms in every)
        rms_norm = _ops_for(self.final_norm.dtype).rms_norm
        norm = partial(rms_norm, weight=self.final_norm, eps=config.rms_norm_eps)
        self.norm = timed(norm, observer, "rms_norm", None)

    def norm_weights(self) -> dict[str, Tensor]:
        """Return the weights of RMSNorm [D], by their names in an Init reply."""
        weights = {"final_norm": self.final_norm}
        for layer, norms in enumerate(self.norms):
            weights[f"layer_{layer}_input_layernorm"] = norms.input_layernorm
            weights[f"layer_{layer}_post_attention_layernorm"] = norms.post_attention_layernorm
        return weights

    def observed(self, observer: Observer | None) -> TeeModel:
        """Return the model with an observer that is told of every local operator."""
        return replace(self, observer=observer)


def load_tee_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> TeeModel:
    """Read the norms; the checkpoint must have been checked for them. Raises ModelError."""
    shapes = light_tensors(config)

    def read(name: str) -> Tensor:
        return load_tensor(checkpoint, name, shapes[name], dtype=dtype)

    norms = [
        LayerNorms(**{short: read(name) for short, name in norm_names(config, layer).items()})
        for layer in range(config.num_hidden_layers)
    ]
    return TeeModel(config, dtype, norms, read(FINAL_NORM), Rope(config))
