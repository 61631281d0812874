"""A digest by which both sides notice that they were started with different models.

It catches a mistake, not a lie: it covers the configuration and the bytes of the embedding, which
every TEE-side directory has, and the service could answer with the right digest and compute with
other weights. Verification of results is a property of a placement, not of this digest.
"""

from __future__ import annotations

import hashlib
import json

import torch

from protocol.model.checkpoint import EMBEDDING, Checkpoint
from protocol.model.config import ModelConfig

_MIN_SAMPLED_ROWS = 64


def model_digest(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Return SHA-256, in hex, over the configuration and some evenly spaced embedding rows.

    EOS ids and `dtype` are left out: they do not change what the service computes.
    """
    described = config.model_dump_json(exclude={"eos_token_ids", "bos_token_id", "dtype"})
    digest = hashlib.sha256(_canonical(described))
    step = max(1, config.vocab_size // _MIN_SAMPLED_ROWS)
    rows = checkpoint.rows(EMBEDDING, 0, config.vocab_size, step).contiguous()
    digest.update(str(rows.dtype).encode())
    digest.update(rows.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _canonical(described: str) -> bytes:
    """Sort keys and sets, whose order pydantic does not promise."""
    value = json.loads(described)
    value["biased_modules"] = sorted(value["biased_modules"])
    return json.dumps(value, sort_keys=True).encode()
