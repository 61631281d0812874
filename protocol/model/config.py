"""config.json of a Hugging Face directory, for the architectures that we run.

Field names are Hugging Face's. What we do not know how to compute is refused by name rather than
ignored; keys that do not change the forward pass are skipped.

`protocol.model.architectures` says how each architecture differs from Llama; what a file does not
say, its entry there does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from protocol.errors import ModelError, describe, shown
from protocol.messages import FUSED_MODULES, FloatDtype, LinearOperator, ModuleName, Projection
from protocol.model.architectures import (
    ARCHITECTURES,
    HEAD_NORMS,
    LLAMA,
    NEUTRAL,
    ROPE_KEYS,
    TEXT_MODELS,
    WRAPPERS,
    ActivationName,
    Architecture,
    Width,
)
from protocol.model.files import find_file, read_json
from protocol.validation import Strict, validate_file, validate_known

if TYPE_CHECKING:
    from protocol.model.at_rest import Manifest

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
    # How much of each head turns.
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    # Of single families: by how much queries grow with their positions; how far the base stretches.
    llama_4_scaling_beta: NotNegative | None = None
    alpha: Positive | None = None

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
    tie_word_embeddings: bool = False


class ModelConfig(_Sizes, Strict):
    """Everything about a model that the forward pass depends on, except the weights.

    `ropes`: the kinds of RoPE that there are; `layer_ropes`: which of them each layer has, None for
    none. What `embedding`, a layer's sublayers, the scores q k^T and the logits are multiplied by
    is a `scale`; to `cap` x is to take cap * tanh(x / cap).
    """

    architecture: Annotated[str, AfterValidator(lambda name: ARCHITECTURES[name] and name)]
    num_key_value_heads: Size
    head_dim: HeadDim
    ropes: tuple[RopeParameters, ...]
    layer_ropes: tuple[int | None, ...]
    dtype: FloatDtype
    biased_modules: frozenset[ModuleName]
    # Per layer: how many tokens back a token may look, itself included; None for all.
    sliding_windows: tuple[Size | None, ...]
    eos_token_ids: frozenset[int]
    activation: ActivationName
    norm_eps: Positive
    embedding_scale: Positive = 1.0
    residual_scale: Positive = 1.0
    # Whether there is an LM head: files of an embedding model may have none.
    generates: bool = True
    score_scale: Positive
    score_cap: Positive | None = None
    logit_scale: Positive = 1.0
    logit_cap: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        heads = self.heads
        if heads[0] % heads[1]:
            raise ValueError(
                f"num_key_value_heads ({heads[1]}) must divide num_attention_heads ({heads[0]})"
            )
        for rope in self.ropes:
            dim = self.rotary_dim(rope)
            if dim < 2 or dim % 2:
                whole = self.head_dim
                raise ValueError(f"partial_rotary_factor of {whole} must be even, not {dim}")
            for name in ("short_factor", "long_factor"):
                factors = getattr(rope, name)
                if factors is not None and len(factors) != dim // 2:
                    half = f"{dim // 2}: half of what turns"
                    raise ValueError(f"rope {name} has {len(factors)} entries, not {half}")
            if rope.rope_type == "dynamic" and dim < 4:
                raise ValueError(f"dynamic RoPE needs a head_dim of at least 4, not {dim}")
            if rope.rope_type == "longrope" and rope.original_max_position_embeddings == 1:
                raise ValueError("longrope needs original_max_position_embeddings of at least 2")
        return self

    def rotary_dim(self, rope: RopeParameters) -> int:
        """Return how many elements of a head turn."""
        return int(self.head_dim * rope.partial_rotary_factor)

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have.

        `max_position_embeddings`, except with dynamic NTK scaling: there it is the length that the
        model was trained with, and `factor` says how far beyond it the scaling is meant to carry.
        """
        factors = [
            rope.factor
            for rope in self.ropes
            if rope.rope_type == "dynamic" and rope.alpha is None and rope.factor is not None
        ]
        return int(self.max_position_embeddings * max([1.0, *factors]))

    @property
    def rope_span(self) -> int | None:
        """Up to how many tokens RoPE is the same, however long a sequence is; None: always."""
        spans = {"dynamic": self.max_position_embeddings} if self.ropes[0].alpha is None else {}
        first = self.ropes[0].original_max_position_embeddings
        return (spans | {"longrope": first}).get(self.ropes[0].rope_type)

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
        """Whether queries and keys are normed."""
        return "q_norm" in self.table.norms

    @property
    def like_llama(self) -> bool:
        """Whether layers differ from Llama's by biases, windows and norms of heads alone."""
        like = replace(LLAMA, biases=self.table.biases, windows=self.table.windows)
        norms = LLAMA.norms | (HEAD_NORMS if self.qk_norm else {})
        like = replace(like, norms=norms, defaults=self.table.defaults, aliases=self.table.aliases)
        return like == self.table and self.activation == "silu" and len(self.ropes) == 1

    def width(self, name: Width) -> int:
        """Return one of the sizes that the table names."""
        H, K, C = self.heads
        widths = {"D": self.hidden_size, "F": self.intermediate_size}
        return (widths | {"C": C, "HC": H * C, "KC": K * C})[name]

    def modules_of(self, operator: LinearOperator) -> tuple[ModuleName, ...]:
        """Return the modules that a fused operator has."""
        return tuple(m for m in FUSED_MODULES[operator] if m in self.table.modules)

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
        for module in self.modules_of(operator):
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

    hidden_act: str = "silu"
    hidden_activation: str = "silu"
    num_key_value_heads: Size | None = None
    head_dim: HeadDim | None = None
    dtype: FloatDtype | None = None
    torch_dtype: FloatDtype | None = None
    attention_bias: bool | None = None
    attention_out_bias: bool | None = None
    mlp_bias: bool | None = None
    use_bias: bool | None = None
    use_qkv_bias: bool | None = None
    rms_norm_eps: Positive = 1e-6
    layer_norm_eps: Positive = 1e-5
    norm_epsilon: Positive = 1e-5
    norm_eps: Positive = 1e-5
    embedding_multiplier: Positive | None = None
    residual_multiplier: Positive | None = None
    attention_multiplier: Positive | None = None
    logits_scaling: Positive | None = None
    logit_scale: Positive | None = None
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    sliding_window: Size | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    sliding_window_pattern: Any = None
    layer_types: Any = None
    no_rope_layers: Any = None
    no_rope_layer_interval: Size = 4
    # Of transformers 5, and before. What they hold is `RopeParameters`'s to check.
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Any = None
    rope_local_base_freq: Any = None
    partial_rotary_factor: Any = None
    original_max_position_embeddings: Any = None


def read_config(directory: Path, manifest: Manifest | None = None) -> ModelConfig:
    """Read `config.json` (and the EOS ids of `generation_config.json`).

    Raises ModelError that names the file and field: a missing or empty directory, an unsupported
    architecture, activation, RoPE type or quantisation, sizes that do not fit together; and
    ManifestError for files that are not those of the manifest.
    """
    path = find_file(directory, "config.json", manifest) if directory.is_dir() else None
    if path is None:
        raise ModelError(str(directory), *what_it_is(directory))
    name, raw = _settings(read_json(path, manifest), path)
    table = ARCHITECTURES[name]
    file = validate_known(_ConfigFile, raw, str(path))
    # As in transformers: generation_config.json decides where it names any.
    eos = file.eos_token_id
    if generation := find_file(directory, "generation_config.json", manifest):
        said = read_json(generation, manifest)
        eos = validate_known(_EndOfText, said, str(generation)).eos_token_id or eos
    heads = file.num_attention_heads
    head_dim = file.head_dim or file.hidden_size // heads
    biased = (m for m, key in table.biases.items() if not key or getattr(file, key))
    types = _layer_types(file, table, path)
    ropes, layer_ropes = _ropes(file, table, types, path)
    activation = getattr(file, table.activation)
    activation = table.aliases.get(activation, activation)
    known = get_args(ActivationName)
    where, expected = f"{path}: {table.activation}", f"one of {', '.join(known)}"
    ModelError.unless(activation in known, where, describe(activation), expected)
    numbers = {field: (getattr(file, one.key), one.power) for field, one in table.numbers.items()}
    fields = file.model_dump(include=set(_Sizes.model_fields)) | {
        "architecture": name,
        "num_key_value_heads": file.num_key_value_heads or heads,
        "head_dim": head_dim,
        "ropes": ropes,
        "layer_ropes": layer_ropes,
        "dtype": file.dtype or file.torch_dtype or "float32",
        "biased_modules": frozenset(biased),
        "sliding_windows": tuple(file.sliding_window if one else None for one in types),
        "eos_token_ids": frozenset(eos),
        "activation": activation,
        "norm_eps": getattr(file, table.norm_eps),
        # Of none, which is refused below, there is no power.
        "score_scale": (head_dim or 1) ** -0.5,
        **{field: value**power for field, (value, power) in numbers.items() if value is not None},
    }
    return validate_file(ModelConfig, fields, str(path))


def what_it_is(path: Path) -> tuple[str, str]:
    """Say what a path is that is no model directory, and which command makes one of it."""
    plain = "a Hugging Face directory with config.json"
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            return "no config.json but an adapter", f"{plain}, as tsqp import --base makes of both"
        if found := sorted(path.glob("*.gguf")):
            return f"no config.json but {shown(found[0].name)}", f"{plain}, as tsqp import makes"
        return "no config.json", plain
    if path.suffix == ".gguf" and path.is_file():
        return "a GGUF file", f"{plain}, as tsqp import makes of it"
    if path.is_file():
        return "a file", f"{plain}, in which it may be"
    hub = len(path.parts) == 2 and not path.is_absolute()
    return "no such directory", plain + ", as tsqp pull gets from a hub" * hub


def _settings(raw: dict[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return the architecture, and the keys of its model with the defaults of those left out.

    Raises ModelError for an architecture that is not in the table, quantised weights, and a key
    that changes numbers of another architecture.
    """
    names = raw.get("architectures")
    name: Any = names[0] if isinstance(names, list) and names else names
    if name in WRAPPERS:
        text: Any = raw.get("text_config")
        ModelError.unless(
            isinstance(text, dict), f"{path}: text_config", describe(text), "settings"
        )
        # As in transformers 5, the outer one counts; without it there is none but the embedding.
        tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", True)}
        raw = {**{k: raw[k] for k in _OUTER if k in raw}, **text, **tied}
        kind = raw.get("model_type")
        where, expected = f"{path}: text_config: model_type", f"one of {', '.join(TEXT_MODELS)}"
        ModelError.unless(str(kind) in TEXT_MODELS, where, describe(kind), expected)
        name = TEXT_MODELS[str(kind)]
    whole = f"{str(name).removesuffix('Model')}ForCausalLM"
    bare = isinstance(name, str) and name.endswith("Model") and whole in ARCHITECTURES
    known = f"{whole}, whose layers these are" if bare else f"one of {', '.join(_NAMES)}"
    found = isinstance(name, str) and name in ARCHITECTURES
    ModelError.unless(found, f"{path}: architectures", describe(name), known)
    quantised = raw.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    ModelError.unless(
        quantised is None,
        f"{path}: quantization_config",
        f"weights quantised by {shown(str(method or 'an unknown method'))}",
        "plain ones, as tsqp import makes of them",
    )
    table = ARCHITECTURES[name]
    read = {one.key for one in table.numbers.values()} | {
        *(("sliding_window",) if table.windows != "none" else ()),
        *(("no_rope_layers",) if table.rope == "listed" else ()),
    }
    for key in NEUTRAL.keys() - read:
        fine = table.neutral.get(key, NEUTRAL[key])
        neutral = raw.get(key) is None or raw[key] in fine
        expected = f"{' or '.join(map(describe, fine)) or 'none'}, for a {name}"
        ModelError.unless(neutral, f"{path}: {key}", describe(raw.get(key)), expected)
    return name, {**table.defaults, **raw}


# Beside the settings of the model that reads text, in a file of several.
_OUTER = ("quantization_config", "eos_token_id", "dtype", "torch_dtype")
_NAMES = (*ARCHITECTURES, *WRAPPERS)


def _layer_types(file: _ConfigFile, table: Architecture, path: Path) -> tuple[bool, ...]:
    """Say of each layer whether it has a window. Raises ModelError."""
    layers, types = range(file.num_hidden_layers), file.layer_types
    if file.sliding_window is None or table.windows in ("none", "all"):
        return (table.windows == "all" and file.sliding_window is not None,) * len(layers)
    if table.windows == "used" and not file.use_sliding_window:
        return (False,) * len(layers)
    if types is not None:
        known = ("sliding_attention", "full_attention")
        fits = isinstance(types, list) and len(types) == len(layers)
        fits = fits and all(isinstance(one, str) and one in known for one in types)
        expected = f"{len(layers)} times {' or '.join(known)}"
        ModelError.unless(fits, f"{path}: layer_types", describe(types), expected)
        return tuple(one == known[0] for one in types)
    if "max_window_layers" in table.defaults:
        return tuple(layer >= file.max_window_layers for layer in layers)
    every = file.sliding_window_pattern
    fits = isinstance(every, int) and every > 0
    ModelError.unless(fits, f"{path}: layer_types", "nothing", "the type of each layer")
    return tuple((layer + 1) % every != 0 for layer in layers)


def _ropes(
    file: _ConfigFile, table: Architecture, windowed: Sequence[bool], path: Path
) -> tuple[tuple[RopeParameters, ...], tuple[int | None, ...]]:
    """Read the kinds of RoPE, and which of them each layer has. Raises ModelError."""
    layers = range(file.num_hidden_layers)
    if not table.rope_by_type:
        has = [True for _ in layers]
        if table.rope == "windowed" and file.sliding_window is not None:
            has = list(windowed)
        if table.rope == "listed":
            every, listed = file.no_rope_layer_interval, file.no_rope_layers
            has = [(n + 1) % every != 0 for n in layers] if listed is None else listed
            fits = isinstance(has, list) and len(has) == len(layers)
            ModelError.unless(
                fits, f"{path}: no_rope_layers", describe(listed), f"{len(layers)} times 0 or 1"
            )
        return (_rope(file, table, path),), tuple(0 if one else None for one in has)
    # Those with a window have one of their own, which is not scaled unless a file says so.
    kinds = []
    for kind, theta in (("full", file.rope_theta), ("sliding", file.rope_local_base_freq)):
        named = file.rope_parameters or {}
        own = named.get(f"{kind}_attention") or ({} if "full_attention" in named else named)
        where = f"{path}: rope_parameters: {kind}_attention"
        ModelError.unless(isinstance(own, dict), where, describe(own), "an object")
        scaled = {} if kind == "sliding" else file.rope_scaling or {}
        given = {"rope_theta": theta} | own | scaled
        alone = {"rope_parameters": given, "rope_scaling": None, "rope_theta": None}
        kinds.append(_rope(file.model_copy(update=alone), table, path))
    return tuple(kinds), tuple(int(one) for one in windowed)


def _rope(file: _ConfigFile, table: Architecture, path: Path) -> RopeParameters:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    key = "rope_scaling" if file.rope_scaling else "rope_parameters"
    outer = {"rope_theta": file.rope_theta, "partial_rotary_factor": file.partial_rotary_factor}
    fields: dict[str, Any] = {name: value for name, value in outer.items() if value is not None}
    fields |= getattr(file, key) or {}
    # `type` is the key of the earliest configurations, and may stand beside `rope_type`.
    legacy_type = fields.pop("type", None)
    fields.setdefault("rope_type", "default" if legacy_type is None else legacy_type)
    if isinstance(kind := fields["rope_type"], str):
        fields["rope_type"] = table.aliases.get(kind, kind)
    if fields["rope_type"] in ("yarn", "longrope", "llama3"):
        # Beside the parameters it wins over what is inside, as in transformers.
        name, outer_length = (
            "original_max_position_embeddings",
            file.original_max_position_embeddings,
        )
        fields |= {} if outer_length is None else {name: outer_length}
        fields.setdefault(name, file.max_position_embeddings)
    for name in (ROPE_KEYS.keys() - table.rope_keys) & fields.keys():
        neutral = fields[name] is None or fields[name] in ROPE_KEYS[name]
        ModelError.unless(neutral, f"{path}: {key}: {name}", describe(fields[name]), "none")
    # What no model of `transformers` reads changes nothing.
    known = {name: fields[name] for name in RopeParameters.model_fields if name in fields}
    return validate_file(RopeParameters, known, f"{path}: {key}")
