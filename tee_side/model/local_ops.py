"""Local operators, which never leave the TEE. Numerics are those of `modeling_llama.py`.

A row's bits depend on that row, on the keys and values before it and on torch alone, not on the
rows beside it, on how a prompt is cut, or on the number of threads. Shape suffixes as in
`protocol.model.forward`.
"""

from functools import lru_cache

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from protocol.model.architectures import ActivationName
from protocol.model.weights import NormTensors
from tee_side.model.batch import Batch

# Positions whose query rows the fused kernel gets at a time, with the keys that any of them may
# look at: it computes what is hidden, too, which would be half of a long prompt.
_BLOCK = 64
# A product has a multiple of so many rows: of others, sums depend on alignment and threads.
_PRODUCT_ROWS = 4
# In steps of so many keys: a growing context seldom needs another bias.
_BIAS_KEYS = 1024
# 2 sqrt(2 / pi): see `activate`.
_GELU = 1.5957691216057308


def rms_norm(h: torch.Tensor, norm: NormTensors, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis, in float32 inside; equals `LlamaRMSNorm`."""
    h32 = h.to(torch.float32)
    # One pass without a temporary as large as the input.
    length = torch.linalg.vector_norm(h32, dim=-1, keepdim=True)
    scale = length.square_().div_(h.shape[-1]).add_(eps).rsqrt_()
    scaled = h32 * scale if h32 is h else h32.mul_(scale).to(h.dtype)
    return scaled.mul_(norm.weight)


def layer_norm(h: torch.Tensor, norm: NormTensors, eps: float) -> torch.Tensor:
    """LayerNorm over the last axis, in float32 inside; equals `torch.nn.LayerNorm`."""
    h32 = h.to(torch.float32)
    h32 = h32 - h32.mean(-1, keepdim=True)
    length = torch.linalg.vector_norm(h32, dim=-1, keepdim=True)
    h32.mul_(length.square_().div_(h.shape[-1]).add_(eps).rsqrt_()).mul_(norm.weight)
    return (h32 if norm.bias is None else h32.add_(norm.bias)).to(h.dtype)


def activate(
    both_TX: torch.Tensor,
    kind: ActivationName,
    gated: bool,
    parameters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return f(gate) * up of [T, 2 F], gate and up side by side, or f(x) of [T, F] without a gate.

    f: SiLU; GELU by its approximation with tanh; max(x, 0)^2; xIELU (arXiv 2411.13010) by alpha_p,
    alpha_n, beta and eps: `parameters`, float32 [4].
    """
    gate_TF, up_TF = both_TX.chunk(2, dim=-1) if gated else (both_TX, None)
    x = gate_TF.to(torch.float32)
    if kind == "relu2":
        y = x.clamp(min=0).square_()
    elif kind == "xielu" and parameters is not None:
        high, low, beta, eps = parameters
        below = torch.minimum(x, eps).exp_().sub_(1.0).sub_(x).mul_(low)
        y = torch.where(x > 0, (x * x).mul_(high), below).add_(x * beta)
    else:
        # torch's silu computes the last few elements of each thread another way; of its exp, none.
        # In place where there is room already: fresh memory for a long prompt costs more than the
        # sum. Of GELU, 1 + tanh u is 2 / (1 + e^-2u).
        u = x if kind == "silu" else (x * x).mul_(0.044715).add_(1.0).mul_(x).mul_(_GELU)
        divisor = u.neg().exp_().add_(1.0)
        y = torch.div(x, divisor, out=divisor)
    y = y.to(both_TX.dtype)
    return y if up_TF is None else y.mul_(up_TF)


def residual(h_TD: torch.Tensor, y_TD: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Add to the residual stream, in place; return it."""
    return h_TD.add_(y_TD if scale == 1.0 else y_TD * scale)


def apply_rope(
    x_TXC: torch.Tensor,
    cos_T1C: torch.Tensor,
    sin_T1c: torch.Tensor,
    dim: int,
    neighbours: bool = False,
) -> torch.Tensor:
    """Rotate the first `dim` elements of every head by its position: halves, or neighbours.

    Equals `apply_rotary_pos_emb` of the architecture. `sin_T1c`: one half of `dim` wide, as both
    halves are the same.
    """
    turned_TXC = x_TXC[..., :dim]
    if neighbours:
        first, second = turned_TXC[..., ::2], turned_TXC[..., 1::2]
        turned_TXC = torch.cat((first, second), dim=-1)
    rotated_TXC = turned_TXC * cos_T1C
    first, second = turned_TXC.chunk(2, dim=-1)
    rotated_first, rotated_second = rotated_TXC.chunk(2, dim=-1)
    rotated_first.addcmul_(second, sin_T1c, value=-1)
    rotated_second.addcmul_(first, sin_T1c)
    if neighbours:
        rotated_TXC = torch.stack((rotated_first, rotated_second), dim=-1).flatten(-2)
    rest_TXC = x_TXC[..., dim:]
    return torch.cat((rotated_TXC, rest_TXC), dim=-1) if rest_TXC.shape[-1] else rotated_TXC


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
def _causal_bias(keys: int, window: int | None) -> torch.Tensor:
    """Return what the fused kernel adds to the scores of a whole block of queries.

    0, or -inf where `causal_mask` hides: [_BLOCK, keys]. What is hidden depends on the distance
    alone, so that fewer keys get the right part. Do not write to it.
    """
    hidden = causal_mask(_BLOCK, keys, window)
    bias = torch.zeros(_BLOCK, keys)
    return bias if hidden is None else bias.masked_fill_(hidden, float("-inf"))


def append(k_TKC: torch.Tensor, v_TKC: torch.Tensor, batch: Batch, layer: int) -> None:
    """Write keys and values of a batch's rows to the caches of their sequences."""
    for rows, *cached in batch.attended(layer):
        for x_TKC, x_KSC in zip((k_TKC[rows], v_TKC[rows]), cached, strict=True):
            x_KSC[:, -len(x_TKC) :] = x_TKC.transpose(0, 1)


def attention(
    q_THC: torch.Tensor,
    batch: Batch,
    layer: int,
    window: int | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Causal grouped-query attention of a batch's rows to their sequences' caches: [T, H * C].

    softmax(s) v in float32, for s = scale q k^T, or cap tanh(s / cap). `window`: as in
    `causal_mask`.
    """
    attended = batch.attended(layer)
    outputs = [_attention(q_THC[rows], k, v, window, scale, cap) for rows, k, v in attended]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention(
    q_THC: torch.Tensor,
    k_KSC: torch.Tensor,
    v_KSC: torch.Tensor,
    window: int | None,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Return the attention of one sequence's last T rows.

    A matrix product's sums depend on its shape. So rows go in items of `size` positions, counted
    from the sequence's first one, with the G query heads that share a key/value head, and with keys
    up to the end of their block: what an item's products are, its position says. Zeros stand for
    rows and keys that are not there.
    """
    T, H, C = q_THC.shape
    K, S, _ = k_KSC.shape
    G, start = H // K, S - T
    size = 1 if G % _PRODUCT_ROWS == 0 else _PRODUCT_ROWS
    # Two items or heads at least: of one, torch's matrix library would share out the sums.
    unit = size if K > 1 else 2 * size
    begin, end = start - start % unit, S + -S % unit
    q_PHC = pad(q_THC.to(torch.float32), (0, 0, 0, 0, start - begin, end - S))
    q_nKgC = q_PHC.view(-1, size, K, G, C).permute(0, 2, 3, 1, 4).reshape(-1, K, G * size, C)
    # Each block with the first key that its window leaves, at a block's beginning.
    blocks = [
        (block, 0 if window is None else max(0, block - window + 1) // _BLOCK * _BLOCK)
        for block in range(begin // _BLOCK * _BLOCK, end, _BLOCK)
    ]
    dropped, behind = blocks[0][1], (0, 0, 0, -S % _BLOCK)
    k_KSC, v_KSC = (pad(x_KSC[:, dropped:].to(torch.float32), behind) for x_KSC in (k_KSC, v_KSC))
    most = max(block + _BLOCK - first for block, first in blocks)
    bias = _causal_bias(most + -most % _BIAS_KEYS, window)
    outputs = []
    for block, first in blocks:
        low, high = max(begin, block), min(end, block + _BLOCK)
        q = q_nKgC[(low - begin) // size : (high - begin) // size]
        seen = slice(first - dropped, block + _BLOCK - dropped)
        k, v = (x_KSC[:, seen].expand(len(q), -1, -1, -1) for x_KSC in (k_KSC, v_KSC))
        part = bias[low - block : high - block, first - block - _BLOCK :].view(len(q), 1, size, -1)
        mask = part.repeat(1, 1, G, 1)
        if cap is None:
            outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
        else:
            scores = (q @ k.mT).mul_(scale / cap).tanh_().mul_(cap).add_(mask)
            outputs.append(scores.softmax(-1) @ v)
    out_nsKGC = torch.cat(outputs).view(-1, K, G, size, C).permute(0, 3, 1, 2, 4)
    return out_nsKGC.reshape(-1, H * C)[start - begin : S - begin].to(q_THC.dtype)
