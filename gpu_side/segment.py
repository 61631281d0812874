"""Consecutive whole layers over a batch of sequences, each with a KV cache of its own.

Numerics are those of `transformers` (modeling_llama.py and its relatives): norms in float32 inside,
the rest in the weights' dtype. Linear weights multiply all rows at once; only attention sees
sequences. Shape suffixes: T rows, D hidden, K key/value heads, G query heads of each, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from gpu_side.segment_attention import PartAttention
from gpu_side.segment_rope import Table, reordered, rotate
from gpu_side.segment_weights import SegmentWeights
from gpu_side.weights import ServiceWeights


class SegmentModel:
    """The layers of a service's weights. `weights.linears` and `weights.segment` are held."""

    def __init__(self, weights: ServiceWeights) -> None:
        if weights.linears is None or weights.segment is None:
            raise TypeError("weights that hold no whole layers")
        self._linears, self._weights = weights.linears, weights.segment
        self._config = weights.config

    def forward(
        self,
        h_TD: torch.Tensor,
        layers: range,
        parts: Sequence[PartAttention],
        table: Table,
        outputs: torch.Tensor | None,
        *,
        lm_head: bool,
    ) -> torch.Tensor:
        """Return hidden states [N, D], or logits [N, V] with `lm_head`.

        `h_TD`: in the weights' dtype. `parts`: whose rows they are, one after the other; their
        caches get the keys and values. `table`: RoPE's, of all rows. `outputs`: which rows.
        """
        for index, layer in enumerate(layers):
            norms = self._weights.layers[layer]
            x_TD = self._norm(h_TD, norms.attention)
            h_TD = h_TD + self._attention(index, layer, x_TD, parts, table)
            x_TD = self._norm(h_TD, norms.mlp)
            h_TD = h_TD + self._mlp(layer, x_TD)
        if outputs is not None:
            h_TD = h_TD[outputs]
        if not lm_head:
            return h_TD
        norm, head = _there(self._weights)
        return linear(self._norm(h_TD, norm), head)

    def _attention(
        self,
        index: int,
        layer: int,
        x_TD: torch.Tensor,
        parts: Sequence[PartAttention],
        table: Table,
    ) -> torch.Tensor:
        norms, linears = self._weights.layers[layer], self._linears[layer]
        heads, K, C = self._config.heads
        qkv = linears["qkv_proj"](x_TD).view(len(x_TD), -1, C)
        q_TKGC = qkv[:, :heads].view(-1, K, heads // K, C)
        k_TK1C, v_TK1C = (x.unsqueeze(2) for x in qkv[:, heads:].chunk(2, dim=1))
        if norms.query is not None and norms.key is not None:
            q_TKGC, k_TK1C = self._norm(q_TKGC, norms.query), self._norm(k_TK1C, norms.key)
        table = reordered(table, norms.order)
        q_TKGC, k_TK1C = rotate(q_TKGC, table), rotate(k_TK1C, table)
        k_TKC, v_TKC, sliding = (
            k_TK1C[:, :, 0],
            v_TK1C[:, :, 0],
            self._config.sliding_windows[layer],
        )
        outputs = [
            part(index, q_TKGC[part.rows], k_TKC[part.rows], v_TKC[part.rows], sliding)
            for part in parts
        ]
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return linears["o_proj"](together)

    def _mlp(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        linears = self._linears[layer]
        gate_TF, up_TF = linears["gate_up_proj"](x_TD).chunk(2, dim=-1)
        return linears["down_proj"](silu(gate_TF) * up_TF)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last axis, in float32 inside."""
        x32 = x.to(torch.float32)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self._config.rms_norm_eps)
        return weight * (x32 * scale).to(x.dtype)


def _there(weights: SegmentWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the final norm and the LM head, which the check has made sure of."""
    if weights.norm is None or weights.lm_head is None:
        raise RuntimeError("a request for an LM head that is not held got through the checks")
    return weights.norm, weights.lm_head
