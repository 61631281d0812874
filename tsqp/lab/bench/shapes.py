"""Shapes of published models, so that a benchmark has nothing to download.

Values are those of the model's published config.json, with two exceptions: weights are written in
bfloat16 whatever the original has, and no token id ends a sequence, because random weights say any.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol.errors import SettingsError
from protocol.model.config import ModelConfig, read_config, read_json


@dataclass(frozen=True)
class Shape:
    """A model without its weights. `source`: whose config.json; `settings`: what it says."""

    name: str
    source: str
    settings: Mapping[str, Any]

    def config(self) -> ModelConfig:
        """Return the configuration as both sides would read it. Raises ModelError."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(dict(self.settings)), encoding="utf-8")
            return read_config(path.parent)

    def with_layers(self, count: int) -> Shape:
        """Return the same shape with another number of layers."""
        return replace(self, settings={**self.settings, "num_hidden_layers": count})


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": None,
}


def _llama_3(
    factor: float, hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool
) -> dict[str, Any]:
    """Llama 3.1 and 3.2: eight key/value heads, RoPE scaled to 131072 tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        **_COMMON,
        "bos_token_id": 128000,
    }


def _llama_2(
    hidden: int, intermediate: int, layers: int, kv_heads: int, context: int
) -> dict[str, Any]:
    """Llama 2 and its kin: 32 heads, 32000 tokens, no scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        **_COMMON,
    }


def _qwen_2(
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    *,
    tied: bool,
) -> dict[str, Any]:
    """Qwen 2.5: biases at q, k and v."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        **_COMMON,
        "bos_token_id": 151643,
    }


_QWEN_3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    **_COMMON,
    "bos_token_id": 151643,
}

_MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    **_COMMON,
}

_PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        _llama_3(32.0, 2048, 8192, 16, 32, tied=True),
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        _llama_3(32.0, 3072, 8192, 28, 24, tied=True),
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        _llama_3(8.0, 4096, 14336, 32, 32, tied=False),
    ),
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", _llama_2(4096, 11008, 32, 32, 4096)),
    "tinyllama-1.1b": (
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        _llama_2(2048, 5632, 22, 4, 2048),
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        _qwen_2(151936, 896, 4864, 24, 14, 2, 32768, tied=True),
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B",
        _qwen_2(151936, 1536, 8960, 28, 12, 2, 131072, tied=True),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        _qwen_2(152064, 3584, 18944, 28, 28, 4, 131072, tied=False),
    ),
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _QWEN_3_0_6B),
    "mistral-7b": ("mistralai/Mistral-7B-v0.3", _MISTRAL_7B),
}

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        name: Shape(name, source, MappingProxyType(settings))
        for name, (source, settings) in _PUBLISHED.items()
    }
)


def find_shape(name: str) -> Shape:
    """Return a shape by its name. Raises SettingsError that lists the names."""
    known = f"one of {', '.join(SHAPES)}"
    SettingsError.unless(name in SHAPES, "--shape", repr(name), known)
    return SHAPES[name]


def shape_of(model: Path | None, shape: str | None) -> Shape:
    """Return a shape by its name, or that of a model's directory. Raises SettingsError, ModelError.

    Of a directory only config.json is read.
    """
    require_one(model, shape)
    if shape is not None or model is None:
        return find_shape(shape or "")
    read_config(model)  # its errors name the directory
    path = model / "config.json"
    return Shape(model.name, str(path), read_json(path) | {"eos_token_id": None})


def require_one(model: object, shape: object) -> None:
    """Refuse a model and a shape together, and neither. Raises SettingsError."""
    got = "neither" if model is None else "both"
    SettingsError.unless(
        (model is None) != (shape is None), "MODEL and --shape", got, "one of them"
    )
