"""How large a reply can be at most, of all that a policy asks for: more is never received.

Without it a service could make the TEE take, and keep, as much as the message limit allows for
every small request.
"""

from __future__ import annotations

import torch

from protocol.messages import FUSED_MODULES, MAX_STATEMENT_BYTES
from protocol.model.config import ModelConfig
from tee_side.policy.placement import Policy
from tee_side.protect.masking import most_rows
from tee_side.words import PRODUCTS, Operator, is_projection

# A header with its method, dtypes and shapes, and the lengths and padding around frames.
_HEADER_BYTES = 16 * 1024
# What Init says of each norm beside its weight: a name, dtype, shape, eps, and a frame's padding.
_NORM_BYTES = 512
_RING_ITEMSIZE = 4


def largest_reply(policy: Policy, config: ModelConfig, step_tokens: int, dtype: torch.dtype) -> int:
    """Return a bound in bytes for every reply that a run can ask for, Init's among them.

    `step_tokens`: rows of a step; `dtype`: of the TEE. Attention products are [K, G * T, S] with as
    many keys as the model has positions.
    """
    sizes = [init_reply_bytes(config)]
    for operator, placement in policy.leaving():
        elements = most_rows(placement.mask, step_tokens) * _row_elements(operator, config)
        integers = policy.arithmetic == "int8" and is_projection(operator)
        sizes.append(elements * (_RING_ITEMSIZE if integers else dtype.itemsize))
    attested = policy.service.attested != "none"
    return max(sizes) + _HEADER_BYTES + attested * MAX_STATEMENT_BYTES


def init_reply_bytes(config: ModelConfig) -> int:
    """Return a bound in bytes for an Init reply, without its header's fixed part."""
    norms = 2 * config.num_hidden_layers + 1
    return norms * (4 * config.hidden_size + _NORM_BYTES) + 4 * config.head_dim


def _row_elements(operator: Operator, config: ModelConfig) -> int:
    """Return how many numbers come back for each row that was sent."""
    if operator in FUSED_MODULES:
        modules = FUSED_MODULES[operator]
        return sum(config.module_shape(module)[0] for module in modules)
    if operator == "attn_scores":
        return config.num_attention_heads * config.max_position_embeddings
    if operator in PRODUCTS:
        return config.num_attention_heads * config.head_dim
    return config.vocab_size if operator == "lm_head" else config.hidden_size
