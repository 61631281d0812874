"""Digests by which both sides notice that they were started with different models.

They catch a mistake, not a lie: they sample, and a service could answer with the right digests and
compute with other weights. Verification of results is a property of a placement.
"""

from __future__ import annotations

import hashlib
import json

import torch

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import ModelConfig

_EMBEDDING_ROWS = 64
_LINEAR_ROWS = 4


def model_digest(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Return SHA-256, in hex, over the configuration, all norms and some rows of the embedding.

    It covers what every TEE-side directory has. EOS ids and `dtype` are left out: they do not
    change what the service computes. Raises ModelError, ManifestError.
    """
    tensors = light_tensors(config)
    checkpoint.require(tensors)
    described = config.model_dump(mode="json", exclude={"eos_token_ids", "dtype", "biased_modules"})
    described["biased_modules"] = sorted(config.biased_modules)

    def compute() -> str:
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        _add_rows(digest, checkpoint, tensors, _EMBEDDING_ROWS)
        return digest.hexdigest()

    return checkpoint.remember(("model", config), compute)


def linear_digest(config: ModelConfig, checkpoint: Checkpoint) -> str | None:
    """Return SHA-256, in hex, over a few rows of every linear weight and bias.

    None where the directory lacks them: a TEE that only offloads needs no linear weights. Raises
    ModelError, ManifestError.
    """
    tensors = linear_tensors(config, FUSED_MODULES)
    if not checkpoint.holds(tensors):
        return None
    checkpoint.require(tensors)

    def compute() -> str:
        digest = hashlib.sha256()
        _add_rows(digest, checkpoint, tensors, _LINEAR_ROWS)
        return digest.hexdigest()

    return checkpoint.remember(("linear", config), compute)


def _add_rows(
    digest: hashlib._Hash, checkpoint: Checkpoint, tensors: dict[str, tuple[int, ...]], rows: int
) -> None:
    """Hash evenly spaced rows of matrices, and vectors as a whole, in the order of their names."""
    for name in sorted(tensors):
        shape = tensors[name]
        step = max(1, shape[0] // rows) if len(shape) > 1 else 1
        sample = checkpoint.rows(name, 0, shape[0], step).contiguous()
        digest.update(f"{name} {sample.dtype} {list(shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
