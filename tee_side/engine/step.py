"""One step: its parts side by side, each as overlapping micro-batches, to logits.

A part holds rows that run alike: those that leave under pads, those of prompts, those that the TEE
computes itself. Where a step has several, the rows of one are at a service while the TEE computes
another's. A prompt may be cut between micro-batches: the later part waits, in the attention of each
layer, until the earlier one has written the keys that it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tee_side.model.batch import Batch
from tee_side.model.forward import forward, logits
from tee_side.model.operators import MicroBatchOperators, Operators
from tee_side.remote.overlap import run, run_overlapped
from tee_side.words import Phase

# A smaller micro-batch costs hardly less than a larger one, in the TEE and at a service.
MIN_MICRO_BATCH_ROWS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run alike. `withheld`: the TEE computes all that would draw pads."""

    batch: Batch
    phase: Phase
    withheld: bool = False

    def table(self, lane: MicroBatchOperators) -> Operators:
        """Return the operators of these rows."""
        return (lane.withheld if self.withheld else lane.tables)[self.phase]


@dataclass(frozen=True, slots=True)
class PartResult:
    """The logits [N, V] of a part's output rows, and the hidden states [R, D] of those it reads.

    These are what the last layer gives, before the last norm.
    """

    logits_NV: torch.Tensor
    hidden_RD: torch.Tensor


@torch.inference_mode()
def run_step(parts: Sequence[Part], lanes: Sequence[MicroBatchOperators]) -> list[PartResult]:
    """Run the parts of a step; see `forward` for errors.

    `lanes`: each part gets one, and the largest is cut into micro-batches for all that are no
    spares. Whether the step fails or not, they keep nothing of it.
    """
    cut = _cut(parts, lanes)
    for part in parts:
        for chunk in part.batch.chunks:
            chunk.cache.begin_step()

    async def run_part(
        batch: Batch, ops: Operators, lane: MicroBatchOperators
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = len(batch.output_rows)
        h_ND, read_RD = (await forward(batch, lane.model, ops)).tensor_split([outputs])
        return await logits(h_ND, lane.model, ops) if ops.head_apart else h_ND, read_RD

    running, free = [], iter(lanes)
    for part, batches in zip(parts, cut, strict=True):
        for batch in batches:
            lane = next(free)
            running.append(run_part(batch, part.table(lane), lane))
    try:
        found = iter(run_overlapped(running))
        results = []
        for part, batches in zip(parts, cut, strict=True):
            outputs, read = zip(*(next(found) for _ in batches), strict=True)
            ops = part.table(lanes[0])
            if ops.head_apart:
                logits_NV = torch.cat([each for each in outputs if len(each)] or outputs)
            else:
                # Once for all of them: wherever it is, the LM head is the largest matrix to read.
                logits_NV = run(logits(torch.cat(outputs), lanes[0].model, ops))
            results.append(PartResult(logits_NV, torch.cat(read)))
        return results
    finally:
        # Release what the step did not use up, because it failed or left operators out.
        for lane in lanes:
            for pads in lane.pads.values():
                pads.end_step()


def _cut(parts: Sequence[Part], lanes: Sequence[MicroBatchOperators]) -> list[list[Batch]]:
    """Cut the largest part into micro-batches; there are as many spare lanes as other parts."""
    cut = [[part.batch] for part in parts]
    sizes = [len(part.batch.token_ids_T) for part in parts]
    largest = sizes.index(max(sizes))
    most = sum(not lane.spare for lane in lanes)
    pieces = max(1, min(most, sizes[largest] // MIN_MICRO_BATCH_ROWS))
    if pieces > 1:
        cut[largest] = parts[largest].batch.split(pieces)
    return cut
