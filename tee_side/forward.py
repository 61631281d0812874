"""The forward pass of LLaMA, Mistral, Qwen2 and Qwen3 on one screen.

`ops.*` may leave the TEE, as the placement policy says; `tee.*` and everything else cannot. At an
`await` another micro-batch may have its turn. Shape suffixes:

    T  tokens in this step, of all sequences together      N  rows whose logits are wanted
    D  hidden size            F  intermediate size         V  vocabulary size
    H  query heads            K  key/value heads           G  query heads per key/value head
    C  head dim               S  context length of one sequence
    R  G * T rows of one key/value head                    X  several heads, or heads side by side

A step is a flat batch, one row per token; only attention looks at sequences separately.
"""

from __future__ import annotations

from functools import partial

import torch

from protocol.errors import ReplyError
from tee_side.batch import Batch, Chunk
from tee_side.functional import causal_mask
from tee_side.light import LightOperators
from tee_side.model import TeeModel
from tee_side.operators import Operators
from tee_side.overlap import until


async def forward(
    batch: Batch, model: TeeModel, ops: Operators, tee: LightOperators
) -> torch.Tensor:
    """Run the layers of one step, or of a micro-batch of it; return [N, D] for `logits`.

    With `logits`, equal to `transformers`' *ForCausalLM of the same architecture. The caches hold
    the new rows but do not count them before the caller commits the batch. Errors of `ops` pass
    through.
    """
    rope = model.rope.of_batch(batch, model.dtype)
    h_TD = await ops.embedding(batch.token_ids_T)
    for layer, norms in enumerate(model.norms):
        normed_TD = tee.rms_norm(layer, h_TD, norms.input_layernorm)
        attended_TD = await attention(normed_TD, layer, batch, rope, model, ops, tee)
        h_TD = tee.residual(layer, h_TD, attended_TD)
        normed_TD = tee.rms_norm(layer, h_TD, norms.post_attention_layernorm)
        h_TD = tee.residual(layer, h_TD, await mlp(normed_TD, layer, ops, tee))
    return h_TD[list(batch.output_rows)]


async def logits(
    h_ND: torch.Tensor, model: TeeModel, ops: Operators, tee: LightOperators
) -> torch.Tensor:
    """Return the logits [N, V] of rows behind the last layer; ReplyError if they are not finite."""
    if not h_ND.shape[0]:
        return h_ND.new_empty(0, 0)
    logits_NV = await ops.lm_head(tee.rms_norm(None, h_ND, model.final_norm))
    if not logits_NV.sum(dtype=torch.float32).isfinite():
        # A service may send anything, and float16 may overflow. A sum is a tenth of the work of
        # looking at each. It refuses finite logits, too, whose sum overflows float32; those are
        # larger than 1e33 on average, and no model's.
        raise ReplyError("logits", got="values that are not finite", expected="finite numbers")
    return logits_NV


async def mlp(h_TD: torch.Tensor, layer: int, ops: Operators, tee: LightOperators) -> torch.Tensor:
    """Gated MLP."""
    gate_TF, up_TF = await ops.gate_up_proj(layer, h_TD)
    return await ops.down_proj(layer, tee.silu_mul(layer, gate_TF, up_TF))


async def attention(
    h_TD: torch.Tensor,
    layer: int,
    batch: Batch,
    rope: tuple[torch.Tensor, torch.Tensor],
    model: TeeModel,
    ops: Operators,
    tee: LightOperators,
) -> torch.Tensor:
    """Grouped-query self-attention over each sequence's own cache."""
    H, K, C = model.config.heads
    qkv_TX = await ops.qkv_proj(layer, h_TD)
    # q, k and v are heads of one tensor, in this order; RoPE turns the first H + K of them.
    qk_TXC, v_TKC = qkv_TX.view(-1, H + 2 * K, C).split_with_sizes((H + K, K), dim=1)
    if model.config.qk_norm:
        qk_TXC[:, :H] = tee.rms_norm(layer, qk_TXC[:, :H], model.norms[layer].q_norm)
        qk_TXC[:, H:] = tee.rms_norm(layer, qk_TXC[:, H:], model.norms[layer].k_norm)
    q_THC, k_TKC = tee.rope(layer, qk_TXC, *rope).split_with_sizes((H, K), dim=1)
    outputs = []
    sizes = [chunk.tokens for chunk in batch.chunks]
    for chunk, q, k, v in zip(
        batch.chunks,
        *(x_TXC.split_with_sizes(sizes) for x_TXC in (q_THC, k_TKC, v_TKC)),
        strict=True,
    ):
        # Rows of the same sequence in an earlier micro-batch: it is seldom behind, but may be.
        await until(partial(chunk.follows, layer))
        k_KSC, v_KSC = tee.kv_cache(layer, chunk, k, v)
        outputs.append(await attend(q, k_KSC, v_KSC, layer, chunk, model, ops, tee))
    return await ops.o_proj(layer, outputs[0] if len(outputs) == 1 else torch.cat(outputs))


async def attend(
    q_THC: torch.Tensor,
    k_KSC: torch.Tensor,
    v_KSC: torch.Tensor,
    layer: int,
    chunk: Chunk,
    model: TeeModel,
    ops: Operators,
    tee: LightOperators,
) -> torch.Tensor:
    """Attention of one sequence's new rows over everything in its cache: [T, H * C]."""
    window = model.config.sliding_windows[layer]
    if ops.attention_stays(layer):
        return tee.attention(layer, q_THC, k_KSC, v_KSC, window)
    # The G query heads that share a key/value head stand below each other: no copy of K and V.
    # Scaling q, not the scores, keeps float16 in range wherever the product is computed.
    (H, K, C), T = model.config.heads, chunk.tokens
    G = H // K
    q_KGTC = (q_THC * C**-0.5).view(T, K, G, C).permute(1, 2, 0, 3)
    scores_KRS = await ops.attn_scores(layer, q_KGTC.reshape(K, G * T, C), k_KSC)
    mask_TS = causal_mask(T, chunk.context, window)
    probs_KGTS = tee.softmax(layer, scores_KRS.view(K, G, T, -1), mask_TS)
    out_KRC = await ops.attn_values(layer, probs_KGTS.view(K, G * T, -1), v_KSC)
    return out_KRC.view(K, G, T, C).permute(2, 0, 1, 3).reshape(T, H * C)
