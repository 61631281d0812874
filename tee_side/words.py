"""The words that policies, masks and reports share: operators, phases, places, stages, layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeGuard, get_args

from protocol.messages import FUSED_MODULES, LinearOperator, Projection

# What a policy places: operators one by one, or whole layers of them ("segment") in one.
Operator = Literal[
    "embedding",
    "qkv_proj",
    "attn_scores",
    "attn_values",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "lm_head",
    "segment",
]
OPERATORS: tuple[Operator, ...] = tuple(name for name in get_args(Operator) if name != "segment")

# What never leaves the TEE. `attention` is scores, softmax and values in one, where all three stay.
LightOperator = Literal[
    "rms_norm",
    "layer_norm",
    "rope",
    "kv_cache",
    "attention",
    "softmax",
    "silu_mul",
    "activation",
    "residual",
    "sample",
]

# Operators that no layer has, and those that multiply two activations.
LAYERLESS: tuple[Operator, ...] = ("embedding", "lm_head")
PRODUCTS: tuple[Operator, ...] = ("attn_scores", "attn_values")

# "attested": on the GPU side, of services that prove what they are before anything is sent.
Place = Literal["tee", "gpu", "attested"]

# The evidence that services may have to give: of their machine, and of its GPUs.
Attested = Literal["none", "snp", "snp+nvidia", "tdx", "tdx+nvidia", "simulated"]

# How results of what leaves are checked; see `tee_side.protect.verification`.
Verify = Literal["none", "freivalds"]

# Prefill: a step that holds tokens of a prompt. Decode: one sampled token a sequence.
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Where rows that leave under pads have these from: the stock of those that were made; dealers, who
# multiply them meanwhile (of a mask that is not dealt, the stock, too); nowhere: the TEE computes.
PadsFrom = Literal["stock", "dealers", "none"]

# What the TEE spends time on for one operator. `tee`: computing it, or scaling and rounding around
# a product that is computed elsewhere; `verify`: checking what came back, its form and its numbers.
# Under a pad rounding is part of `mask`, and checking the numbers and scaling back of `unmask`.
TeeStage = Literal["tee", "mask", "verify", "unmask"]

# One linear operator of one layer, or the LM head, which is counted to the last layer.
Site: TypeAlias = tuple[int, Projection]
PROJECTIONS: tuple[Projection, ...] = (*FUSED_MODULES, "lm_head")


def layer_of(site: Site) -> int | None:
    """Return the layer that has a site's operator; None for the LM head, which no layer has."""
    layer, operator = site
    return None if operator == "lm_head" else layer


def is_projection(operator: Operator) -> TypeGuard[Projection]:
    """Say whether this multiplies by a weight."""
    return operator in PROJECTIONS


def is_linear(operator: Operator) -> TypeGuard[LinearOperator]:
    """Say whether this is one of a layer's linear operators."""
    return operator in FUSED_MODULES


def registered_name(operator: Operator) -> str:
    """Return under which name the class is registered that sends an operator (`tsqp.operators`)."""
    return "attention" if operator in PRODUCTS else operator


# "3", "0-3" or "4-"; for expressions that look for one in a longer text.
LAYER_RANGE = r"\d{1,4}(?:-\d{0,4})?"


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `last`, both included; to the end of the model if `last` is None."""

    first: int
    last: int | None

    @staticmethod
    def parse(text: str) -> LayerRange:
        """Read "3", "0-3" or "4-". Raises ValueError that says what is expected."""
        if re.fullmatch(LAYER_RANGE, text) is None:
            raise ValueError('layers such as "3", "0-3" or "4-"')
        first_text, dash, last_text = text.partition("-")
        first = int(first_text)
        last = first if not dash else int(last_text) if last_text else None
        if last is not None and last < first:
            raise ValueError("a range that does not run backwards")
        return LayerRange(first, last)

    def __contains__(self, layer: int) -> bool:
        return self.first <= layer and (self.last is None or layer <= self.last)

    def overlaps(self, other: LayerRange) -> bool:
        """Say whether the two have a layer in common."""
        return self.first in other or other.first in self

    def __str__(self) -> str:
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{'' if self.last is None else self.last}"
