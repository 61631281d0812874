"""Measures one policy, in a process of its own: the TEE side as `tee-runner` puts it together.

Every case is timed without an observer, but for Embedding and LM head; where the time goes is
measured in further steps, with one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from operator import itemgetter, sub
from pathlib import Path
from typing import TypeAlias

from protocol.prepared import Exchange
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.model.batch import kv_bytes
from tee_side.observer import AnyOperator
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import Operator, Phase, Place
from tsqp.lab.bench.job import WARM_UP, Answer, BenchSettings, vocabulary_bytes
from tsqp.lab.bench.prepare import pad_dealing, pad_making
from tsqp.lab.bench.results import (
    STAGES,
    Case,
    Finished,
    OperatorCost,
    RequestTimes,
    Span,
    Spread,
    Stages,
    Timeline,
)
from tsqp.lab.measure import cpu_ns, elapsed_us, peak_bytes, random_ids, rounds

Step: TypeAlias = Callable[[], object]
Observed: TypeAlias = tuple[float, tuple[OperatorCost, ...], tuple[Span, ...]]
Site = tuple[AnyOperator, int | None]
# Process ids and endpoints; the id is 0 of a service that is not ours.
Services: TypeAlias = Sequence[tuple[int, str]]
_NS = 1e-3  # microseconds in a nanosecond
HEAVY: tuple[Operator, ...] = ("embedding", "lm_head")
# A case is run as often as the plan says, or until its time is over: to warm up, timed, observed.
_WARM_UP_S, _TIMED_S, _OBSERVED_S = 0.6, 5.0, 2.0
# A median of fewer says nothing of how far they differ.
_LEAST_TIMED = 2


def measure(
    given: BenchSettings,
    model: Path,
    name: str,
    services: Services = (),
    bank: Path | None = None,
) -> Iterator[Answer]:
    """Measure a policy by its name or path, and yield what it does and finds. Raises TsqpError.

    `bank`: its pads, None to make them on the way.
    """
    policy = load_policy(name)
    # What is measured here is no secret, and the services are our own: they prove nothing.
    policy = policy.model_copy(update={"service": ServiceTerms(attested="none")})
    settings = RunnerSettings(
        model=model,
        policy=policy,
        gpu=tuple(endpoint for _, endpoint in services[:1]),
        dealers=tuple(endpoint for _, endpoint in services[1:]),
        masks=MaskSettings(
            key=given.key if policy.feature_mask else None,
            bank=BankPlace.at(bank, beside_bank=True) if bank else None,
        ),
        dtype=given.dtype,
        kernels=given.kernels,
        threads=given.threads,
        engine=EngineSettings(step_tokens=given.step_tokens),
        micro_batches=given.micro_batches,
        spin_us=given.spin_us,
        link=given.link,
        # Services of its own get tokens drawn at random, which are no secret.
        dealer_in_the_clear=given.dealer_in_the_clear or not given.endpoints,
    )
    yield "loading"
    with Runner(settings) as runner:
        gc.collect()
        gc.freeze()  # as tee-runner does
        yield from _cases(runner, given, services)
        peak, itemsize = peak_bytes(), runner.dtype.itemsize
        cached, pads = given.plan.cached_tokens(given.step_tokens), None
        if bank or policy.dealt:
            yield "making pads"
            pads = (
                pad_making(model, policy, bank.parent)
                if bank
                else pad_dealing(policy, runner.pads[0])
            )
        yield Finished(
            tee_peak_bytes=peak,
            kv_bytes=kv_bytes(runner.config, cached, runner.dtype),
            vocabulary_bytes=vocabulary_bytes(runner.config, policy, itemsize),
            pads=pads,
        )


def prompt_step(runner: Runner, prompt: Sequence[int]) -> Step:
    """Return what runs a prompt up to its first token."""
    return lambda: list(runner.generate(prompt, max_new_tokens=1, with_text=False).steps())


def decode_step(
    closing: ExitStack, runner: Runner, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Step:
    """Return what decodes a token of each of some sequences, which have had their prompts."""
    engine = runner.engine
    running = [engine.add(prompt, max_new_tokens=new_tokens) for prompt in prompts]
    for sequence in running:
        closing.callback(engine.remove, sequence)
    while not all(sequence.token_ids for sequence in running):
        engine.step()
    return engine.step


def observed(
    runner: Runner, step: Step, most: int = 1, *, keep_spans: bool = False
) -> list[Observed]:
    """Run a step under an observer, so often or until the time is over.

    Returns of each run its time in us, what each operator cost, and its spans if they are kept.
    """
    collector = Collector(keep_spans=keep_spans)
    runner.observe(collector)
    runs: list[Observed] = []
    for _ in rounds(most, _OBSERVED_S):
        _stock_up(runner)
        collector.reset(time.perf_counter_ns())
        runs.append((elapsed_us(step), collector.costs(1), collector.spans()))
    runner.observe(None)
    return runs


def _stock_up(runner: Runner) -> None:
    """Have pads dealt before a step that is measured: a server has them dealt beside its steps."""
    for pads in runner.pads:
        if pads.dealing is not None:
            pads.stock_up()


def _cases(runner: Runner, given: BenchSettings, services: Services) -> Iterator[Answer]:
    """Run whole prompts, decode steps of sequences that have had theirs, and a request to its end.

    A timeline is of the longest prompt, and of the first kind of decode step.
    """
    plan, step_tokens = given.plan, given.step_tokens
    prompts: list[list[int]] = random_ids(
        runner.config.vocab_size, plan.longest(step_tokens), seed=0, sequences=plan.sequences
    ).tolist()
    for tokens in plan.prefill:
        yield f"prefill {tokens}"
        step = prompt_step(runner, prompts[0][:tokens])
        keep_spans = tokens == max(plan.prefill)
        yield from _case(runner, given, services, "prefill", tokens, 1, step, keep_spans)
    for context, batch in plan.decode:
        yield f"decode {batch} x {context}"
        new_tokens = plan.new_tokens(context, batch, step_tokens)
        keep_spans = (context, batch) == plan.decode[0]
        with ExitStack() as closing:
            own = [prompt[:context] for prompt in prompts[:batch]]
            step = decode_step(closing, runner, own, new_tokens)
            yield from _case(runner, given, services, "decode", context, batch, step, keep_spans)
    if plan.generation:
        tokens, new_tokens = plan.generation
        yield f"generating {new_tokens} tokens"
        running = runner.generate(prompts[0][:tokens], max_new_tokens=new_tokens, with_text=False)
        for _ in running.steps():
            pass
        timing = running.result().timing
        # As a client waits for it.
        yield RequestTimes(
            prompt_tokens=tokens,
            new_tokens=new_tokens,
            ttft_ms=timing.ttft_s * 1e3,
            tpot_ms=(timing.tpot_s or 0.0) * 1e3,
            total_ms=timing.total_s * 1e3,
        )


def _case(
    runner: Runner,
    given: BenchSettings,
    services: Services,
    phase: Phase,
    tokens: int,
    batch: int,
    work: Step,
    keep_spans: bool,
) -> Iterator[Case | Timeline]:
    for _ in rounds(WARM_UP, _WARM_UP_S):
        _stock_up(runner)
        work()
    repeats = given.plan.repeats if phase == "prefill" else given.plan.decode_steps
    pids = [0, *(pid for pid, _ in services if pid)]
    cpu = [0.0] * len(pids)
    traffic_before = runner.totals()
    times_ms: list[float] = []
    heavy_ms: list[float] = []
    heavy = Collector()
    runner.observe(heavy, HEAVY)
    for _ in rounds(repeats, _TIMED_S, least=_LEAST_TIMED):
        _stock_up(runner)
        heavy.reset(0)
        cpu_before = [cpu_ns(pid) for pid in pids]
        times_ms.append(elapsed_us(work) / 1e3)
        spent = zip(pids, cpu_before, cpu, strict=True)
        cpu = [so_far + (cpu_ns(pid) - before) / 1e6 for pid, before, so_far in spent]
        heavy_ms.append(sum(cost.stages.tee_us for cost in heavy.costs(1)) / 1e3)
    count = len(times_ms)
    tee, *gpu = [of_all / count for of_all in cpu]
    traffic = runner.totals()
    often = given.plan.observed(phase, count)
    runs = sorted(observed(runner, work, often, keep_spans=keep_spans), key=itemgetter(0))
    # The median one; of two in the middle the shorter.
    observed_us, costs, spans = runs[(len(runs) - 1) // 2]
    step_ms = Spread.of(times_ms)
    done = batch if phase == "decode" else tokens
    yield Case(
        phase=phase,
        tokens=tokens,
        batch=batch,
        micro_batches=given.micro_batches,
        step_ms=step_ms,
        heavy_ms=statistics.median(heavy_ms),
        overhead_ms=statistics.median(map(sub, times_ms, heavy_ms)),
        tokens_per_s=done / step_ms.median * 1e3,
        cpu_tee_ms=tee,
        cpu_gpu_ms=None if services and not gpu else sum(gpu),
        rpcs=(traffic.round_trips - traffic_before.round_trips) / count,
        bytes_sent=(traffic.bytes_sent - traffic_before.bytes_sent) / count,
        bytes_received=(traffic.bytes_received - traffic_before.bytes_received) / count,
        operators=costs,
        rest_us=observed_us - sum(cost.stages.total_us for cost in costs),
    )
    if spans:
        yield Timeline(phase=phase, tokens=tokens, batch=batch, spans=spans)


# ----------------------------------------------------------------------------------- observer


class Collector:
    """Adds up steps since `reset`. The operators of micro-batch 0 tell `collector(0)`, and so on.

    `keep_spans`: keep every piece of a step as well. See `tee_side.observer.Observer`.
    """

    def __init__(self, *, keep_spans: bool = False) -> None:
        self._keep_spans = keep_spans
        # Of each operator of each layer where it ran, its counts, and its nanoseconds by stage.
        self._places: dict[Site, Place] = {}
        self._sums: dict[Site, dict[str, float]] = defaultdict(
            partial(defaultdict[str, float], int)
        )
        # Of a piece what `Span` says; made into one later, as that takes time.
        self._pieces: list[tuple[int, Site, str, float, float]] = []
        self._lane = self._origin_ns = 0

    def __call__(self, index: int) -> Collector:
        """Return the observer of a micro-batch, which adds to the same sums."""
        made = copy(self)
        made._lane = index
        return made

    def reset(self, origin_ns: int) -> None:
        """Forget everything; spans are counted from this moment on."""
        self._origin_ns = origin_ns
        self._sums.clear()
        self._pieces.clear()

    def costs(self, steps: int) -> tuple[OperatorCost, ...]:
        """Return the mean of `steps` steps, in the order in which operators were first called."""
        return tuple(
            OperatorCost(
                operator=operator,
                layer=layer,
                place=self._places.get((operator, layer), "tee"),
                calls=sums["calls"] / steps,
                rpcs=sums["rpcs"] / steps,
                bytes_sent=sums["bytes_sent"] / steps,
                bytes_received=sums["bytes_received"] / steps,
                stages=Stages(**{name: _NS * sums[name] / steps for name in STAGES}),
            )
            for (operator, layer), sums in self._sums.items()
        )

    def spans(self) -> tuple[Span, ...]:
        """Return the pieces, by their start."""
        spans = [
            Span(
                lane=lane,
                operator=operator,
                layer=layer,
                stage=stage,
                start_us=_NS * (started_ns - self._origin_ns),
                duration_us=_NS * elapsed_ns,
            )
            for lane, (operator, layer), stage, started_ns, elapsed_ns in self._pieces
        ]
        return tuple(sorted(spans, key=lambda span: (span.start_us, span.lane)))

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        """Count a call."""
        self._places[operator, layer] = place
        self._sums[operator, layer]["calls"] += 1

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: str,
        started_ns: float,
        ended_ns: float,
    ) -> None:
        """Add to a stage, and keep a piece of the timeline, if they are to be kept."""
        elapsed_ns = ended_ns - started_ns
        self._sums[operator, layer][f"{stage}_us"] += elapsed_ns
        if self._keep_spans and elapsed_ns > 0:
            self._pieces.append((self._lane, (operator, layer), stage, started_ns, elapsed_ns))

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        """Add round trips, stage by stage."""
        sums = self._sums[operator, layer]
        for exchange in exchanges:
            sums["rpcs"] += 1
            sums["bytes_sent"] += exchange.bytes_sent
            sums["bytes_received"] += exchange.bytes_received
            sent_ns, received_ns = exchange.sent_ns, exchange.sent_ns + exchange.elapsed_ns
            self.spent(operator, layer, "encode", sent_ns - exchange.encode_ns, sent_ns)
            self.spent(operator, layer, "decode", received_ns, received_ns + exchange.decode_ns)
        # Requests side by side: the slowest is the time that they took.
        slowest = max(exchanges, key=lambda exchange: exchange.elapsed_ns)
        timing = slowest.timing
        # The service's clock is its own and its claims are not checked: they are made to fit.
        queue_ns = min(timing.queue_us * 1000 if timing else 0, slowest.elapsed_ns)
        gpu_ns = min(timing.compute_us * 1000 if timing else 0, slowest.elapsed_ns - queue_ns)
        # How the wire's time divides into there and back is not known: in halves.
        half_ns = (slowest.elapsed_ns - queue_ns - gpu_ns) / 2
        start_ns = float(slowest.sent_ns)
        for stage, spent_ns in (
            ("wire", half_ns),
            ("queue", queue_ns),
            ("gpu", gpu_ns),
            ("wire", half_ns),
        ):
            self.spent(operator, layer, stage, start_ns, start_ns + spent_ns)
            start_ns += spent_ns
