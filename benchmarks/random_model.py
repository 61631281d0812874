"""Writes a model directory of a real model's shape with random weights; nothing to download."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import light_tensors, linear_tensors
from protocol.model.config import read_config

LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": None,
}


def write_random_model(directory: Path, settings: dict[str, Any], seed: int = 0) -> int:
    """Write config.json and model.safetensors (bfloat16); return the size of the tensors."""
    (directory / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = read_config(directory)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in (light_tensors(config) | linear_tensors(config, FUSED_MODULES)).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        noise = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
        tensors[name] = noise.mul_(1 / math.sqrt(shape[1]))
    save_file(tensors, directory / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())
