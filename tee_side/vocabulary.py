"""The words that policies, masks and reports share: operators, phases, places."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeGuard, get_args

from protocol.messages import FUSED_MODULES, LinearOperator

Operator = Literal[
    "embedding",
    "qkv_proj",
    "attn_scores",
    "attn_values",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "lm_head",
]
OPERATORS: tuple[Operator, ...] = get_args(Operator)

# Operators that no layer has, and those that multiply two activations.
LAYERLESS: tuple[Operator, ...] = ("embedding", "lm_head")
PRODUCTS: tuple[Operator, ...] = ("attn_scores", "attn_values")

Place = Literal["tee", "gpu"]

# Prefill: a step that holds tokens of a prompt. Decode: one sampled token a sequence.
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# One linear operator of one layer.
Site: TypeAlias = tuple[int, LinearOperator]


def is_linear(operator: Operator) -> TypeGuard[LinearOperator]:
    """Say whether this is one of a layer's linear operators."""
    return operator in FUSED_MODULES
