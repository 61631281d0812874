"""Plans: checks what is asked for, measures a few layers of each policy, and predicts the whole.

Everything is checked before anything is made or measured.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_side.served_model import check_columns
from protocol.errors import PolicyError, SettingsError
from protocol.model.config import ModelConfig
from protocol.tensors import ITEMSIZE
from tee_side.engine.step import MIN_MICRO_BATCH_ROWS
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.words import LAYERLESS, OPERATORS, PHASES, is_linear
from tsqp.lab.bench import prepare
from tsqp.lab.bench.memory import check_disk, check_memory, tee_parts
from tsqp.lab.bench.model import PadMaking
from tsqp.lab.bench.shapes import Shape, shape_of
from tsqp.lab.measure import describe_machine, in_fresh_process
from tsqp.lab.plan.costs import (
    Costs,
    PlanReport,
    PlanSettings,
    PolicyPlan,
    Several,
    Step,
)
from tsqp.lab.plan.fit import Instead, kernel_rates
from tsqp.lab.plan.layers import DECODED, measure, pads_needed
from tsqp.lab.plan.predict import GLOO_GB_PER_S, GLOO_US, Hardware, crossover, predict, rpcs_of
from tsqp.run.trust import product_operations

# Of each kind: a first one, whose caches the LM head has emptied, and two that follow.
LAYERS = 3
# Weights that stay must not fit into a cache, or they would seem to be read faster than they are.
_KEPT_BYTES = 256 * 2**20

Say = Callable[[str], None]


class Planning:
    """One plan. Raises SettingsError, PolicyError and ModelError before any work."""

    def __init__(self, settings: PlanSettings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._shape = shape_of(settings.model, settings.shape)
        self._config = config = self._shape.config()
        self._itemsize = ITEMSIZE[settings.dtype or config.dtype]
        self._threads = min(settings.cores, len(os.sched_getaffinity(0)))
        self._instead: Instead | None = None
        self._kinds = {name: _kinds(policy, config) for name, policy in settings.policies}
        self._check()

    def run(self) -> PlanReport:
        """Measure and predict. Raises TsqpError."""
        settings = self._settings
        if settings.machine is not None:
            self._say("measuring products, to compare them with the machine's")
            here = kernel_rates(sorted({1, self._threads}))
            self._instead = settings.machine.beside(here, settings.cores, settings.transport)
        return PlanReport(
            machine=describe_machine(),
            model=self._shape.name,
            num_hidden_layers=self._config.num_hidden_layers,
            dtype=settings.dtype or self._config.dtype,
            gpu=settings.profile.name,
            transport=settings.transport,
            link_gbps=settings.link.gbps,
            link_rtt_us=settings.link.rtt_us,
            tee_cores=settings.cores,
            measured_threads=self._threads,
            prompt_tokens=settings.prompt_tokens,
            context=settings.context,
            batch=settings.batch,
            micro_batches=settings.micro_batches,
            tensor_parallel=settings.tensor_parallel,
            policies=tuple(self._plan(name, policy) for name, policy in settings.policies),
        )

    # ------------------------------------------------------------------------- before any work

    def _check(self) -> None:
        settings, config = self._settings, self._config
        check_columns(config, (0, settings.tensor_parallel), "--tensor-parallel")
        if settings.machine is not None:  # what it lacks
            settings.machine.beside(((1.0,), (1.0,)), settings.cores, settings.transport)
        tokens = max(settings.prompt_tokens + 1, settings.context + DECODED)
        SettingsError.unless(
            tokens <= config.context_length,
            "--prompt-tokens, --context",
            f"sequences of up to {tokens} tokens while it is measured",
            f"at most {config.context_length}, the model's context",
        )
        needed = 0
        for name, policy in settings.policies:
            policy.check(config.num_hidden_layers)
            SettingsError.unless(
                not policy.segments(config.num_hidden_layers),
                f"policy {policy.name}",
                "segments",
                "a policy without: tsqp bench --device model:PROFILE measures segments",
            )
            SettingsError.unless(
                policy.feature_mask is None,
                f"policy {policy.name}",
                f"the feature mask {policy.feature_mask and policy.feature_mask.name}",
                "a policy without one: its service needs a directory that tsqp"
                " provision wrote; measure it with tsqp bench MODEL --server-model DIR",
            )
            for layer in set(self._kinds[name]):
                alike, shape = self._few_layers(policy, layer)
                few = shape.config()
                check_memory(
                    few,
                    [alike],
                    device=settings.device,
                    services=policy.services,
                    sequences=settings.batch,
                    tokens=tokens,
                    itemsize=self._itemsize,
                    step_tokens=settings.step_tokens,
                )
                made = prepare.required_bytes(few, linear=prepare.needs_linear(alike, few))
                made += prepare.required_bytes(few, linear=False) if alike.verified else 0
                made += prepare.bank_bytes(few, alike, self._pads(alike) + prepare.TIMED_PADS)
                needed = max(needed, made)
        check_disk(needed)

    def _pads(self, policy: Policy) -> int:
        settings, phases = self._settings, prepare.pad_phases(policy)
        return pads_needed(phases, prompt_tokens=settings.prompt_tokens, batch=settings.batch)

    def _few_layers(self, policy: Policy, layer: int) -> tuple[Policy, Shape]:
        """Return a few layers like one of the whole model's: what places them, and their shape."""
        config, policy = self._config, _as_in_layer(policy, layer)
        count = LAYERS
        kept = sum(
            math.prod(config.row_layout(operator)[1])
            for _, operator in policy.sites_here(1)
            if is_linear(operator)
        ) * (self._itemsize if policy.arithmetic == "float" else 1)
        if kept:
            count = max(count, min(config.num_hidden_layers, -(-_KEPT_BYTES // kept)))
        shape = self._shape.with_layers(count)
        return policy, replace(shape, settings=_alike(shape.settings, config, layer, count))

    # --------------------------------------------------------------------------------- the run

    def _plan(self, name: str, policy: Policy) -> PolicyPlan:
        settings, config = self._settings, self._config
        costs = self._costs(name, policy)
        hardware = Hardware(
            *(settings.profile, settings.link, settings.cores, self._itemsize, self._instead),
            settings.tensor_parallel,
        )
        prefill = predict(costs.prefill, costs, hardware)
        decode = predict([costs.decode], costs, hardware)
        making, made_us = costs.pads, 0.0
        if making is not None:
            instead = self._instead
            faster = costs.threads / settings.cores if instead is None else instead.shared
            making = making.scaled(token=faster)
            made_us = making.token_ms * 1e3 * settings.batch * ("decode" in making.phases)
        several: Several | None = None
        if policy.services and hardware.ranks > 1:
            alone = replace(hardware, ranks=1)
            several = Several(
                tpot_alone_ms=predict([costs.decode], costs, alone).total_us / 1e3,
                ttft_alone_ms=predict(costs.prefill, costs, alone).total_us / 1e3,
                decode=crossover(hardware, rpcs_of(costs.decode, costs.order)),
                prefill=crossover(hardware, rpcs_of(costs.prefill[0], costs.order)),
            )
        memory = tee_parts(
            config,
            policy,
            tokens=max(settings.prompt_tokens, settings.context),
            sequences=settings.batch,
            itemsize=self._itemsize,
            step_tokens=settings.step_tokens,
        )
        return PolicyPlan(
            policy=policy.name,
            summary=policy.summary,
            leakage_summary=policy.leakage_summary(),
            prefill=prefill,
            decode=decode,
            ttft_ms=prefill.total_us / 1e3,
            tpot_ms=decode.total_us / 1e3,
            tokens_per_s_per_request=1e6 / decode.total_us,
            tokens_per_s=settings.batch * 1e6 / decode.total_us,
            sustained_tokens_per_s=settings.batch * 1e6 / (decode.total_us + made_us),
            pads=making,
            tee_memory_bytes=sum(memory.values()),
            assumptions=tuple(self._assumptions(policy, costs)),
            several=several,
        )

    def _costs(self, name: str, policy: Policy) -> Costs:
        """Measure every kind of layer that the policy makes of the model's."""
        kinds = self._kinds[name]
        different = sorted(set(kinds))
        measured: list[Costs] = []
        pads: PadMaking | None = None
        for layer in different:
            with tempfile.TemporaryDirectory(prefix="tsqp-plan-") as folder:
                found = self._measure(Path(folder), policy, layer)
            measured.append(found)
            if found.pads is not None and pads is None:
                # Of the whole model, at the rate of some layers' products.
                alike, few = self._few_layers(policy, layer)
                part = _pad_operations(alike, few.config())
                more = _pad_operations(policy, self._config) / part
                pads = found.pads.scaled(token=more, cpu=more)
        _, few = self._few_layers(policy, different[0])
        return Costs(
            threads=self._threads,
            layers=few.config().num_hidden_layers,
            order=[different.index(kind) for kind in kinds],
            prefill=[
                _with_kinds(steps) for steps in zip(*(one.prefill for one in measured), strict=True)
            ],
            decode=_with_kinds([one.decode for one in measured]),
            pads=pads,
        )

    def _measure(self, folder: Path, policy: Policy, layer: int) -> Costs:
        settings = self._settings
        alike, shape = self._few_layers(policy, layer)
        config = shape.config()
        self._say(f"{policy.name}: making {config.num_hidden_layers} layers of {shape.name}")
        linear = prepare.needs_linear(alike, config)
        model = prepare.random_model(folder / "model", shape, linear=linear)
        if alike.arithmetic == "int8":
            model = prepare.calibration(model, folder)
        if alike.verified:
            # Services answer with zeros, which is what these weights give.
            model = prepare.hollow(model, folder)
        bank = prepare.pad_bank(model, alike, self._pads(alike), folder / "pads", zeros=True)
        self._say(f"{policy.name}: measuring them")
        with ExitStack() as running:
            services = prepare.start_services(running, policy, model, folder, settings)
            return in_fresh_process(
                measure,
                replace(settings, policies=()),
                alike,
                model,
                [endpoint for _, endpoint in services],
                bank,
                self._threads,
                where=f"policy {policy.name}",
            )

    def _assumptions(self, policy: Policy, costs: Costs) -> Iterator[str]:
        settings = self._settings
        measured = f"measured on {costs.layers} layers with {costs.threads} threads"
        if settings.machine is not None:
            yield f"work of the TEE is slower or faster than here as products are; {measured}"
            yield "round trips as the machine's file has them, of a client that does nothing else"
        else:
            yield f"the TEE's processor is as fast as this machine's; {measured}"
            if settings.cores > self._threads:
                yield (
                    f"{settings.cores} cores, {self._threads} of which are here: weights that stay,"
                    f" and all TEE work in steps of more than a few rows, are assumed to be"
                    f" {settings.cores / self._threads:g} times as fast; this is not measured"
                )
        if policy.services:
            yield f"accelerator {settings.profile.name} as described: peak rates, so a lower bound"
            yield (
                "a link without loss or congestion, laid over this machine's"
                f" {settings.transport} round trips: the longer of both counts"
            )
            if settings.tensor_parallel > 1:
                yield (
                    f"a request goes to the other accelerators in {GLOO_US:g} us and at"
                    f" {GLOO_GB_PER_S:g} GB/s (gloo, measured on 2 EPYC cores), and results come"
                    " back at the described rate to the host; other work of their processors is"
                    " not counted"
                )
        if any(isinstance(mask, AdditiveMask) for mask in policy.masks):
            yield "pads are made ahead; making them is counted in the sustained rate only"
        if settings.micro_batches > 1 and settings.batch < 2 * MIN_MICRO_BATCH_ROWS:
            yield f"{settings.batch} sequences are too few to decode in micro-batches"


def _as_in_layer(policy: Policy, layer: int) -> Policy:
    """Return a policy that does in every layer what `policy` does in one. Raises PolicyError."""
    operators = {
        operator: tuple(
            placement.model_copy(update={"layers": None})
            for placement in placements
            if placement.layers is None or layer in placement.layers
        )
        for operator, placements in policy.operators.items()
    }
    PolicyError.unless(
        all(operators.values()),
        f"policy {policy.name}",
        f"nothing for layer {layer}",
        "placements",
    )
    return policy.model_copy(update={"operators": operators})


def _kinds(policy: Policy, config: ModelConfig) -> list[int]:
    """Return for each layer the first one that is like it: placements and attention window."""
    first: dict[object, int] = {}
    kinds = []
    policy.check(config.num_hidden_layers)
    for layer in range(config.num_hidden_layers):
        placements = [
            policy.at(operator, layer, phase).model_copy(update={"layers": None})
            for operator in OPERATORS
            if operator not in LAYERLESS
            for phase in PHASES
        ]
        key = (repr(placements), config.sliding_windows[layer])
        kinds.append(first.setdefault(key, layer))
    return kinds


def _alike(
    settings: Mapping[str, Any], config: ModelConfig, layer: int, count: int
) -> dict[str, Any]:
    """Return settings of a model whose layers all look back as far as one of the whole model's."""
    named = dict(settings)
    named.pop("layer_types", None)
    if len(set(config.sliding_windows)) > 1:
        kind = "full_attention" if config.sliding_windows[layer] is None else "sliding_attention"
        named["layer_types"] = [kind] * count
    elif config.sliding_windows[0] is None:
        named["sliding_window"] = None
    elif "use_sliding_window" in named:
        named["layer_types"] = ["sliding_attention"] * count
    return named


def _pad_operations(policy: Policy, config: ModelConfig) -> int:
    """Return the int8 multiplications and additions behind one token's pads."""
    return sum(map(product_operations, prepare.pad_layouts(policy, config).values()))


def _with_kinds(steps: Sequence[Step]) -> Step:
    """Return the first of some steps, with a layer of the kind of each."""
    together = zip(*(step.lanes for step in steps), strict=True)
    lanes = [[alike[0][0], *(layer for _, layer, _ in alike), alike[0][-1]] for alike in together]
    return Step(steps[0].rows, lanes)
