"""What a few layers and a machine were measured to cost, and what is predicted from it.

Times are microseconds unless a name says otherwise, sizes are bytes.

`tsqp plan --fit FILE` measures a machine: how fast its kernels are, what a round trip takes, and
its accelerator. `tsqp plan --machine FILE` plans for it. On the machine that plans, the layers of a
model are measured as ever; what FILE says replaces the rest:

- work in the TEE takes as much longer as FILE's kernels are slower than those here, of one thread
  for what one thread does, and of as many threads as are planned for otherwise;
- a round trip takes `rtt_us` and its bytes' time, whatever it takes here;
- the accelerator is the one that was measured, where there was one.
"""

from __future__ import annotations

import json
import timeit
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import torch
from pydantic import BaseModel, Field

from gpu_side.devices import DeviceProfile, Microseconds, Rate
from gpu_side.tasks import Task
from protocol import native
from protocol.errors import SettingsError
from protocol.integer import empty_weight, int8_product, ring_product
from protocol.model.weights import CPU
from protocol.validation import validate_file
from tee_side.policy.placement import Policy
from tsqp.lab.bench.job import Measuring
from tsqp.lab.bench.ping_pong import ping_pong
from tsqp.lab.bench.results import Document, PadMaking, PingPong
from tsqp.link import Link

# The names that `--transport` has, and those of the ping-pong.
TRANSPORTS = {"tcp": "zeromq-tcp", "ipc": "zeromq-ipc", "unix": "unix", "shm": "shm"}
# A weight that no cache holds, and rows for which arithmetic counts, or reading it.
_OUT, _IN, _ROWS = 16_384, 8_192, 256
_REPEATS = 9
_SQUARE = 4096

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


class Transport(Document):
    """A round trip of `size` bytes, both ways together, takes `rtt_us` + size / `gb_per_s`.

    As a Linear RPC, from tensor to tensor, of a service that computes nothing: `rtt_us` is what
    launching a request takes.
    """

    rtt_us: Microseconds
    gb_per_s: Rate

    def us(self, size: int) -> float:
        """Return the time of a round trip in microseconds."""
        return self.rtt_us + size / (self.gb_per_s * 1e3)


class Machine(Document):
    """What was measured. `int8_gops`, `gb_per_s`: with 1, 2, ... threads.

    `int8_gops`: 10^9 operations a second of products of hundreds of rows; `gb_per_s`: 10^9 bytes a
    second of a weight that a product of one row reads. `spin_us`: of both ends of round trips.
    `gpu`: None where none was measured.
    """

    kernels: str
    spin_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    int8_gops: Annotated[tuple[Rate, ...], Field(min_length=1)]
    gb_per_s: Annotated[tuple[Rate, ...], Field(min_length=1)]
    transports: dict[str, Transport]
    gpu: DeviceProfile | None = None

    def toml(self) -> str:
        """Return the file's text."""
        lines = [
            f"{name} = {json.dumps(value)}"
            for name, value in self.model_dump(exclude={"transports", "gpu"}).items()
        ]
        tables: dict[str, BaseModel] = {f"transports.{k}": v for k, v in self.transports.items()}
        if self.gpu is not None:
            tables["gpu"] = self.gpu
        for name, table in tables.items():
            values = table.model_dump().items()
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Instead:
    """What replaces measurements here: factors of the TEE's times, and the transport.

    `alone`: for work of one thread; `shared`: of all threads; `weights`: for reading weights.
    """

    alone: float
    shared: float
    weights: float
    transport: Transport


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


# ------------------------------------------------------------------------------------ measuring one


def read_machine(path: Path) -> Machine:
    """Read what `--fit` wrote. Raises SettingsError."""
    where, expected = str(path), "what tsqp plan --fit wrote"
    with SettingsError.for_os(where, expected):
        text = path.read_bytes()
    with SettingsError.instead_of((ValueError, RecursionError), where, "no TOML", expected):
        content = tomllib.loads(text.decode())
    return validate_file(Machine, content, where, SettingsError)


def fit_machine(
    cores: int, spin_us: float, device: str | None, say: Callable[[str], None]
) -> Machine:
    """Measure this machine: some 20 seconds. Raises ProcessError, SettingsError."""
    say("measuring products")
    gops, gb_per_s = kernel_rates(range(1, cores + 1))
    say("measuring round trips")
    transports = fit_transports(ping_pong(spin_us))
    if device is not None:
        say(f"measuring {device}")
    return Machine(
        kernels=native.choice().variant,
        spin_us=spin_us,
        int8_gops=gops,
        gb_per_s=gb_per_s,
        transports=transports,
        gpu=None if device is None else fit_gpu(torch.device(device)),
    )


def kernel_rates(threads: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return `int8_gops` and `gb_per_s` of this process with each number of threads."""
    weight = empty_weight(_OUT, _IN, CPU)
    weight.fill_(1)
    many, one = (torch.ones(rows, _IN, dtype=torch.int32) for rows in (_ROWS, 1))
    gops, rates = [], []
    before = torch.get_num_threads()
    for count in threads:
        native.set_up(None, count)
        product_s = _fastest_s(lambda: ring_product(many, weight, 1))
        gops.append(2.0 * _ROWS * _OUT * _IN / product_s / 1e9)
        rates.append(weight.numel() / _fastest_s(lambda: ring_product(one, weight, 1)) / 1e9)
    native.set_up(None, before)
    return tuple(gops), tuple(rates)


def fit_transports(found: Sequence[PingPong]) -> dict[str, Transport]:
    """Return the line through the smallest and the largest round trip of each transport."""
    made = {}
    for name, measured in TRANSPORTS.items():
        ours = [one for one in found if (one.transport, one.kind) == (measured, "ours")]
        if len(ours) > 1:
            small, *_, large = sorted(ours, key=lambda one: one.payload_bytes)
            more_us = max(large.p50_us - small.p50_us, 1e-3)
            gb_per_s = 2 * (large.payload_bytes - small.payload_bytes) / more_us / 1e3
            rtt_us = max(0.0, small.p50_us - 2 * small.payload_bytes / (gb_per_s * 1e3))
            made[name] = Transport(rtt_us=rtt_us, gb_per_s=gb_per_s)
    return made


def fit_gpu(device: torch.device) -> DeviceProfile:
    """Measure launches, products, memory and copies of a device, as `DeviceProfile` has them."""
    empty = torch.zeros(1, device=device)
    a = torch.zeros(_SQUARE, _SQUARE, dtype=torch.bfloat16, device=device)
    digits = torch.zeros(_SQUARE, _SQUARE, dtype=torch.int8, device=device)
    host = torch.zeros(_SQUARE, _SQUARE, dtype=torch.bfloat16, pin_memory=device.type == "cuda")

    def clock() -> float:
        torch.get_device_module(device).synchronize(device)
        return timeit.default_timer()

    timed_s = partial(_fastest_s, clock=clock)
    products, moved_gb = 2.0 * _SQUARE**3, a.nbytes / 1e9
    return DeviceProfile(
        name="measured",
        launch_us=timed_s(lambda: empty.add_(1)) * 1e6,
        tflops=products / timed_s(lambda: a @ a) / 1e12,
        int8_tops=products / timed_s(lambda: int8_product(digits, digits)) / 1e12,
        # Read and written.
        gb_per_s=2 * moved_gb / timed_s(lambda: a.add_(0)),
        pcie_gb_per_s=moved_gb / timed_s(lambda: a.copy_(host)),
    )


def _fastest_s(
    work: Callable[[], object], clock: Callable[[], float] = timeit.default_timer
) -> float:
    """Return the shortest of some runs: what the machine can do, whatever else it was doing."""
    work()
    return min(timeit.repeat(work, timer=clock, repeat=_REPEATS, number=1))
