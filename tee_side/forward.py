"""The forward pass of LLaMA, Mistral, Qwen2 and Qwen3 on one screen.

`ops.*` may leave the TEE, as the placement policy says; nothing else can. Shape suffixes:

    T  tokens in this step, of all sequences together      N  rows whose logits are wanted
    D  hidden size            F  intermediate size         V  vocabulary size
    H  query heads            K  key/value heads           G  query heads per key/value head
    C  head dim               S  context length of one sequence
    R  G * T rows of one key/value head                    X  heads side by side: H * C or K * C

A step is a flat batch, one row per token; only attention looks at sequences separately.
"""

from __future__ import annotations

import torch

from protocol.errors import ReplyError
from tee_side.batch import Batch, Chunk
from tee_side.functional import apply_rope, causal_mask, silu_mul, softmax
from tee_side.model import TeeModel
from tee_side.operators import Operators


@torch.inference_mode()
def forward(batch: Batch, model: TeeModel, ops: Operators) -> torch.Tensor:
    """Run one step and return the logits [N, V] of the batch's output rows.

    Equal to `transformers`' *ForCausalLM of the same architecture. The caches hold the new rows but
    do not count them before the caller commits the batch. Errors of `ops` pass through; ReplyError
    for logits that are not finite.
    """
    h_TD = ops.embedding(batch.token_ids_T)
    for layer in range(model.config.num_hidden_layers):
        norms = model.norms[layer]
        h_TD = h_TD + attention(model.normed(h_TD, norms.input_layernorm), layer, batch, model, ops)
        h_TD = h_TD + mlp(model.normed(h_TD, norms.post_attention_layernorm), layer, ops)
    h_ND = model.normed(h_TD[list(batch.output_rows)], model.final_norm)
    logits_NV = ops.lm_head(h_ND) if batch.output_rows else h_ND.new_empty(0, 0)
    if not logits_NV.isfinite().all():
        # A service may send anything, and float16 may overflow.
        raise ReplyError("logits", got="values that are not finite", expected="finite numbers")
    return logits_NV


def mlp(h_TD: torch.Tensor, layer: int, ops: Operators) -> torch.Tensor:
    """Gated MLP."""
    gate_TF, up_TF = ops.gate_up_proj(layer, h_TD)
    return ops.down_proj(layer, silu_mul(gate_TF, up_TF))


def attention(
    h_TD: torch.Tensor, layer: int, batch: Batch, model: TeeModel, ops: Operators
) -> torch.Tensor:
    """Grouped-query self-attention over each sequence's own cache."""
    C = model.config.head_dim
    q_TX, k_TX, v_TX = ops.qkv_proj(layer, h_TD)
    q_THC, k_TKC, v_TKC = (x_TX.view(len(x_TX), -1, C) for x_TX in (q_TX, k_TX, v_TX))
    if model.config.qk_norm:
        q_THC = model.normed(q_THC, model.norms[layer].q_norm)
        k_TKC = model.normed(k_TKC, model.norms[layer].k_norm)
    outputs = [
        attend(q_THC[c.rows], k_TKC[c.rows], v_TKC[c.rows], layer, c, model, ops)
        for c in batch.chunks
    ]
    return ops.o_proj(layer, outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def attend(
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    layer: int,
    chunk: Chunk,
    model: TeeModel,
    ops: Operators,
) -> torch.Tensor:
    """Attention of one sequence's new rows over everything in its cache: [T, H * C]."""
    T, H, C = q_THC.shape
    K = k_TKC.shape[1]
    cos_TC, sin_TC = model.rope.cos_sin(
        chunk.cache.length, chunk.context, chunk.known_length, q_THC.dtype
    )
    q_THC, k_TKC = apply_rope(q_THC, cos_TC, sin_TC), apply_rope(k_TKC, cos_TC, sin_TC)
    k_KSC, v_KSC = chunk.cache.append(layer, k_TKC, v_TKC)

    # The G query heads that share a key/value head stand below each other: no copy of K and V.
    # Scaling q, not the scores, keeps float16 in range wherever the product is computed.
    G = H // K
    q_KGTC = (q_THC * C**-0.5).view(T, K, G, C).permute(1, 2, 0, 3)
    scores_KRS = ops.attn_scores(layer, q_KGTC.reshape(K, G * T, C), k_KSC)
    mask_TS = causal_mask(T, chunk.context, model.config.sliding_windows[layer])
    probs_KGTS = softmax(scores_KRS.view(K, G, T, -1), mask_TS)
    out_KRC = ops.attn_values(layer, probs_KGTS.view(K, G * T, -1), v_KSC)
    return out_KRC.view(K, G, T, C).permute(2, 0, 1, 3).reshape(T, H * C)
