"""config.json of a Hugging Face directory, for the architectures that we run.

Field names are Hugging Face's. What we do not know how to compute is refused by name rather than
ignored; keys that do not change the forward pass are skipped.

The table of architectures (`ARCHITECTURES`) says how each differs from Llama. Configuration,
checkpoint, weights, digests and the forward pass read it. A `Width` is a letter or two of the shape
suffixes: D hidden size, F intermediate size, C head dim, HC and KC all query heads and all
key/value heads side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from protocol.errors import ModelError, describe
from protocol.messages import FUSED_MODULES, FloatDtype, ModuleName, Projection
from protocol.model.files import find_file, read_json
from protocol.validation import M, Strict, validate_file

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

ArchitectureName = Literal[
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
]
Width = Literal["D", "F", "C", "HC", "KC"]


class Weight(NamedTuple):
    """A module or an RMSNorm of a layer: where its tensors are, and how wide its output is.

    `inputs`: how wide a module's input is.
    """

    path: str
    outputs: Width
    inputs: Width = "D"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry.

    `biases`: the modules that may have one, each with the key of config.json that says so; empty
    where they always have. `head_dim`: of a config.json that does not say; None for the hidden size
    over the number of heads. `windows`: which layers have `sliding_window`: none, all, or those
    that config.json lists.
    """

    norms: Mapping[str, Weight]
    modules: Mapping[ModuleName, Weight]
    biases: Mapping[str, str]
    head_dim: int | None = None
    windows: Literal["none", "all", "listed"] = "none"


_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = dict.fromkeys((*_QKV, "o_proj"), "attention_bias")

LLAMA = Architecture(
    norms={name: Weight(name, "D") for name in ("input_layernorm", "post_attention_layernorm")},
    modules={
        "q_proj": Weight("self_attn.q_proj", "HC"),
        "k_proj": Weight("self_attn.k_proj", "KC"),
        "v_proj": Weight("self_attn.v_proj", "KC"),
        "o_proj": Weight("self_attn.o_proj", "D", "HC"),
        "gate_proj": Weight("mlp.gate_proj", "F"),
        "up_proj": Weight("mlp.up_proj", "F"),
        "down_proj": Weight("mlp.down_proj", "D", "F"),
    },
    biases=_ATTENTION | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias"),
)
_HEAD_NORMS = {"q_norm": Weight("self_attn.q_norm", "C"), "k_norm": Weight("self_attn.k_norm", "C")}

ARCHITECTURES: Mapping[ArchitectureName, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": replace(LLAMA, biases={}, windows="all"),
    "Qwen2ForCausalLM": replace(LLAMA, biases=dict.fromkeys(_QKV, ""), windows="listed"),
    "Qwen3ForCausalLM": replace(
        LLAMA,
        norms={**LLAMA.norms, **_HEAD_NORMS},
        biases=_ATTENTION,
        head_dim=128,
        windows="listed",
    ),
}

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]
# What a rope_type cannot do without.
_ROPE_NEEDS: dict[RopeType, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
# Bounds within which no formula of RoPE overflows or divides by zero.
Positive: TypeAlias = Annotated[float, Field(ge=1e-30, lt=1e12)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, lt=1e12)]
# The first fault ends the reading: pydantic would take some kilobytes for each.
Factors: TypeAlias = Annotated[tuple[Positive, ...], Field(strict=False, fail_fast=True)]
HeadDim: TypeAlias = Annotated[int, Field(ge=2, le=1024, multiple_of=2)]


class RopeParameters(Strict):
    """RoPE frequencies; the names are those of `rope_parameters` (or `rope_scaling`)."""

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
    short_factor: Factors | None = None
    long_factor: Factors | None = None
    # Rotating only a part of each head is not implemented.
    partial_rotary_factor: Annotated[float, Field(ge=1.0, le=1.0)] = 1.0

    @model_validator(mode="after")
    def _complete(self) -> RopeParameters:
        for name in _ROPE_NEEDS.get(self.rope_type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type} needs {name}")
        return self


class _Sizes(BaseModel):
    """What is taken from config.json as it stands there."""

    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, lt=4096)]
    num_attention_heads: Size
    max_position_embeddings: Size
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False


class ModelConfig(_Sizes, Strict):
    """Everything about a model that the forward pass depends on, except the weights."""

    architecture: ArchitectureName
    num_key_value_heads: Size
    head_dim: HeadDim
    rope: RopeParameters
    dtype: FloatDtype
    biased_modules: frozenset[ModuleName]
    # Per layer: how many tokens back a token may look, itself included; None for all.
    sliding_windows: tuple[Size | None, ...]
    eos_token_ids: frozenset[int]

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        heads, rope = self.heads, self.rope
        if heads[0] % heads[1]:
            raise ValueError(
                f"num_key_value_heads ({heads[1]}) must divide num_attention_heads ({heads[0]})"
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(rope, name)
            if factors is not None and len(factors) != self.head_dim // 2:
                raise ValueError(
                    f"rope {name} has {len(factors)} entries, head_dim / 2 is {self.head_dim // 2}"
                )
        if rope.rope_type == "dynamic" and self.head_dim < 4:
            raise ValueError(f"dynamic RoPE needs a head_dim of at least 4, not {self.head_dim}")
        if rope.rope_type == "longrope" and rope.original_max_position_embeddings == 1:
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

    @property
    def table(self) -> Architecture:
        """The entry of the architecture."""
        return ARCHITECTURES[self.architecture]

    @property
    def qk_norm(self) -> bool:
        """Whether each head of queries and keys is normed."""
        return "q_norm" in self.table.norms

    def width(self, name: Width) -> int:
        """Return one of the sizes that the table names."""
        H, K, C = self.heads
        widths = {"D": self.hidden_size, "F": self.intermediate_size}
        return (widths | {"C": C, "HC": H * C, "KC": K * C})[name]

    def module_shape(self, module: ModuleName) -> tuple[int, int]:
        """Return (out_features, in_features) of one linear module."""
        found = self.table.modules[module]
        return self.width(found.outputs), self.width(found.inputs)

    def row_layout(self, operator: Projection) -> tuple[dict[ModuleName, slice], tuple[int, int]]:
        """Say which rows of an operator's matrix belong to which module, and the matrix's shape.

        The shape is (sum of out_features, in_features). The LM head has no modules.
        """
        if operator == "lm_head":
            return {}, (self.vocab_size, self.hidden_size)
        rows: dict[ModuleName, slice] = {}
        start = in_features = 0
        for module in FUSED_MODULES[operator]:
            out_features, in_features = self.module_shape(module)
            rows[module] = slice(start, start + out_features)
            start += out_features
        return rows, (start, in_features)


def _listed(value: object) -> object:
    """Return one value, several or none (None) as a list."""
    return [] if value is None else value if isinstance(value, list) else [value]


class _EndOfText(BaseModel):
    """The EOS ids of `generation_config.json`, or of config.json."""

    model_config = ConfigDict(frozen=True, strict=True)

    eos_token_id: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(strict=False, fail_fast=True),
        BeforeValidator(_listed),
    ] = ()


class _ConfigFile(_Sizes, _EndOfText):
    """The keys of config.json that the forward pass depends on. None is as good as left out."""

    architectures: Annotated[
        ArchitectureName,
        BeforeValidator(lambda value: value[0] if isinstance(value, list) and value else value),
    ]
    # What we cannot compute otherwise.
    hidden_act: Literal["silu"] = "silu"
    quantization_config: None = None
    pretraining_tp: Literal[1] = 1
    num_key_value_heads: Size | None = None
    head_dim: HeadDim | None = None
    dtype: FloatDtype | None = None
    torch_dtype: FloatDtype | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    # The default of all three configuration classes that have it.
    sliding_window: Size | None = 4096
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: Any = None
    # Of transformers 5, and before. What they hold is `RopeParameters`'s to check.
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Any = None
    original_max_position_embeddings: Any = None


def read_config(directory: Path, manifest: Manifest | None = None) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`).

    Raises ModelError that names the file and field: a missing or empty directory, an unsupported
    architecture, activation, RoPE type or quantisation, sizes that do not fit together; and
    ManifestError for files that are not those of the manifest.
    """
    ModelError.unless(directory.is_dir(), str(directory), "no such directory", "a model directory")
    path = find_file(directory, "config.json", manifest)
    if path is None:
        raise ModelError(str(directory), "no config.json", "a Hugging Face directory")
    file = _read_known(_ConfigFile, path, manifest)
    # As in transformers: generation_config.json decides where it names any.
    eos = file.eos_token_id
    if generation := find_file(directory, "generation_config.json", manifest):
        eos = _read_known(_EndOfText, generation, manifest).eos_token_id or eos
    heads, table = file.num_attention_heads, ARCHITECTURES[file.architectures]
    biased = (m for m, key in table.biases.items() if not key or getattr(file, key))
    fields = file.model_dump(include=set(_Sizes.model_fields)) | {
        "architecture": file.architectures,
        "num_key_value_heads": file.num_key_value_heads or heads,
        "head_dim": file.head_dim or table.head_dim or file.hidden_size // heads,
        "rope": _rope(file, path),
        "dtype": file.dtype or file.torch_dtype or "float32",
        "biased_modules": frozenset(biased),
        "sliding_windows": _sliding_windows(file, path),
        "eos_token_ids": frozenset(eos),
    }
    return validate_file(ModelConfig, fields, str(path))


def _read_known(cls: type[M], path: Path, manifest: Manifest | None) -> M:
    """Read the keys of a file that a model has, and skip the others."""
    raw = read_json(path, manifest)
    known = {name: raw[name] for name in cls.model_fields if name in raw}
    return validate_file(cls, known, str(path))


def _rope(file: _ConfigFile, path: Path) -> RopeParameters:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    key = "rope_scaling" if file.rope_scaling else "rope_parameters"
    fields: dict[str, Any] = {} if file.rope_theta is None else {"rope_theta": file.rope_theta}
    fields |= getattr(file, key) or {}
    # `type` is the key of the earliest configurations, and may stand beside `rope_type`.
    legacy_type = fields.pop("type", None)
    fields.setdefault("rope_type", "default" if legacy_type is None else legacy_type)
    if fields["rope_type"] in ("yarn", "longrope", "llama3"):
        # Beside the parameters it wins over what is inside, as in transformers.
        name, outer = "original_max_position_embeddings", file.original_max_position_embeddings
        fields |= {} if outer is None else {name: outer}
        fields.setdefault(name, file.max_position_embeddings)
    return validate_file(RopeParameters, fields, f"{path}: {key}")


def _sliding_windows(file: _ConfigFile, path: Path) -> tuple[int | None, ...]:
    layers, window, types = file.num_hidden_layers, file.sliding_window, file.layer_types
    listed = ARCHITECTURES[file.architectures].windows
    if listed == "all":
        return (window,) * layers
    if listed == "none" or window is None or not file.use_sliding_window:
        return (None,) * layers
    if types is None:
        first = file.max_window_layers
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    fits = isinstance(types, list) and len(types) == layers
    fits = fits and all(isinstance(t, str) and t in known for t in types)
    ModelError.unless(
        fits, f"{path}: layer_types", describe(types), f"{layers} times {' or '.join(known)}"
    )
    return tuple(known[t] for t in types)
