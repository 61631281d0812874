"""One step of the engine: a flat batch, whole or as micro-batches that overlap.

While a service works for one micro-batch, the TEE works on another. Micro-batches of several
sequences are independent of each other; those of one long prompt follow each other through the
layers as a wavefront, each a little behind the one whose keys it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tee_side.model.batch import Batch
from tee_side.model.forward import forward, logits
from tee_side.model.operators import MicroBatchOperators
from tee_side.remote.overlap import run, run_overlapped
from tee_side.words import Phase

# A smaller micro-batch costs hardly less than a larger one, in the TEE and at a service.
MIN_MICRO_BATCH_ROWS = 4


@torch.inference_mode()
def run_step(
    batch: Batch,
    lanes: Sequence[MicroBatchOperators],
    phase: Phase,
    *,
    withhold: bool = False,
) -> torch.Tensor:
    """Run a batch and return the logits [N, V] of its output rows; see `forward` for errors.

    `lanes`: the operators of each micro-batch; one of them is no micro-batch at all. Whether the
    step fails or not, they keep nothing of it. `withhold`: have the TEE compute what is under pads.
    """
    rows = batch.token_ids_T.shape[0]
    parts = max(1, min(len(lanes), rows // MIN_MICRO_BATCH_ROWS))
    micro_batches = [batch] if parts == 1 else batch.split(parts)
    for chunk in batch.chunks:
        chunk.cache.begin_step()
    apart = lanes[0].tables[phase].head_apart and not withhold
    drawing = [pads for lane in lanes for pads in lane.pads]

    async def run_part(part: Batch, lane: MicroBatchOperators) -> torch.Tensor:
        ops = lane.tables[phase]
        h_ND = await forward(part, lane.model, ops)
        return await logits(h_ND, lane.model, ops) if apart else h_ND

    try:
        for pads in drawing if withhold else ():
            pads.withhold()
        found = run_overlapped([run_part(*one) for one in zip(micro_batches, lanes, strict=False)])
        if apart:
            return torch.cat([logits_NV for logits_NV in found if len(logits_NV)] or found)
        # Once for all of them: wherever it is, the LM head is the largest matrix to read.
        return run(logits(torch.cat(found), lanes[0].model, lanes[0].tables[phase]))
    finally:
        # Release what the step did not use up, because it failed or left operators out.
        for pads in drawing:
            pads.end_step()
