"""The TEE's forward pass: `protocol.model.forward`, over operators that a policy has placed.

Shape suffixes are those of that module.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import torch

from protocol.errors import ReplyError
from protocol.model.forward import forward as run_layers
from tee_side.model.batch import Batch
from tee_side.model.layers import TeeModel
from tee_side.model.operators import Operators


def forward(batch: Batch, model: TeeModel, ops: Operators) -> Coroutine[Any, Any, torch.Tensor]:
    """Run the layers of one step, or of a micro-batch of it; return [N + R, D].

    The hidden states of `batch.wanted_rows`, for `logits`; these themselves, [N, V], where the LM
    head is part of a segment. The caches hold the new rows but do not count them before the caller
    commits the batch. Errors of `ops` pass through.
    """
    parts = [(chunk.start, chunk.context, chunk.known_length) for chunk in batch.chunks]
    # A segment that ends with the last layer returns the wanted rows alone.
    chosen = len(model.layers) - 1 in ops.segments
    wanted = None if chosen else batch.wanted_rows
    # No coroutine of its own: each resumption would enter one frame more.
    return run_layers(batch.token_ids_T, model.layers, model.rope.of(parts), ops, batch, wanted)


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
