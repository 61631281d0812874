"""The table of architectures: by what each differs from Llama.

Configuration, checkpoint, forward pass, calibration, attacks, benchmarks and plan read it and
nothing else knows a family. One of known parts is an entry here and a row of the table of
`tests/equivalence`. Facts are those of `transformers`' model of the same name.

Tensors have Llama's names everywhere but in files: a `Weight` says where a file has one. A `Width`
is a letter or two of the shape suffixes: D hidden size, F intermediate size, C head dim, HC and KC
all query heads and all key/value heads side by side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from protocol.messages import ModuleName

Width = Literal["D", "F", "C", "HC", "KC"]
# Where a norm stands: before attention and before the MLP, under Llama's names; behind each of
# them, before what they give is added; of queries and keys.
NormName = Literal[
    "input_layernorm",
    "post_attention_layernorm",
    "attention_output_norm",
    "mlp_output_norm",
    "q_norm",
    "k_norm",
]
ActivationName = Literal["silu", "gelu_pytorch_tanh", "relu2", "xielu"]
Norms: TypeAlias = dict[NormName, "Weight"]
Modules: TypeAlias = dict[ModuleName, "Weight"]
Biases: TypeAlias = dict[ModuleName, str]


class Weight(NamedTuple):
    """A module or a norm of a layer: where its tensors are in a file, and how wide its output is.

    Modules with one path are one tensor there, in the order of the fused operator. `inputs`: how
    wide a module's input is.
    """

    path: str
    outputs: Width
    inputs: Width = "D"


class Number(NamedTuple):
    """A number of the forward pass: a key of config.json, to a power."""

    key: str
    power: float = 1.0


def _norms(before: tuple[str, ...], behind: tuple[str, ...] = ()) -> Norms:
    """Norms of layers by their paths: before attention and the MLP, and behind each of them."""
    places: tuple[NormName, ...] = ("input_layernorm", "post_attention_layernorm")
    last: tuple[NormName, ...] = ("attention_output_norm", "mlp_output_norm")
    paths = (*zip(places, before, strict=False), *zip(last, behind, strict=False))
    return {name: Weight(path, "D") for name, path in paths}


_BEFORE = ("input_layernorm", "post_attention_layernorm")
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
HEAD_NORMS: Norms = {
    "q_norm": Weight("self_attn.q_norm", "C"),
    "k_norm": Weight("self_attn.k_norm", "C"),
}
_WIDE_NORMS: Norms = {
    "q_norm": Weight("self_attn.q_norm", "HC"),
    "k_norm": Weight("self_attn.k_norm", "KC"),
}

_QKV: tuple[ModuleName, ...] = ("q_proj", "k_proj", "v_proj")
_ATTENTION: Biases = dict.fromkeys((*_QKV, "o_proj"), "attention_bias")
_MLP: Biases = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias")
_GATED: Modules = {
    "q_proj": Weight("self_attn.q_proj", "HC"),
    "k_proj": Weight("self_attn.k_proj", "KC"),
    "v_proj": Weight("self_attn.v_proj", "KC"),
    "o_proj": Weight("self_attn.o_proj", "D", "HC"),
    "gate_proj": Weight("mlp.gate_proj", "F"),
    "up_proj": Weight("mlp.up_proj", "F"),
    "down_proj": Weight("mlp.down_proj", "D", "F"),
}
_UNGATED: Modules = {name: one for name, one in _GATED.items() if name != "gate_proj"}
_FUSED_MLP: Modules = _GATED | {
    name: Weight("mlp.gate_up_proj", "F") for name in ("gate_proj", "up_proj")
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry; what is left out is Llama's.

    **config.json.** `defaults`: of keys that a file may leave out; `aliases`: what files call
    otherwise, activations and types of RoPE; `activation`, `norm_eps`: the keys that say so;
    `numbers`: of `ModelConfig`, by its names; `neutral`: what of `NEUTRAL` is otherwise. `biases`:
    the modules that may have one, each with the key that says so; empty where they always have.

    **Norms.** `norm`: RMSNorm or LayerNorm, `norm_bias`: with a bias; `norm_offset`: what is added
    to a weight. `qk_norm_last`: queries and keys are normed behind RoPE.

    **Attention.** `windows`: which layers have `sliding_window`: none, all, those that config.json
    lists, or these where it says that windows are used. `rope`: which layers have it: all, those
    with a window, those that config.json lists; `rope_by_type`: those with a window have another;
    `rope_keys`: settings of it that this architecture alone reads; `neighbours`: it turns elements
    2 i and 2 i + 1 together, not i and i + n. `rope_anew`: a sequence that grows out of the
    context of a longrope's short factors begins anew.

    `parallel`: the MLP reads what attention reads.
    """

    norms: Norms = field(default_factory=lambda: _norms(_BEFORE))
    modules: Modules = field(default_factory=lambda: _GATED)
    biases: Biases = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    norm_eps: str = "rms_norm_eps"
    qk_norm_last: bool = False
    activation: str = "hidden_act"
    numbers: dict[str, Number] = field(default_factory=dict)
    windows: Literal["none", "all", "listed", "used"] = "none"
    rope: Literal["all", "windowed", "listed"] = "all"
    rope_by_type: bool = False
    rope_keys: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    neutral: dict[str, tuple[object, ...]] = field(default_factory=dict)
    rope_anew: bool = False
    neighbours: bool = False
    parallel: bool = False

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return "gate_proj" in self.modules


# Families of which a part of each head turns.
_PARTIAL = frozenset({"partial_rotary_factor"})
# RoPE of files that say nothing of it.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16_384,
}
LLAMA = Architecture(biases=_ATTENTION | _MLP)
_MISTRAL = Architecture(windows="all", defaults={"sliding_window": 4096})
_QWEN2 = Architecture(
    biases=dict.fromkeys(_QKV, ""),
    windows="used",
    defaults={"sliding_window": 4096, "max_window_layers": 28},
)
_GEMMA = Architecture(
    biases=_ATTENTION,
    norm_offset=1.0,
    aliases={"gelu": "gelu_pytorch_tanh"},
    numbers={"embedding_scale": Number("hidden_size", 0.5)},
    defaults={"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
)
_GEMMA2 = replace(
    _GEMMA,
    aliases={},
    norms=_norms(
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    activation="hidden_activation",
    windows="listed",
    numbers={
        **_GEMMA.numbers,
        "score_scale": Number("query_pre_attn_scalar", -0.5),
        "score_cap": Number("attn_logit_softcapping"),
        "logit_cap": Number("final_logit_softcapping"),
    },
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    norms=_GEMMA2.norms | HEAD_NORMS,
    rope_by_type=True,
    defaults=_GEMMA2.defaults
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    # What the settings within a multimodal file leave out.
    | {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"max_position_embeddings": 131_072},
)
_OLMO2 = Architecture(
    norms=_norms((), _BEHIND) | _WIDE_NORMS, biases=_ATTENTION, defaults={"rms_norm_eps": 1e-5}
)
_COHERE = Architecture(
    norms=_norms(("input_layernorm",)),
    norm="layer",
    norm_eps="layer_norm_eps",
    biases=_ATTENTION,
    numbers={"logit_scale": Number("logit_scale")},
    neighbours=True,
    parallel=True,
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625}
    | {"rope_theta": 500_000.0},
)
_GLM = Architecture(
    modules=_FUSED_MLP,
    biases=dict.fromkeys(_QKV, "attention_bias"),
    rope_keys=_PARTIAL,
    neighbours=True,
    defaults={"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
    | {"rms_norm_eps": 1.5625e-7},
)
_LAYER_NORM = Architecture(norm="layer", norm_bias=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": replace(_MISTRAL, windows="listed"),
    "Ministral3ForCausalLM": replace(
        _MISTRAL,
        rope_keys=frozenset({"llama_4_scaling_beta"}),
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_parameters": _YARN},
    ),
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": replace(
        _QWEN2,
        norms=_norms(_BEFORE) | HEAD_NORMS,
        biases=_ATTENTION,
        defaults=_QWEN2.defaults | {"head_dim": 128},
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Phi3ForCausalLM": Architecture(
        modules=_FUSED_MLP
        | {name: Weight("self_attn.qkv_proj", _GATED[name].outputs) for name in _QKV},
        windows="all",
        aliases={"su": "longrope", "yarn": "longrope"},
        rope_keys=_PARTIAL,
        rope_anew=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": replace(
        LLAMA,
        numbers={
            "embedding_scale": Number("embedding_multiplier"),
            "residual_scale": Number("residual_multiplier"),
            "score_scale": Number("attention_multiplier"),
            "logit_scale": Number("logits_scaling", -1.0),
        },
        defaults={"attention_multiplier": 1.0},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        windows="listed",
        rope_by_type=True,
        defaults=_OLMO2.defaults
        | {"sliding_window": 4096, "sliding_window_pattern": 4}
        | {"rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0},
    ),
    "Exaone4ForCausalLM": Architecture(
        norms=_norms((), _BEHIND) | HEAD_NORMS,
        windows="listed",
        rope="windowed",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "SmolLM3ForCausalLM": replace(
        LLAMA,
        windows="used",
        rope="listed",
        defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
    ),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        windows="listed",
        rope="windowed",
        defaults={
            **_COHERE.defaults,
            "rope_theta": 10_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM, norms=_norms(_BEFORE, ("post_self_attn_layernorm", "post_mlp_layernorm"))
    ),
    "Ernie4_5ForCausalLM": Architecture(
        biases=dict.fromkeys(_GATED, "use_bias"),
        neighbours=True,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"rope_theta": 500_000.0},
    ),
    "HeliumForCausalLM": Architecture(
        biases=dict.fromkeys(_QKV, "attention_bias") | _MLP,
        neighbours=True,
        defaults={"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        norms=_norms(_BEFORE)
        | {
            "q_norm": Weight("self_attn.query_layernorm", "C"),
            "k_norm": Weight("self_attn.key_layernorm", "C"),
        },
        qk_norm_last=True,
        biases=_ATTENTION,
        rope_keys=frozenset({"alpha"}),
        neutral={"use_qk_norm": (True,)},
        defaults={"rms_norm_eps": 1e-5},
    ),
    "StableLmForCausalLM": replace(
        _LAYER_NORM,
        norm_eps="layer_norm_eps",
        rope_keys=_PARTIAL,
        biases=dict.fromkeys(_QKV, "use_qkv_bias"),
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "Starcoder2ForCausalLM": replace(
        _LAYER_NORM,
        norm_eps="norm_epsilon",
        modules=_UNGATED
        | {"up_proj": Weight("mlp.c_fc", "F"), "down_proj": Weight("mlp.c_proj", "D", "F")},
        biases=dict.fromkeys(_UNGATED, "use_bias"),
        windows="all",
        defaults={"norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "NemotronForCausalLM": replace(
        _LAYER_NORM,
        norm_offset=1.0,
        norm_eps="norm_eps",
        rope_keys=_PARTIAL,
        modules=_UNGATED,
        biases=LLAMA.biases,
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    ),
    "SeedOssForCausalLM": Architecture(
        biases=_ATTENTION | {"o_proj": "attention_out_bias"} | _MLP,
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "CwmForCausalLM": Architecture(
        windows="listed",
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192}
        | {"rope_theta": 1e6, "rope_parameters": _LLAMA3 | {"factor": 16.0}},
    ),
    "ArceeForCausalLM": Architecture(
        modules=_UNGATED,
        biases=LLAMA.biases,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "ApertusForCausalLM": Architecture(
        norms=_norms(("attention_layernorm", "feedforward_layernorm")) | HEAD_NORMS,
        modules=_UNGATED,
        biases=_ATTENTION,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "xielu"}
        | {"rope_theta": 1.2e7, "rope_parameters": _LLAMA3 | {"factor": 8.0}},
    ),
}

# Files of several models, of which we run the one that reads text.
WRAPPERS = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
# What such a file calls it (`model_type`).
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
# Keys by which a family's numbers change, each with the values that change nothing: who does not
# read one refuses any other.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "sliding_window": (),
    "no_rope_layers": ([],),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_parallel_residual": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "clip_qkv": (),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "attention_chunk_size": (),
}
# Of RoPE settings, what single families alone read: others refuse it, but what changes nothing.
ROPE_KEYS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("llama_4_scaling_beta", "alpha", "mrope_section", "mrope_interleaved"), ()),
    "partial_rotary_factor": (1,),
}
