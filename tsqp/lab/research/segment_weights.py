"""The tensors that the server of a segment mask gets, a layer at a time.

Linear weights, real biases and norms under their Hugging Face names, in the dtypes that the model
has them in; `rope_order` in float32. Behind the last layer the final norm and the LM head, as
`lm_head.weight` even where it is tied to the embedding, if the mask hides them. Never the embedding
or the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from protocol.errors import ModelError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import (
    FINAL_NORM,
    Checkpoint,
    light_tensors,
    linear_tensors,
    lm_head_name,
    module_name,
    norm_names,
)
from protocol.model.config import ModelConfig
from protocol.model.weights import load_tensor
from tee_side.protect.masks.mask import KeyedSegment, Mask, SegmentMask

Tensors = dict[str, torch.Tensor]


def segment_shards(
    config: ModelConfig, checkpoint: Checkpoint, mask: SegmentMask, keyed: KeyedSegment
) -> list[Callable[[], Tensors]]:
    """Return what makes each layer's tensors, and those behind the last one where they leave.

    They raise ModelError that names a tensor.
    """
    layers = range(config.num_hidden_layers)
    shards: list[Callable[[], Tensors]] = [
        partial(_layer, config, checkpoint, mask, keyed, layer) for layer in layers
    ]
    return shards + [partial(_head, config, checkpoint, keyed)] * mask.hides_head


def as_stored(checkpoint: Checkpoint, mask: Mask, name: str, made: torch.Tensor) -> torch.Tensor:
    """Return a transformed tensor in the dtype that the model has it in, float32 if it has none.

    Raises ModelError that names it where that cannot hold it.
    """
    held = checkpoint.holds([name])
    dtype = checkpoint.rows(name, 0, 1).dtype if held else torch.float32
    stored = made.to(dtype).contiguous()
    if not bool(stored.isfinite().all()):
        raise ModelError(
            f"{checkpoint.directory}: {name}",
            got="values that are not finite, transformed",
            expected=f"weights that mask {mask.name} leaves within {dtype}",
        )
    return stored


def _layer(
    config: ModelConfig, checkpoint: Checkpoint, mask: SegmentMask, keyed: KeyedSegment, layer: int
) -> Tensors:
    """Transform a layer; only one module of it is in float64 at a time."""
    shapes = light_tensors(config) | linear_tensors(config, FUSED_MODULES)
    prefix = f"model.layers.{layer}."

    def read(name: str) -> Tensors:
        tensor = load_tensor(checkpoint, name, shapes[name], dtype=torch.float64)
        return {name.removeprefix(prefix): tensor}

    norms: Tensors = {}
    for name in norm_names(config, layer).values():
        norms |= read(name)
    tensors: Tensors = {}
    for module in (module for modules in FUSED_MODULES.values() for module in modules):
        plain = dict(norms)
        for name in shapes:
            if name.startswith(f"{module_name(config, layer, module)}."):
                plain |= read(name)
        tensors |= {
            prefix + short: as_stored(checkpoint, mask, prefix + short, made)
            for short, made in keyed.layer(layer, plain).items()
        }
    return tensors


def _head(config: ModelConfig, checkpoint: Checkpoint, keyed: KeyedSegment) -> Tensors:
    """Transform what is behind the last layer, in the model's own dtype: float64 is too large."""

    def read(name: str) -> torch.Tensor:
        dtype = checkpoint.rows(name, 0, 1).dtype
        return load_tensor(checkpoint, name, light_tensors(config)[name], dtype=dtype)

    return keyed.head(read(FINAL_NORM), read(lm_head_name(config)))
