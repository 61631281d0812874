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

from protocol.model.architectures import NormName
from protocol.model.config import ModelConfig, RopeParameters
from protocol.model.weights import LightWeights

Tensor: TypeAlias = torch.Tensor
Norm: TypeAlias = Callable[[Tensor], Tensor]
# One tensor in, one out.
Call: TypeAlias = Callable[[Tensor], Awaitable[Tensor]]
ByLayer: TypeAlias = Sequence[Call] | Mapping[int, Call]
# cos [T, 1, 2 c], and sin [T, 1, c], whose two halves are the same, for the first 2 c elements of a
# head; and by what queries grow with their positions, [T, 1, 1], or None.
Rotation: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
# Positions by which a table of them grows.
_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What is computed here in a layer, bound to what the layer has.

    `attention_norm`, `mlp_norm`: before them; `attention_output`, `mlp_output`: of what they give;
    `turn`: of the heads of queries and keys [T, H + K, C], by the rotations of the step, with what
    norms them; `activation`: [T, 2 F], gate and up, or [T, F] without a gate, to [T, F];
    `residual`: adds a sublayer's output to the stream, in place. `parallel`: the MLP reads what
    attention reads.
    """

    index: int
    heads: tuple[int, int, int]
    attention_norm: Norm
    mlp_norm: Norm
    attention_output: Norm
    mlp_output: Norm
    turn: Callable[[Tensor, Sequence[Rotation]], Tensor]
    activation: Norm
    residual: Callable[[Tensor, Tensor], Tensor]
    parallel: bool = False


def bound(
    light: LightWeights,
    config: ModelConfig,
    layer: int,
    maths: Any,
    timed: Callable[..., Any] = lambda function, _name: function,
) -> dict[str, Any]:
    """Return the fields of a `Layer`: operators, bound to what the layer has.

    `maths`: has `rms_norm`, `layer_norm`, `apply_rope`, `activate` and `residual`, with the
    arguments of those in `tee_side.model.local_ops`; `timed`: gets each and its name, and returns
    what is called instead.
    """
    table, H = config.table, config.num_attention_heads
    kind = f"{table.norm}_norm"

    def norm(name: NormName, otherwise: Norm) -> Norm:
        if (own := light.norms.get(name)) is None:
            return otherwise
        found: Norm = timed(partial(getattr(maths, kind), norm=own, eps=config.norm_eps), kind)
        return found

    q_norm, k_norm = (norm(name, _same) for name in ("q_norm", "k_norm"))
    # Heads side by side are normed together where the norm is as wide as they are.
    wide = config.qk_norm and table.norms["q_norm"].outputs != "C"
    first, last = config.qk_norm and not table.qk_norm_last, table.qk_norm_last
    which, dim = config.layer_ropes[layer], 0
    if which is not None:
        dim = config.rotary_dim(config.ropes[which])
    rope = timed(partial(maths.apply_rope, dim=dim, neighbours=table.neighbours), "rope")

    def normed(x_TXC: Tensor) -> Tensor:
        for part_TXC, own in ((x_TXC[:, :H], q_norm), (x_TXC[:, H:], k_norm)):
            part_TXC.copy_(own(part_TXC.flatten(1) if wide else part_TXC).view(part_TXC.shape))
        return x_TXC

    def turn(x_TXC: Tensor, rotations: Sequence[Rotation]) -> Tensor:
        if first:
            x_TXC = normed(x_TXC)
        if which is not None:
            cos, sin, growth = rotations[which]
            x_TXC = rope(x_TXC, cos, sin)
            if growth is not None:
                x_TXC[:, :H].mul_(growth)
        return normed(x_TXC) if last else x_TXC

    scaled = {} if config.residual_scale == 1 else {"scale": config.residual_scale}
    activate = partial(
        maths.activate, kind=config.activation, gated=table.gated, parameters=light.xielu
    )
    named = "silu_mul" if (config.activation, table.gated) == ("silu", True) else "activation"
    return {
        "index": layer,
        "heads": config.heads,
        # Not the stream itself, to which is added in place.
        "attention_norm": norm("input_layernorm", torch.clone),
        "mlp_norm": norm("post_attention_layernorm", torch.clone),
        "attention_output": norm("attention_output_norm", _same),
        "mlp_output": norm("mlp_output_norm", _same),
        "turn": turn,
        "activation": timed(activate, named),
        "residual": timed(partial(maths.residual, **scaled), "residual"),
        "parallel": table.parallel,
    }


def _same(x: Tensor) -> Tensor:
    return x


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
    ropes: Sequence[Rotation],
    ops: Ops[L, B],
    batch: B,
    outputs: Sequence[int] | Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Run layers; return the hidden states [N, D] of the rows `outputs`, None for all [T, D].

    Before the last norm. `scale`: of the embedding, rounded to its dtype. Equal to `transformers`'
    model of the same architecture. Errors of `ops` pass through.
    """
    h_TD = await ops.embedding(entering)
    if scale != 1.0:
        h_TD = h_TD * torch.tensor(scale, dtype=h_TD.dtype)
    for layer in layers:
        if (segment := ops.segments.get(layer.index)) is not None:
            # A service computes these layers in one call, and keeps their keys and values.
            h_TD = await segment(h_TD, batch)
            continue
        # Attention: q, k and v are heads of one tensor, in this order.
        H, K, C = layer.heads
        x_TD = layer.attention_norm(h_TD)
        qkv_TX = await ops.qkv_proj[layer.index](x_TD)
        qk_TXC, v_TKC = qkv_TX.view(-1, H + 2 * K, C).split_with_sizes((H + K, K), dim=1)
        q_THC, k_TKC = layer.turn(qk_TXC, ropes).split_with_sizes((H, K), dim=1)
        mixed_TX = await ops.attention(layer, q_THC, k_TKC, v_TKC, batch)
        # The memory of a reply that is let go is the next one's: a prompt's have 16 MB and more,
        # and fresh pages of as much cost a twentieth of the prompt.
        del qkv_TX, qk_TXC, q_THC, k_TKC, v_TKC
        y_TD = layer.attention_output(await ops.o_proj[layer.index](mixed_TX))
        h_TD = layer.residual(h_TD, y_TD)
        # MLP: the operator for gate and up gives up alone where there is no gate.
        x_TD = x_TD if layer.parallel else layer.mlp_norm(h_TD)
        both_TX = await ops.gate_up_proj[layer.index](x_TD)
        between_TF = layer.activation(both_TX)
        del mixed_TX, both_TX, x_TD, y_TD
        y_TD = layer.mlp_output(await ops.down_proj[layer.index](between_TF))
        h_TD = layer.residual(h_TD, y_TD)
        del between_TF, y_TD
    return h_TD if outputs is None else h_TD[outputs]


def capped(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """Return scale * x, or cap * tanh(scale * x / cap)."""
    if cap is not None:
        return (x * (scale / cap)).tanh_().mul_(cap)
    return x if scale == 1.0 else x * scale


def staying(function: Callable[[Tensor], Tensor]) -> Call:
    """Return a function that is computed here as an operator that could be elsewhere."""

    async def call(x: Tensor) -> Tensor:
        return function(x)

    return call


class Rope:
    """cos and sin of the positions of a step, computed in float32, of each kind of RoPE.

    With `dynamic` and `longrope` the frequencies depend on how long the sequence has become. As in
    transformers, keys that are already cached keep the rotation they were written with. With the
    others they are kept for all positions so far: to compute those of a token takes 0.17 ms.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._kept = [self._table(rope, 0, _STEP, 1) for rope in config.ropes]

    def of(self, parts: Iterable[tuple[int, int, int]]) -> list[Rotation]:
        """Return the rotations of some rows, of each kind.

        `parts`: the rows of each sequence, from `start` to `end - 1`, and its length.
        """
        given = list(parts)
        return [self._of(number, given) for number in range(len(self._kept))]

    def _of(self, number: int, parts: Sequence[tuple[int, int, int]]) -> Rotation:
        tables = [self._of_part(number, *part) for part in parts]
        if len(tables) == 1:
            return tables[0]
        cos_T1C = torch.cat([cos for cos, _, _ in tables])
        sin_T1c = torch.cat([sin for _, sin, _ in tables])
        grown = [growth for _, _, growth in tables if growth is not None]
        return cos_T1C, sin_T1c, torch.cat(grown) if grown else None

    def _of_part(self, number: int, start: int, end: int, length: int) -> Rotation:
        rope = self._config.ropes[number]
        if rope.rope_type in ("dynamic", "longrope"):
            return self._table(rope, start, end, length)
        if self._kept[number][0].shape[0] < end:
            self._kept[number] = self._table(rope, 0, end + -end % _STEP, length)
        cos_P1C, sin_P1c, growth_P11 = self._kept[number]
        growth = None if growth_P11 is None else growth_P11[start:end]
        return cos_P1C[start:end], sin_P1c[start:end], growth

    def _table(self, rope: RopeParameters, start: int, end: int, length: int) -> Rotation:
        inv_freq_c, scaling = rope_frequencies(self._config, rope, length)
        positions_T = torch.arange(start, end, dtype=torch.float32)
        angles_T1c = torch.outer(positions_T, inv_freq_c).unsqueeze(1)
        cos_T1c, sin_T1c = (
            (x * scaling).to(self._device, self._dtype)
            for x in (angles_T1c.cos(), angles_T1c.sin())
        )
        growth_T11 = None
        if rope.llama_4_scaling_beta is not None:
            known = rope.original_max_position_embeddings or self._config.max_position_embeddings
            growth_T = 1 + rope.llama_4_scaling_beta * (1 + (positions_T / known).floor()).log()
            growth_T11 = growth_T[:, None, None].to(self._device, self._dtype)
        return cos_T1c.repeat(1, 1, 2), sin_T1c, growth_T11


def rope_frequencies(
    config: ModelConfig, rope: RopeParameters, sequence_length: int = 1
) -> tuple[torch.Tensor, float]:
    """Return (`inv_freq`, `attention_scaling`) for a sequence of `sequence_length` tokens.

    `inv_freq`: float32 [c]. cos and sin are to be multiplied by `attention_scaling`.
    """
    dim = config.rotary_dim(rope)
    exponents_c = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    if rope.rope_type == "default":
        return 1.0 / rope.rope_theta**exponents_c, 1.0
    from protocol.model.rope_scaling import SCALINGS

    return SCALINGS[rope.rope_type](config, rope, sequence_length, exponents_c)
