"""What the forward pass itself holds: sizes, norms and RoPE, all from the TEE's own directory.

A `TeeLayer` has the local operators of one layer, bound to its norms. Nothing of it leaves the TEE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from protocol.model.checkpoint import FINAL_NORM, Checkpoint, light_tensors, norm_names
from protocol.model.config import ModelConfig
from protocol.model.forward import Layer, Norm, bound
from protocol.model.rope import Rope
from protocol.model.weights import LayerNorms, load_tensor
from protocol.native import compiled_for
from tee_side.model.kv_cache import KVCache
from tee_side.observer import Observer, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class TeeLayer(Layer):
    """The local operators of one layer, timed where there is an observer.

    `kv_cache`: `KVCache.append` of this layer; `attention`: see `tee_side.model.local_ops`.
    `window`: how many tokens back a token may look, itself included; None for all.
    """

    kv_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    window: int | None


@dataclass(eq=False)
class TeeModel:
    """The part of a model that is needed whatever the placement is.

    `norms`, `final_norm`: the weights; `layers`, `norm`: what the forward pass calls.
    """

    config: ModelConfig
    dtype: torch.dtype
    norms: list[LayerNorms]
    final_norm: torch.Tensor
    rope: Rope
    observer: Observer | None = None
    layers: tuple[TeeLayer, ...] = field(init=False)
    norm: Norm = field(init=False)

    def __post_init__(self) -> None:
        # One of the two is imported: a run does not trust the code of the other.
        found = "native.kernels" if compiled_for(self.dtype) else "model.local_ops"
        ops: Any = import_module(f"tee_side.{found}")
        self.layers = tuple(self._layer(index, ops) for index in range(len(self.norms)))
        norm = partial(ops.rms_norm, weight=self.final_norm, eps=self.config.rms_norm_eps)
        self.norm = timed(norm, self.observer, "rms_norm", None)

    def _layer(self, index: int, ops: Any) -> TeeLayer:
        def told(function: Callable[..., Any], name: Any) -> Callable[..., Any]:
            return timed(function, self.observer, name, index)

        window = self.config.sliding_windows[index]
        return TeeLayer(
            index=index,
            **bound(self.norms[index], self.config, ops, told),
            kv_cache=told(partial(KVCache.append, layer=index), "kv_cache"),
            attention=told(partial(ops.attention, window=window), "attention"),
            window=window,
        )

    def observed(self, observer: Observer | None) -> TeeModel:
        """Return the model with an observer that is told of every local operator."""
        return replace(self, observer=observer)


def load_tee_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> TeeModel:
    """Read the norms; the checkpoint must have been checked for them. Raises ModelError."""
    shapes = light_tensors(config)

    def read(name: str) -> torch.Tensor:
        return load_tensor(checkpoint, name, shapes[name], dtype=dtype)

    norms = [
        LayerNorms(**{short: read(name) for short, name in norm_names(config, layer).items()})
        for layer in range(config.num_hidden_layers)
    ]
    return TeeModel(config, dtype, norms, read(FINAL_NORM), Rope(config, dtype))
