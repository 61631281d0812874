"""Plans: checks what is asked, measures a few layers of each policy, predicts, and prints that.

Everything is checked before anything is made or measured.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gpu_side.weights import check_columns
from protocol.errors import PolicyError, SettingsError
from protocol.model.config import ModelConfig
from protocol.tensors import ITEMSIZE
from tee_side.engine.step import MIN_MICRO_BATCH_ROWS
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.words import LAYERLESS, OPERATORS, PHASES, is_linear
from tsqp.lab.bench import prepare
from tsqp.lab.bench.job import (
    check_disk,
    check_memory,
    needs_linear,
    tee_parts,
)
from tsqp.lab.bench.results import PadMaking
from tsqp.lab.bench.shapes import Shape, shape_of
from tsqp.lab.measure import describe_machine, in_fresh_process
from tsqp.lab.plan.costs import (
    Costs,
    Instead,
    PlanReport,
    PlanSettings,
    PolicyPlan,
    Prediction,
    Several,
    Step,
    kernel_rates,
)
from tsqp.lab.plan.layers import DECODED, measure, pads_needed
from tsqp.lab.plan.predict import GLOO_GB_PER_S, GLOO_US, Hardware, crossover, predict, rpcs_of
from tsqp.leakage_summary import leakage_summary
from tsqp.run.bank import pad_layouts, product_operations
from tsqp.run.process import bytes_for_people
from tsqp.tables import definitions, table

# What a service has to beat; planned for beside whatever is asked.
BEST_ALONE = "tee-only-int8"
_TERMS = (
    ("TEE weights", "LM head, and linear layers that stay in the TEE"),
    ("TEE operators", "everything else computed there: attention, norms, sampling"),
    ("messages", "encoding and decoding, at both ends"),
    ("transport", "what handing messages over takes here beyond the link's own time"),
    ("link", "bandwidth: bytes both ways; latency: one round trip an RPC"),
    ("GPU", "kernels and copies on the accelerator described"),
)

# Of each kind: a first one, whose caches the LM head has emptied, and two that follow.
LAYERS = 3
# Weights that stay must not fit into a cache, or they would seem to be read faster than they are.
_KEPT_BYTES = 256 * 2**20


class Planning:
    """One plan. Raises SettingsError, PolicyError and ModelError before any work."""

    def __init__(self, settings: PlanSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._shape = shape_of(settings.model, settings.shape)
        self._config = config = self._shape.config()
        self._itemsize = ITEMSIZE[settings.dtype or config.dtype]
        self._threads = min(settings.cores, len(os.sched_getaffinity(0)))
        self._instead: Instead | None = None
        self._kinds = {name: _kinds(policy, config) for name, policy in settings.policies}
        check_columns(config, (0, settings.tensor_parallel), "--tensor-parallel")
        if (machine := settings.machine) is not None:
            SettingsError.unless(
                settings.cores <= len(machine.int8_gops),
                "--tee-cores",
                str(settings.cores),
                f"at most {len(machine.int8_gops)}, as measured",
            )
            SettingsError.unless(
                settings.transport in machine.transports,
                "--transport",
                settings.transport,
                f"of --machine: {', '.join(machine.transports) or 'none'}",
            )
        tokens = max(settings.prompt_tokens + 1, settings.context + DECODED)
        SettingsError.unless(
            tokens <= config.context_length,
            "--prompt-tokens, --context",
            f"sequences of up to {tokens} tokens while it is measured",
            f"at most {config.context_length}, the model's context",
        )
        needed = 0
        for name, policy in settings.policies:
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
                made = prepare.required_bytes(few, linear=needs_linear(alike, few))
                made += prepare.required_bytes(few, linear=False) if alike.verified else 0
                made += prepare.bank_bytes(
                    few, alike, pads_needed(alike, settings) + prepare.TIMED_PADS
                )
                needed = max(needed, made)
        check_disk(needed)

    def run(self) -> PlanReport:
        """Measure and predict. Raises TsqpError."""
        settings = self._settings
        if settings.machine is not None:
            self._say("measuring products, to compare them with the machine's")
            gops, gb_per_s = kernel_rates(sorted({1, self._threads}))
            machine, last = settings.machine, settings.cores - 1
            self._instead = Instead(
                alone=gops[0] / machine.int8_gops[0],
                shared=gops[-1] / machine.int8_gops[last],
                weights=gb_per_s[-1] / machine.gb_per_s[last],
                transport=machine.transports[settings.transport],
            )
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

    def _few_layers(self, policy: Policy, layer: int) -> tuple[Policy, Shape]:
        """Return a few layers like one of the whole model's: what places them, and their shape.

        Raises PolicyError for a policy that places nothing in the layer.
        """
        config = self._config
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
        policy = policy.model_copy(update={"operators": operators})
        count = LAYERS
        kept = sum(
            math.prod(config.row_layout(operator)[1])
            for _, operator in policy.sites_here(1)
            if is_linear(operator)
        ) * (self._itemsize if policy.arithmetic == "float" else 1)
        if kept:
            count = max(count, min(config.num_hidden_layers, -(-_KEPT_BYTES // kept)))
        # All of them look back as far as that layer does.
        named = {**self._shape.settings, "num_hidden_layers": count}
        named.pop("layer_types", None)
        window = config.sliding_windows[layer]
        if len(set(config.sliding_windows)) > 1:
            kind = "full_attention" if window is None else "sliding_attention"
            named["layer_types"] = [kind] * count
        elif window is None:
            named["sliding_window"] = None
        elif "use_sliding_window" in named:
            named["layer_types"] = ["sliding_attention"] * count
        if config.table.rope == "listed":
            named["no_rope_layers"] = [int(config.layer_ropes[layer] is not None)] * count
        return policy, replace(self._shape, settings=named)

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
        return PolicyPlan(
            policy=policy.name,
            summary=policy.summary,
            leakage_summary=leakage_summary(policy),
            prefill=prefill,
            decode=decode,
            ttft_ms=prefill.total_us / 1e3,
            tpot_ms=decode.total_us / 1e3,
            tokens_per_s_per_request=1e6 / decode.total_us,
            tokens_per_s=settings.batch * 1e6 / decode.total_us,
            sustained_tokens_per_s=settings.batch * 1e6 / (decode.total_us + made_us),
            pads=making,
            tee_memory_bytes=sum(
                tee_parts(
                    config,
                    policy,
                    tokens=max(settings.prompt_tokens, settings.context),
                    sequences=settings.batch,
                    itemsize=self._itemsize,
                    step_tokens=settings.step_tokens,
                ).values()
            ),
            assumptions=tuple(self._assumptions(policy, costs)),
            several=several,
        )

    def _costs(self, name: str, policy: Policy) -> Costs:
        """Measure every kind of layer that the policy makes of the model's."""
        settings, kinds = self._settings, self._kinds[name]
        different = sorted(set(kinds))
        measured: list[Costs] = []
        pads: PadMaking | None = None
        for layer in different:
            alike, shape = self._few_layers(policy, layer)
            few = shape.config()
            with tempfile.TemporaryDirectory(prefix="tsqp-plan-") as made, ExitStack() as running:
                folder = Path(made)
                self._say(f"{policy.name}: making {few.num_hidden_layers} layers of {shape.name}")
                linear = needs_linear(alike, few)
                model = in_fresh_process(
                    prepare.write_random_model, folder / "model", shape, linear
                )
                if alike.verified:
                    # Services answer with zeros, which is what these weights give.
                    model = in_fresh_process(prepare.write_hollow, model, folder / "hollow")
                bank = prepare.pad_bank(
                    model, alike, pads_needed(alike, settings), folder / "pads", zeros=True
                )
                self._say(f"{policy.name}: measuring them")
                services = prepare.start_services(running, policy, model, folder, settings)
                found = in_fresh_process(
                    measure,
                    replace(settings, policies=()),
                    alike,
                    model,
                    [endpoint for _, endpoint in services],
                    bank,
                    self._threads,
                    where=f"policy {policy.name}",
                )
            measured.append(found)
            if found.pads is not None and pads is None:
                # Of the whole model, at the rate of some layers' products.
                part, whole = (
                    sum(map(product_operations, pad_layouts(placed, config).values()))
                    for placed, config in ((alike, few), (policy, self._config))
                )
                more = whole / part
                pads = found.pads.scaled(token=more, cpu=more)
        return Costs(
            threads=self._threads,
            layers=self._few_layers(policy, different[0])[1].config().num_hidden_layers,
            order=[different.index(kind) for kind in kinds],
            prefill=[
                _with_kinds(steps) for steps in zip(*(one.prefill for one in measured), strict=True)
            ],
            decode=_with_kinds([one.decode for one in measured]),
            pads=pads,
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


def _kinds(policy: Policy, config: ModelConfig) -> list[int]:
    """Return for each layer the first one that is like it: placements and attention window."""
    policy.check(config.num_hidden_layers)

    def key(layer: int) -> object:
        placements = [
            policy.at(operator, layer, phase).model_copy(update={"layers": None})
            for operator in OPERATORS
            if operator not in LAYERLESS
            for phase in PHASES
        ]
        return repr(placements), config.sliding_windows[layer], config.layer_ropes[layer]

    keys = list(map(key, range(config.num_hidden_layers)))
    return list(map(keys.index, keys))


def _with_kinds(steps: Sequence[Step]) -> Step:
    """Return the first of some steps, with a layer of the kind of each."""
    together = zip(*(step.lanes for step in steps), strict=True)
    lanes = [[alike[0][0], *(layer for _, layer, _ in alike), alike[0][-1]] for alike in together]
    return Step(steps[0].rows, lanes)


# ------------------------------------------------------------------------------------ listing


def show(report: PlanReport, console: Console) -> None:
    """Print a report: what each policy would reach, part by part."""
    link = "no link between them"
    if report.link_gbps is not None or report.link_rtt_us > 0:
        rate = "any" if report.link_gbps is None else f"{report.link_gbps:g}"
        link = f"a link of {rate} Gbit/s with {report.link_rtt_us:g} us round trip"
    console.print(
        f"{report.model}: {report.num_hidden_layers} layers, {report.dtype};"
        f" TEE with {report.tee_cores} cores, accelerator {report.gpu}, {link};"
        f" micro-batches: {report.micro_batches}"
    )
    console.print()
    console.print(definitions(_TERMS))
    for found in report.policies:
        console.print()
        console.print(f"policy {found.policy}: {found.summary}")
        console.print(found.leakage_summary or f"policy {found.policy}: nothing leaves the TEE")
        console.print()
        console.print(definitions(_figures(found, report)))
        console.print()
        console.print(
            _parts(f"Up to the first token of a prompt of {report.prompt_tokens}", found.prefill)
        )
        together = "one sequence" if report.batch == 1 else f"{report.batch} sequences together"
        step = f"One decode step of {together}, context {report.context}"
        console.print(_parts(step, found.decode))
        console.print("Assumed:")
        console.print(definitions([("  -", line) for line in found.assumptions]))


def _figures(found: PolicyPlan, report: PlanReport) -> Iterator[tuple[str, str]]:
    rate = f"{found.tokens_per_s_per_request:.1f} tokens/s"
    if report.batch > 1:
        rate += f" a sequence, {found.tokens_per_s:.1f} of all {report.batch} together"
    yield "time to first token", f"{_ms(found.prefill.total_us)} ms{_held_back(found.prefill)}"
    yield "decode", f"{rate}, {_ms(found.decode.total_us)} ms a step{_held_back(found.decode)}"
    if (several := found.several) is not None:
        decode = several.tpot_alone_ms / found.tpot_ms
        prefill = several.ttft_alone_ms / found.ttft_ms
        text = f"decode {decode:.2f} times as fast as with one accelerator; first token"
        yield f"--tensor-parallel {report.tensor_parallel}", f"{text} {prefill:.2f}"
        for when, where in (("decode", several.decode), ("prompt", several.prefill)):
            if where is not None:
                least, largest = map(
                    bytes_for_people, (where.weight_bytes or 0, where.largest_bytes)
                )
                pays = "no weight" if where.weight_bytes is None else f"weights from {least}"
                yield f"pays, {when}", f"for {pays}; the largest that leaves has {largest}"
    if found.pads is not None:
        rate = f"{found.sustained_tokens_per_s:.1f} tokens/s of all together"
        made = f"{found.pads.token_ms:.2f} ms to make a token's pads"
        yield "sustained", f"{rate}; {made}, on the same cores after the step that uses them"
    (alone,) = (one for one in report.policies if one.policy == BEST_ALONE)
    if alone is not found:
        decode = alone.tpot_ms / found.tpot_ms
        sustained = found.sustained_tokens_per_s / alone.sustained_tokens_per_s
        text = f"decode {decode:.2f} times as fast, {sustained:.2f} sustained; first token"
        yield f"beside {BEST_ALONE}", f"{text} {alone.ttft_ms / found.ttft_ms:.2f}"
    yield "TEE memory", f"about {bytes_for_people(found.tee_memory_bytes)}"


def _held_back(found: Prediction) -> str:
    return f"; bottleneck: {found.bottleneck}" if found.bottleneck else ""


def _parts(title: str, found: Prediction) -> Table:
    numbers = ("ms", "share", "without it, ms", "times as fast")
    rows = [
        (
            part.name + (" (bottleneck)" if part.name == found.bottleneck else ""),
            _ms(part.busy_us),
            f"{part.busy_us / found.total_us:.0%}",
            _ms(part.without_us),
            f"{found.total_us / part.without_us:.2f}" if part.without_us > 0 else "-",
        )
        for part in found.parts
        if part.busy_us > 0
    ]
    traffic = (
        f"{_ms(found.total_us)} ms, {found.rpcs} RPCs, {found.bytes_sent:,} bytes up,"
        f" {found.bytes_received:,} down"
    )
    return table(
        f"{title}: {traffic}", [("part", False), *((name, True) for name in numbers)], rows
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 1e4 else f"{us / 1e3:.2f}"
