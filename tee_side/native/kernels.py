"""The compiled kernels of the TEE, called with tensors.

First the operators of `tee_side.model.local_ops`, with the same arguments and results, for float32
and bfloat16. A row's bits depend on that row and the instruction set alone, not on the
rows beside it, on how a prompt is cut, or on the number of threads. Equal to torch's within a few
units in the last place: RMSNorm and attention sum in another order.

A `batch` is one of `tee_side.model.batch`, of which `layout` says where caches are.

Then what happens around a product of integers: one pass before it, one pass after it.
"""

from functools import partial
from typing import Any, get_args

import torch

from protocol import native
from protocol.keystream import Streams
from protocol.model.architectures import ActivationName
from protocol.model.weights import NormTensors
from protocol.native import FLOATS, library

Tensor = torch.Tensor
# In the order of `Activation` in protocol/native/kernels.h.
_ACTIVATIONS = get_args(ActivationName)


def rms_norm(h: Tensor, norm: NormTensors, eps: float, *, centred: bool = False) -> Tensor:
    """See `tee_side.model.local_ops.rms_norm`; `layer_norm` where `centred`."""
    features = norm.weight.shape[0]
    # As rows with one stride, without a copy where it has one.
    rows = h if h.dim() == 2 and h.stride(1) == 1 else h.reshape(-1, features)
    out = torch.empty(h.shape, dtype=h.dtype)
    library.norm(
        *(FLOATS[h.dtype], rows.data_ptr(), rows.stride(0), rows.shape[0], features),
        *(norm.weight.data_ptr(), 0 if norm.bias is None else norm.bias.data_ptr(), eps),
        *(centred, out.data_ptr(), native.own.pool),
    )
    return out


layer_norm = partial(rms_norm, centred=True)


def activate(
    both_TX: Tensor, kind: ActivationName, gated: bool, parameters: Tensor | None = None
) -> Tensor:
    """See `tee_side.model.local_ops.activate`."""
    if both_TX.stride(1) != 1:
        both_TX = both_TX.contiguous()
    rows, features = both_TX.shape[0], both_TX.shape[1] // (2 if gated else 1)
    out_TF = torch.empty(rows, features, dtype=both_TX.dtype)
    gate = both_TX.data_ptr()
    library.activate(
        *(FLOATS[both_TX.dtype], _ACTIVATIONS.index(kind), gate),
        *(gate + features * both_TX.itemsize if gated else 0, both_TX.stride(0), rows, features),
        *(0 if parameters is None else parameters.data_ptr(), out_TF.data_ptr(), native.own.pool),
    )
    return out_TF


def residual(h_TD: Tensor, y_TD: Tensor, scale: float = 1.0) -> Tensor:
    """See `tee_side.model.local_ops.residual`."""
    y_TD = y_TD.contiguous()
    library.residual(FLOATS[h_TD.dtype], h_TD.data_ptr(), y_TD.data_ptr(), scale, h_TD.numel())
    return h_TD


def apply_rope(
    x_TXC: Tensor, cos_T1C: Tensor, sin_T1c: Tensor, dim: int, neighbours: bool = False
) -> Tensor:
    """See `tee_side.model.local_ops.apply_rope`."""
    rows, heads, size = x_TXC.shape
    out_TXC = torch.empty(rows, heads, size, dtype=x_TXC.dtype)
    library.rope(
        *(FLOATS[x_TXC.dtype], x_TXC.data_ptr(), x_TXC.stride(0), rows, heads, size, dim),
        *(neighbours, cos_T1C.data_ptr(), sin_T1c.data_ptr(), out_TXC.data_ptr()),
        native.own.pool,
    )
    return out_TXC


def append(k_TKC: Tensor, v_TKC: Tensor, batch: Any, layer: int) -> None:
    """See `tee_side.model.local_ops.append`."""
    kv_heads, *where = batch.layout(layer)
    library.append(
        *(FLOATS[k_TKC.dtype], k_TKC.data_ptr(), k_TKC.stride(0), v_TKC.data_ptr()),
        *(v_TKC.stride(0), kv_heads, k_TKC.shape[2], *where),
    )


def attention(
    q_THC: Tensor, batch: Any, layer: int, window: int | None, scale: float, cap: float | None
) -> Tensor:
    """See `tee_side.model.local_ops.attention`."""
    T, H, C = q_THC.shape
    out = torch.empty(T, H * C, dtype=q_THC.dtype)
    kv_heads, *where = batch.layout(layer)
    library.attention(
        *(FLOATS[q_THC.dtype], q_THC.data_ptr(), q_THC.stride(0), H, kv_heads, C),
        *(*where, window or 0, scale, cap or 0.0, out.data_ptr(), native.own.pool),
    )
    return out


def encode(
    x_TI: Tensor,
    largest: float,
    pad: Tensor | Streams | None,
    products: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, bool, Tensor, Tensor | None]:
    """Return q + r modulo 2^32 for q = round(x / scale), whether x is finite, scales, and sums.

    `x_TI`: float32 or bfloat16 [T, I]. `largest`: what a row's largest element becomes under its
    scale, float32 [T]. `pad`: r, int32 [T, I], or what it is drawn from; None for q alone.
    `products`: what q is multiplied by for the sums, as `expect` does: low and high words of a
    check's products with a weight, int32 [k, I] each; None for neither.
    """
    x_TI = x_TI.contiguous()
    scale_T = torch.empty(x_TI.shape[0], dtype=torch.float32)
    sent_TI = torch.empty(x_TI.shape, dtype=torch.int32)
    expected_Tk, sums = None, (0, 0, 0)
    if products is not None:
        low_kI, high_kI = products
        expected_Tk = torch.empty(x_TI.shape[0], low_kI.shape[0], dtype=torch.int64)
        sums = low_kI.data_ptr(), high_kI.data_ptr(), expected_Tk.data_ptr()
    is_finite: bool = library.encode(
        *(FLOATS[x_TI.dtype], x_TI.data_ptr(), *x_TI.shape, largest, scale_T.data_ptr()),
        pad.data_ptr() if isinstance(pad, Tensor) else 0,
        *((pad.of.data_ptr(), pad.parts) if isinstance(pad, Streams) else (0, 0)),
        *(*sums, sent_TI.data_ptr(), native.own.pool),
    )
    if not is_finite and isinstance(pad, Streams):  # or without instructions for AES
        return encode(x_TI, largest, pad.elements(), products)
    return sent_TI, is_finite, scale_T, expected_Tk


def expect(q_TI: Tensor, low_kI: Tensor, high_kI: Tensor | None = None) -> Tensor:
    """Return q times some vectors, low + 2^32 high, modulo 2^64: int64 [T, k].

    `low_kI`, `high_kI`: int32; None for a high half of zeros.
    """
    q_TI = q_TI.contiguous()
    expected_Tk = torch.empty(q_TI.shape[0], low_kI.shape[0], dtype=torch.int64)
    library.expect(
        *(q_TI.data_ptr(), *q_TI.shape, low_kI.data_ptr()),
        *(0 if high_kI is None else high_kI.data_ptr(), expected_Tk.data_ptr(), native.own.pool),
    )
    return expected_Tk


def decode(
    y_TO: Tensor,
    u_TO: Tensor | None,
    scale_T: Tensor,
    factor_O: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    vectors_kO: Tensor | None = None,
    expected_Tk: Tensor | None = None,
) -> Tensor | None:
    """Return (y - u) * scale * factor + bias in a dtype, [T, O]; None where the check says no.

    `y_TO`, `u_TO`: int32; None for no pad. `scale_T`, `factor_O`: float32. `vectors_kO`,
    `expected_Tk`: what (y - u) times them has to be modulo 2^64; None to check nothing. Each number
    of y and u is read once.
    """
    y_TO = y_TO.contiguous()
    out_TO = torch.empty(y_TO.shape, dtype=dtype)
    holds = library.decode(
        *(FLOATS[dtype], y_TO.data_ptr(), 0 if u_TO is None else u_TO.data_ptr(), *y_TO.shape),
        *(scale_T.data_ptr(), factor_O.data_ptr(), 0 if bias_O is None else bias_O.data_ptr()),
        *(out_TO.data_ptr(), 0 if vectors_kO is None else vectors_kO.data_ptr()),
        *(0 if expected_Tk is None else expected_Tk.data_ptr(), native.own.pool),
    )
    return out_TO if holds else None


def linear(
    x_TI: Tensor,
    largest: float,
    digits: int,
    weight_OI: Tensor,
    factor_O: Tensor,
    bias_O: Tensor | None,
) -> tuple[Tensor, bool]:
    """Return x W + bias in the dtype of x, [T, O], and whether x is finite.

    Each row of x is rounded as `encode` does, in so many digits as hold `largest`. `weight_OI`:
    int8, rows of one piece each; `factor_O`: float32, what one step of an output's weights stands
    for.
    """
    x_TI = x_TI.contiguous()
    out_TO = torch.empty(x_TI.shape[0], weight_OI.shape[0], dtype=x_TI.dtype)
    is_finite: bool = library.linear(
        *(FLOATS[x_TI.dtype], x_TI.data_ptr(), *x_TI.shape, largest, digits),
        *(weight_OI.data_ptr(), weight_OI.stride(0), factor_O.data_ptr()),
        0 if bias_O is None else bias_O.data_ptr(),
        *(weight_OI.shape[0], out_TO.data_ptr(), native.own.pool),
    )
    return out_TO, is_finite
