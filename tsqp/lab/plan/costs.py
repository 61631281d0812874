"""What a few layers were measured to cost, what is predicted from it.

Times are microseconds unless a name says otherwise, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias, get_args

from gpu_side.devices import DeviceProfile
from gpu_side.tasks import Task
from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import Measuring
from tsqp.lab.bench.model import Document, PadMaking
from tsqp.lab.plan.fit import Machine
from tsqp.link import Link

PartName = Literal[
    "TEE weights",
    "TEE operators",
    "masks and checks",
    "messages",
    "transport",
    "link bandwidth",
    "link latency",
    "GPU",
]
PARTS: tuple[PartName, ...] = get_args(PartName)


@dataclass(frozen=True)
class Rpc:
    """One round trip to a service that computes nothing, for what `asked` says.

    `encode_us`, `send_us`, `receive_us` and `decode_us` occupy the TEE; `service_us` is the
    service's own handling, as it claims; `wire_us` is what is left of the round trip. A prediction
    adds `gpu_us`, and `up_us` and `down_us` to put it on a link.
    """

    service: int
    asked: Task
    bytes_sent: int = 0
    bytes_received: int = 0
    encode_us: float = 0.0
    send_us: float = 0.0
    wire_us: float = 0.0
    service_us: float = 0.0
    receive_us: float = 0.0
    decode_us: float = 0.0
    gpu_us: float = 0.0
    up_us: float = 0.0
    down_us: float = 0.0

    @property
    def total_us(self) -> float:
        """From before it is encoded until its reply is decoded."""
        return sum((getattr(self, name) for name in RPC_TIMES), start=0.0)

    def stretched(self, factor: float) -> Rpc:
        """Return it with `factor` times as long for everything."""
        return replace(self, **{name: getattr(self, name) * factor for name in RPC_TIMES})


RPC_TIMES = tuple(one.name for one in fields(Rpc) if one.name.endswith("_us"))


@dataclass
class Stretch:
    """Work in the TEE, and the RPCs that it ends with: one, or one a service side by side."""

    work_us: float
    rpcs: list[Rpc] = field(default_factory=list)


@dataclass
class Section:
    """A part of a forward pass: what comes before the layers, one layer, or what comes after.

    `after_us`: work behind its last reply. Of all its work, `mask_share` masks, unmasks and checks,
    and `product_share` multiplies by a weight that stays in the TEE.
    """

    segments: list[Stretch] = field(default_factory=list)
    after_us: float = 0.0
    mask_share: float = 0.0
    product_share: float = 0.0

    @property
    def total_us(self) -> float:
        """All work in the TEE, and all round trips."""
        return self.after_us + sum(
            segment.work_us + sum(rpc.total_us for rpc in segment.rpcs) for segment in self.segments
        )


# One micro-batch of a step: what comes before the layers, one for each kind of layer, and the rest.
LaneCost: TypeAlias = Sequence[Section]


@dataclass(frozen=True)
class Step:
    """One step of the engine: `rows` tokens, in as many lanes as it has micro-batches."""

    rows: int
    lanes: Sequence[LaneCost]


@dataclass(frozen=True)
class Costs:
    """What was measured: the steps of one prompt, a decode step, and the making of pads, if any.

    Of a whole model, `pads` are all of its pads, and `order` says which of the kinds of layers each
    layer is. `threads`: of the TEE side; `layers`: how many were measured, of each kind.
    """

    prefill: Sequence[Step]
    decode: Step
    pads: PadMaking | None = None
    threads: int = 1
    layers: int = 1
    order: Sequence[int] = ()


@dataclass(frozen=True)
class PlanSettings(Measuring):
    """What `tsqp plan` is asked.

    `policies`: with the name or path that each was given by. Of `model` only config.json is read.
    `cores`: of the TEE side; `transport`: over which a round trip is measured on this machine, or
    was on `machine` (None: this one). `prompt_tokens`: of the prompt; `context`: behind each token
    that is decoded, of `batch` sequences together. `tensor_parallel`: ranks of each service.
    """

    policies: tuple[tuple[str, Policy], ...]
    profile: DeviceProfile
    link: Link
    cores: int
    prompt_tokens: int = 128
    context: int = 128
    batch: int = 1
    machine: Machine | None = None
    tensor_parallel: int = 1


class PartCost(Document):
    """What one part of a step takes, and how long the whole would take if it cost nothing.

    Where micro-batches overlap, parts add up to more than the whole.
    """

    name: PartName
    busy_us: float
    without_us: float


class Prediction(Document):
    """A prompt up to its first token, or one decode step of all sequences together.

    `bottleneck`: the part without which it would be shortest; None if it takes no time.
    """

    total_us: float
    rpcs: int
    bytes_sent: int
    bytes_received: int
    parts: tuple[PartCost, ...]
    bottleneck: PartName | None


class Crossover(Document):
    """Of a product's weight: the size from which several accelerators are faster than one.

    `weight_bytes`: None where they never are. `largest_bytes`: of the model's weights that leave.
    """

    weight_bytes: int | None
    largest_bytes: int


class Several(Document):
    """What more than one accelerator changes. `tpot_alone_ms`, `ttft_alone_ms`: with one.

    `decode`, `prefill`: where it pays; None where no product with a weight leaves.
    """

    tpot_alone_ms: float
    ttft_alone_ms: float
    decode: Crossover | None
    prefill: Crossover | None


class PolicyPlan(Document):
    """What is predicted for one policy. `assumptions`: what is neither measured nor described.

    `pads`: what making them takes; `sustained_tokens_per_s`: of all sequences, where they are made
    on the same cores, after each step. Both as on so many cores. `several`: None for one
    accelerator, or where nothing leaves.
    """

    policy: str
    summary: str
    leakage_summary: str | None
    prefill: Prediction
    decode: Prediction
    ttft_ms: float
    tpot_ms: float
    tokens_per_s_per_request: float
    tokens_per_s: float
    sustained_tokens_per_s: float
    pads: PadMaking | None
    tee_memory_bytes: int
    assumptions: tuple[str, ...]
    several: Several | None = None


class PlanReport(Document):
    """All that `tsqp plan` says."""

    version: Literal[1] = 1
    machine: dict[str, str | int]
    model: str
    num_hidden_layers: int
    dtype: str
    gpu: str
    transport: str
    link_gbps: float | None
    link_rtt_us: float
    tee_cores: int
    measured_threads: int
    prompt_tokens: int
    context: int
    batch: int
    micro_batches: int
    tensor_parallel: int = 1
    policies: tuple[PolicyPlan, ...]
