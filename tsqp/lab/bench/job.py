"""What `tsqp bench` is asked, what it tells the process that measures, and what that answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from protocol.errors import SettingsError
from protocol.messages import FloatDtype
from tee_side.engine.engine import DEFAULT_STEP_TOKENS
from tee_side.policy.placement import Policy
from tee_side.words import Phase
from tsqp.lab.bench.model import Case, Document, Finished, RequestTimes, Timeline

# Of every case, before anything is timed.
WARM_UP = 2
_LEAST_OBSERVED, _MOST_OBSERVED = 3, 12


class Requests(NamedTuple):
    """`batch` requests side by side, and that `times` times. `option`: what asks for them."""

    option: str
    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    times: int = 1


class Plan(Document):
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

    def requests(self, step_tokens: int) -> Iterator[Requests]:
        """Yield all that is asked for in a run, at most."""
        for tokens in self.prefill:
            yield Requests("--prefill", tokens, 1, times=self.runs("prefill"))
        for context, batch in self.decode:
            new = self.new_tokens(context, batch, step_tokens)
            yield Requests("--context, --decode-steps", context, new, batch)
        if self.generation:
            yield Requests("the request", *self.generation)

    def longest(self, step_tokens: int) -> int:
        """Return how many tokens a sequence may become."""
        asked = self.requests(step_tokens)
        return max((one.prompt_tokens + one.new_tokens for one in asked), default=1)

    def cached_tokens(self, step_tokens: int) -> int:
        """Return how many tokens of all sequences together are in KV caches, at most."""
        asked = self.requests(step_tokens)
        return max(
            (one.batch * (one.prompt_tokens + one.new_tokens - 1) for one in asked), default=0
        )

    def pads(self, phases: Collection[Phase], step_tokens: int) -> int:
        """Return how many pads a policy uses up, at most, where tokens of these phases take one."""
        needed = 0
        for one in self.requests(step_tokens):
            tokens = one.prompt_tokens if "prefill" in phases else 0
            # The first new token comes with the prompt.
            tokens += one.new_tokens if "decode" in phases and one.new_tokens > 1 else 0
            needed += one.times * one.batch * tokens
        return needed

    def check(self, context_length: int, step_tokens: int) -> None:
        """Refuse cases that do not fit a model's context. Raises SettingsError."""
        SettingsError.unless(
            self.sequences <= step_tokens,
            "--batch",
            f"{self.sequences} sequences",
            f"at most {step_tokens}, which is what --step-tokens puts into a step",
        )
        for one in self.requests(step_tokens):
            SettingsError.unless(
                one.prompt_tokens + one.new_tokens <= context_length,
                one.option,
                f"{one.prompt_tokens} tokens and {one.new_tokens} new ones after them",
                f"at most {context_length}, the model's context, together",
            )

    def fitted(
        self, context_length: int, step_tokens: int, *, prefill: bool, context: bool
    ) -> Plan:
        """Return a plan whose cases fit a model's context.

        `prefill`, `context`: whether these lengths are defaults. Then prompts that are too long
        are dropped, and contexts that are too long become the longest that is possible.
        """

        def shortened(length: int, batch: int) -> tuple[int, int]:
            longest = context_length - self.new_tokens(length, batch, step_tokens)
            # One for which there is no room at all is kept, and refused by `check`.
            return min(length, longest) if longest > 0 else length, batch

        prompts, decode, generation = self.prefill, self.decode, self.generation
        if prefill:
            prompts = tuple(tokens for tokens in prompts if tokens < context_length)
        if context:
            decode = tuple(dict.fromkeys(shortened(*one) for one in decode))
        if generation:
            prompt = min(generation[0], context_length - generation[1])
            generation = (prompt, generation[1]) if prompt > 0 else None
        return self.model_copy(
            update={"prefill": prompts, "decode": decode, "generation": generation}
        )


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What `bench` and `plan` measure, and with which services of their own.

    `model`: a directory, or `shape`: the name of one whose weights are made at random. `device`,
    `transport`, `kernels`, `gpu_threads`: of services; `kernels`, `dtype`, `spin_us`: of both
    sides.
    """

    model: Path | None = None
    shape: str | None = None
    device: str = "null"
    transport: str = "tcp"
    kernels: str = "auto"
    gpu_threads: int = 1
    spin_us: float = 0.0
    dtype: FloatDtype | None = None
    step_tokens: int = DEFAULT_STEP_TOKENS
    micro_batches: int = 1


@dataclass(frozen=True)
class BenchSettings(Measuring):
    """One run of the benchmark.

    `endpoints`: of services that run already, in place of those that are started. `policies`: with
    the name or path that each was given by. `baselines`: whether to measure the others, too.
    `command`: as it was typed, for the report. `default_prefill`, `default_context`: whether the
    plan's lengths are defaults, so that they may give way to a short context.
    `shares_in_the_clear`: whether `endpoints` may get shares over links without keys.
    """

    command: str
    policies: tuple[tuple[str, Policy], ...]
    endpoints: tuple[str, ...] = ()
    threads: int = 1
    link_gbps: float | None = None
    link_rtt_us: float = 0.0
    key: Path | None = None
    server_model: Path | None = None
    baselines: bool = True
    plan: Plan = field(default_factory=Plan)
    default_prefill: bool = False
    default_context: bool = False
    shares_in_the_clear: bool = False

    @property
    def computes(self) -> bool:
        """Whether the services really compute, so that what they answer is right."""
        # Services that run already are taken for real ones.
        return bool(self.endpoints) or not (
            self.device == "null" or self.device.startswith("model:")
        )

    @property
    def link(self) -> str | None:
        """The modelled link, for people."""
        if self.link_gbps is None and self.link_rtt_us == 0:
            return None
        rate = f"{self.link_gbps:g} Gbit/s" if self.link_gbps is not None else "unbounded rate"
        return f"{rate}, {self.link_rtt_us:g} us round trip"


@dataclass(frozen=True)
class PolicyJob:
    """One policy's measurements, by one process.

    `policy`: its name or path; `endpoints`: of services; `service_pids`: of those that are ours;
    `bank`: its pads, None to make them on the way.
    """

    settings: BenchSettings
    model: Path
    policy: str
    endpoints: tuple[str, ...] = ()
    service_pids: tuple[int, ...] = ()
    bank: Path | None = None


# What a job tells: what it does now, what it has measured, and at last what is known at its end.
Answer: TypeAlias = str | Case | Timeline | RequestTimes | Finished
