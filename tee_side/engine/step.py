"""The sequences under way, and one step of them: which rows it computes, to logits and tokens.

Decode comes first: one row each, and a reader waits for every one of them. Prompts share what is
left of the step's budget, each owner's alike. Whether rows get pads is settled for each sequence.

A part holds rows that run alike: those that leave under pads, those of prompts, those that the TEE
computes itself. Where a step has several, the rows of one are at a service while the TEE computes
another's. A prompt may be cut between micro-batches: the later part waits, in the attention of each
layer, until the earlier one has written the keys that it looks at.
"""

from __future__ import annotations

from collections import Counter, abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from protocol.errors import PadsExhaustedError, TsqpError
from tee_side.engine.request import FinishReason, Grammar, NewToken, Request, SamplingSettings
from tee_side.engine.tokenizer import TextStream
from tee_side.model.batch import Batch, KVCache, Take
from tee_side.model.operators import MicroBatchOperators, Operators, forward, logits
from tee_side.protect.masks.mask import Mask
from tee_side.protect.pads.source import Pads
from tee_side.remote.call import run, run_overlapped
from tee_side.words import PadsFrom, Phase

if TYPE_CHECKING:
    from tee_side.engine.drafts import Drafts
    from tee_side.engine.reading import PromptReader
    from tee_side.engine.sampling import AskedSampling

# A smaller micro-batch costs hardly less than a larger one, in the TEE and at a service.
MIN_MICRO_BATCH_ROWS = 4


class Sampler:
    """Chooses the tokens of one sequence: the likeliest that its grammar allows.

    A request that asks for anything else has its scores changed, and a token drawn, by
    `tee_side.engine.sampling`. `prompt_tokens`: how many of the sequence's tokens are not counted
    as generated. `sample`: its index among several of a request, which is added to the seed.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_tokens: int,
        matcher: Grammar | None = None,
        sample: int = 0,
    ) -> None:
        self._matcher = matcher
        self._words_V = np.empty(0, dtype=np.uint32)
        self._asked: AskedSampling | None = None
        if settings.model_copy(update={"seed": None}) != SamplingSettings():
            from tee_side.engine.sampling import AskedSampling

            self._asked = AskedSampling(settings, prompt_tokens, sample)

    def sample(self, logits_V: torch.Tensor, previous_ids: abc.Sequence[int]) -> int:
        """Return the next token id.

        `previous_ids`: prompt and what was generated so far; it begins with that of the last call.
        Raises what the matcher raises.
        """
        if logits_V.dtype == torch.bfloat16:
            # In memory of its own, as half a megabyte of fresh pages costs more than the sampling;
            # by numpy, whose one thread never waits for another that has no core.
            if len(self._words_V) != len(logits_V):
                self._words_V = np.empty(len(logits_V), dtype=np.uint32)
            halves_V = logits_V.view(torch.int16).numpy().view(np.uint16)
            np.left_shift(halves_V, 16, out=self._words_V, dtype=np.uint32)
            scores_V = torch.from_numpy(self._words_V.view(np.float32))
        else:
            scores_V = logits_V.to(torch.float32)
        if self._matcher is not None:
            scores_V = self._matcher.hide(scores_V)
        if self._asked is None:
            # numpy's argmax takes a tenth of the time of torch's; the first of equals, as there.
            token_id = int(scores_V.numpy().argmax())
        else:
            token_id = self._asked.choose(scores_V, previous_ids)
        if self._matcher is not None:
            self._matcher.advance(token_id)
        return token_id


@dataclass(eq=False)
class Sequence:
    """One sample of a request, and what has been generated of it; made by the engine.

    `ids`: of prompt and answer; `prompt_tokens`: how many are the prompt's. `followers`: other
    samples of the request, which get its keys and values of the prompt and `follow` until then.
    `reader`: reads the prompt. `reused_tokens`: of the prompt, whose keys and values were there.
    """

    request: Request
    sample: int
    ids: list[int]
    prompt_tokens: int
    cache: KVCache
    sampler: Sampler
    max_new_tokens: int
    stop_ids: frozenset[int]
    watch: TextStream | None = None
    drafts: Drafts | None = None
    reader: PromptReader | None = None
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
    follows: bool = False
    followers: list[Sequence] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Token ids generated so far, EOS included."""
        return self.ids[self.prompt_tokens :]

    @property
    def phase(self) -> Phase:
        """Prefill while tokens of the prompt, or several lost ones, are pending; then decode."""
        behind = self.cache.length < self.prompt_tokens or self.pending > 1
        return "prefill" if behind else "decode"

    @property
    def pending(self) -> int:
        """How many of its tokens the cache does not hold yet."""
        return len(self.ids) - self.cache.length

    @property
    def new_tokens_left(self) -> int:
        """How many tokens it may still generate."""
        return self.max_new_tokens - (len(self.ids) - self.prompt_tokens)

    def append(self, token_id: int) -> None:
        """Take a token, and finish on EOS, at a stop string or at the length limit."""
        self.ids.append(token_id)
        if self.drafts is not None:
            self.drafts.append(token_id)
        if self.watch is not None:
            self.watch.feed(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.new_tokens_left <= 0:
            self.finish_reason = "length"
        if self.watch is not None:
            if self.finish_reason is not None:
                self.watch.flush()
            if self.watch.found:
                self.finish_reason = "stop"


@dataclass(frozen=True, slots=True)
class Sampled(NewToken):
    """A token that a step produced, and the logits [V] that it was sampled from."""

    sequence: Sequence
    logits_V: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence in a step: `tokens` that are pending, and guesses behind them.

    `phase`, `outputs` (how many rows' logits are wanted) and `take` (what the batch is made of) are
    the sequence's before the step.
    """

    sequence: Sequence
    phase: Phase
    tokens: int
    outputs: int
    take: Take

    @classmethod
    def of(
        cls, sequence: Sequence, phase: Phase, tokens: int, drafts: tuple[int, ...] = ()
    ) -> Rows:
        """Return rows of a sequence, which is in this phase."""
        cache, left, reader = sequence.cache, sequence.pending - tokens, sequence.reader
        outputs = 0 if left or not sequence.max_new_tokens else 1 + len(drafts)
        ids = [*sequence.ids[cache.length : cache.length + tokens], *drafts]
        read = range(0) if reader is None else reader.rows(cache.length, tokens)
        take = Take(cache, ids, left, len(drafts), read, outputs > 0)
        return cls(sequence, phase, tokens, outputs, take)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a step that run alike. `pads`: where they have them from.

    `rows`: those of each sequence, in the order of the batch.
    """

    batch: Batch
    phase: Phase
    pads: PadsFrom = "stock"
    rows: abc.Sequence[Rows] = ()


Refuse: TypeAlias = abc.Callable[[Sequence, TsqpError], None]


def fail_step(_sequence: Sequence, error: TsqpError) -> None:
    """Raise what a sequence cannot go on for: the step fails."""
    raise error


class _PadBudget:
    """Which rows of a step get pads."""

    def __init__(self, lane: MicroBatchOperators) -> None:
        self._lane = lane
        self._planned: Counter[Mask] = Counter()
        self._in_tee: set[Pads] = set()

    def settle(self, phase: Phase, rows: int) -> PadsFrom:
        """Say where rows of a sequence have their pads from, and take those that are made.

        Raises PadsExhaustedError, and what making pads meets.
        """
        source: PadsFrom = "stock"
        found = self._found(phase, source)
        if phase == "prefill" and (
            beyond := [p for m, p in found if not p.in_stock(self._planned[m] + rows)]
        ):
            if not all(pads.dealers_there for pads in beyond):
                return self._withhold(pads for _, pads in found)
            source = "dealers"
            found = self._found(phase, source)
        for mask, pads in found:
            if pads.ready(self._planned[mask] + rows) < self._planned[mask] + rows:
                if pads.when_out == "tee":
                    return self._withhold([pads])
                raise pads.exhausted(rows)
        self._planned.update({mask: rows for mask, _ in found})
        return source

    def plenty(self, rows: int) -> bool:
        """Say whether there are pads to spare: for decoded rows that may come to nothing."""
        found = self._found("decode", "stock")
        return all(pads.plenty(self._planned[mask] + rows) for mask, pads in found)

    def _found(self, phase: Phase, source: PadsFrom) -> list[tuple[Mask, Pads]]:
        masks = self._lane.tables[phase, source].masks
        return [(mask, self._lane.pads[mask].source) for mask in masks]

    def _withhold(self, without: abc.Iterable[Pads]) -> PadsFrom:
        for pads in without:
            if pads not in self._in_tee:
                self._in_tee.add(pads)
                pads.in_tee += 1
        return "none"


def compose(
    sequences: abc.Iterable[Sequence],
    lane: MicroBatchOperators,
    refuse: Refuse,
    *,
    step_tokens: int,
    speculative_tokens: int = 0,
) -> list[Part]:
    """Compose a step of up to `step_tokens` rows; pads are made where runs wait for them.

    `lane`: any of the step's. `refuse`: told of each sequence that gets no pads.
    """
    budget = _PadBudget(lane)
    groups: dict[int, tuple[Phase, PadsFrom, list[Rows]]] = {}
    for wanted in _wanted(sequences, budget, step_tokens, speculative_tokens):
        sequence, phase = wanted.sequence, wanted.phase
        try:
            pads = budget.settle(phase, len(wanted.take.ids))
            # What is read of a prompt goes through the TEE's own LM head.
            if sequence.reader is not None and lane.tables[phase, "stock"].head_in_segment:
                pads = "none"
        except PadsExhaustedError as error:
            refuse(sequence, error)
            continue
        _, _, rows = groups.setdefault(id(lane.tables[phase, pads]), (phase, pads, []))
        rows.append(wanted)
    return [
        Part(Batch.of([one.take for one in rows]), phase, pads, rows)
        for phase, pads, rows in groups.values()
    ]


def _wanted(
    sequences: abc.Iterable[Sequence], budget: _PadBudget, step_tokens: int, speculative_tokens: int
) -> abc.Iterable[Rows]:
    found: dict[Phase, list[Sequence]] = {"decode": [], "prefill": []}
    for sequence in sequences:
        sequence.cache.grow_to(len(sequence.ids))
        if not sequence.follows:
            found[sequence.phase].append(sequence)
    decode, prefill = found["decode"][:step_tokens], found["prefill"]
    spare = step_tokens - len(decode)
    for sequence in decode:
        most = min(speculative_tokens, spare, sequence.new_tokens_left - 1)
        most = sequence.cache.drafts_alike(most)
        drafts: tuple[int, ...] = ()
        if sequence.drafts is not None and most > 0 and budget.plenty(1 + most):
            drafts = tuple(sequence.drafts.propose(most))
        spare -= len(drafts)
        yield Rows.of(sequence, "decode", 1, drafts)
    owners = {s.request.owner for s in prefill}
    shares = dict.fromkeys(owners, spare // max(1, len(owners)))
    tokens: Counter[Sequence] = Counter()
    for equally in (True, False):
        for sequence in prefill:
            owner = sequence.request.owner
            most = min(spare, shares[owner]) if equally else spare
            taken = min(most, sequence.pending - tokens[sequence])
            tokens[sequence] += taken
            shares[owner] -= taken
            spare -= taken
    for sequence, taken in tokens.items():
        if taken:
            yield Rows.of(sequence, "prefill", taken)


@torch.inference_mode()
def run_step(
    parts: abc.Sequence[Part], lanes: abc.Sequence[MicroBatchOperators]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the parts of a step; see `forward` for errors.

    Returns of each the logits [N, V] of its output rows, and the hidden states [R, D] of those that
    it reads: what the last layer gives, before the last norm.

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
            ops = lane.tables[part.phase, part.pads]
            running.append(run_part(batch, ops, lane))
    try:
        found = iter(run_overlapped(running))
        results = []
        for part, batches in zip(parts, cut, strict=True):
            outputs, read = zip(*(next(found) for _ in batches), strict=True)
            ops = lanes[0].tables[part.phase, part.pads]
            if ops.head_apart:
                logits_NV = torch.cat([each for each in outputs if len(each)] or outputs)
            else:
                # Once for all of them: wherever it is, the LM head is the largest matrix to read.
                logits_NV = run(logits(torch.cat(outputs), lanes[0].model, ops))
            results.append((logits_NV, torch.cat(read)))
        return results
    finally:
        # Their pads are used by nothing any more, whether the step failed or not.
        for lane in lanes:
            for pads in lane.pads.values():
                pads.end_step()


def _cut(parts: abc.Sequence[Part], lanes: abc.Sequence[MicroBatchOperators]) -> list[list[Batch]]:
    """Cut the largest part into micro-batches; there are as many spare lanes as other parts."""
    cut = [[part.batch] for part in parts]
    sizes = [len(part.batch.token_ids_T) for part in parts]
    largest = sizes.index(max(sizes))
    most = sum(not lane.spare for lane in lanes)
    pieces = max(1, min(most, sizes[largest] // MIN_MICRO_BATCH_ROWS))
    if pieces > 1:
        cut[largest] = parts[largest].batch.split(pieces)
    return cut
