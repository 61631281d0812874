"""The forward pass of LLaMA, Mistral, Qwen2 and Qwen3 on one screen.

`ops.*` may leave the TEE, as the placement policy says; `layer.*` and everything else cannot. At an
`await` another micro-batch may have its turn. Shape suffixes:

    T  tokens in this step, of all sequences together      N  rows whose logits are wanted
    D  hidden size            F  intermediate size         V  vocabulary size
    H  query heads            K  key/value heads           G  query heads per key/value head
    C  head dim               S  context length of one sequence
    R  G * T rows of one key/value head                    X  several heads, or heads side by side

A step is a flat batch, one row per token; only `ops.attention` looks at sequences separately.
"""

from __future__ import annotations

import torch

from protocol.errors import ReplyError
from tee_side.model.batch import Batch
from tee_side.model.layers import Layer, TeeModel
from tee_side.model.operators import Operators

Rotation = tuple[torch.Tensor, torch.Tensor]


async def forward(batch: Batch, model: TeeModel, ops: Operators) -> torch.Tensor:
    """Run the layers of one step, or of a micro-batch of it; return [N + R, D].

    The hidden states of `batch.wanted_rows`, for `logits`; these themselves, [N, V], where the LM
    head is part of a segment.

    With `logits`, equal to `transformers`' *ForCausalLM of the same architecture. The caches hold
    the new rows but do not count them before the caller commits the batch. Errors of `ops` pass
    through.
    """
    rope = model.rope.of_batch(batch, model.dtype)
    h_TD = await ops.embedding(batch.token_ids_T)
    for layer in model.layers:
        if (segment := ops.segments.get(layer.index)) is not None:
            # A service computes these layers in one call, and keeps their keys and values.
            h_TD = await segment(h_TD, batch)
            continue
        normed_TD = layer.input_layernorm(h_TD)
        h_TD = layer.residual(h_TD, await attention(layer, normed_TD, rope, batch, model, ops))
        normed_TD = layer.post_attention_layernorm(h_TD)
        h_TD = layer.residual(h_TD, await mlp(layer, normed_TD, ops))
    return h_TD if layer.index in ops.segments else h_TD[batch.wanted_rows]


async def attention(
    layer: Layer,
    h_TD: torch.Tensor,
    rope: Rotation,
    batch: Batch,
    model: TeeModel,
    ops: Operators,
) -> torch.Tensor:
    """Grouped-query self-attention over each sequence's own cache."""
    H, K, C = model.config.heads
    qkv_TX = await ops.qkv_proj[layer.index](h_TD)
    # q, k and v are heads of one tensor, in this order; RoPE turns the first H + K of them.
    qk_TXC, v_TKC = qkv_TX.view(-1, H + 2 * K, C).split_with_sizes((H + K, K), dim=1)
    if model.config.qk_norm:
        qk_TXC[:, :H] = layer.q_norm(qk_TXC[:, :H])
        qk_TXC[:, H:] = layer.k_norm(qk_TXC[:, H:])
    q_THC, k_TKC = layer.rope(qk_TXC, *rope).split_with_sizes((H, K), dim=1)
    return await ops.o_proj[layer.index](await ops.attention(layer, q_THC, k_TKC, v_TKC, batch))


async def mlp(layer: Layer, h_TD: torch.Tensor, ops: Operators) -> torch.Tensor:
    """Gated MLP."""
    gate_TF, up_TF = (await ops.gate_up_proj[layer.index](h_TD)).chunk(2, dim=-1)
    return await ops.down_proj[layer.index](layer.silu_mul(gate_TF, up_TF))


async def logits(h_ND: torch.Tensor, model: TeeModel, ops: Operators) -> torch.Tensor:
    """Return the logits [N, V] of rows behind the last layer; ReplyError if they are not finite."""
    if not h_ND.shape[0]:
        return h_ND.new_empty(0, 0)
    logits_NV = h_ND if ops.head_in_segment else await ops.lm_head(model.norm(h_ND))
    # Of bfloat16 in its own range, which is float32's: a copy of that would cost more than the sum.
    wide = logits_NV.dtype if logits_NV.dtype == torch.bfloat16 else torch.float32
    if not logits_NV.sum(dtype=wide).isfinite():
        # A service may send anything, and float16 may overflow. A sum is a tenth of the work of
        # looking at each. It refuses finite logits, too, whose sum overflows float32; those are
        # larger than 1e33 on average, and no model's.
        raise ReplyError("logits", got="values that are not finite", expected="finite numbers")
    return logits_NV
