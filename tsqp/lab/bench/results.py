"""What `tsqp bench` reports: the JSON document, from which everything that is shown is drawn.

Times are microseconds unless a name says otherwise, sizes are bytes. A *step* is one forward pass
of the engine; a *case* is one kind of step of one policy, run several times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from tee_side.words import Phase, Place


class Document(BaseModel):
    """A part of what is reported, or of what one process tells another."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stages(Document):
    """Where time went, in microseconds.

    `tee_us`: the operator itself where it runs in the TEE, and scaling and rounding around a
    product that does not; `queue_us` and `gpu_us` are the service's own claim, and `wire_us` is
    what is left of the round trip.
    """

    tee_us: float = 0.0
    mask_us: float = 0.0
    verify_us: float = 0.0
    encode_us: float = 0.0
    wire_us: float = 0.0
    queue_us: float = 0.0
    gpu_us: float = 0.0
    decode_us: float = 0.0
    unmask_us: float = 0.0

    @property
    def total_us(self) -> float:
        """All of it."""
        return sum((getattr(self, name) for name in type(self).model_fields), start=0.0)


# What a baseline's service does, where it has one.
Against: TypeAlias = Literal["null", "cpu", "none"]
STAGES: tuple[str, ...] = tuple(Stages.model_fields)


class OperatorCost(Document):
    """One operator in one layer (None: in none, or in all together), in one step.

    `operator`: a placed one (`qkv_proj`) or a light one (`rms_norm`).
    """

    operator: str
    layer: int | None
    place: Place | Literal["tee+gpu"]
    calls: float
    rpcs: float
    bytes_sent: float
    bytes_received: float
    stages: Stages


class Spread(Document):
    """A median of several runs, with the smallest and the largest of them."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return that of some runs, at least one."""
        return cls(
            median=statistics.median(values), low=min(values), high=max(values), runs=len(values)
        )


class Case(Document):
    """One kind of step under one policy.

    `tokens`: of the prompt in prefill; in decode, of the context that each sequence has. `batch`:
    sequences. `step_ms`: wall time of the measured part (a whole prompt, or one decode step).
    `heavy_ms`: of it, Embedding and LM head computed in the TEE; `overhead_ms`: the rest.
    `tokens_per_s`: prompt tokens, or tokens decoded of all sequences together. `cpu_*_ms`: CPU
    time of all threads of a side, per measured part; None where the services are not ours.

    `operators`: of one more such part, run with an observer. As many are observed as are timed (in
    decode 3 to 12), one by one, and this is the one whose wall time is their median. They add up to
    it less `rest_us`, which is what no operator accounts for; that is negative where micro-batches
    overlap, by what was done at the same time.
    """

    phase: Phase
    tokens: int
    batch: int
    micro_batches: int
    step_ms: Spread
    heavy_ms: float
    overhead_ms: float
    tokens_per_s: float
    cpu_tee_ms: float
    cpu_gpu_ms: float | None
    rpcs: float
    bytes_sent: float
    bytes_received: float
    operators: tuple[OperatorCost, ...]
    rest_us: float


class RequestTimes(Document):
    """A whole request: time to first token and time per output token, without an observer."""

    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    tpot_ms: float
    total_ms: float


class Span(Document):
    """A piece of the timeline of one step. `lane`: the micro-batch; times from the step's start."""

    lane: int
    operator: str
    layer: int | None
    stage: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


class Timeline(Document):
    """One measured step, piece by piece."""

    phase: Phase
    tokens: int
    batch: int
    spans: tuple[Span, ...]


class PadMaking(Document):
    """Making the pads that a policy uses up: one for each token of a step in `phases`.

    Measured in the same run, on the TEE side's threads with nothing else to do: `token_ms` for the
    pads of one token, `cpu_ms` of all threads together, in a product of `batch_tokens`; medians.
    """

    phases: tuple[Phase, ...]
    token_ms: float
    cpu_ms: float
    batch_tokens: int

    def scaled(self, *, token: float, cpu: float = 1.0) -> PadMaking:
        """Return it with so many times as much of both times."""
        return self.model_copy(
            update={"token_ms": self.token_ms * token, "cpu_ms": self.cpu_ms * cpu}
        )


class Finished(Document):
    """What is known of a policy once everything is measured, and 0 before.

    `tee_peak_bytes`: largest resident set of the process. `pads`: None for a policy that uses none
    up, or whose pads no bank holds: a step makes those.
    """

    tee_peak_bytes: int = 0
    kv_bytes: int = 0
    vocabulary_bytes: int = 0
    pads: PadMaking | None = None


class PolicyRun(Finished):
    """All cases of one policy. `gpu_peak_bytes`: of its services together, where they are ours."""

    policy: str
    summary: str
    leakage_summary: str | None
    cases: tuple[Case, ...]
    generation: RequestTimes | None
    timelines: tuple[Timeline, ...]
    gpu_peak_bytes: int | None


class Baseline(Document):
    """Another way to do the same: `transformers`, `published`, `unmasked` (a GPU alone).

    `step_ms` is comparable with `overhead_ms` where `against` is "null", with `step_ms` otherwise.
    With `new_tokens` beyond 1: of decode the mean of a step, of prefill the whole request.
    """

    name: str
    description: str
    phase: Phase
    tokens: int
    new_tokens: int
    dtype: str
    against: Against
    step_ms: Spread
    round_trips: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class PingPong(Document):
    """Round trips of one payload each way. `ours`: as a Linear RPC; `raw`: the same frames."""

    transport: str
    payload_bytes: int
    kind: Literal["ours", "raw"]
    p50_us: float
    p90_us: float
    round_trips: int


class Setup(Document):
    """What was measured, and on what. `gpu_threads`: None where the services are not ours.

    Reports from before `spin_us`, `step_tokens` and `kernels` were noted were made with their
    defaults.
    """

    command: str
    created: str
    machine: dict[str, str | int]
    model: str
    num_hidden_layers: int
    dtype: str
    device: str
    transport: str
    link: str | None
    tee_threads: int
    gpu_threads: int | None
    spin_us: float = 0.0
    step_tokens: int = 512
    kernels: str = "torch"


class Report(Document):
    """The document. `incomplete`: why it lacks cases, None if it lacks none."""

    version: Literal[1] = 1
    setup: Setup
    policies: tuple[PolicyRun, ...]
    baselines: tuple[Baseline, ...]
    ping_pong: tuple[PingPong, ...]
    incomplete: str | None = None
