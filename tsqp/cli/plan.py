"""`tsqp plan`: what a deployment would reach, and what holds it back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from protocol.messages import MAX_RANKS
from tsqp.cli.config import CONTEXT, THREADS, config_option, model_argument
from tsqp.cli.gpu_service import without_columns
from tsqp.cli.lab_options import OutputFile, Outputs, complete_shape
from tsqp.cli.options import use
from tsqp.run.process import EXIT_FAILURE
from tsqp.run.settings import DEFAULT_POLICY, model_directory
from tsqp.tables import definitions, open_console, table

if TYPE_CHECKING:
    from rich.table import Table

    from tsqp.lab.plan.costs import Crossover, PlanReport, PolicyPlan, Prediction
    from tsqp.run.link import Link

# What a service has to beat; planned for beside whatever is asked.
_BEST_ALONE = "tee-only-int8"
_TERMS = (
    ("TEE weights", "LM head, and linear layers that stay in the TEE"),
    ("TEE operators", "everything else computed there: attention, norms, sampling"),
    ("messages", "encoding and decoding, at both ends"),
    ("transport", "what handing messages over takes here beyond the link's own time"),
    ("link", "bandwidth: bytes both ways; latency: one round trip an RPC"),
    ("GPU", "kernels and copies on the accelerator described"),
)


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@click.option(
    "--shape",
    metavar="NAME",
    shell_complete=complete_shape,
    help="In place of MODEL: the shape of a known one; nothing is downloaded.",
)
@click.option(
    "--gpu",
    allow_from_autoenv=False,  # elsewhere it is an endpoint
    metavar="PROFILE",
    help="The accelerator: a name such as h100, or a TOML file that describes one. Default: that of"
    " --machine.",
)
@click.option(
    "--machine",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Plan for the machine that --fit measured, not for this one.",
)
@click.option(
    "--fit",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Only measure this machine, without a model, and write FILE for --machine: int8 products"
    " and memory by threads, round trips and bytes of every transport, and --device.",
)
@click.option(
    "--device",
    metavar="cuda",
    help="With --fit: also this accelerator's launches, products, memory and copies.",
)
@click.option("--tee-cores", type=THREADS, help="Of the TEE side; default: as many as there are.")
@click.option(
    "--link",
    metavar="GBPS,RTT_US",
    help="Between the two: bandwidth in Gbit/s (or `any`) and round-trip time in microseconds."
    " Default: none, both on one machine.",
)
@use("policy", policy={"multiple": True, "default": (DEFAULT_POLICY,), "help": "Repeatable."})
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, help="Of the prompt.")
@click.option(
    "--context", type=click.IntRange(min=1), default=128, help="Tokens behind a decoded one."
)
@click.option(
    "--batch", type=click.IntRange(1, 1024), default=1, help="Sequences decoded together."
)
@use("micro_batches")
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, MAX_RANKS),
    default=1,
    metavar="N",
    help="Spread every weight's columns over so many accelerators of each service.",
)
@without_columns
@click.option(
    "--transport",
    type=click.Choice(["tcp", "ipc", "unix", "shm"]),
    default="tcp",
    help="Whose round trip is measured: ZeroMQ's tcp or ipc, a unix stream socket, or shm: shared"
    " memory.",
)
@use("step_tokens", "dtype", "spin_us", dtype={"help": "Of both sides; default: the model's own."})
@use("as_json")
@config_option
@click.pass_context
def plan(
    run: click.Context,
    /,
    *,
    model: str | None,
    shape: str | None,
    gpu: str | None,
    machine: Path | None,
    fit: Path | None,
    device: str | None,
    tee_cores: int | None,
    link: str | None,
    policy: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Predict time to first token and tokens per second, and name the bottleneck.

    MODEL is a Hugging Face directory, or "demo"; only its config.json is read. What the TEE side
    and a round trip cost is measured here, on a few layers with random weights; the accelerator and
    the link are computed from their descriptions. Predictions are of the median step.
    """
    from gpu_side.devices import find_profile
    from tee_side.policy.placement import load_policy
    from tsqp.lab.plan.costs import PlanSettings
    from tsqp.lab.plan.fit import Machine, fit_machine, read_machine
    from tsqp.lab.plan.planning import Planning

    cores = tee_cores or len(os.sched_getaffinity(0))
    if fit is not None:
        outputs: Outputs[Machine] = Outputs({"--fit": (fit, Machine.toml)}, _say)
        with outputs.checked():
            measured = fit_machine(cores, options["spin_us"], _accelerator(device), _say)
        outputs.write(measured)
        if not outputs.written:
            run.exit(EXIT_FAILURE)
        return
    planned = None if machine is None else read_machine(machine)
    profile = find_profile(gpu) if gpu else planned.gpu if planned else None
    if profile is None:
        raise SettingsError(
            "--gpu", got="none", expected="an accelerator, or --machine with one that was measured"
        )
    # First, as the work takes a while.
    console = None if as_json else open_console()
    settings = PlanSettings(
        policies=tuple((name, load_policy(name)) for name in dict.fromkeys((*policy, _BEST_ALONE))),
        profile=profile,
        machine=planned,
        link=read_link(link),
        cores=cores,
        model=model_directory(model) if model else None,
        shape=shape,
        **options,
    )
    report = Planning(settings, _say).run()
    if console is None:
        click.echo(report.model_dump_json(indent=1))
        return
    console.print(_title(report))
    console.print()
    console.print(definitions(_TERMS))
    for found in report.policies:
        console.print()
        console.print(f"policy {found.policy}: {found.summary}")
        console.print(found.leakage_summary or f"policy {found.policy}: nothing leaves the TEE")
        console.print()
        console.print(definitions(_figures(found, report)))
        console.print()
        prompt = f"Up to the first token of a prompt of {report.prompt_tokens}"
        console.print(_parts(prompt, found.prefill))
        together = "one sequence" if report.batch == 1 else f"{report.batch} sequences together"
        step = f"One decode step of {together}, context {report.context}"
        console.print(_parts(step, found.decode))
        console.print("Assumed:")
        console.print(definitions([("  -", line) for line in found.assumptions]))


def _accelerator(device: str | None) -> str | None:
    """Return the device to measure. Raises SettingsError for one that is not here."""
    from gpu_side.devices import parse_device

    if device is not None and not device.startswith("cuda"):
        raise SettingsError("--device", got=repr(device), expected="cuda or cuda:N")
    if device is not None:
        parse_device(device)
    return device


def read_link(text: str | None) -> Link:
    """Read `GBPS,RTT_US`, where GBPS may be `any`; None is no link. Raises SettingsError."""
    from tsqp.run.link import Link

    if text is None:
        return Link(None, 0.0)
    parts = [part.strip() for part in text.split(",")]
    try:
        gbps, rtt_us = parts
        return Link(None if gbps == "any" else float(gbps), float(rtt_us))
    except ValueError:
        raise SettingsError(
            "--link", got=repr(text), expected="GBPS,RTT_US such as 10,100, or any,100"
        ) from None


def _title(report: PlanReport) -> str:
    link = "no link between them"
    if report.link_gbps is not None or report.link_rtt_us > 0:
        rate = "any" if report.link_gbps is None else f"{report.link_gbps:g}"
        link = f"a link of {rate} Gbit/s with {report.link_rtt_us:g} us round trip"
    return (
        f"{report.model}: {report.num_hidden_layers} layers, {report.dtype};"
        f" TEE with {report.tee_cores} cores, accelerator {report.gpu}, {link};"
        f" micro-batches: {report.micro_batches}"
    )


def _figures(found: PolicyPlan, report: PlanReport) -> list[tuple[str, str]]:
    from tsqp.run.process import bytes_for_people

    rate = f"{found.tokens_per_s_per_request:.1f} tokens/s"
    if report.batch > 1:
        rate += f" a sequence, {found.tokens_per_s:.1f} of all {report.batch} together"
    return [
        ("time to first token", f"{_ms(found.prefill.total_us)} ms{_held_back(found.prefill)}"),
        ("decode", f"{rate}, {_ms(found.decode.total_us)} ms a step{_held_back(found.decode)}"),
        *_with_several(found, report),
        *_with_pads(found),
        *_beside_alone(found, report),
        ("TEE memory", f"about {bytes_for_people(found.tee_memory_bytes)}"),
    ]


def _with_several(found: PolicyPlan, report: PlanReport) -> list[tuple[str, str]]:
    if (several := found.several) is None:
        return []
    decode, prefill = several.tpot_alone_ms / found.tpot_ms, several.ttft_alone_ms / found.ttft_ms
    text = f"decode {decode:.2f} times as fast as with one accelerator; first token {prefill:.2f}"
    lines = [(f"--tensor-parallel {report.tensor_parallel}", text)]
    for when, where in (("decode", several.decode), ("prompt", several.prefill)):
        lines += [] if where is None else [(f"pays, {when}", _pays(where))]
    return lines


def _pays(where: Crossover) -> str:
    from tsqp.run.process import bytes_for_people

    largest = f"the largest that leaves has {bytes_for_people(where.largest_bytes)}"
    if where.weight_bytes is None:
        return f"for no weight; {largest}"
    return f"for weights from {bytes_for_people(where.weight_bytes)}; {largest}"


def _with_pads(found: PolicyPlan) -> list[tuple[str, str]]:
    if found.pads is None:
        return []
    made = f"{found.pads.token_ms:.2f} ms to make a token's pads"
    rate = f"{found.sustained_tokens_per_s:.1f} tokens/s of all together"
    return [("sustained", f"{rate}; {made}, on the same cores after the step that uses them")]


def _beside_alone(found: PolicyPlan, report: PlanReport) -> list[tuple[str, str]]:
    (alone,) = (one for one in report.policies if one.policy == _BEST_ALONE)
    if alone is found:
        return []
    decode = alone.tpot_ms / found.tpot_ms
    sustained = found.sustained_tokens_per_s / alone.sustained_tokens_per_s
    text = f"decode {decode:.2f} times as fast, {sustained:.2f} sustained; first token"
    return [(f"beside {_BEST_ALONE}", f"{text} {alone.ttft_ms / found.ttft_ms:.2f}")]


def _held_back(found: Prediction) -> str:
    return f"; bottleneck: {found.bottleneck}" if found.bottleneck else ""


def _parts(title: str, found: Prediction) -> Table:
    columns = [("part", False), ("ms", True), ("share", True), ("without it, ms", True)]
    columns += [("times as fast", True)]
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
    return table(f"{title}: {traffic}", columns, rows)


def _ms(us: float) -> str:
    return f"{us / 1e3:,.1f}" if us >= 1e4 else f"{us / 1e3:.2f}"


def _say(line: str) -> None:
    click.echo(f"tsqp plan: {line}", err=True)
