"""Runs sequences: every step is one flat batch of prefill chunks and decode tokens.

A sequence's *pending* tokens are those that its cache does not hold yet: the prompt at first, then
the token sampled last. A step takes some pending tokens of every sequence, so prefill in chunks,
decode, and several sequences at once are one code path. What the rows run on is settled before: the
table of their phase, or the one that draws no pads.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.errors import LimitError, PromptError, SessionLostError, TsqpError
from tee_side.engine.request import Logprob, Request, SamplingSettings
from tee_side.engine.step import (
    Part,
    Refuse,
    Rows,
    Sampled,
    Sampler,
    Sequence,
    compose,
    fail_step,
    run_step,
)
from tee_side.engine.tokenizer import TextStream, Tokenizer
from tee_side.model.batch import KVCache, available_kv_bytes, kv_bytes, kv_refused, mib
from tee_side.model.operators import MicroBatchOperators, TeeModel
from tee_side.observer import timed

if TYPE_CHECKING:
    from tee_side.engine.prefix_pool import PrefixPool

DEFAULT_STEP_TOKENS = 512

# How often services may lose keys and values of a sequence, where each loss counts for less with
# every token, and for nothing after so many.
_MOST_LOSSES = 5
_REMEMBERED_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Bounds and habits of an engine.

    `step_tokens`: rows of one step at most. `max_model_len`: tokens of a prompt and its answer;
    None: the model's context. `max_kv_bytes`: what the KV caches of all running sequences may have
    together, kept prefixes included; None: 80 % of the memory available now. `max_sequences`: that
    run at a time; `max_waiting`: requests that wait. `speculative_tokens`: guessed for each step of
    a sequence (0: none). `prefix_reuse`: whether caches are kept for later prompts. Both show in
    what the GPU host sees of lengths and timing.
    """

    step_tokens: int = DEFAULT_STEP_TOKENS
    max_model_len: int | None = None
    max_kv_bytes: int | None = None
    max_sequences: int = 64
    max_waiting: int = 256
    speculative_tokens: int = 0
    prefix_reuse: bool = False


@dataclass(kw_only=True)
class Counts:
    """What an engine has done since it was made, and what was accepted of its drafts.

    Prefix queries and hits: in tokens of prompts that earlier ones could have, and had, begun with.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Engine:
    """Holds the running sequences. One thread; errors of the channel pass through `step`.

    `lanes`: operators for as many micro-batches as a step may be cut into. `tokenizer`: for stop
    strings, which are refused without one. `refuse`: told of a sequence that cannot go on, such as
    one that gets no pads, while the others do, and removes none before the step has ended; at first
    `step` raises instead.
    """

    def __init__(
        self,
        model: TeeModel,
        lanes: abc.Sequence[MicroBatchOperators],
        settings: EngineSettings | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._model = model
        self.settings = settings or EngineSettings()
        given, context = self.settings.max_kv_bytes, model.config.context_length
        self.max_kv_bytes = available_kv_bytes() if given is None else given
        self.context = min(context, self.settings.max_model_len or context)
        self.lanes = lanes
        self.tokenizer = tokenizer
        self.refuse: Refuse = fail_step
        self.counts = Counts()
        # All of them may have a row in each step.
        self.max_sequences = min(self.settings.max_sequences, self.settings.step_tokens)
        self._running: list[Sequence] = []
        self._prefixes: PrefixPool | None = None
        if self.settings.prefix_reuse:
            from tee_side.engine.prefix_pool import PrefixPool

            self._prefixes = PrefixPool()

    @property
    def _elsewhere(self) -> abc.Collection[int]:
        """The layers whose keys and values services keep."""
        return self.lanes[0].tables["decode", "stock"].segments

    @property
    def generates(self) -> bool:
        """Whether there is an LM head."""
        return self._model.config.generates

    def check(self, request: Request) -> None:
        """Refuse what could never run. Raises PromptError, and LimitError for too large a cache."""
        most, new, samples = self.max_sequences, request.max_new_tokens, request.samples
        prompt, context = len(request.prompt_ids), self.context
        vocabulary = self._model.config.vocab_size
        outside, ids = "an id outside the vocabulary", f"0 to {vocabulary - 1}"
        biased = max(request.sampling.logit_bias, default=0) < vocabulary
        known = all(0 <= token_id < vocabulary for token_id in request.prompt_ids)
        fewer = f"fewer than the context of {context} tokens"
        at_a_time = f"1 to {most}, which run at a time"
        one = request.prompt_logprobs is None or request.pooling is None
        readable = not request.stop or self.tokenizer is not None
        vectors = not new and request.prompt_logprobs is None
        headless, alone = "a model without an LM head", "embeddings of a prompt alone"
        for holds, where, got, expected in (
            (biased, "logit_bias", outside, ids),
            (prompt, "prompt", "no tokens", "at least one"),
            (known, "prompt token ids", outside, ids),
            (prompt < context + (new == 0), "prompt", f"{prompt} tokens", fewer),
            (new >= (not _reads(request)), "max_new_tokens", str(new), "at least 1"),
            (1 <= samples <= most, "samples", str(samples), at_a_time),
            (one, "log-probabilities and pooling", "both", "one of them"),
            (self.generates or vectors, "request", headless, alone),
            (readable, "stop strings", "no tokenizer", "one to compare text"),
        ):
            PromptError.unless(holds, where, got, expected)
        self._require_kv(request, self.max_kv_bytes)

    def add(
        self,
        prompt_ids: abc.Sequence[int],
        *,
        max_new_tokens: int,
        sampling: SamplingSettings | None = None,
        eos_token_ids: frozenset[int] | None = None,
        stop: abc.Sequence[str] = (),
    ) -> Sequence:
        """Admit one sequence now, as `admit` does."""
        (sequence,) = self.admit(
            Request(
                prompt_ids=tuple(prompt_ids),
                max_new_tokens=max_new_tokens,
                sampling=sampling or SamplingSettings(),
                stop_ids=eos_token_ids,
                stop=tuple(stop),
            )
        )
        return sequence

    def admit(self, request: Request) -> list[Sequence]:
        """Take a request in, and count all of its KV caches as taken, before any work is done.

        Generation ends at the model's context length even if `max_new_tokens` would allow more.
        Raises PromptError: empty, too long for the context, or ids outside the vocabulary; and
        LimitError where its KV caches do not fit beside those of the running sequences, or the
        machine refuses to give as much; retrying helps if other sequences are what is in the way.
        """
        self.check(request)
        self._remove_finished()
        left = self.max_kv_bytes - sum(sequence.cache.nbytes for sequence in self._running)
        needed = self._require_kv(request, left)
        if self._prefixes is not None:
            self._prefixes.make_room(needed + self._prefixes.nbytes - left)
        sequences: list[Sequence] = []
        try:
            while len(sequences) < request.samples:
                sequences.append(self._new_sequence(request, len(sequences)))
        except TsqpError:
            for sequence in sequences:
                sequence.cache.release()
            raise
        first, *others = sequences
        first.followers = others
        for other in others:
            other.follows = True
        if self._prefixes is not None and first.reader is None:
            whose = request.owner, request.salt
            first.reused_tokens = self._prefixes.fill(whose, request.prompt_ids, first.cache)
            self.counts.prefix_queries += len(request.prompt_ids)
            self.counts.prefix_hits += first.reused_tokens
        self._running += sequences
        return sequences

    def _new_sequence(self, request: Request, sample: int) -> Sequence:
        config, prompt = self._model.config, len(request.prompt_ids)
        matcher = None if request.grammar is None else request.grammar.copy()
        watch = None
        if self.tokenizer and request.stop:
            watch = TextStream(self.tokenizer, request.stop, request.prompt_ids)
        sequence = Sequence(
            request,
            sample,
            list(request.prompt_ids),
            prompt,
            KVCache(config, self._capacity(request), self._model.dtype, self._elsewhere),
            Sampler(request.sampling, prompt, matcher, sample),
            min(request.max_new_tokens, self.context - prompt),
            config.eos_token_ids if request.stop_ids is None else request.stop_ids,
            watch,
        )
        if self.settings.speculative_tokens and request.max_new_tokens:
            from tee_side.engine.drafts import Drafts

            sequence.drafts = Drafts(request.prompt_ids)
        if _reads(request) and not sample:
            from tee_side.engine.reading import PromptReader

            sequence.reader = PromptReader(request)
        return sequence

    def _capacity(self, request: Request) -> int:
        prompt = len(request.prompt_ids)
        # The last token is never fed back, so it needs no place in the cache.
        return prompt + max(0, min(request.max_new_tokens, self.context - prompt) - 1)

    def _require_kv(self, request: Request, left: int) -> int:
        """Return how many bytes a request's caches have; LimitError if they are more than `left`.

        This counts; it does not take: the kernel gives pages as a cache grows, and one that was
        admitted finds them unless something else has taken the memory meanwhile.
        """
        capacity = self._capacity(request)
        config, dtype = self._model.config, self._model.dtype
        here = config.num_hidden_layers - len(self._elsewhere)
        needed = request.samples * kv_bytes(config, capacity, dtype, here)
        if needed > left:
            where = f"KV memory, of which {mib(self.max_kv_bytes)} may be used (--max-kv-mib)"
            expected = f"at most {mib(left)}, which is what is left"
            raise kv_refused(where, needed, capacity, expected, most=self.max_kv_bytes)
        return needed

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that the program does not wait for any more, or that has ended."""
        if sequence not in self._running:
            return
        self._running = [running for running in self._running if running is not sequence]
        request, cache = sequence.request, sequence.cache
        if self._prefixes is not None and sequence.finish_reason is not None:
            self._prefixes.keep((request.owner, request.salt), sequence.ids, cache)
        else:
            cache.release()

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that are not finished."""
        return tuple(s for s in self._running if s.finish_reason is None)

    @property
    def kv_bytes(self) -> int:
        """What the KV caches have, kept prefixes included."""
        kept = 0 if self._prefixes is None else self._prefixes.nbytes
        return sum(sequence.cache.nbytes for sequence in self._running) + kept

    def _remove_finished(self) -> None:
        for sequence in [s for s in self._running if s.finish_reason is not None]:
            self.remove(sequence)

    def run(self, sequences: abc.Sequence[Sequence]) -> abc.Generator[list[Sampled], None, None]:
        """Step these sequences until each has ended or was removed; yield what each step gave.

        Others stand still meanwhile. Where the iteration ends early, they are removed. Raises as
        `step`.
        """
        try:
            while left := [s for s in self._running if s in sequences and s.finish_reason is None]:
                yield self.step(left)
        finally:
            for sequence in sequences:
                self.remove(sequence)

    def step(self, only: abc.Iterable[Sequence] | None = None) -> list[Sampled]:
        """Run one flat batch and return the tokens it produced; none during chunked prefill.

        `only`: of these sequences. A step that raises has changed nothing and can be repeated.
        """
        parts = compose(
            self.running if only is None else only,
            self.lanes[0],
            self.refuse,
            step_tokens=self.settings.step_tokens,
            speculative_tokens=self.settings.speculative_tokens,
        )
        if not parts:
            return []
        try:
            results = run_step(parts, self.lanes)
        except (SessionLostError, LimitError) as error:
            self._give_up(parts, error)
            return []
        given, lane = [], self.lanes[0]
        for part, (logits_NV, hidden_RD) in zip(parts, results, strict=True):
            logits = logits_NV.split([one.outputs for one in part.rows])
            hidden = hidden_RD.split([len(one.take.read) for one in part.rows])
            for rows, its_NV, its_RD in zip(part.rows, logits, hidden, strict=True):
                reader, logprobs = rows.sequence.reader, list[Logprob]()
                if reader is not None:
                    start = rows.sequence.cache.length + rows.take.read.start
                    ops = lane.tables[part.phase, "none"]
                    logprobs = reader.read(its_RD, start, lane.model, ops)
                given.append((rows, its_NV, its_RD, logprobs))
        # From here on nothing can fail: the step counts for every sequence, or for none.
        sampled: list[Sampled] = []
        for rows, its_NV, its_RD, logprobs in given:
            try:
                sampled += self._count(rows, its_NV, its_RD, logprobs)
            except TsqpError as error:  # a grammar whose next mask would be too costly
                self.refuse(rows.sequence, error)
        self.counts.steps += 1
        self._remove_finished()
        return sampled

    def _give_up(self, parts: abc.Sequence[Part], error: TsqpError) -> None:
        """Refuse the last sequence where there is no memory, or one was lost time after time.

        The others are computed again in the next step, and may have room then: a service's memory
        may be too small for all.
        """
        sequences = [rows.sequence for part in parts for rows in part.rows]
        worn = any(one.cache.losses > _MOST_LOSSES for one in sequences)
        if worn or isinstance(error, LimitError):
            self.refuse(max(sequences, key=self._running.index), error)
        for sequence in sequences:
            if not sequence.cache.length:
                sequence.reused_tokens = 0

    def _count(
        self,
        rows: Rows,
        logits_NV: torch.Tensor,
        hidden_RD: torch.Tensor,
        logprobs: list[Logprob],
    ) -> list[Sampled]:
        """Take what a step gave one sequence; return its tokens, and those of its followers."""
        sequence, followers = rows.sequence, rows.sequence.followers
        was_prefill = rows.phase == "prefill"
        if was_prefill:
            self.counts.prompt_tokens += rows.tokens
        if sequence.reader is not None and was_prefill:
            sequence.reader.keep(logprobs, hidden_RD, self._model)
        sampled: list[Sampled] = []
        for logits_V, guess in zip(logits_NV, (*rows.take.ids[rows.tokens :], None), strict=False):
            sampled.append(self._sample(sequence, logits_V))
            if sampled[-1].token_id != guess or sequence.finish_reason is not None:
                break
        accepted = max(0, len(sampled) - 1)
        sequence.cache.commit(rows.tokens + accepted)
        self.counts.draft_tokens += rows.take.drafts
        self.counts.accepted_tokens += accepted
        if was_prefill and not rows.take.left:
            for other in followers:
                other.follows = False
                other.cache.copy_from(sequence.cache, sequence.prompt_tokens)
                if rows.outputs:
                    sampled.append(self._sample(other, logits_NV[0]))
            for one in (sequence, *followers) if not rows.outputs else ():
                one.finish_reason = "length"
            sequence.followers = []
        return sampled

    def _sample(self, sequence: Sequence, logits_V: torch.Tensor) -> Sampled:
        request, observer = sequence.request, self.lanes[0].model.observer
        sample = timed(sequence.sampler.sample, observer, "sample", None)
        token_id = sample(logits_V, sequence.ids)
        logprob = None
        if request.logprobs is not None:
            from tee_side.engine.reading import logprobs_of

            logprob = logprobs_of(logits_V, token_id, request.logprobs)
        sequence.append(token_id)
        sequence.cache.losses = max(0.0, sequence.cache.losses - 1 / _REMEMBERED_TOKENS)
        self.counts.generation_tokens += 1
        return Sampled(
            sequence.sample, token_id, logprob, sequence.finish_reason, sequence, logits_V
        )


def _reads(request: Request) -> bool:
    return request.prompt_logprobs is not None or request.pooling is not None
