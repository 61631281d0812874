"""Whole layers as a server of a segment mask computes them, plain and slow, in any float dtype.

Written from the models' definition, without code of ours: the masks are tried against it. Shape
suffixes as in `tee_side.model.forward`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import linear, silu

from protocol.model.config import ModelConfig

Tensors = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Divide rows by their root mean square."""
    return weight * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()


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
        scores_TT = (q_TC @ k_TC.t() * scale).masked_fill(_hidden(T, config, layer), -torch.inf)
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


def _hidden(rows: int, config: ModelConfig, layer: int) -> torch.Tensor:
    """Say which tokens a row does not attend to: later ones, and those beyond a window."""
    back_TT = torch.arange(rows)[:, None] - torch.arange(rows)
    return (back_TT < 0) | (back_TT >= (config.sliding_windows[layer] or rows))


def _turned(x_TC: torch.Tensor, order_c: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rotate pair i, channels i and i + C / 2, by the frequency of the model's pair order[i]."""
    half = config.head_dim // 2
    frequency_c = config.rope.rope_theta ** (-order_c.double() / half)
    angles_Tc = torch.arange(len(x_TC)).double()[:, None] * frequency_c
    cos_Tc, sin_Tc = angles_Tc.cos().to(x_TC.dtype), angles_Tc.sin().to(x_TC.dtype)
    a_Tc, b_Tc = x_TC[:, :half], x_TC[:, half:]
    return torch.cat((a_Tc * cos_Tc - b_Tc * sin_Tc, b_Tc * cos_Tc + a_Tc * sin_Tc), dim=1)
