"""What the orchestrator tells the process that measures, and what that answers, line by line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from protocol.errors import SettingsError
from protocol.messages import FloatDtype
from tee_side.words import Phase
from tsqp.lab.bench.model import Case, Generation, PadMaking, Timeline

# Of every case, before anything is timed.
WARM_UP = 2
_LEAST_OBSERVED, _MOST_OBSERVED = 3, 12


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Plan(_Line):
    """Which cases to measure, and how often.

    `prefill`: prompt lengths; `decode`: (context, sequences); `generation`: (prompt, new tokens).
    """

    prefill: tuple[int, ...] = (1, 128, 512)
    decode: tuple[tuple[int, int], ...] = ((128, 1), (128, 8), (512, 1))
    generation: tuple[int, int] | None = (128, 32)
    repeats: int = 5
    decode_steps: int = 24

    @property
    def sequences(self) -> int:
        """Sequences that run together at most."""
        return max((batch for _, batch in self.decode), default=1)

    def observed(self, phase: Phase, timed: int) -> int:
        """Return how often a case is run with an observer after it was timed so often."""
        if phase == "prefill":
            return min(_LEAST_OBSERVED, timed)
        return min(_MOST_OBSERVED, max(_LEAST_OBSERVED, timed))

    def runs(self, phase: Phase) -> int:
        """Return how often a case is run in all, at most: a prompt, or a decode step."""
        timed = self.repeats if phase == "prefill" else self.decode_steps
        return WARM_UP + timed + self.observed(phase, timed)

    def new_tokens(self, context: int, batch: int, step_tokens: int) -> int:
        """Return how many tokens each sequence of a decode case generates, at most.

        The first comes with its prompt. Where prompts are more than a step takes, the first
        sequences decode while the last ones are still in prefill.
        """
        # Decoding sequences go first, one token each; the rest of a step is for prompts.
        prompts = -(-context * batch // max(1, step_tokens - batch + 1))
        return prompts + self.runs("decode")

    def longest(self, step_tokens: int) -> int:
        """Return how many tokens a sequence may become."""
        lengths = [tokens + 1 for tokens in self.prefill]
        lengths += [
            context + self.new_tokens(context, batch, step_tokens) for context, batch in self.decode
        ]
        lengths += [sum(self.generation)] if self.generation else []
        return max(lengths, default=1)

    def cached_tokens(self, step_tokens: int) -> int:
        """Return how many tokens of all sequences together are in KV caches, at most."""
        cached = [*self.prefill]
        cached += [
            batch * (context + self.new_tokens(context, batch, step_tokens) - 1)
            for context, batch in self.decode
        ]
        cached += [sum(self.generation) - 1] if self.generation else []
        return max(cached, default=0)

    def check(self, context_length: int, step_tokens: int) -> None:
        """Refuse cases that do not fit a model's context. Raises SettingsError."""
        limit = f"{context_length}, the model's context"
        longest = max(self.prefill, default=0)
        if longest >= context_length:
            raise SettingsError(
                "--prefill", got=f"{longest} tokens", expected=f"fewer than {limit}"
            )
        if self.sequences > step_tokens:
            raise SettingsError(
                "--batch",
                got=f"{self.sequences} sequences",
                expected=f"at most {step_tokens}, which is what --step-tokens puts into a step",
            )
        for context, batch in self.decode:
            new = self.new_tokens(context, batch, step_tokens)
            if context + new > context_length:
                raise SettingsError(
                    "--context, --decode-steps",
                    got=f"{context} tokens and {new} decoded after them",
                    expected=f"at most {limit}, together",
                )
        if self.generation and sum(self.generation) > context_length:
            raise SettingsError(
                "the request",
                got=f"{sum(self.generation)} tokens",
                expected=f"at most {limit}",
            )

    def fitted(
        self, context_length: int, step_tokens: int, *, prefill: bool, context: bool
    ) -> Plan:
        """Return a plan whose cases fit a model's context.

        `prefill`, `context`: whether these lengths are defaults. Then prompts that are too long
        are dropped, and contexts that are too long become the longest that is possible.
        """
        prompts, decode, generation = self.prefill, self.decode, self.generation
        if prefill:
            prompts = tuple(tokens for tokens in prompts if tokens < context_length)
        if context:
            fitting = (
                (
                    min(length, context_length - self.new_tokens(length, batch, step_tokens)),
                    batch,
                )
                for length, batch in decode
            )
            # One for which there is no room at all is kept, and refused by `check`.
            decode = tuple(
                dict.fromkeys(
                    (new, batch) if new > 0 else old
                    for (new, batch), old in zip(fitting, decode, strict=True)
                )
            )
        if generation:
            prompt = min(generation[0], context_length - generation[1])
            generation = (prompt, generation[1]) if prompt > 0 else None
        return self.model_copy(
            update={"prefill": prompts, "decode": decode, "generation": generation}
        )


class Job(_Line):
    """One policy's measurements, by one process."""

    model: Path
    policy: str
    endpoints: tuple[str, ...]
    service_pids: tuple[int, ...]
    key: Path | None
    bank: Path | None
    kernels: str
    threads: int
    step_tokens: int
    micro_batches: int
    spin_us: float
    link_gbps: float | None
    link_rtt_us: float
    dtype: FloatDtype | None
    shares_in_the_clear: bool
    plan: Plan


class Progress(_Line):
    """What is being measured now."""

    kind: Literal["progress"] = "progress"
    doing: str


class Measured(_Line):
    """A case that is done, with its timeline if one was kept."""

    kind: Literal["measured"] = "measured"
    case: Case | None = None
    timeline: Timeline | None = None
    generation: Generation | None = None


class Finished(_Line):
    """The last line: what is known once everything is measured."""

    kind: Literal["finished"] = "finished"
    peak_bytes: int
    kv_bytes: int
    vocabulary_bytes: int
    pads: PadMaking | None = None


class Failed(_Line):
    """The error that ended the process early, in its three parts."""

    kind: Literal["failed"] = "failed"
    where: str
    got: str
    expected: str


Answer = Progress | Measured | Finished | Failed
