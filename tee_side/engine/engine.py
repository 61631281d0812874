"""Runs sequences: every step is one flat batch of prefill chunks and decode tokens.

A sequence's *pending* tokens are those that its cache does not hold yet: the prompt at first, then
the token sampled last. A step takes some pending tokens of every sequence, so prefill in chunks,
decode, and several sequences at once are one code path. Where a policy places prefill and decode
differently, a step holds sequences of one phase only, and the phases take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ids
from collections.abc import Sequence as Lanes
from dataclasses import dataclass, field
from typing import Literal

import torch

from protocol.errors import PromptError
from tee_side.engine.sampling import Sampler, SamplingSettings
from tee_side.engine.step import run_step
from tee_side.model.batch import Batch
from tee_side.model.kv_cache import KVCache, available_kv_bytes, kv_bytes, kv_refused, mib
from tee_side.model.layers import TeeModel
from tee_side.model.operators import MicroBatchOperators
from tee_side.observer import timed
from tee_side.words import PHASES, Phase

DEFAULT_STEP_TOKENS = 512

FinishReason = Literal["stop", "length"]


@dataclass(eq=False)
class Sequence:
    """One prompt and what has been generated from it; create with `Engine.add`.

    `ids`: of both; `prompt_tokens`: how many are the prompt's. `arrived`: tokens that `Runner.step`
    has put here for the `Generation` of this sequence.
    """

    ids: list[int]
    prompt_tokens: int
    cache: KVCache
    sampler: Sampler
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    finish_reason: FinishReason | None = None
    arrived: deque[Sampled] = field(default_factory=deque)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.ids[: self.prompt_tokens]

    @property
    def token_ids(self) -> list[int]:
        """Token ids generated so far, EOS included."""
        return self.ids[self.prompt_tokens :]

    @property
    def phase(self) -> Phase:
        """Prefill while tokens of the prompt are pending, decode afterwards."""
        return "prefill" if self.cache.length < self.prompt_tokens else "decode"

    def append(self, token_id: int) -> None:
        """Take a token, and finish on EOS or at the length limit."""
        self.ids.append(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif len(self.ids) - self.prompt_tokens >= self.max_new_tokens:
            self.finish_reason = "length"

    def stop(self) -> None:
        """Finish now, because a stop string was found."""
        self.finish_reason = "stop"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step produced, and the logits [V] that it was sampled from."""

    sequence: Sequence
    token_id: int
    logits_V: torch.Tensor


class Engine:
    """Holds the running sequences. One thread; errors of the channel pass through `step`.

    `lanes`: operators for as many micro-batches as a step may be cut into. `max_kv_bytes`: what the
    KV caches of all running sequences may have together; None: 80 % of the memory available now.
    """

    def __init__(
        self,
        model: TeeModel,
        lanes: Lanes[MicroBatchOperators],
        *,
        step_tokens: int = DEFAULT_STEP_TOKENS,
        max_kv_bytes: int | None = None,
    ) -> None:
        self._model = model
        self.max_kv_bytes = available_kv_bytes() if max_kv_bytes is None else max_kv_bytes
        self.lanes = lanes
        self._step_tokens = step_tokens
        self._running: list[Sequence] = []
        self._last_phase: Phase = "decode"

    def add(
        self,
        prompt_ids: Ids[int],
        *,
        max_new_tokens: int,
        sampling: SamplingSettings | None = None,
        eos_token_ids: frozenset[int] | None = None,
    ) -> Sequence:
        """Admit a prompt and count its whole KV cache as taken, before any work is done for it.

        Generation ends at the model's context length even if `max_new_tokens` would allow more.
        Raises PromptError: empty, too long for the context, or ids outside the vocabulary; and
        LimitError where its KV cache does not fit beside those of the running sequences, or the
        machine refuses to give as much.
        """
        config, prompt = self._model.config, len(prompt_ids)
        context, vocabulary = config.context_length, config.vocab_size
        if not prompt_ids:
            raise PromptError("prompt", got="no tokens", expected="at least one")
        if not all(0 <= token_id < vocabulary for token_id in prompt_ids):
            got, expected = "an id outside the vocabulary", f"0 to {vocabulary - 1}"
            raise PromptError("prompt token ids", got=got, expected=expected)
        if prompt >= context:
            expected = f"fewer than the context of {context} tokens"
            raise PromptError("prompt", got=f"{prompt} tokens", expected=expected)
        if max_new_tokens < 1:
            raise PromptError("max_new_tokens", got=str(max_new_tokens), expected="at least 1")
        new_tokens = min(max_new_tokens, context - prompt)
        # The last token is never fed back, so it needs no place in the cache.
        capacity = prompt + new_tokens - 1
        self._require_kv(capacity)
        sequence = Sequence(
            list(prompt_ids),
            prompt,
            KVCache(config, capacity, self._model.dtype),
            Sampler(sampling or SamplingSettings()),
            new_tokens,
            config.eos_token_ids if eos_token_ids is None else eos_token_ids,
        )
        self._running.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that the program does not wait for any more."""
        self._running = [running for running in self._running if running is not sequence]
        sequence.cache.release()

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that are not finished."""
        return tuple(s for s in self._running if s.finish_reason is None)

    def _remove_finished(self) -> None:
        for sequence in self._running:
            if sequence.finish_reason is not None:
                self.remove(sequence)

    def _require_kv(self, capacity: int) -> None:
        """Refuse a sequence whose KV cache does not fit beside those that are running.

        This counts; it does not take: the kernel gives pages as a cache grows, and one that was
        admitted finds them unless something else has taken the memory meanwhile. Raises LimitError;
        retrying helps if other sequences are what is in the way.
        """
        self._remove_finished()
        needed = kv_bytes(self._model.config, capacity, self._model.dtype)
        left = self.max_kv_bytes - sum(sequence.cache.nbytes for sequence in self._running)
        if needed > left:
            where = f"KV memory, of which {mib(self.max_kv_bytes)} may be used (--max-kv-mib)"
            expected = f"at most {mib(left)}, which is what is left"
            raise kv_refused(where, needed, capacity, expected, most=self.max_kv_bytes)

    def step(self) -> list[Sampled]:
        """Run one flat batch and return the tokens it produced; none during chunked prefill.

        A step that raises has changed nothing and can be repeated.
        """
        parts: list[tuple[KVCache, list[int], int]] = []
        complete: list[Sequence] = []
        budget = self._step_tokens
        phase, candidates = self._next()
        # Decode tokens first: one row each, and a reader is waiting for every one of them.
        for sequence in sorted(candidates, key=lambda s: len(s.ids) - s.cache.length):
            pending = sequence.ids[sequence.cache.length :]
            if taken := pending[:budget]:
                parts.append((sequence.cache, taken, len(pending) - len(taken)))
                budget -= len(taken)
                if len(taken) == len(pending):
                    complete.append(sequence)
        if not parts:
            return []
        batch = Batch.of(parts)
        withhold = phase == "prefill" and not self._in_stock(self._step_tokens - budget)
        logits_NV = run_step(batch, self.lanes, phase, withhold=withhold)
        observer = self.lanes[0].model.observer
        sampled = []
        for sequence, logits_V in zip(complete, logits_NV, strict=True):
            sample = timed(sequence.sampler.sample, observer, "sample", None)
            sampled.append(Sampled(sequence, sample(logits_V, sequence.ids), logits_V))
        # From here on nothing can fail: the step counts for every sequence, or for none.
        batch.commit()
        self._last_phase = phase
        for one in sampled:
            one.sequence.append(one.token_id)
        self._remove_finished()
        return sampled

    def _in_stock(self, rows: int) -> bool:
        """Say whether pads for a prompt's step are in stock: by counts, not by its tokens."""
        return all(pads.in_stock(rows) for pads in self.lanes[0].pads)

    def _next(self) -> tuple[Phase, Ids[Sequence]]:
        """Return the next step's phase and the sequences that may join it."""
        running, tables = self.running, self.lanes[0].tables
        if tables["prefill"] is tables["decode"]:
            return "decode", running
        first, second = sorted(PHASES, key=lambda phase: phase == self._last_phase)
        found = [s for s in running if s.phase == first]
        return (first, found) if found else (second, running)
