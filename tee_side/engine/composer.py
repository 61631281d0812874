"""What a step computes: which rows of which sequences, and on which operators.

Decode first: one row each, and a reader waits for every one of them. Prompts share what is left of
the step's budget, each owner's alike. Whether rows get pads is settled here, for each sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.errors import PadsExhaustedError, TsqpError
from tee_side.engine.sequence import Sequence
from tee_side.engine.step import Part
from tee_side.model.batch import Batch, Take
from tee_side.model.operators import MicroBatchOperators
from tee_side.protect.masks.mask import Mask
from tee_side.protect.pads.source import Pads


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence: `tokens` that are pending, and guesses behind them."""

    sequence: Sequence
    tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing of the sequence is pending behind them."""
        return self.tokens == self.sequence.pending

    @property
    def outputs(self) -> int:
        """Of how many rows the logits are wanted."""
        return 1 + len(self.drafts) if self.complete and self.sequence.max_new_tokens else 0

    @property
    def read(self) -> range:
        """Which rows of a prompt are read."""
        reader = self.sequence.reader
        return range(0) if reader is None else reader.rows(self.sequence.cache.length, self.tokens)

    def take(self) -> Take:
        """Return what the batch is made of."""
        sequence, cache = self.sequence, self.sequence.cache
        ids = [*sequence.ids[cache.length : cache.length + self.tokens], *self.drafts]
        left, wanted = sequence.pending - self.tokens, self.outputs > 0
        return Take(cache, ids, left, len(self.drafts), self.read, wanted)


@dataclass(frozen=True, slots=True)
class Composed:
    """The parts of a step, and of whose rows each consists; `refused` get no pads."""

    parts: list[Part]
    rows: list[list[Rows]]
    refused: list[tuple[Sequence, TsqpError]]


class _PadBudget:
    """Which rows of a step get pads."""

    def __init__(self, lane: MicroBatchOperators) -> None:
        self._lane = lane
        self._planned: Counter[Mask] = Counter()
        self._in_tee: set[Pads] = set()

    def settle(self, sequence: Sequence, rows: int) -> bool:
        """Take pads for rows of a sequence; return whether the TEE computes them instead.

        Raises PadsExhaustedError, and what making pads meets.
        """
        phase, found = sequence.phase, self._found(sequence)
        if phase == "prefill" and not all(p.in_stock(self._planned[m] + rows) for m, p in found):
            return self._withhold(p for _, p in found)
        for mask, pads in found:
            if pads.ready(self._planned[mask] + rows) < self._planned[mask] + rows:
                if pads.when_out == "tee":
                    return self._withhold([pads])
                raise pads.exhausted(rows)
        self._planned.update({mask: rows for mask, _ in found})
        return False

    def plenty(self, sequence: Sequence, rows: int) -> bool:
        """Say whether there are pads to spare: for rows that may come to nothing."""
        return all(pads.plenty(self._planned[m] + rows) for m, pads in self._found(sequence))

    def _found(self, sequence: Sequence) -> list[tuple[Mask, Pads]]:
        masks = self._lane.tables[sequence.phase].masks
        return [(mask, self._lane.pads[mask].source) for mask in masks]

    def _withhold(self, without: Iterable[Pads]) -> bool:
        for pads in without:
            if pads not in self._in_tee:
                self._in_tee.add(pads)
                pads.in_tee += 1
        return True


def compose(
    sequences: Iterable[Sequence],
    lane: MicroBatchOperators,
    *,
    step_tokens: int,
    speculative_tokens: int = 0,
) -> Composed:
    """Compose a step of up to `step_tokens` rows; pads are made where runs wait for them.

    `lane`: any of the step's.
    """
    budget = _PadBudget(lane)
    groups: dict[int, tuple[Part, list[Rows]]] = {}
    refused: list[tuple[Sequence, TsqpError]] = []
    for wanted in _wanted(list(sequences), budget, step_tokens, speculative_tokens):
        sequence, phase = wanted.sequence, wanted.sequence.phase
        try:
            withheld = budget.settle(sequence, wanted.tokens + len(wanted.drafts))
            # What is read of a prompt goes through the TEE's own LM head.
            withheld |= sequence.reader is not None and lane.tables[phase].head_in_segment
        except PadsExhaustedError as error:
            refused.append((sequence, error))
            continue
        part = Part(Batch.of([]), phase, withheld)
        groups.setdefault(id(part.table(lane)), (part, []))[1].append(wanted)
    parts = [
        Part(Batch.of([one.take() for one in rows]), part.phase, part.withheld)
        for part, rows in groups.values()
    ]
    return Composed(parts, [rows for _, rows in groups.values()], refused)


def _wanted(
    sequences: list[Sequence], budget: _PadBudget, step_tokens: int, speculative_tokens: int
) -> Iterable[Rows]:
    decode = [s for s in sequences if s.phase == "decode"][:step_tokens]
    spare = step_tokens - len(decode)
    for sequence in decode:
        most = min(speculative_tokens, spare, sequence.new_tokens_left - 1)
        drafts: tuple[int, ...] = ()
        if sequence.drafts is not None and most > 0 and budget.plenty(sequence, 1 + most):
            drafts = tuple(sequence.drafts.propose(most))
        spare -= len(drafts)
        yield Rows(sequence, 1, drafts)
    prefill = [s for s in sequences if s.phase == "prefill" and not s.follows]
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
            yield Rows(sequence, taken)
