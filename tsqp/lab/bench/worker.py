"""Measures one policy, in a process of its own: the TEE side as `tee-runner` puts it together.

Every case is timed without an observer, but for Embedding and LM head; where the time goes is
measured in further steps, with one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from operator import itemgetter, sub
from typing import TypeAlias

import torch

from protocol.model.config import ModelConfig
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import Operator, Phase
from tsqp.lab.bench.job import WARM_UP, PolicyJob
from tsqp.lab.bench.machine import cpu_ns, peak_bytes
from tsqp.lab.bench.memory import kv_bytes, vocabulary_bytes
from tsqp.lab.bench.model import (
    Case,
    Finished,
    OperatorCost,
    RequestTimes,
    Span,
    Spread,
    Timeline,
)
from tsqp.lab.bench.prepare import pad_making
from tsqp.lab.measure import Collector, Tell, elapsed_us, rounds
from tsqp.run.link import Link

Step: TypeAlias = Callable[[], object]
Observed: TypeAlias = tuple[float, tuple[OperatorCost, ...], tuple[Span, ...]]
HEAVY: tuple[Operator, ...] = ("embedding", "lm_head")
# A case is run as often as the plan says, or until its time is over: to warm up, timed, observed.
_WARM_UP_S, _TIMED_S, _OBSERVED_S = 0.6, 5.0, 2.0
# A median of fewer says nothing of how far they differ.
_LEAST_TIMED = 2


def measure(job: PolicyJob, tell: Tell) -> None:
    """Measure a job, and tell `Answer`s. Raises TsqpError."""
    given, policy = job.settings, load_policy(job.policy)
    # What is measured here is no secret, and the services are our own: they prove nothing.
    policy = policy.model_copy(update={"service": ServiceTerms(attested="none")})
    settings = RunnerSettings(
        model=job.model,
        policy=policy,
        gpu=job.endpoints,
        masks=MaskSettings(
            key=given.key if policy.feature_mask else None,
            bank=BankPlace.at(job.bank, beside_bank=True) if job.bank else None,
        ),
        dtype=given.dtype,
        kernels=given.kernels,
        threads=given.threads,
        engine=EngineSettings(step_tokens=given.step_tokens),
        micro_batches=given.micro_batches,
        spin_us=given.spin_us,
        link=Link.of(given.link_gbps, given.link_rtt_us),
        # Services of its own get tokens drawn at random, which are no secret.
        shares_in_the_clear=given.shares_in_the_clear or not given.endpoints,
    )
    tell("loading")
    with Runner(settings) as runner:
        gc.collect()
        gc.freeze()  # as tee-runner does
        cases = _Cases(runner, job, tell)
        plan = given.plan
        for tokens in plan.prefill:
            cases.prefill(tokens, timeline=tokens == max(plan.prefill))
        for context, batch in plan.decode:
            cases.decode(context, batch, timeline=(context, batch) == plan.decode[0])
        if plan.generation:
            cases.generation(*plan.generation)
        peak, itemsize = peak_bytes(), runner.dtype.itemsize
        cached, pads = plan.cached_tokens(given.step_tokens), None
        if job.bank:
            tell("making pads")
            pads = pad_making(job.model, policy, job.bank.with_name(f"{job.bank.name}-timed"))
        tell(
            Finished(
                tee_peak_bytes=peak,
                kv_bytes=kv_bytes(runner.config, tokens=cached, itemsize=itemsize),
                vocabulary_bytes=vocabulary_bytes(runner.config, policy, itemsize),
                pads=pads,
            )
        )


def random_prompts(config: ModelConfig, tokens: int, count: int) -> list[list[int]]:
    """Return random token ids: what they say makes no difference to time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(
        0, config.vocab_size, (count, tokens), generator=generator
    ).tolist()
    return ids


def prompt_step(runner: Runner, prompt: Sequence[int]) -> Step:
    """Return what runs a prompt up to its first token."""
    return lambda: list(runner.generate(prompt, max_new_tokens=1, with_text=False).steps())


def decode_step(
    closing: ExitStack, runner: Runner, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Step:
    """Return what decodes a token of each of some sequences, which have had their prompts."""
    running = [
        runner.generate(prompt, max_new_tokens=new_tokens, with_text=False) for prompt in prompts
    ]
    for one in running:
        closing.callback(one.close)
    while not all(one.arrived for one in running):
        runner.step()
    return runner.step


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
        collector.reset(time.perf_counter_ns())
        runs.append((elapsed_us(step), collector.costs(1), collector.spans()))
    runner.observe(None)
    return runs


class _Cases:
    """The cases of one policy."""

    def __init__(self, runner: Runner, job: PolicyJob, tell: Tell) -> None:
        self._runner, self._job, self._tell = runner, job, tell
        self._settings, self._plan = job.settings, job.settings.plan
        longest = self._plan.longest(self._settings.step_tokens)
        self._prompts = random_prompts(runner.config, longest, self._plan.sequences)

    def prefill(self, tokens: int, *, timeline: bool) -> None:
        """Run whole prompts of a length, up to the first token."""
        self._tell(f"prefill {tokens}")
        step = prompt_step(self._runner, self._prompts[0][:tokens])
        self._measure("prefill", tokens, 1, step, self._plan.repeats, timeline)

    def decode(self, context: int, batch: int, *, timeline: bool) -> None:
        """Run decode steps of some sequences, each with so many tokens behind it."""
        self._tell(f"decode {batch} x {context}")
        new_tokens = self._plan.new_tokens(context, batch, self._settings.step_tokens)
        prompts = [prompt[:context] for prompt in self._prompts[:batch]]
        with ExitStack() as closing:
            step = decode_step(closing, self._runner, prompts, new_tokens)
            self._measure("decode", context, batch, step, self._plan.decode_steps, timeline)

    def generation(self, prompt_tokens: int, new_tokens: int) -> None:
        """Run a request to its end, as a client waits for it."""
        self._tell(f"generating {new_tokens} tokens")
        prompt = self._prompts[0][:prompt_tokens]
        running = self._runner.generate(prompt, max_new_tokens=new_tokens, with_text=False)
        for _ in running.steps():
            pass
        timing = running.result().timing
        self._tell(
            RequestTimes(
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                ttft_ms=timing.ttft_s * 1e3,
                tpot_ms=(timing.tpot_s or 0.0) * 1e3,
                total_ms=timing.total_s * 1e3,
            )
        )

    def _measure(
        self,
        phase: Phase,
        tokens: int,
        batch: int,
        work: Step,
        repeats: int,
        timeline: bool,
    ) -> None:
        for _ in rounds(WARM_UP, _WARM_UP_S):
            work()
        pids: tuple[int | str, ...] = ("self", *self._job.service_pids)
        cpu_before = [cpu_ns(pid) for pid in pids]
        traffic_before = self._runner.traffic
        times_ms: list[float] = []
        heavy_ms: list[float] = []
        heavy = Collector()
        self._runner.observe(heavy, HEAVY)
        for _ in rounds(repeats, _TIMED_S, least=_LEAST_TIMED):
            heavy.reset(0)
            times_ms.append(elapsed_us(work) / 1e3)
            spent_ns = (heavy.sums(name, None).stages.get("tee", 0) for name in HEAVY)
            heavy_ms.append(sum(spent_ns) / 1e6)
        count = len(times_ms)
        tee, *services = [
            (cpu_ns(pid) - before) / 1e6 / count
            for pid, before in zip(pids, cpu_before, strict=True)
        ]
        traffic = self._runner.traffic
        often = self._plan.observed(phase, count)
        runs = sorted(observed(self._runner, work, often, keep_spans=timeline), key=itemgetter(0))
        # The median one; of two in the middle the shorter.
        observed_us, costs, spans = runs[(len(runs) - 1) // 2]
        step_ms = Spread.of(times_ms)
        done = batch if phase == "decode" else tokens
        self._tell(
            Case(
                phase=phase,
                tokens=tokens,
                batch=batch,
                micro_batches=self._settings.micro_batches,
                step_ms=step_ms,
                heavy_ms=statistics.median(heavy_ms),
                overhead_ms=statistics.median(map(sub, times_ms, heavy_ms)),
                tokens_per_s=done / step_ms.median * 1e3,
                cpu_tee_ms=tee,
                cpu_gpu_ms=None if self._job.endpoints and not services else sum(services),
                rpcs=(traffic.round_trips - traffic_before.round_trips) / count,
                bytes_sent=(traffic.bytes_sent - traffic_before.bytes_sent) / count,
                bytes_received=(traffic.bytes_received - traffic_before.bytes_received) / count,
                operators=costs,
                rest_us=observed_us - sum(cost.stages.total_us for cost in costs),
            )
        )
        if spans:
            self._tell(Timeline(phase=phase, tokens=tokens, batch=batch, spans=spans))
