"""The table of architectures: how each differs from Llama.

Configuration, checkpoint, weights, digests and the forward pass read it. Names are those of Hugging
Face. A `Width` is a letter or two of the shape suffixes: D hidden size, F intermediate size, C head
dim, HC and KC all query heads and all key/value heads side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from protocol.messages import ModuleName

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
_MLP = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp_bias")

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
    biases={**_ATTENTION, **_MLP},
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
