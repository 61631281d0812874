"""Measures what a few layers cost, in a process of its own: the TEE side of one policy."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache

import torch

from gpu_side.served_model import ServedModel
from gpu_side.tasks import RequestChecker
from protocol import native
from protocol.channel import Channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.messages import FUSED_MODULES
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.tensors import torch_dtype
from protocol.transport import open_channel
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.model.operators import MicroBatchOperators, load_tee_model
from tee_side.policy.placement import load_policy
from tee_side.protect.pads.bank_files import BankPlace
from tee_side.words import Phase
from tsqp.lab.bench.model import OperatorCost, PadMaking
from tsqp.lab.bench.prepare import pad_making
from tsqp.lab.bench.worker import Collector, random_prompts
from tsqp.lab.measure import rounds
from tsqp.lab.plan.costs import Costs, LayerJob, Step, as_in_layer
from tsqp.lab.plan.trace import Sections, Tracer, typical_lanes, with_round_trips

_WARM_UP = 2
_PROMPTS = 5
_DECODE_STEPS = 40
_OBSERVED = 6
# Repeats of a slow prompt end here, once there are a few.
_BUDGET_S = 3.0
_LEAST_PROMPTS = 3

Shares = dict[str, tuple[float, float]]
Lanes = Sequence[MicroBatchOperators]


# Tokens that a sequence decodes at most while it is measured: one more comes from its prompt.
DECODED = _DECODE_STEPS + _WARM_UP + 2


def pads_needed(phases: Collection[Phase], *, prompt_tokens: int, batch: int) -> int:
    """Return how many pads a run uses up at most, where these phases need any."""
    needed = 0
    if "prefill" in phases:
        # With all lanes and with one, each with a first run that is not counted, and observed.
        needed += 2 * (_PROMPTS + 2) * prompt_tokens + 3 * batch
    if "decode" in phases:
        needed += 3 * batch * DECODED
    return needed + 64


def measure(job: LayerJob) -> Costs:
    """Measure a job. Raises TsqpError."""
    with ExitStack() as closing:
        layers = _Layers(job, closing)
        gc.collect()
        gc.freeze()  # as tee-runner does
        prefill, decode = layers.prefill(), layers.decode()
        pads: PadMaking | None = None
        if job.bank:
            policy = as_in_layer(load_policy(job.policy), job.layer)
            pads = pad_making(job.model, policy, job.bank.with_name("timed"))
        return Costs(prefill, decode, pads)


class _Layers:
    """The engine as `tee_side.runner` puts it together, with events noted instead of observed."""

    def __init__(self, job: LayerJob, closing: ExitStack) -> None:
        self._settings = job.settings
        native.set_up(None, job.threads)
        policy = as_in_layer(load_policy(job.policy), job.layer)
        self._config = config = read_config(job.model)
        dtype = torch_dtype(job.settings.dtype or config.dtype)
        checkpoint = Checkpoint(job.model)
        self._model = load_tee_model(config, checkpoint, dtype)
        self._assembly = assembly = Assembly(
            policy,
            config,
            checkpoint,
            self._model,
            MaskSettings(bank=BankPlace.at(job.bank, beside_bank=True) if job.bank else None),
            step_tokens=job.settings.step_tokens,
        )
        closing.callback(assembly.close)
        spin_us = job.settings.spin_us
        self._channels: list[Channel] = [
            closing.enter_context(open_channel(endpoint, timeout_s=60.0, spin_us=spin_us))
            for endpoint in job.endpoints
        ]
        held = ServedModel(
            config=config,
            model_digest="",
            linear_digest="",
            provision=None,
            arithmetic=(policy.served_arithmetic,),
            norms={},
        )
        self._tracer = Tracer(RequestChecker(held, DEFAULT_MAX_MESSAGE_BYTES))
        self._lanes = [
            self._tracer.lane(
                index,
                self._channels,
                lambda channels: assembly.lanes(lambda _layer: channels)[0],
            )
            for index in range(job.settings.micro_batches)
        ]

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
        together, shares = self._steps(batch, self._lanes), self._decode_shares(batch)
        return _step(batch, together, lambda rows: self._steps(rows, self._lanes[:1]), shares)

    # -------------------------------------------------------------------------------- running

    def _engine(self, lanes: Lanes) -> Engine:
        settings = EngineSettings(step_tokens=self._settings.step_tokens)
        return Engine(self._model, lanes, settings)

    def _run_prompt(self, tokens: int, lanes: Lanes) -> list[Sections]:
        engine = self._engine(lanes)
        (prompt,) = random_prompts(self._config, tokens, 1)
        sequence = engine.add(prompt, max_new_tokens=1, eos_token_ids=frozenset())
        traces = []
        while sequence.finish_reason is None:
            traces.append(self._tracer.step(engine.step))
        return traces

    def _prompts(self, tokens: int, lanes: Lanes) -> list[list[Sections]]:
        self._run_prompt(tokens, lanes)
        counted = rounds(_PROMPTS, _BUDGET_S, least=_LEAST_PROMPTS)
        return [self._run_prompt(tokens, lanes) for _ in counted]

    def _started(self, batch: int, lanes: Lanes) -> Engine:
        """Return an engine of so many sequences that have had their prompts.

        But for the last token those are zeros in the cache: what is there makes no difference.
        """
        engine, config, context = self._engine(lanes), self._config, self._settings.context
        nothing = torch.zeros(
            context - 1, config.num_key_value_heads, config.head_dim, dtype=self._model.dtype
        )
        sequences = [
            engine.add(prompt, max_new_tokens=DECODED, eos_token_ids=frozenset())
            for prompt in random_prompts(config, context, batch)
        ]
        for sequence in sequences:
            for layer in range(config.num_hidden_layers):
                sequence.cache.append(layer, nothing, nothing)
            sequence.cache.commit(context - 1)
        while not all(sequence.token_ids for sequence in sequences):
            engine.step()
        return engine

    def _steps(self, batch: int, lanes: Lanes) -> list[Sections]:
        engine = self._started(batch, lanes)
        for _ in range(_WARM_UP):
            engine.step()
        return [self._tracer.step(engine.step) for _ in range(_DECODE_STEPS)]

    # ------------------------------------------------------------------------------- observed

    def _observed(self) -> tuple[Lanes, Collector]:
        """Return operators with an observer, whose events are not noted."""
        collector = Collector()
        lanes = self._assembly.lanes(
            lambda _layer: self._channels, collector, micro_batches=len(self._lanes)
        )
        return lanes, collector

    def _decode_shares(self, batch: int) -> Shares:
        engine = self._started(batch, self._lanes[:1])
        engine.lanes, collector = self._observed()
        for _ in range(_WARM_UP):
            engine.step()
        collector.reset(time.perf_counter_ns())
        for _ in range(_OBSERVED):
            engine.step()
        return _shares(collector.costs(_OBSERVED))


def _step(
    rows: int, runs: Sequence[Sections], alone: Callable[[int], list[Sections]], shares: Shares
) -> Step:
    """Return what is typical of a step. `alone`: runs a lane of so many rows without others."""
    lanes = typical_lanes(runs)
    if len(lanes) > 1:
        (undisturbed,) = typical_lanes(alone(rows // len(lanes)))
        lanes = [with_round_trips(lane, undisturbed) for lane in lanes]
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
