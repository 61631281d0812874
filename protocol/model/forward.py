"""The forward pass of every architecture in the table, on one screen.

`ops.*` may be computed elsewhere; `layer.*` is computed here. The TEE, a service, an attacker and a
benchmark bind their own (docs/adr/0025). At an `await` another micro-batch may have its turn. Shape
suffixes:

    T  tokens in this step, of all sequences together      N  rows whose logits are wanted
    D  hidden size            F  intermediate size         V  vocabulary size
    H  query heads            K  key/value heads           G  query heads per key/value head
    C  head dim               S  context length of one sequence
    R  G * T rows of one key/value head                    X  several heads, or heads side by side

A step is a flat batch, one row per token; only `ops.attention` looks at sequences separately.

Behind it is RoPE; the scalings that a configuration may name are in `protocol.model.rope_scaling`.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from protocol.model.config import ModelConfig
from protocol.model.weights import LayerNorms

Tensor: TypeAlias = torch.Tensor
Norm: TypeAlias = Callable[[Tensor], Tensor]
# One tensor in, one out.
Call: TypeAlias = Callable[[Tensor], Awaitable[Tensor]]
ByLayer: TypeAlias = Sequence[Call] | Mapping[int, Call]
# cos [T, 1, C], and sin [T, 1, C / 2], whose two halves are the same.
Rotation: TypeAlias = tuple[Tensor, Tensor]
# Positions by which a table of them grows.
_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What is computed here in a layer. `rope`: turns heads [T, X, C] by a `Rotation`."""

    index: int
    heads: tuple[int, int, int]
    input_layernorm: Norm
    post_attention_layernorm: Norm
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    residual: Callable[[Tensor, Tensor], Tensor]


def bound(
    norms: LayerNorms,
    config: ModelConfig,
    maths: Any,
    timed: Callable[..., Any] = lambda function, _name: function,
) -> dict[str, Any]:
    """Return the fields of a `Layer` but its index: operators, bound to the layer's norms.

    `maths`: has `rms_norm`, `apply_rope`, `silu_mul` and `residual`, with the arguments of those in
    `tee_side.model.local_ops`; `timed`: gets each and its name, and returns what is called instead.
    """
    fields: dict[str, Any] = {"heads": config.heads, "rope": timed(maths.apply_rope, "rope")}
    for name in config.table.norms:
        norm = partial(maths.rms_norm, weight=getattr(norms, name), eps=config.rms_norm_eps)
        fields[name] = timed(norm, "rms_norm")
    return fields | {name: timed(getattr(maths, name), name) for name in ("silu_mul", "residual")}


L = TypeVar("L", bound=Layer)
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops(Generic[L, B]):
    """What a forward pass calls that may be elsewhere.

    `embedding`: what enters the pass to [T, D]. The linear operators, biases included, of each
    layer: `qkv_proj` [T, D] -> [T, (H + 2 K) * C], all heads of q, of k, of v side by side;
    `o_proj` [T, H * C] -> [T, D]; `gate_up_proj` [T, D] -> [T, 2 F], gate and up; `down_proj`
    [T, F] -> [T, D]. `attention`: of q [T, H, C], k and v [T, K, C] over the sequences of the batch
    to [T, H * C]. `segments`: by each layer that is in one; the first computes them all, and the
    others return what they get.
    """

    embedding: Call
    qkv_proj: ByLayer
    o_proj: ByLayer
    gate_up_proj: ByLayer
    down_proj: ByLayer
    attention: Callable[[L, Tensor, Tensor, Tensor, B], Awaitable[Tensor]]
    segments: Mapping[int, Callable[[Tensor, B], Awaitable[Tensor]]] = field(default_factory=dict)


async def forward(
    entering: Tensor,
    layers: Sequence[L],
    rope: Rotation,
    ops: Ops[L, B],
    batch: B,
    outputs: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Run layers; return the hidden states [N, D] of the rows `outputs`, None for all [T, D].

    Before the last norm. Equal to `transformers`' model of the same architecture. Errors of `ops`
    pass through.
    """
    h_TD = await ops.embedding(entering)
    for layer in layers:
        if (segment := ops.segments.get(layer.index)) is not None:
            # A service computes these layers in one call, and keeps their keys and values.
            h_TD = await segment(h_TD, batch)
            continue
        # Attention: q, k and v are heads of one tensor, in this order.
        H, K, C = layer.heads
        qkv_TX = await ops.qkv_proj[layer.index](layer.input_layernorm(h_TD))
        qk_TXC, v_TKC = qkv_TX.view(-1, H + 2 * K, C).split_with_sizes((H + K, K), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk_TXC[:, :H] = layer.q_norm(qk_TXC[:, :H])
            qk_TXC[:, H:] = layer.k_norm(qk_TXC[:, H:])
        q_THC, k_TKC = layer.rope(qk_TXC, *rope).split_with_sizes((H, K), dim=1)
        mixed_TX = await ops.attention(layer, q_THC, k_TKC, v_TKC, batch)
        # The memory of a reply that is let go is the next one's: a prompt's have 16 MB and more,
        # and fresh pages of as much cost a twentieth of the prompt.
        del qkv_TX, qk_TXC, q_THC, k_TKC, v_TKC
        h_TD = layer.residual(h_TD, await ops.o_proj[layer.index](mixed_TX))
        # Gated MLP.
        both_TX = await ops.gate_up_proj[layer.index](layer.post_attention_layernorm(h_TD))
        between_TF = layer.silu_mul(*both_TX.chunk(2, dim=-1))
        del mixed_TX, both_TX
        h_TD = layer.residual(h_TD, await ops.down_proj[layer.index](between_TF))
        del between_TF
    return h_TD if outputs is None else h_TD[outputs]


def staying(function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that is computed here as an operator that could be elsewhere."""

    async def call(x: Tensor) -> Tensor:
        return function(x)

    return call


class Rope:
    """cos and sin of the positions of a step, computed in float32.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with. With the
    others they are kept for all positions so far: to compute those of a token takes 0.17 ms.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._by_length = config.rope.rope_type in ("dynamic", "longrope")
        self._kept = self._table(0, _STEP, 1)

    def of(self, parts: Iterable[tuple[int, int, int]]) -> Rotation:
        """Return cos [T, 1, C] and half of sin [T, 1, C / 2], its two halves being the same.

        `parts`: the rows of each sequence, from `start` to `end - 1`, and its length.
        """
        tables = [self._of_part(*part) for part in parts]
        if len(tables) == 1:
            return tables[0]
        cos_T1C, sin_T1c = (torch.cat(column) for column in zip(*tables, strict=True))
        return cos_T1C, sin_T1c

    def _of_part(self, start: int, end: int, length: int) -> Rotation:
        if self._by_length:
            return self._table(start, end, length)
        if self._kept[0].shape[0] < end:
            self._kept = self._table(0, end + -end % _STEP, length)
        cos_P1C, sin_P1c = self._kept
        return cos_P1C[start:end], sin_P1c[start:end]

    def _table(self, start: int, end: int, length: int) -> Rotation:
        inv_freq_c, scaling = rope_frequencies(self._config, length)
        positions_T = torch.arange(start, end, dtype=torch.float32)
        angles_T1c = torch.outer(positions_T, inv_freq_c).unsqueeze(1)
        cos_T1c, sin_T1c = (
            (x * scaling).to(self._device, self._dtype)
            for x in (angles_T1c.cos(), angles_T1c.sin())
        )
        return cos_T1c.repeat(1, 1, 2), sin_T1c


def rope_frequencies(config: ModelConfig, sequence_length: int = 1) -> tuple[torch.Tensor, float]:
    """Return (`inv_freq`, `attention_scaling`) for a sequence of `sequence_length` tokens.

    `inv_freq`: float32 [head_dim / 2]. cos and sin are to be multiplied by `attention_scaling`.
    """
    dim, theta = config.head_dim, config.rope.rope_theta
    exponents_c = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    if config.rope.rope_type == "default":
        return 1.0 / theta**exponents_c, 1.0
    from protocol.model.rope_scaling import SCALINGS

    return SCALINGS[config.rope.rope_type](config, sequence_length, exponents_c)
