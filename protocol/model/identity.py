"""Digests by which both sides notice that they were started with different models.

They catch a mistake, not a lie: they sample, and a service could answer with the right digests and
compute with other weights. Verification of results is a property of a placement.
"""

from __future__ import annotations

import hashlib
import json

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint, Shapes, light_tensors, linear_tensors
from protocol.model.config import ModelConfig
from protocol.model.tensor_file import bytes_of

_EMBEDDING_ROWS = 64
_LINEAR_ROWS = 4


def model_digest(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Return SHA-256, in hex, over the configuration, all norms and some rows of the embedding.

    It covers what every TEE-side directory has. EOS ids and `dtype` are left out: they do not
    change what the service computes. Raises ModelError, ManifestError.
    """
    described = config.model_dump(mode="json", exclude={"eos_token_ids", "dtype", "biased_modules"})
    described["biased_modules"] = sorted(config.biased_modules)
    described["qk_norm"] = config.qk_norm
    start = json.dumps(described, sort_keys=True).encode()
    return _digest(start, checkpoint, light_tensors(config), _EMBEDDING_ROWS)


def linear_digest(config: ModelConfig, checkpoint: Checkpoint) -> str | None:
    """Return SHA-256, in hex, over a few rows of every linear weight and bias.

    None where the directory lacks them: a TEE that only offloads needs no linear weights. Raises
    ModelError, ManifestError.
    """
    tensors = linear_tensors(config, FUSED_MODULES)
    return _digest(b"", checkpoint, tensors, _LINEAR_ROWS) if checkpoint.holds(tensors) else None


def _digest(start: bytes, checkpoint: Checkpoint, tensors: Shapes, rows: int) -> str:
    """Hash evenly spaced rows of matrices, and vectors as a whole, in the order of their names."""
    checkpoint.require(tensors)

    def compute() -> str:
        digest = hashlib.sha256(start)
        for name in sorted(tensors):
            shape = tensors[name]
            step = max(1, shape[0] // rows) if len(shape) > 1 else 1
            sample = checkpoint.rows(name, 0, shape[0], step)
            digest.update(f"{name} {sample.dtype} {list(shape)}".encode())
            digest.update(bytes_of(sample))
        return digest.hexdigest()

    return checkpoint.remember((start, tuple(tensors)), compute)
