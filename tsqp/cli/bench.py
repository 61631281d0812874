"""`tsqp bench` and `plan`: what a step costs policy by policy, measured here, and predicted."""

from __future__ import annotations

import os
import shlex
import sys
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from protocol.errors import SettingsError
from protocol.messages import MAX_RANKS
from tsqp.cli.config import CONTEXT, THREADS, config_option, model_argument, use
from tsqp.cli.gpu_service import without_columns
from tsqp.cli.lab_options import COUNTS, OutputFile, Outputs, complete_shape
from tsqp.extras import needing
from tsqp.run.process import EXIT_FAILURE
from tsqp.run.settings import DEFAULT_POLICY, model_directory
from tsqp.tables import open_console

if TYPE_CHECKING:
    from tsqp.lab.bench.results import Report
    from tsqp.link import Link


class _Listing(click.Option):
    """An option whose help names what a mapping holds, in place of `*`.

    `named`: where that is, `module:name`; it is only looked up when the help is shown.
    """

    def __init__(self, *args: Any, named: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._named = named

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the usual two columns, with the names."""
        names = ", ".join(resolve_name(self._named))
        text, self.help = self.help, f"{self.help}".replace("*", names)
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = text


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@click.option(
    "--shape",
    metavar="NAME",
    cls=_Listing,
    named="tsqp.lab.bench.shapes:SHAPES",
    shell_complete=complete_shape,
    help="In place of MODEL: the shape of a known one, with random weights; nothing is downloaded."
    " One of *.",
)
@use(
    "policy",
    policy={"multiple": True, "default": ("attention-in-tee", "shielded"), "help": "Repeatable."},
)
@click.option(
    "--device",
    default="null",
    cls=_Listing,
    named="gpu_side.devices:PROFILES",
    help="Of the service: cpu, cuda, null (answers at once: what is left is our own cost), or"
    " model:PROFILE (takes as long as the accelerator described would). Profiles: *, or a TOML"
    " file.",
)
@click.option(
    "--transport",
    type=click.Choice(["tcp", "ipc", "unix", "shm"]),
    default="tcp",
    help="tcp and ipc are ZeroMQ's; unix is a stream socket, shm shared memory.",
)
@click.option(
    "--gpu",
    multiple=True,
    allow_from_autoenv=False,  # services that others use are measured on purpose only
    metavar="ENDPOINT",
    help="Measure services that run, and start none.",
)
@use("dealer_in_the_clear")
@click.option("--prefill", type=COUNTS, default="1,128,512", help="Prompt lengths in tokens.")
@click.option("--context", type=COUNTS, default="128", help="Tokens behind a decoded one.")
@click.option("--batch", type=COUNTS, default="1,8", help="Sequences decoded together.")
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=5, help="Of each prompt length at most."
)
@click.option(
    "--decode-steps",
    type=click.IntRange(1, 10_000),
    default=24,
    help="Timed for each context and batch; up to 12 more are observed. They need room in the"
    " model's context.",
)
@use(
    *("step_tokens", "micro_batches", "dtype", "kernels", "threads"),
    dtype={"help": "Of both sides; default: the model's own."},
    kernels={"help": "Of both sides: the best, torch's, or of these instructions."},
    threads={"help": "Of the TEE side; default: one a core."},
)
@click.option("--gpu-threads", type=THREADS, help="Of the service; default: one a core.")
@use("spin_us", "link_gbps", "link_rtt_us", "key")
@click.option(
    "--server-model",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="With transformed weights, by tsqp provision.",
)
@click.option(
    "--baselines/--no-baselines",
    default=True,
    help="Also tee-only and tee-only-int8, transformers, the published client, raw ping-pong, and"
    " with --device cuda that GPU alone, unmasked.",
)
@click.option(
    "--json",
    "json_path",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Write everything to FILE.",
)
@click.option(
    "--html",
    "html_path",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Write a page with plots.",
)
@click.option(
    "--trace",
    "trace_path",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Write a trace for ui.perfetto.dev.",
)
@click.option("--details", is_flag=True, help="Also print every layer.")
@config_option
@click.pass_context
def bench(
    context: click.Context,
    /,
    *,
    model: str | None,
    shape: str | None,
    policy: tuple[str, ...],
    json_path: Path | None,
    html_path: Path | None,
    trace_path: Path | None,
    details: bool,
    **options: Any,
) -> None:
    """Measure where the time and the bytes of every layer go, under one or several policies.

    MODEL is a Hugging Face directory, or "demo". Each policy is measured in processes of its own,
    with the baselines in the same run. What is there is written even if the run is interrupted.
    """
    with needing("tsqp bench", "the extra bench: pip install '.[bench]'"):
        from tsqp.lab.bench.plots import perfetto_json
        from tsqp.lab.bench.run import Bench
        from tsqp.lab.bench.shown import render_html, show
    import torch

    from protocol import native
    from tee_side.policy.placement import load_policy
    from tsqp.lab.bench.job import BenchSettings, Plan
    from tsqp.lab.report import check_installed
    from tsqp.link import Link

    if html_path is not None:
        check_installed("tsqp bench --html")
    console = open_console()
    outputs: Outputs[Report] = Outputs(
        {
            "--json": (json_path, lambda report: report.model_dump_json(indent=1) + "\n"),
            "--html": (html_path, render_html),
            "--trace": (trace_path, perfetto_json),
        },
        _say,
    )
    given = frozenset(
        name
        for name in context.params
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    )
    for name in ("device", "transport", "gpu_threads"):
        SettingsError.unless(
            not options["gpu"] or name not in given,
            f"--{name.replace('_', '-')}",
            "it together with --gpu",
            "one of them: no service is started",
        )
    cores, gbps, rtt_us = torch.get_num_threads(), options["link_gbps"], options["link_rtt_us"]
    settings = BenchSettings(
        command=shlex.join(["tsqp", *sys.argv[1:]]),
        policies=tuple((name, load_policy(name)) for name in dict.fromkeys(policy)),
        model=model_directory(model) if model else None,
        shape=shape,
        endpoints=options["gpu"],
        dealer_in_the_clear=options["dealer_in_the_clear"],
        device=options["device"],
        transport=options["transport"],
        kernels=native.use(options["kernels"]).variant,
        threads=options["threads"] or cores,
        gpu_threads=options["gpu_threads"] or cores,
        dtype=options["dtype"],
        step_tokens=options["step_tokens"],
        micro_batches=options["micro_batches"],
        spin_us=options["spin_us"],
        link=None if gbps is None and rtt_us == 0 else Link(gbps, rtt_us),
        key=options["key"],
        server_model=options["server_model"],
        baselines=options["baselines"],
        plan=Plan(
            prefill=options["prefill"],
            decode=tuple(product(options["context"], options["batch"])),
            generation=(min(128, max(options["prefill"])), 32),
            repeats=options["repeats"],
            decode_steps=options["decode_steps"],
        ),
        defaults=context.params.keys() - given,
    )
    outputs.report_of(Bench(settings, _say), lambda report: show(report, console, details=details))
    if not outputs.written:
        context.exit(EXIT_FAILURE)


def _say(line: str) -> None:
    click.echo(f"tsqp {click.get_current_context().info_name}: {line}", err=True)


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
    from gpu_side.devices import find_profile, parse_device
    from tee_side.policy.placement import load_policy
    from tsqp.lab.plan.costs import Machine, PlanSettings, fit_machine, read_machine
    from tsqp.lab.plan.planning import BEST_ALONE, Planning, show

    cores = tee_cores or len(os.sched_getaffinity(0))
    if fit is not None:
        outputs: Outputs[Machine] = Outputs({"--fit": (fit, Machine.toml)}, _say)
        SettingsError.unless(
            device is None or device.startswith("cuda"),
            "--device",
            repr(device),
            "cuda or cuda:N",
        )
        if device is not None:
            parse_device(device)
        outputs.write(fit_machine(cores, options["spin_us"], device, _say))
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


def read_link(text: str | None) -> Link:
    """Read `GBPS,RTT_US`, where GBPS may be `any`; None is no link. Raises SettingsError."""
    from tsqp.link import Link

    if text is None:
        return Link(None, 0.0)
    gbps, _, rtt_us = text.partition(",")
    with SettingsError.instead_of(
        ValueError, "--link", repr(text), "GBPS,RTT_US such as 10,100, or any,100"
    ):
        return Link(None if gbps.strip() == "any" else float(gbps), float(rtt_us))
