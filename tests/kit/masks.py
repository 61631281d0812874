"""What every mask must do, whatever its kind: one harness that applies any of them.

A mask is tried on every operator that it supports, through a server that multiplies as the real one
does: in float32 by float32 weights, or in int32 modulo 2^32 by int8 weights. Under a segment mask
it runs two layers, and the LM head behind them.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import NamedTuple, get_args

import torch
from torch.nn.functional import linear, silu

from protocol.model.checkpoint import light_tensors, linear_tensors
from protocol.model.config import ModelConfig, RopeParameters
from tee_side.protect.masks.mask import AdditiveMask, Factors, Given, Mask, Masked, Pad, Seed
from tee_side.protect.pads.dealt import FreshPads
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import PadLayout, SiteShape
from tee_side.words import PRODUCTS, Operator, is_projection
from tsqp.mask_kinds import FeatureMask, FeatureSite, RowMask, SegmentMask

# Of a call: a chunk of a prompt, and one token.
ROWS = (33, 1)

# A small model: hidden size 48, six query heads and two key/value heads of 16, vocabulary 320.
FEATURES: dict[Operator, tuple[int, tuple[int, ...]]] = {
    "qkv_proj": (48, (96, 32, 32)),
    "o_proj": (96, (48,)),
    "gate_up_proj": (48, (96, 96)),
    "down_proj": (96, (48,)),
    "lm_head": (48, (320,)),
}
VOCABULARY, HIDDEN = 320, 48
KV_HEADS, GROUP, HEAD_DIM, EARLIER = 2, 3, 16, 11
# What a segment is made of. Without biases, rows of zeros stay zeros.
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=KV_HEADS * GROUP,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=256,
    ropes=(RopeParameters(),),
    layer_ropes=(0, 0),
    activation="silu",
    norm_eps=1e-6,
    score_scale=HEAD_DIM**-0.5,
    dtype="float32",
    biased_modules=frozenset(),
    sliding_windows=(None, 7),
    eos_token_ids=frozenset(),
)

Change = Callable[[torch.Tensor], torch.Tensor]


class _Asked(NamedTuple):
    operator: Operator
    rows: int
    randomness: Randomness
    site_key: bytes
    change: Change
    dtype: torch.dtype


@dataclass(frozen=True)
class Trial:
    """One application of a mask. `weight`: the plain one [O, I], of a linear operator."""

    inputs: tuple[torch.Tensor, ...]
    sent: tuple[torch.Tensor, ...]
    replies: tuple[torch.Tensor, ...]
    unmask: Callable[..., torch.Tensor]
    plain: torch.Tensor
    result: torch.Tensor
    # Largest value that the plain result is unmasked from: noise has a rounding of its own.
    noise: float
    weight: torch.Tensor | None = None

    @property
    def error(self) -> float:
        """Largest difference from the plain result, relative to its largest value."""
        scale = float(self.plain.double().abs().max())
        return float((self.result.double() - self.plain.double()).abs().max()) / max(scale, 1e-30)

    @property
    def crossed(self) -> bytes:
        flat = (tensor.contiguous().view(-1) for tensor in self.sent)
        return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in flat)


def supported(mask: type[Mask]) -> list[Operator]:
    """Return the operators that a mask works on."""
    return [operator for operator in get_args(Operator) if mask.supports(operator)]


def key(label: str) -> bytes:
    """Return a key for `Randomness`, the same one in every run."""
    return zlib.crc32(label.encode()).to_bytes(4, "big") * 8


def apply(
    mask: Mask,
    operator: Operator,
    rows: int,
    randomness: Randomness,
    *,
    site_key: bytes = bytes(32),
    change: Change = lambda x: x,
    dtype: torch.dtype = torch.float32,
) -> Trial:
    """Hide the input of an operator, let the server compute, and unmask.

    `site_key`: what a feature mask's static map is drawn from. `change`: of the plain input.
    """
    if operator == "embedding":
        return _embedding(mask, rows, randomness)
    asked = _Asked(operator, rows, randomness, site_key, change, dtype)
    if operator in PRODUCTS:
        return _product(mask, asked)
    return _segment(mask, asked) if isinstance(mask, SegmentMask) else _linear(mask, asked)


def _linear(mask: Mask, asked: _Asked) -> Trial:
    operator, rows, *_, change, dtype = asked
    in_features, outputs = FEATURES[operator]
    integer = mask.arithmetic == "int8"
    x_TI = change(_normal(rows, in_features, seed=rows))
    w_OI = _normal(sum(outputs), in_features, seed=1) / in_features**0.5
    if integer:
        # Up to the largest inputs whose sums stay within the ring; the weights are int8.
        x_TI = (x_TI * 2**16).round().clamp(-(2**24), 2**24).to(torch.int32)
        w_OI = (w_OI * 300).round().clamp(-127, 127)
        weight_OI = w_OI.to(torch.int64)
        plain = wrapped(x_TI.long() @ weight_OI.t())
    else:
        x_TI, weight_OI = x_TI.to(dtype), w_OI
        plain = x_TI.double() @ weight_OI.double().t()
    given = x_TI.clone()
    masked, served_OI, noise = _hidden(mask, x_TI, weight_OI, asked)
    assert torch.equal(x_TI, given), "a mask changed its input"
    # What a service can compute of what it gets.
    crossed = tuple(one.elements() if isinstance(one, Seed) else one for one in masked.sent)
    replies = tuple(_served(sent, served_OI) for sent in crossed)
    result = _unmasked(masked.unmask, replies)
    return Trial((x_TI,), crossed, replies, masked.unmask, plain, result, noise, weight_OI)


def _hidden(
    mask: Mask, x_TI: torch.Tensor, weight_OI: torch.Tensor, asked: _Asked
) -> tuple[Masked, torch.Tensor, float]:
    """Return what crosses, the weights that the server holds, and how large the noise is."""
    operator, randomness = asked.operator, asked.randomness
    match mask:
        case RowMask():
            return mask.mask(x_TI, randomness), weight_OI, 0.0
        case FeatureMask():
            in_features, outputs = FEATURES[operator]
            gain = None
            if operator in ("qkv_proj", "gate_up_proj"):
                gain = 1 + 0.2 * _normal(in_features, seed=2)
            site = FeatureSite(in_features, outputs, gain, Randomness(asked.site_key))
            transform = mask.transform(site)
            served_OI = transform.weight(weight_OI.double()).float()
            return transform.mask(x_TI, randomness), served_OI, 0.0
        case Pad(pads="dealt"):
            assert is_projection(operator)
            in_features, outputs = FEATURES[operator]
            layout = PadLayout((SiteShape(0, operator, in_features, sum(outputs)),))
            deal = FreshPads(layout, 2, randomness).deal
            return mask.hiding(Given((0, operator), randomness, deal=deal))(x_TI), weight_OI, 0.0
        case AdditiveMask():
            r_TI = mask.draw(randomness.ring(*x_TI.shape))
            u_TO = _served(r_TI, weight_OI)
            noise = 0.0 if mask.arithmetic == "int8" else float(u_TO.abs().max())
            return mask.mask(x_TI, Factors(r_TI, u_TO)), weight_OI, noise
    raise TypeError(f"mask {mask.name}: got {type(mask).__name__}, expected one of the kinds")


def _segment(mask: SegmentMask, asked: _Asked) -> Trial:
    """Run all layers, or the LM head alone, in float32 by the weights that the mask has made."""
    operator, rows, randomness, site_key, change, dtype = asked
    compute = run_layers if operator == "segment" else run_head
    h_TD = change(_normal(rows, HIDDEN, seed=rows)).to(dtype)
    keyed, weights = mask.keyed(CONFIG, Randomness(site_key)), _model()
    served: dict[str, torch.Tensor] = {}
    for layer in range(CONFIG.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        made = keyed.layer(layer, own)
        assert {tensor.dtype for tensor in made.values()} == {torch.float64}
        served |= {prefix + name: tensor.float() for name, tensor in made.items()}
    if mask.hides_head:
        norm_D, head_VD = (
            weights[name].float() for name in ("model.norm.weight", "lm_head.weight")
        )
        served |= keyed.head(norm_D, head_VD)
    given = h_TD.clone()
    masked = keyed.mask(h_TD, repeat(randomness))
    assert torch.equal(h_TD, given), "a mask changed its input"
    (sent,) = masked.sent
    assert not isinstance(sent, Seed)
    reply = compute(CONFIG, served, sent.float()).to(dtype)
    unmask = masked.unmask if operator == "segment" else keyed.unmask_logits
    plain = compute(CONFIG, weights, h_TD.double())
    return Trial((h_TD,), (sent,), (reply,), unmask, plain, _unmasked(unmask, (reply,)), 0.0)


@cache
def _model() -> dict[str, torch.Tensor]:
    """Return the weights of `CONFIG`, float64 with the values of float32."""
    shapes = light_tensors(CONFIG) | linear_tensors(CONFIG)
    return {
        name: (
            _normal(*shape, seed=number) / shape[1] ** 0.5
            if len(shape) > 1
            else 1 + 0.2 * _normal(*shape, seed=number)
        ).double()
        for number, (name, shape) in enumerate(shapes.items())
    }


def _product(mask: Mask, asked: _Asked) -> Trial:
    operator, rows, randomness, _, change, dtype = asked
    assert isinstance(mask, RowMask), mask.name
    context = EARLIER + rows
    a_shape, b_shape = (
        ((KV_HEADS, GROUP * rows, HEAD_DIM), (KV_HEADS, HEAD_DIM, context))
        if operator == "attn_scores"
        else ((KV_HEADS, GROUP * rows, context), (KV_HEADS, context, HEAD_DIM))
    )
    a, b = change(_normal(*a_shape, seed=3)).to(dtype), change(_normal(*b_shape, seed=4)).to(dtype)
    given = a.clone(), b.clone()
    masked = mask.mask_product(a, b, randomness)
    assert all(map(torch.equal, (a, b), given)), "a mask changed its input"
    replies = (torch.matmul(masked.a, masked.b),)
    plain, result = torch.matmul(a.double(), b.double()), _unmasked(masked.unmask, replies)
    return Trial((a, b), (masked.a, masked.b), replies, masked.unmask, plain, result, 0.0)


def _embedding(mask: Mask, rows: int, randomness: Randomness) -> Trial:
    assert isinstance(mask, RowMask), mask.name
    table = _normal(VOCABULARY, HIDDEN, seed=5)
    ids_T = torch.arange(rows) * 7 % VOCABULARY
    masked = mask.mask_ids(ids_T, VOCABULARY, randomness)
    (sent,) = masked.sent
    assert not isinstance(sent, Seed)
    replies = (table[sent],)
    result = _unmasked(masked.unmask, replies)
    return Trial((ids_T,), (sent,), replies, masked.unmask, table[ids_T], result, 0.0)


def _unmasked(
    unmask: Callable[..., torch.Tensor], replies: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    given = [reply.clone() for reply in replies]
    result = unmask(*replies)
    assert all(map(torch.equal, replies, given)), "a mask changed a reply"
    return result


def wrapped(exact: torch.Tensor) -> torch.Tensor:
    """Return int64 modulo 2^32, as int32 holds it."""
    return ((exact + 2**31) % 2**32 - 2**31).to(torch.int32)


def _served(sent: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Multiply as a service does: modulo 2^32, or in float32 (and back to the input's dtype)."""
    if sent.dtype == torch.int32:
        return wrapped(sent.long() @ weight_OI.t())
    return (sent.float() @ weight_OI.float().t()).to(sent.dtype)


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------- whole layers, from the models' definition, without code of ours

Tensors = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Divide rows by their root mean square."""
    return weight * x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()


def run_layer(
    config: ModelConfig, layer: int, weights: Tensors, h_TD: torch.Tensor
) -> torch.Tensor:
    """Return what a layer makes of one sequence from its beginning; names as within the layer."""
    H, K, C = config.heads
    T = len(h_TD)

    def module(name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weights[f"{name}.weight"], config)

    normed_TD = norm("input_layernorm", h_TD)
    q_THC, k_TKC, v_TKC = (
        module(f"self_attn.{name}_proj", normed_TD).view(T, heads, C)
        for name, heads in (("q", H), ("k", K), ("v", K))
    )
    if config.qk_norm:
        # The weight is [C], or one for each head.
        q_THC, k_TKC = norm("self_attn.q_norm", q_THC), norm("self_attn.k_norm", k_TKC)
    order_Kc = torch.arange(C // 2).expand(K, -1)
    if "self_attn.rope_order" in weights:
        order_Kc = weights["self_attn.rope_order"].long()
    scale, out_THC = C**-0.5, torch.empty_like(q_THC)
    for head in range(H):
        group = head * K // H
        q_TC = _turned(q_THC[:, head], order_Kc[group], config)
        k_TC = _turned(k_TKC[:, group], order_Kc[group], config)
        scores_TT = (q_TC @ k_TC.t() * scale).masked_fill(_unseen(T, config, layer), -torch.inf)
        out_THC[:, head] = scores_TT.softmax(-1) @ v_TKC[:, group]
    h_TD = h_TD + module("self_attn.o_proj", out_THC.flatten(1))
    normed_TD = norm("post_attention_layernorm", h_TD)
    between_TF = silu(module("mlp.gate_proj", normed_TD)) * module("mlp.up_proj", normed_TD)
    return h_TD + module("mlp.down_proj", between_TF)


def run_layers(config: ModelConfig, weights: Tensors, h_TD: torch.Tensor) -> torch.Tensor:
    """Return what all layers make of one sequence; names as in the model."""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        h_TD = run_layer(config, layer, own, h_TD)
    return h_TD


def run_head(config: ModelConfig, weights: Tensors, h_ND: torch.Tensor) -> torch.Tensor:
    """Return logits [N, V]."""
    return rms_norm(h_ND, weights["model.norm.weight"], config) @ weights["lm_head.weight"].t()


def _unseen(rows: int, config: ModelConfig, layer: int) -> torch.Tensor:
    """Say which tokens a row does not attend to: later ones, and those beyond a window."""
    back_TT = torch.arange(rows)[:, None] - torch.arange(rows)
    return (back_TT < 0) | (back_TT >= (config.sliding_windows[layer] or rows))


def _turned(x_TC: torch.Tensor, order_c: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rotate pair i, channels i and i + C / 2, by the frequency of the model's pair order[i]."""
    half = config.head_dim // 2
    frequency_c = config.ropes[0].rope_theta ** (-order_c.double() / half)
    angles_Tc = torch.arange(len(x_TC)).double()[:, None] * frequency_c
    cos_Tc, sin_Tc = angles_Tc.cos().to(x_TC.dtype), angles_Tc.sin().to(x_TC.dtype)
    a_Tc, b_Tc = x_TC[:, :half], x_TC[:, half:]
    return torch.cat((a_Tc * cos_Tc - b_Tc * sin_Tc, b_Tc * cos_Tc + a_Tc * sin_Tc), dim=1)
