"""config.json of a Hugging Face directory, for the architectures that we run.

Field names are Hugging Face's. What we do not know how to compute is refused by name rather than
ignored; keys that do not change the forward pass are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.errors import ModelError, describe
from protocol.messages import FloatDtype, ModuleName
from protocol.model.files import parse_json
from protocol.model.manifest import Manifest, find_file, read_file
from protocol.validation import validate_file

# An index names some thousand tensors. Parsed, the worst JSON takes thirty times its size.
MAX_JSON_BYTES = 2 * 1024 * 1024

Architecture = Literal[
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
]
ARCHITECTURES: tuple[Architecture, ...] = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
# Bounds within which no formula of RoPE overflows or divides by zero.
Positive: TypeAlias = Annotated[float, Field(ge=1e-30, lt=1e12)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, lt=1e12)]


class RopeParameters(BaseModel):
    """RoPE frequencies; the names are those of `rope_parameters` (or `rope_scaling`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rope_type: RopeType = "default"
    # Its logarithm is divided by.
    rope_theta: Annotated[float, Field(gt=1, lt=1e12)] = 10000.0
    factor: Positive | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: NotNegative | None = None
    mscale_all_dim: NotNegative | None = None
    truncate: bool = True
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    # The first fault ends the reading: pydantic would take some kilobytes for each.
    short_factor: Annotated[tuple[Positive, ...], Field(strict=False, fail_fast=True)] | None = None
    long_factor: Annotated[tuple[Positive, ...], Field(strict=False, fail_fast=True)] | None = None
    # Rotating only a part of each head is not implemented.
    partial_rotary_factor: Annotated[float, Field(ge=1.0, le=1.0)] = 1.0

    @model_validator(mode="after")
    def _complete(self) -> RopeParameters:
        needed: dict[str, tuple[str, ...]] = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "yarn": (),
            "longrope": ("short_factor", "long_factor"),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }
        for name in needed.get(self.rope_type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type} needs {name}")
        return self


class ModelConfig(BaseModel):
    """Everything about a model that the forward pass depends on, except the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    architecture: Architecture
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, lt=4096)]
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)]
    rms_norm_eps: Positive
    tie_word_embeddings: bool
    rope: RopeParameters
    dtype: FloatDtype
    biased_modules: frozenset[ModuleName]
    qk_norm: bool
    # Per layer: how many tokens back a token may look, itself included; None for all.
    sliding_windows: tuple[Size | None, ...]
    eos_token_ids: frozenset[int]

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must divide"
                f" num_attention_heads ({self.num_attention_heads})"
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            if factors is not None and len(factors) != self.head_dim // 2:
                raise ValueError(
                    f"rope {name} has {len(factors)} entries, head_dim / 2 is {self.head_dim // 2}"
                )
        if self.rope.rope_type == "dynamic" and self.head_dim < 4:
            raise ValueError(f"dynamic RoPE needs a head_dim of at least 4, not {self.head_dim}")
        original = self.rope.original_max_position_embeddings
        if self.rope.rope_type == "longrope" and original is not None and original < 2:
            raise ValueError("longrope needs original_max_position_embeddings of at least 2")
        return self

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have.

        `max_position_embeddings`, except with dynamic NTK scaling: there it is the length that the
        model was trained with, and `factor` says how far beyond it the scaling is meant to carry.
        """
        if self.rope.rope_type == "dynamic" and self.rope.factor is not None:
            return int(self.max_position_embeddings * max(1.0, self.rope.factor))
        return self.max_position_embeddings

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of query heads, number of key/value heads, and the size of each."""
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    def module_shape(self, module: ModuleName) -> tuple[int, int]:
        """Return (out_features, in_features) of one linear module."""
        query = self.num_attention_heads * self.head_dim
        key = self.num_key_value_heads * self.head_dim
        shapes: dict[ModuleName, tuple[int, int]] = {
            "q_proj": (query, self.hidden_size),
            "k_proj": (key, self.hidden_size),
            "v_proj": (key, self.hidden_size),
            "o_proj": (self.hidden_size, query),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        return shapes[module]


def read_json(path: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError that names the file, ManifestError if it differs."""
    content = read_file(path, MAX_JSON_BYTES, manifest)
    try:
        value = parse_json(content, str(path))
    except ValueError as error:
        raise ModelError(
            str(path), got=f"{type(error).__name__}: {error}"[:120], expected="a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(str(path), got=type(value).__name__, expected="a JSON object")
    return value


def read_config(directory: Path, manifest: Manifest | None = None) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`).

    Raises ModelError that names the file and field: a missing or empty directory, an unsupported
    architecture, activation, RoPE type or quantisation, sizes that do not fit together; and
    ManifestError for files that are not those of the manifest.
    """
    if not directory.is_dir():
        raise ModelError(str(directory), got="no such directory", expected="a model directory")
    path = find_file(directory, "config.json", manifest)
    if path is None:
        raise ModelError(str(directory), got="no config.json", expected="a Hugging Face directory")
    raw = read_json(path, manifest)
    architecture = _architecture(raw, path)
    _refuse_unsupported(raw, path)
    heads = raw.get("num_attention_heads")
    fields: dict[str, Any] = {
        name: raw.get(name)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
    }
    fields |= {
        "architecture": architecture,
        "num_key_value_heads": _given(raw, "num_key_value_heads", heads),
        "head_dim": _given(raw, "head_dim", _default_head_dim(raw, architecture)),
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "rope": _rope(raw, path),
        "dtype": _given(raw, "dtype", _given(raw, "torch_dtype", "float32")),
        "biased_modules": _biased_modules(raw, architecture, path),
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "sliding_windows": _sliding_windows(raw, architecture, path),
        "eos_token_ids": _eos_token_ids(raw, directory, path, manifest),
    }
    return validate_file(ModelConfig, fields, str(path))


def _given(raw: dict[str, Any], field: str, default: object) -> object:
    """Return a value, or the default where there is none: 0 and false are values."""
    value = raw.get(field)
    return default if value is None else value


def _architecture(raw: dict[str, Any], path: Path) -> Architecture:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architectures",
            got=describe(name),
            expected=f"one of {', '.join(ARCHITECTURES)}",
        )
    return cast(Architecture, name)


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    checks = (
        ("hidden_act", raw.get("hidden_act", "silu") == "silu", "silu"),
        ("quantization_config", raw.get("quantization_config") is None, "unquantised weights"),
        ("pretraining_tp", raw.get("pretraining_tp", 1) == 1, "1"),
    )
    for field, fine, expected in checks:
        if not fine:
            raise ModelError(f"{path}: {field}", got=describe(raw[field]), expected=expected)


def _default_head_dim(raw: dict[str, Any], architecture: Architecture) -> int | None:
    if architecture == "Qwen3ForCausalLM":
        return 128  # Qwen3Config's default is a constant, not hidden_size / num_attention_heads
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    if type(hidden) is int and type(heads) is int and heads > 0:
        return hidden // heads
    return None


def _rope(raw: dict[str, Any], path: Path) -> RopeParameters:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    key = "rope_parameters"
    for name in ("rope_parameters", "rope_scaling"):
        if raw.get(name) is not None and not isinstance(raw[name], dict):
            raise ModelError(f"{path}: {name}", got=describe(raw[name]), expected="an object")
        key = name if raw.get(name) else key
    given = raw.get(key) or {}
    fields = {"rope_theta": raw["rope_theta"]} if raw.get("rope_theta") is not None else {}
    fields |= given
    # `type` is the key of the earliest configurations, and may stand beside `rope_type`.
    legacy_type = fields.pop("type", None)
    fields.setdefault("rope_type", "default" if legacy_type is None else legacy_type)
    if fields["rope_type"] in ("yarn", "longrope", "llama3"):
        # Beside the parameters it wins over what is inside, as in transformers.
        if (outer := raw.get("original_max_position_embeddings")) is not None:
            fields["original_max_position_embeddings"] = outer
        fields.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    return validate_file(RopeParameters, fields, f"{path}: {key}")


def _flag(raw: dict[str, Any], name: str, path: Path) -> bool:
    value = raw.get(name)
    if value is not None and type(value) is not bool:
        raise ModelError(f"{path}: {name}", got=describe(value), expected="true or false")
    return bool(value)


def _biased_modules(raw: dict[str, Any], architecture: Architecture, path: Path) -> frozenset[str]:
    if architecture == "Qwen2ForCausalLM":
        return frozenset({"q_proj", "k_proj", "v_proj"})
    biased: set[str] = set()
    if architecture != "MistralForCausalLM" and _flag(raw, "attention_bias", path):
        biased |= {"q_proj", "k_proj", "v_proj", "o_proj"}
    if architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias", path):
        biased |= {"gate_proj", "up_proj", "down_proj"}
    return frozenset(biased)


def _sliding_windows(
    raw: dict[str, Any], architecture: Architecture, path: Path
) -> tuple[int | None, ...]:
    layers = raw.get("num_hidden_layers")
    window = raw.get("sliding_window", 4096)  # the default of all three configuration classes
    if type(layers) is not int or not 0 < layers < 4096:
        raise ModelError(
            f"{path}: num_hidden_layers", got=describe(layers), expected="1 to 4095 layers"
        )
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * layers
    if type(window) is not int or not 0 < window <= 2**24:
        raise ModelError(
            f"{path}: sliding_window", got=describe(window), expected=f"1 to {2**24} tokens"
        )
    if architecture == "MistralForCausalLM":
        return (window,) * layers
    if not _flag(raw, "use_sliding_window", path):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise ModelError(
                f"{path}: max_window_layers", got=describe(first), expected="a number of layers"
            )
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(t not in ("sliding_attention", "full_attention") for t in types)
    ):
        raise ModelError(
            f"{path}: layer_types",
            got=describe(types),
            expected=f"{layers} times sliding_attention or full_attention",
        )
    return tuple(known[t] for t in types)


def _eos_token_ids(
    raw: dict[str, Any], directory: Path, path: Path, manifest: Manifest | None
) -> frozenset[int]:
    """EOS ids: generation_config.json if it names any, else config.json (as transformers does)."""
    value = None
    generation = find_file(directory, "generation_config.json", manifest)
    if generation is not None:
        value = read_json(generation, manifest).get("eos_token_id")
        path = generation
    if value is None:
        value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ModelError(
            f"{path}: eos_token_id", got=describe(value), expected="an integer or a list of them"
        )
    return frozenset(ids)
