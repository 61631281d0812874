"""Measures what a few layers cost, in a process of its own: the TEE side of one policy.

What is noted is what a step asks of services and where its layers begin: far less than by an
observer of every operator, so that what is timed is what runs without it. One thread does all of
the TEE's work, so the time between two events belongs to one lane: to the one that was resumed, or
after a request to the one whose turn is next.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeAlias, cast

import torch

from gpu_side.tasks import Computed, RequestChecker, Task
from gpu_side.weights import ServedModel
from protocol import native
from protocol.channel import Channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import TsqpError
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.forward import Norm
from protocol.prepared import Exchange, Payload, PreparedRequest
from protocol.tensors import torch_dtype
from protocol.transport import open_channel
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.model.operators import MicroBatchOperators, load_tee_model
from tee_side.policy.placement import Policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.protect.pads.source import Pads
from tsqp.lab.bench.job import pad_phases
from tsqp.lab.bench.prepare import pad_dealing, pad_making
from tsqp.lab.bench.results import OperatorCost, PadMaking
from tsqp.lab.bench.worker import Collector
from tsqp.lab.measure import random_ids, rounds
from tsqp.lab.plan.costs import (
    RPC_TIMES,
    Costs,
    LaneCost,
    PlanSettings,
    Rpc,
    Section,
    Step,
    Stretch,
)
from tsqp.link import WrappedChannel

_WARM_UP = 2
_PROMPTS = 5
_DECODE_STEPS = 40
_OBSERVED = 6
# Repeats of a slow prompt end here, once there are a few.
_BUDGET_S = 3.0
_LEAST_PROMPTS = 3

Shares = dict[str, tuple[float, float]]
Lanes = Sequence[MicroBatchOperators]
_US = 1e-3  # microseconds in a nanosecond
# Of the measured values of a section, on either side: a hiccup is no cost of it.
_TRIMMED = 0.1


# Tokens that a sequence decodes at most while it is measured: one more comes from its prompt.
DECODED = _DECODE_STEPS + _WARM_UP + 2


def pads_needed(policy: Policy, settings: PlanSettings) -> int:
    """Return how many pads a run uses up at most, where the policy needs any."""
    phases, batch, needed = pad_phases(policy), settings.batch, 0
    if "prefill" in phases:
        # With all lanes and with one, each with a first run that is not counted, and observed.
        needed += 2 * (_PROMPTS + 2) * settings.prompt_tokens + 3 * batch
    if "decode" in phases:
        needed += 3 * batch * DECODED
    return needed + 64


def measure(
    settings: PlanSettings,
    policy: Policy,
    model: Path,
    endpoints: Sequence[str],
    bank: Path | None,
    threads: int,
) -> Costs:
    """Measure a policy on a model of which all layers are alike. Raises TsqpError.

    `endpoints`: of its services; `bank`: its pads, where it uses some up.
    """
    native.set_up(None, threads)
    with ExitStack() as closing:
        layers = _Layers(settings, policy, model, endpoints, bank, closing)
        gc.collect()
        gc.freeze()  # as tee-runner does
        return Costs(
            layers.prefill(),
            layers.decode(),
            layers.pads(model, policy, bank),
        )


class _Layers:
    """The engine as `tee_side.runner` puts it together, with events noted instead of observed."""

    def __init__(
        self,
        settings: PlanSettings,
        policy: Policy,
        model: Path,
        endpoints: Sequence[str],
        bank: Path | None,
        closing: ExitStack,
    ) -> None:
        self._settings = settings
        self._config, checkpoint = config, _ = Checkpoint.open(model)
        dtype = torch_dtype(settings.dtype or config.dtype)
        self._model = load_tee_model(config, checkpoint, dtype)
        self._assembly = assembly = Assembly(
            policy,
            config,
            checkpoint,
            self._model,
            MaskSettings(bank=BankPlace.at(bank, beside_bank=True) if bank else None),
            step_tokens=settings.step_tokens,
        )
        closing.callback(assembly.close)
        self._channels: list[Channel] = [
            closing.enter_context(open_channel(endpoint, timeout_s=60.0, spin_us=settings.spin_us))
            for endpoint in endpoints
        ]
        held = ServedModel(
            config=config,
            model_digest="",
            linear_digest="",
            provision=None,
            arithmetic=(policy.served_arithmetic,),
            norms={},
        )
        self._engine = partial(
            Engine, self._model, settings=EngineSettings(step_tokens=settings.step_tokens)
        )
        self._tracer = Tracer(RequestChecker(held, DEFAULT_MAX_MESSAGE_BYTES))
        self._lanes = [
            self._tracer.lane(index, self._channels, assembly)
            for index in range(settings.micro_batches)
        ]

    def pads(self, model: Path, policy: Policy, bank: Path | None) -> PadMaking | None:
        """Measure the making of pads, where the policy needs any."""
        if dealt := self._dealt:
            return pad_dealing(policy, dealt[0])
        return pad_making(model, policy, bank.parent) if bank else None

    @property
    def _dealt(self) -> list[Pads]:
        return [pads for pads in self._assembly.pads.values() if pads.dealing is not None]

    # --------------------------------------------------------------------------------- phases

    def prefill(self) -> list[Step]:
        """Measure the steps of a prompt, up to its first token."""
        tokens, step_tokens = self._settings.prompt_tokens, self._settings.step_tokens
        together = self._prompts(tokens, self._lanes)
        observed, collector = self._observed()
        self._run_prompt(tokens, observed)
        shares = _shares(collector.costs(1))

        @cache
        def alone(rows: int) -> list[Sections]:
            return [run[0] for run in self._prompts(rows, self._lanes[:1])]

        return [
            _step(min(step_tokens, tokens - start), runs, alone, shares)
            for start, *runs in zip(range(0, tokens, step_tokens), *together, strict=True)
        ]

    def decode(self) -> Step:
        """Measure a decode step of all sequences."""
        batch = self._settings.batch
        together = self._steps(batch, self._lanes)
        observed, collector = self._observed()
        engine = self._started(batch, observed)
        collector.reset(time.perf_counter_ns())
        for _ in range(_OBSERVED):
            engine.step()
        shares = _shares(collector.costs(_OBSERVED))
        return _step(batch, together, lambda rows: self._steps(rows, self._lanes[:1]), shares)

    # -------------------------------------------------------------------------------- running

    def _run_prompt(self, tokens: int, lanes: Lanes) -> list[Sections]:
        engine = self._engine(lanes)
        (prompt,) = random_ids(self._config.vocab_size, tokens, seed=0).tolist()
        sequence = engine.add(prompt, max_new_tokens=1, eos_token_ids=frozenset())
        traces = []
        while sequence.finish_reason is None:
            traces.append(self._step(engine))
        return traces

    def _step(self, engine: Engine) -> Sections:
        """Run a step, whose pads have been dealt before, where dealers multiply them."""
        for pads in self._dealt:
            pads.stock_up()
        return self._tracer.step(engine.step)

    def _prompts(self, tokens: int, lanes: Lanes) -> list[list[Sections]]:
        self._run_prompt(tokens, lanes)
        return [
            self._run_prompt(tokens, lanes)
            for _ in rounds(_PROMPTS, _BUDGET_S, least=_LEAST_PROMPTS)
        ]

    def _started(self, batch: int, lanes: Lanes) -> Engine:
        """Return an engine of so many sequences that have had their prompts and some steps.

        But for the last token those are zeros in the cache: what is there makes no difference.
        """
        engine, config, context = self._engine(lanes), self._config, self._settings.context
        sequences = [
            engine.add(prompt, max_new_tokens=DECODED, eos_token_ids=frozenset())
            for prompt in random_ids(config.vocab_size, context, seed=0, sequences=batch).tolist()
        ]
        for sequence in sequences:
            for memory in sequence.cache.memory:
                memory.zero_()  # so that it is there
            sequence.cache.commit(context - 1)
        while not all(sequence.token_ids for sequence in sequences):
            engine.step()
        for _ in range(_WARM_UP):
            engine.step()
        return engine

    def _steps(self, batch: int, lanes: Lanes) -> list[Sections]:
        engine = self._started(batch, lanes)
        return [self._step(engine) for _ in range(_DECODE_STEPS)]

    # ------------------------------------------------------------------------------- observed

    def _observed(self) -> tuple[Lanes, Collector]:
        """Return operators with an observer, whose events are not noted."""
        collector = Collector()
        return self._assembly.lanes(
            lambda _layer: self._channels, collector, micro_batches=len(self._lanes)
        ), collector


def _step(
    rows: int, runs: Sequence[Sections], alone: Callable[[int], list[Sections]], shares: Shares
) -> Step:
    """Return what is typical of a step. `alone`: runs a lane of so many rows without others."""
    lanes = typical_lanes(runs)
    if len(lanes) > 1:
        (undisturbed,) = typical_lanes(alone(rows // len(lanes)))
        lanes = [[*map(with_round_trips, lane, undisturbed)] for lane in lanes]
    for lane in lanes:
        for name, section in zip(("head", "layer", "tail"), lane, strict=True):
            section.mask_share, section.product_share = shares.get(name, (0.0, 0.0))
    return Step(rows, lanes)


def _shares(costs: tuple[OperatorCost, ...]) -> Shares:
    """Return for each section which share of its work is for masks, and for kept weights."""
    work, masks, products = (defaultdict[str, float](float) for _ in range(3))
    for cost in costs:
        section = "layer"
        if cost.layer is None:
            section = "head" if cost.operator == "embedding" else "tail"
        stages = cost.stages
        hiding = stages.mask_us + stages.unmask_us + stages.verify_us
        work[section] += hiding + stages.tee_us
        masks[section] += hiding
        if cost.place == "tee" and (cost.operator in FUSED_MODULES or cost.operator == "lm_head"):
            products[section] += stages.tee_us
    return {
        section: (masks[section] / total, products[section] / total)
        for section, total in work.items()
        if total > 0
    }


# ------------------------------------------------------------------------------------- events


# A lane did something, or came by, between two pieces of its work: "asked" where a request was
# handed over, the round trip where its reply is there, the layer that begins, and None past the
# last layer.
Happened: TypeAlias = "Rpc | int | Literal['asked'] | None"
# Of each lane of a step its sections by name: "head", the numbers of layers, and "tail", which a
# lane may lack.
Sections: TypeAlias = "list[dict[str | int, Section]]"


class Tracer:
    """Collects the events of one step after the other. `checker`: as a service has one."""

    def __init__(self, checker: RequestChecker) -> None:
        self.checker = checker
        # Of each event its lane, and when it began and had been written down here.
        self._events: list[tuple[int, int, int, Happened]] = []

    def note(self, lane: int, start_ns: int, what: Happened) -> None:
        """Keep an event that ends now."""
        self._events.append((lane, start_ns, time.perf_counter_ns(), what))

    def step(self, work: Callable[[], object]) -> Sections:
        """Run a step, and return what the sections of each lane cost."""
        self._events = []
        resumed_ns = time.perf_counter_ns()
        work()
        end_ns = time.perf_counter_ns()
        found: dict[int, dict[str | int, Section]] = {}
        under_way = Counter[int]()
        several = len({lane for lane, *_ in self._events}) > 1

        def current(lane: int) -> Section:
            sections = found.setdefault(lane, {"head": Section()})
            return sections[next(reversed(sections))]

        owner: int | None = None
        for came_by, start_ns, noted_ns, what in self._events:
            lane = came_by if owner is None else owner
            section, gap_us = current(lane), (start_ns - resumed_ns) * _US
            if under_way[lane] and what == "asked" and came_by == lane:
                # The next of several requests that are sent side by side.
                section.segments[-1].work_us += gap_us
            else:
                section.after_us += gap_us
            resumed_ns, owner = noted_ns, came_by
            section = current(owner)
            if what == "asked":
                if not under_way[owner]:
                    section.segments.append(Stretch(section.after_us))
                    section.after_us = 0.0
                under_way[owner] += 1
                owner = None
            elif isinstance(what, Rpc):
                # A lane that runs alone does nothing while it waits: all of that is the wire's.
                rpc = what if several else replace(what, receive_us=0.0)
                section.segments[-1].rpcs.append(rpc)
                under_way[owner] -= 1
            else:
                found[owner]["tail" if what is None else what] = Section()
        # What it asked for last has been answered by then, if it asked at all.
        current(owner or 0).after_us += (end_ns - resumed_ns) * _US
        return [sections for _, sections in sorted(found.items())]

    def lane(
        self, index: int, channels: Sequence[Channel], assembly: Assembly
    ) -> MicroBatchOperators:
        """Return the operators of a lane, whose events are noted.

        Its model has norms that say where a layer begins, and where the last ended.
        """

        def marked(layer: int | None, norm: Norm) -> Norm:
            def call(h: torch.Tensor) -> torch.Tensor:
                self.note(index, time.perf_counter_ns(), layer)
                return norm(h)

            return call

        noted: list[Channel] = [
            _NotedChannel(channel, self, index, number) for number, channel in enumerate(channels)
        ]
        made = assembly.lanes(lambda _layer: noted)[0]
        marking = replace(made.model)
        marking.norm = marked(None, made.model.norm)
        marking.layers = tuple(
            replace(layer, attention_norm=marked(layer.index, layer.attention_norm))
            for layer in made.model.layers
        )
        return replace(made, model=marking)


class _NotedChannel(WrappedChannel):
    """A `Channel` that says when it was used."""

    def __init__(self, channel: Channel, tracer: Tracer, lane: int, service: int) -> None:
        super().__init__(channel)
        self._tracer, self._lane, self._service = tracer, lane, service
        # Of requests under way: when they began and ended to be handed over, and what they ask for.
        self._asked: dict[int, tuple[int, int, Task]] = {}

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        start_ns = time.perf_counter_ns()
        request_id = self._channel.start(prepared, payload, timeout_s)
        end_ns = time.perf_counter_ns()
        # The request itself is not kept: its memory would not be used again.
        task = self._tracer.checker.check(cast("Computed", prepared.request(payload)))
        self._asked[request_id] = start_ns, end_ns, task
        self._tracer.note(self._lane, start_ns, "asked")
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        start_ns = time.perf_counter_ns()
        exchange = self._channel.wait(request_id)
        end_ns = time.perf_counter_ns()
        encoding_ns, submitted_ns, task = self._asked.pop(request_id)
        arrived_ns = exchange.sent_ns + exchange.elapsed_ns
        send_ns = submitted_ns - exchange.sent_ns
        timing = exchange.timing
        service_ns = 0 if timing is None else (timing.queue_us + timing.compute_us) * 1000
        rpc = Rpc(
            service=self._service,
            asked=task,
            bytes_sent=exchange.bytes_sent,
            bytes_received=exchange.bytes_received,
            encode_us=(exchange.sent_ns - encoding_ns) * _US,
            send_us=max(0, send_ns) * _US,
            wire_us=max(0, exchange.elapsed_ns - service_ns - send_ns) * _US,
            service_us=service_ns * _US,
            receive_us=max(0, arrived_ns - start_ns) * _US,
            decode_us=(end_ns - arrived_ns) * _US,
        )
        self._tracer.note(self._lane, start_ns, rpc)
        return exchange


# ----------------------------------------------------------------------------------- sections


def typical_lanes(runs: Sequence[Sections]) -> list[LaneCost]:
    """Return what is typical of several runs of the same step, lane by lane.

    A lane's layers are put together: they are all of one kind.
    """
    return [
        [
            typical([run[index]["head"] for run in runs]),
            typical([s for run in runs for name, s in run[index].items() if isinstance(name, int)]),
            typical([run[index].get("tail", Section()) for run in runs]),
        ]
        for index in range(len(runs[0]))
    ]


def typical(sections: Sequence[Section]) -> Section:
    """Return the section of which each piece is the median of what was measured.

    Pieces are then stretched so that together they take the trimmed mean of the whole: a median
    of each forgets what makes now one piece slow and now another. Raises TsqpError if the sections
    have not the same RPCs.
    """
    shapes = {tuple(len(one.rpcs) for one in section.segments) for section in sections}
    TsqpError.unless(len(shapes) == 1, "tsqp plan", f"layers with {len(shapes)} patterns", "one")
    alike = zip(*(section.segments for section in sections), strict=True)
    made = Section(
        [
            Stretch(
                statistics.median(one.work_us for one in segments),
                [_typical_rpc(rpcs) for rpcs in zip(*(one.rpcs for one in segments), strict=True)],
            )
            for segments in alike
        ],
        statistics.median(section.after_us for section in sections),
    )
    totals, total_us = sorted(section.total_us for section in sections), made.total_us
    cut = int(len(totals) * _TRIMMED)
    mean_us = statistics.fmean(totals[cut : len(totals) - cut])
    factor = mean_us / total_us if total_us > 0 else 1.0
    stretched = (
        Stretch(one.work_us * factor, [rpc.stretched(factor) for rpc in one.rpcs])
        for one in made.segments
    )
    return Section([*stretched], made.after_us * factor)


def _typical_rpc(rpcs: Sequence[Rpc]) -> Rpc:
    times = {name: statistics.median([getattr(rpc, name) for rpc in rpcs]) for name in RPC_TIMES}
    # What it asks for in the last of the measured steps: contexts grow.
    return replace(rpcs[-1], **times)


def with_round_trips(section: Section, alone: Section) -> Section:
    """Return a lane's section with the round trips of one that ran without others beside it."""
    # A lane without output rows has no tail.
    if not section.segments:
        return section

    def merge(rpc: Rpc, other: Rpc) -> Rpc:
        receive_us = min(rpc.receive_us, other.wire_us)
        wire_us, service_us = other.wire_us - receive_us, other.service_us
        return replace(rpc, receive_us=receive_us, wire_us=wire_us, service_us=service_us)

    merged = [
        Stretch(here.work_us, [merge(*both) for both in zip(here.rpcs, there.rpcs, strict=True)])
        for here, there in zip(section.segments, alone.segments, strict=True)
    ]
    return replace(section, segments=merged)
