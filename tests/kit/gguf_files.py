"""Writes a model of transformers as llama.cpp's converter does: metadata, names, order of rows.

What each architecture's file has was found by running llama.cpp (llama-cpp-python 0.3.30) on such
files until its logits were those of transformers, to 1e-5 or to what its table of GELU in sixteen
bits allows. What a file does not say, llama.cpp takes for granted: the scale of Gemma's scores,
patterns of windows, and which layers have no RoPE.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

Config = Any  # config.json, with what is derived: see `_read`
Tensors = Iterator[tuple[str, torch.Tensor]]


def _read(directory: Path) -> Config:
    """`size`: of a head; `rope`: of layers without a window; `local`: of those with one."""
    c = SimpleNamespace(**json.loads((directory / "config.json").read_text()))
    c.size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    given = c.rope_parameters
    c.rope, c.local = given.get("full_attention", given), given.get("sliding_attention", {})
    c.kind, c.scaled = c.rope.get("rope_type"), c.rope.get("rope_type") in ("linear", "yarn")
    c.original = c.rope.get("original_max_position_embeddings", c.max_position_embeddings)
    c.windowed = [kind == "sliding_attention" for kind in getattr(c, "layer_types", None) or []]
    return c


def _attention_factor(c: Config) -> float | None:
    if c.kind != "longrope":
        return None
    scale = c.max_position_embeddings / c.original
    return math.sqrt(1 + math.log(scale) / math.log(c.original)) if scale > 1 else 1.0


# Behind the name of the architecture; None: no key is written.
_VALUES: dict[str, Callable[[Config], Any]] = {
    "block_count": lambda c: c.num_hidden_layers,
    "context_length": lambda c: c.max_position_embeddings,
    "embedding_length": lambda c: c.hidden_size,
    "feed_forward_length": lambda c: c.intermediate_size,
    "attention.head_count": lambda c: c.num_attention_heads,
    "attention.head_count_kv": lambda c: c.num_key_value_heads,
    "attention.layer_norm_rms_epsilon": lambda c: c.rms_norm_eps,
    "attention.layer_norm_epsilon": lambda c: next(
        getattr(c, n) for n in ("layer_norm_eps", "norm_epsilon", "norm_eps") if hasattr(c, n)
    ),
    "attention.key_length": lambda c: getattr(c, "head_dim", None),
    "attention.value_length": lambda c: getattr(c, "head_dim", None),
    "attention.sliding_window": lambda c: c.sliding_window,
    "attention.sliding_window_pattern": lambda c: c.windowed if c.sliding_window else None,
    "attention.scale": lambda c: c.attention_multiplier,
    "attention.temperature_scale": lambda c: c.rope["llama_4_scaling_beta"],
    "rope.dimension_count": lambda c: int(c.size * c.rope.get("partial_rotary_factor", 1.0)),
    "rope.freq_base": lambda c: float(c.rope["rope_theta"]),
    "rope.freq_base_swa": lambda c: c.local.get("rope_theta"),
    "rope.scaling.type": lambda c: c.kind if c.scaled else None,
    "rope.scaling.factor": lambda c: c.rope["factor"] if c.scaled else None,
    "rope.scaling.original_context_length": lambda c: c.original if c.kind == "yarn" else None,
    "rope.scaling.attn_factor": _attention_factor,
    "rope.scaling.yarn_attn_factor": lambda c: c.rope.get("attention_factor"),
    "rope.scaling.yarn_beta_fast": lambda c: c.rope.get("beta_fast"),
    "rope.scaling.yarn_beta_slow": lambda c: c.rope.get("beta_slow"),
    "rope.scaling.yarn_log_multiplier": lambda c: c.rope["mscale_all_dim"],
    "attn_logit_softcapping": lambda c: c.attn_logit_softcapping,
    "final_logit_softcapping": lambda c: c.final_logit_softcapping,
    "logit_scale": lambda c: getattr(c, "logits_scaling", None) or c.logit_scale,
    "embedding_scale": lambda c: c.embedding_multiplier,
    "residual_scale": lambda c: c.residual_multiplier,
    "use_parallel_residual": lambda c: c.use_parallel_residual,
    "vocab_size": lambda c: c.vocab_size,
}
_SHAPE = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv"),
)
_RMS, _LAYER = ("attention.layer_norm_rms_epsilon",), ("attention.layer_norm_epsilon",)
_HEAD = ("attention.key_length", "attention.value_length")
_WINDOW, _PATTERN = ("attention.sliding_window",), ("attention.sliding_window_pattern",)
_TURNED = ("rope.dimension_count",)
_BASE = (
    *(*_SHAPE, *_HEAD, "rope.freq_base", "rope.freq_base_swa"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast"),
    "rope.scaling.yarn_beta_slow",
)
_LLAMA = (*_BASE, *_RMS, *_TURNED, "vocab_size")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Kind:
    """What files of an architecture have: `more`, keys whose value is another than usually.

    `permuted`: rows i and i + n of a head of queries and keys are neighbours; `added`: to norms.
    """

    arch: str
    keys: tuple[str, ...]
    permuted: bool = False
    added: float = 0.0
    more: tuple[tuple[str, Callable[[Config], Any]], ...] = ()


_UNSCALED = (("rope.scaling.type", lambda _: "none"),)
KINDS: dict[str, Kind] = {
    "llama": Kind("llama", _LLAMA, permuted=True),
    "mistral": Kind("llama", _LLAMA, permuted=True),
    "qwen2": Kind("qwen2", _BASE + _RMS),
    "qwen3": Kind("qwen3", _BASE + _RMS),
    "gemma": Kind("gemma", _SHAPE + _HEAD + _RMS, added=1.0),
    "gemma2": Kind("gemma2", _SHAPE + _HEAD + _RMS + _WINDOW + _CAPS, added=1.0),
    "gemma3": Kind("gemma3", _BASE + _RMS + _WINDOW, added=1.0),
    "phi3": Kind(
        "phi3",
        (*_SHAPE, *_RMS, *_TURNED, "rope.freq_base", "rope.scaling.attn_factor"),
        more=(
            ("rope.scaling.original_context_length", lambda c: c.original),
            ("attention.sliding_window", lambda c: c.sliding_window or 0),
        ),
    ),
    "granite": Kind(
        "granite",
        (*_LLAMA, "attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        permuted=True,
    ),
    "smollm3": Kind("smollm3", _LLAMA, permuted=True),
    "arcee": Kind("arcee", _LLAMA, permuted=True),
    "ministral3": Kind(
        "mistral3",
        (*_LLAMA, "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"),
        permuted=True,
    ),
    "olmo2": Kind("olmo2", _BASE + _RMS),
    "olmo3": Kind("olmo2", _BASE + _RMS + _WINDOW + _PATTERN),
    "exaone4": Kind("exaone4", _BASE + _RMS + _WINDOW + _PATTERN),
    "cohere": Kind("command-r", (*_BASE, *_LAYER, "logit_scale"), more=_UNSCALED),
    "cohere2": Kind(
        "cohere2", (*_BASE, *_LAYER, *_WINDOW, *_TURNED, "logit_scale"), more=_UNSCALED
    ),
    "glm4": Kind("glm4", _BASE + _RMS + _TURNED),
    "ernie4.5": Kind("ernie4_5", _BASE + _RMS),
    "stablelm": Kind("stablelm", (*_SHAPE, *_LAYER, *_TURNED, "use_parallel_residual")),
    "starcoder2": Kind("starcoder2", _BASE + _LAYER),
    "nemotron": Kind("nemotron", _BASE + _LAYER + _TURNED, added=1.0),
    "seed-oss": Kind("seed_oss", _BASE + _RMS),
}


def write(path: Path, directory: Path, kind: str, *, few: str = "", pre: str = "smollm") -> None:
    """Write a model of one shard. `few`: modules in eight bits, by a part of their names.

    `pre`: how texts are cut before bytes are merged.
    """
    k, c = KINDS[kind], _read(directory)
    writer = gguf.GGUFWriter(path, k.arch)
    values = {key: _VALUES[key](c) for key in k.keys} | {key: of(c) for key, of in k.more}
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32}
    kinds |= {float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in values.items():
        if value is not None:
            kinds[type(value)](f"{k.arch}.{key}", value)
    add_tokenizer(writer, c.vocab_size, pre)
    for name, tensor in (*_stored(load_file(directory / "model.safetensors"), k, c), *_factors(c)):
        data = tensor.float().contiguous().numpy()
        q8 = gguf.GGMLQuantizationType.Q8_0
        if few and few in name:
            writer.add_tensor(name, gguf.quants.quantize(data, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(tensors: dict[str, torch.Tensor], k: Kind, c: Config) -> Tensors:
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == k.arch)
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    for name, given in tensors.items():
        tensor, (stem, _, part) = given, name.rpartition(".")
        if c.tie_word_embeddings and stem == "lm_head":
            continue
        if k.permuted and stem.endswith(("q_proj", "k_proj")):
            tensor = given.unflatten(0, (-1, 2, c.size // 2)).transpose(1, 2).flatten(0, 2)
        if name.endswith("norm.weight"):
            tensor = given + k.added
        yield f"{names.get_name(stem)}.{part}", tensor


def _factors(c: Config) -> Tensors:
    """What the frequencies of RoPE are divided by, where that has no keys."""
    if c.kind == "llama3":
        low, high = c.rope["low_freq_factor"], c.rope["high_freq_factor"]
        waves_c = 2 * math.pi * c.rope["rope_theta"] ** (torch.arange(0, c.size, 2) / c.size)
        blend_c = ((c.original / waves_c - low) / (high - low)).clamp(0, 1)
        yield "rope_freqs.weight", 1 / ((1 - blend_c) / c.rope["factor"] + blend_c)
    for which in ("long", "short") if c.kind == "longrope" else ():
        yield f"rope_factors_{which}.weight", torch.tensor(c.rope[f"{which}_factor"])


def add_tokenizer(writer: gguf.GGUFWriter, size: int, pre: str) -> None:
    """A small one of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in shown] + [chr(256 + n) for n in range(256 - len(shown))]
    tokens = ["<s>", "</s>", "<|im_end|>", *letters, "th", "the", "Ġthe", "12", "ab"]
    tokens += [f"<{n}>" for n in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (size - 3)])
    writer.add_token_merges(["t h", "th e", "Ġ the", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
