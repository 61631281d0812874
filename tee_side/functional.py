"""The light operators, which never leave the TEE. Numerics are those of `modeling_llama.py`.

Shape suffixes as in `tee_side.forward`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import silu


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in float32 inside; equals `LlamaRMSNorm`."""
    h32 = h.to(torch.float32)
    scaled = h32 * torch.rsqrt(h32.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(h.dtype)


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return silu(gate_TF) * up_TF


def apply_rope(x_TXC: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """Rotate every head by its position; equals `apply_rotary_pos_emb` (halves, not pairs)."""
    first, second = x_TXC.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_TXC * cos_TC.unsqueeze(1) + rotated * sin_TC.unsqueeze(1)


@lru_cache(maxsize=4)
def causal_mask(tokens: int, context: int, window: int | None) -> torch.Tensor | None:
    """Say which keys the last `tokens` positions of a context may not look at: bool [T, S].

    A row looks at itself and what comes before it, at most `window` tokens in all. None if every
    row may look at everything, as in decode. All layers of a step ask for the same one, and get
    it: do not write to it.
    """
    if tokens == 1 and (window is None or context <= window):
        return None
    query_T1 = torch.arange(context - tokens, context).unsqueeze(1)
    key_1S = torch.arange(context).unsqueeze(0)
    hidden = key_1S > query_T1
    return hidden if window is None else hidden | (key_1S <= query_T1 - window)


def softmax(scores: torch.Tensor, causal_mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis in float32, cast back; hidden keys get probability 0."""
    scores32 = scores.to(torch.float32)
    if causal_mask is not None:
        scores32 = scores32.masked_fill(causal_mask, float("-inf"))
    return scores32.softmax(-1).to(scores.dtype)
