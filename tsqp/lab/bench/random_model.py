"""Writes a model directory of a real model's shape with random weights; nothing to download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import INDEX_FILE, light_tensors, linear_tensors
from protocol.model.config import ModelConfig, read_config

DTYPE = torch.bfloat16
# A prime, so that no row of a matrix starts where another has started: all rows differ.
_BLOCK = 4_194_301
# Memory while writing is about this, or one tensor where that is larger.
_SHARD_BYTES = 256 * 2**20


def model_tensors(config: ModelConfig, *, linear: bool = True) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a directory of this model has.

    `linear`: with the linear modules; without them, what the TEE needs where they are elsewhere.
    """
    tensors = light_tensors(config)
    return tensors | linear_tensors(config, FUSED_MODULES) if linear else tensors


def required_bytes(config: ModelConfig, *, linear: bool = True) -> int:
    """Return the size of the tensors on disk; their names and shapes come to a little more."""
    shapes = model_tensors(config, linear=linear).values()
    return sum(math.prod(shape) for shape in shapes) * DTYPE.itemsize


def write_random_model(
    directory: Path, settings: Mapping[str, Any], seed: int = 0, *, linear: bool = True
) -> int:
    """Write config.json and bfloat16 weights into an existing directory; return their bytes.

    Weights are normal, of variance 1 / in_features, so that activations stay in range; norms are
    ones. They are cut out of one block of random values, which is as fast as the disk. Files are
    shards with an index. Raises ModelError for settings that are no model's, OSError if the disk
    is full (`memory.check_disk` says so before).
    """
    (directory / "config.json").write_text(json.dumps(dict(settings)), encoding="utf-8")
    config = read_config(directory)
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(_BLOCK).normal_(generator=generator)  # float32: scaled, then rounded once
    blocks: dict[float, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(model_tensors(config, linear=linear)), start=1):
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in shard.items():
            if len(shape) == 1 and not name.endswith(".bias"):
                tensors[name] = torch.ones(shape, dtype=DTYPE)
                continue
            scale = 1 / math.sqrt(shape[-1])
            if scale not in blocks:
                blocks[scale] = (block * scale).to(DTYPE)
            start = int(torch.randint(_BLOCK, (), generator=generator))
            tensors[name] = _cut(blocks[scale], start, shape)
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = required_bytes(config, linear=linear)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return total


def _shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in tensors.items():
        tensor_bytes = math.prod(shape) * DTYPE.itemsize
        if shard and size + tensor_bytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += tensor_bytes
    yield shard


def _cut(block: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the block's values from `start` on, over and over."""
    flat = torch.empty(math.prod(shape), dtype=block.dtype)
    done = 0
    while done < flat.numel():
        piece = block[start : start + flat.numel() - done]
        flat[done : done + piece.numel()] = piece
        done += piece.numel()
        start = 0
    return flat.view(shape)
