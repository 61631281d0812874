"""Local operators, which never leave the TEE. Numerics are those of `modeling_llama.py`.

Shape suffixes as in `tee_side.model.forward`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

# Query rows that the fused kernel gets at a time, with the keys that any of them may look at: it
# computes what is hidden, too, which would be half of a long prompt.
_QUERY_BLOCK = 128
# In steps of so many keys: a growing context seldom needs another bias.
_BIAS_KEYS = 1024


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in float32 inside; equals `LlamaRMSNorm`."""
    h32 = h.to(torch.float32)
    # The norm is one pass without a temporary as large as the input; eps + norm^2 / D another.
    norm = torch.linalg.vector_norm(h32, dim=-1, keepdim=True)
    scale = torch.addcmul(_constant(eps), norm, norm, value=1 / h.shape[-1]).rsqrt_()
    scaled = h32 * scale if h32 is h else h32.mul_(scale).to(h.dtype)
    return scaled.mul_(weight)


@lru_cache(maxsize=4)
def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    # In place where there is room already: fresh memory for a long prompt costs more than the sum.
    return silu(gate_TF).mul_(up_TF)


def residual(h_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """Add to the residual stream, in place; return it."""
    return h_TD.add_(y_TD)


def apply_rope(x_TXC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1c: torch.Tensor) -> torch.Tensor:
    """Rotate every head by its position; equals `apply_rotary_pos_emb` (halves, not pairs).

    `sin_T1c`: one half of C wide, as both halves are the same.
    """
    rotated_TXC = x_TXC * cos_T1C
    first, second = x_TXC.chunk(2, dim=-1)
    rotated_first, rotated_second = rotated_TXC.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin_T1c, value=-1)
    rotated_second.addcmul_(first, sin_T1c)
    return rotated_TXC


def causal_mask(tokens: int, context: int, window: int | None) -> torch.Tensor | None:
    """Say which keys the last `tokens` positions of a context may not look at: bool [T, S].

    A row looks at itself and what comes before it, at most `window` tokens in all. None if every
    row may look at everything, as in decode.
    """
    if tokens == 1 and (window is None or context <= window):
        return None
    query_T1 = torch.arange(context - tokens, context).unsqueeze(1)
    key_1S = torch.arange(context).unsqueeze(0)
    hidden = key_1S > query_T1
    return hidden if window is None else hidden | (key_1S <= query_T1 - window)


# One, and no more: with a long context it is megabytes, and all layers of a step ask for the same.
@lru_cache(maxsize=1)
def _causal_bias(keys: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return what the fused kernel adds to the scores of a whole block of queries.

    0, or -inf where `causal_mask` hides: [_QUERY_BLOCK, keys]. What is hidden depends on the
    distance alone, so that fewer rows with fewer keys get the lower right corner. Do not write to
    it.
    """
    hidden = causal_mask(_QUERY_BLOCK, keys, window)
    bias = torch.zeros(_QUERY_BLOCK, keys, dtype=dtype)
    return bias if hidden is None else bias.masked_fill_(hidden, float("-inf"))


def attention(
    q_THC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Causal grouped-query attention of a sequence's last T rows: [T, H * C].

    softmax(q k^T / sqrt C) v, with float32 between the products. `window`: as in `causal_mask`.
    """
    T, H, C = q_THC.shape
    K, S, _ = k_KSC.shape
    if window is not None and window + T <= S:
        # Nobody looks at what is before the first row's window.
        S = window + T - 1
        k_KSC, v_KSC = k_KSC[:, -S:], v_KSC[:, -S:]
    if T == 1:
        # The G query heads that share a key/value head are rows of one product with it: a quarter
        # of the time that the kernel takes for a row a head.
        q_KGC = q_THC.reshape(1, K, H // K, C)
        out_KGC = scaled_dot_product_attention(q_KGC, k_KSC.unsqueeze(0), v_KSC.unsqueeze(0))
        return out_KGC.reshape(1, H * C)
    q_KGTC = q_THC.reshape(T, K, H // K, C).permute(1, 2, 0, 3)
    # One key/value head for G query heads, without a copy.
    k_KGSC, v_KGSC = (x_KSC.unsqueeze(1).expand(K, H // K, S, C) for x_KSC in (k_KSC, v_KSC))
    out_THC = torch.empty(T, H, C, dtype=q_THC.dtype)
    out_KGTC = out_THC.view(T, K, H // K, C).permute(1, 2, 0, 3)
    most = S if window is None else min(S, window - 1 + _QUERY_BLOCK)
    bias = _causal_bias(most + -most % _BIAS_KEYS, window, q_THC.dtype)
    for start in range(0, T, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, T)
        first = 0 if window is None else max(0, S - T + start - window + 1)
        seen = S - T + end
        out_KGTC[:, :, start:end] = scaled_dot_product_attention(
            q_KGTC[:, :, start:end],
            k_KGSC[:, :, first:seen],
            v_KGSC[:, :, first:seen],
            attn_mask=bias[start - end :, first - seen :],
        )
    return out_THC.view(T, H * C)
