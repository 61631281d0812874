"""Measures one policy, in a process of its own: the TEE side as `tee-runner` puts it together.

Every case is timed without an observer, but for Embedding and LM head; where the time goes is
measured in further steps, with one.
"""

from __future__ import annotations

import gc
import operator
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

import torch

from protocol.model.config import ModelConfig
from tee_side.assembly import MaskSettings
from tee_side.engine.engine import EngineSettings
from tee_side.engine.generation import Generation as Running
from tee_side.policy.placement import ServiceTerms, load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import Operator, Phase
from tsqp.lab.bench.job import WARM_UP, Job
from tsqp.lab.bench.machine import cpu_ns, peak_bytes
from tsqp.lab.bench.memory import kv_bytes, vocabulary_bytes
from tsqp.lab.bench.model import (
    Case,
    Finished,
    Generation,
    OperatorCost,
    Span,
    Spread,
    Timeline,
)
from tsqp.lab.bench.pads import pad_making
from tsqp.lab.measure import Collector, Tell, rounds
from tsqp.run.link import Link

_Observed: TypeAlias = tuple[float, tuple[OperatorCost, ...], tuple[Span, ...]]
HEAVY: tuple[Operator, ...] = ("embedding", "lm_head")
# A case is run as often as the plan says, or until its time is over: to warm up, timed, observed.
_WARM_UP_S, _TIMED_S, _OBSERVED_S = 0.6, 5.0, 2.0
# A median of fewer says nothing of how far they differ.
_LEAST_TIMED = 2


def measure(job: Job, tell: Tell) -> None:
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


class _Cases:
    """The cases of one policy."""

    def __init__(self, runner: Runner, job: Job, tell: Tell) -> None:
        self._runner, self._job, self._tell = runner, job, tell
        self._settings, self._plan = job.settings, job.settings.plan
        self._prompts = _prompts(
            runner.config, self._plan.longest(self._settings.step_tokens), self._plan.sequences
        )

    def prefill(self, tokens: int, *, timeline: bool) -> None:
        """Run whole prompts of a length, up to the first token."""
        self._tell(f"prefill {tokens}")
        self._measure(
            "prefill", tokens, 1, lambda: self._prompt(tokens), self._plan.repeats, timeline
        )

    def decode(self, context: int, batch: int, *, timeline: bool) -> None:
        """Run decode steps of some sequences, each with so many tokens behind it."""
        self._tell(f"decode {batch} x {context}")
        plan = self._plan
        new_tokens = plan.new_tokens(context, batch, self._settings.step_tokens)
        running = [self._generate(index, context, new_tokens) for index in range(batch)]
        while any(one.token_count == 0 and not one.arrived for one in running):
            self._runner.step()
        self._measure("decode", context, batch, self._runner.step, plan.decode_steps, timeline)
        for one in running:
            one.close()

    def generation(self, prompt_tokens: int, new_tokens: int) -> None:
        """Run a request to its end, as a client waits for it."""
        self._tell(f"generating {new_tokens} tokens")
        running = self._generate(0, prompt_tokens, new_tokens)
        for _ in running.steps():
            pass
        timing = running.result().timing
        self._tell(
            Generation(
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                ttft_ms=timing.ttft_s * 1e3,
                tpot_ms=(timing.tpot_s or 0.0) * 1e3,
                total_ms=timing.total_s * 1e3,
            )
        )

    def _prompt(self, tokens: int) -> None:
        for _ in self._generate(0, tokens, 1).steps():
            pass

    def _generate(self, index: int, prompt_tokens: int, new_tokens: int) -> Running:
        return self._runner.generate(
            self._prompts[index][:prompt_tokens], max_new_tokens=new_tokens, with_text=False
        )

    def _measure(
        self,
        phase: Phase,
        tokens: int,
        batch: int,
        work: Callable[[], None],
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
            before = time.perf_counter_ns()
            heavy.reset(before)
            work()
            times_ms.append((time.perf_counter_ns() - before) / 1e6)
            spent_ns = (heavy.sums(name, None).stages.get("tee", 0) for name in HEAVY)
            heavy_ms.append(sum(spent_ns) / 1e6)
        count = len(times_ms)
        tee, *services = [
            (cpu_ns(pid) - before) / 1e6 / count
            for pid, before in zip(pids, cpu_before, strict=True)
        ]
        traffic = self._runner.traffic
        elapsed_us, costs, spans = self._observe(work, self._plan.observed(phase, count), timeline)
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
                overhead_ms=statistics.median(map(operator.sub, times_ms, heavy_ms)),
                tokens_per_s=done / step_ms.median * 1e3,
                cpu_tee_ms=tee,
                cpu_gpu_ms=None if self._job.endpoints and not services else sum(services),
                rpcs=(traffic.round_trips - traffic_before.round_trips) / count,
                bytes_sent=(traffic.bytes_sent - traffic_before.bytes_sent) / count,
                bytes_received=(traffic.bytes_received - traffic_before.bytes_received) / count,
                operators=costs,
                rest_us=elapsed_us - sum(cost.stages.total_us for cost in costs),
            )
        )
        if spans:
            self._tell(Timeline(phase=phase, tokens=tokens, batch=batch, spans=spans))

    def _observe(self, work: Callable[[], None], times: int, timeline: bool) -> _Observed:
        """Return the median one of some runs: its time in us, its costs, and its spans if kept."""
        collector = Collector(keep_spans=timeline)
        self._runner.observe(collector)
        runs: list[_Observed] = []
        for _ in rounds(times, _OBSERVED_S):
            before = time.perf_counter_ns()
            collector.reset(before)
            work()
            elapsed_us = (time.perf_counter_ns() - before) / 1e3
            runs.append((elapsed_us, collector.costs(1), collector.spans()))
        self._runner.observe(None)
        # Of two in the middle the shorter.
        return sorted(runs, key=operator.itemgetter(0))[(len(runs) - 1) // 2]


def _prompts(config: ModelConfig, tokens: int, count: int) -> list[list[int]]:
    """Return random token ids: what they say makes no difference to time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(
        0, config.vocab_size, (count, tokens), generator=generator
    ).tolist()
    return ids
