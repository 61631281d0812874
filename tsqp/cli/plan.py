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
from tsqp.tables import open_console

if TYPE_CHECKING:
    from tsqp.run.link import Link


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
    from tsqp.lab.plan.figures import BEST_ALONE, show
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
        policies=tuple((name, load_policy(name)) for name in dict.fromkeys((*policy, BEST_ALONE))),
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
    show(report, console)


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


def _say(line: str) -> None:
    click.echo(f"tsqp plan: {line}", err=True)
