"""The operators of `tee_side.model.local_ops`, compiled: the same arguments and results.

For float32 and bfloat16. A row's bits depend on that row and the instruction set alone, not on the
rows beside it, on how a prompt is cut, or on the number of threads. Equal to torch's within a few
units in the last place: RMSNorm and attention sum in another order.
"""

from __future__ import annotations

import torch

from protocol import native
from protocol.native import FLOATS, library


def rms_norm(h: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `tee_side.model.local_ops.rms_norm`."""
    features = weight.shape[0]
    # As rows with one stride, without a copy where it has one.
    rows = h if h.dim() == 2 and h.stride(1) == 1 else h.reshape(-1, features)
    out = torch.empty(h.shape, dtype=h.dtype)
    library.rms_norm(
        FLOATS[h.dtype],
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        features,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        native.own.pool,
    )
    return out


def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
    """See `tee_side.model.local_ops.silu_mul`."""
    rows, features = gate_TF.shape
    if gate_TF.stride() != up_TF.stride():
        gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    out_TF = torch.empty(rows, features, dtype=gate_TF.dtype)
    library.silu_mul(
        FLOATS[gate_TF.dtype],
        gate_TF.data_ptr(),
        up_TF.data_ptr(),
        gate_TF.stride(0),
        rows,
        features,
        out_TF.data_ptr(),
        native.own.pool,
    )
    return out_TF


def residual(h_TD: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """See `tee_side.model.local_ops.residual`."""
    y_TD = y_TD.contiguous()
    library.residual(FLOATS[h_TD.dtype], h_TD.data_ptr(), y_TD.data_ptr(), h_TD.numel())
    return h_TD


def apply_rope(x_TXC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1c: torch.Tensor) -> torch.Tensor:
    """See `tee_side.model.local_ops.apply_rope`."""
    rows, heads, dim = x_TXC.shape
    out_TXC = torch.empty(rows, heads, dim, dtype=x_TXC.dtype)
    library.rope(
        FLOATS[x_TXC.dtype],
        x_TXC.data_ptr(),
        x_TXC.stride(0),
        rows,
        heads,
        dim,
        cos_T1C.data_ptr(),
        sin_T1c.data_ptr(),
        out_TXC.data_ptr(),
        native.own.pool,
    )
    return out_TXC


def append(x_TKC: torch.Tensor, cache_KSC: torch.Tensor, start: int) -> None:
    """Write keys or values to the positions of a cache from `start` on, where there is room."""
    rows, heads, dim = x_TKC.shape
    library.append(
        FLOATS[x_TKC.dtype],
        x_TKC.data_ptr(),
        x_TKC.stride(0),
        rows,
        heads,
        dim,
        cache_KSC.data_ptr(),
        cache_KSC.shape[1],
        start,
    )


def attention(
    q_THC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, window: int | None
) -> torch.Tensor:
    """See `tee_side.model.local_ops.attention`; k and v are parts of a cache [K, capacity, C]."""
    T, H, C = q_THC.shape
    K, S, _ = k_KSC.shape
    out = torch.empty(T, H * C, dtype=q_THC.dtype)
    library.attention(
        FLOATS[q_THC.dtype],
        q_THC.data_ptr(),
        q_THC.stride(0),
        T,
        H,
        K,
        C,
        k_KSC.data_ptr(),
        v_KSC.data_ptr(),
        k_KSC.stride(0) // C,
        S,
        window or 0,
        out.data_ptr(),
        native.own.pool,
    )
    return out
