"""`tsqp bench`: where each microsecond and byte of a step goes, policy by policy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, THREADS, config_option, model_argument
from tsqp.cli.lab_options import COUNTS, OutputFile, Outputs, complete_shape
from tsqp.cli.options import use
from tsqp.extras import needing
from tsqp.run.process import EXIT_FAILURE
from tsqp.run.settings import model_directory

if TYPE_CHECKING:
    from tsqp.lab.bench.model import Report

DEFAULT_POLICIES = ("attention-in-tee", "shielded")


class _Listing(click.Option):
    """An option whose help ends in names that are only looked up when it is shown."""

    def __init__(self, *args: Any, names: Callable[[], Iterable[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._names = names

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the usual two columns, with the names."""
        text, self.help = self.help, f"{self.help} {', '.join(self._names())}."
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = text


def _shapes() -> Iterable[str]:
    from tsqp.lab.bench.shapes import SHAPES

    return SHAPES


def _profiles() -> Iterable[str]:
    from gpu_side.devices import PROFILES

    return [*sorted(PROFILES), "or a TOML file"]


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@click.option(
    "--shape",
    metavar="NAME",
    cls=_Listing,
    names=_shapes,
    shell_complete=complete_shape,
    help="In place of MODEL: the shape of a known one, with random weights; nothing is downloaded."
    " One of",
)
@use("policy", policy={"multiple": True, "default": DEFAULT_POLICIES, "help": "Repeatable."})
@click.option(
    "--device",
    default="null",
    cls=_Listing,
    names=_profiles,
    help="Of the service: cpu, cuda, null (answers at once: what is left is our own cost), or"
    " model:PROFILE (takes as long as the accelerator described would). Profiles:",
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
@use("shares_in_the_clear")
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
        from tsqp.lab.bench.run import Bench
        from tsqp.lab.bench.shown import render_html, show
        from tsqp.lab.bench.timeline import perfetto_json
        from tsqp.tables import open_console
    from tsqp.lab.charts import check_installed

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
    with outputs.checked():
        run = Bench(_settings(model, shape, policy, options, given), _say)
    outputs.report_of(run, lambda report: show(report, console, details=details))
    if not outputs.written:
        context.exit(EXIT_FAILURE)


def _settings(
    model: str | None,
    shape: str | None,
    policies: tuple[str, ...],
    options: dict[str, Any],
    given: frozenset[str],
) -> Any:
    """Return `BenchSettings`. `given`: the options that were given, by their names."""
    import torch

    from protocol import native
    from tee_side.policy.placement import load_policy
    from tsqp.lab.bench.job import BenchSettings, Plan

    for name, kind in (
        ("device", "--device"),
        ("transport", "--transport"),
        ("gpu_threads", "--gpu-threads"),
    ):
        SettingsError.unless(
            not options["gpu"] or name not in given,
            kind,
            "it together with --gpu",
            "one of them: no service is started",
        )
    cores = torch.get_num_threads()
    contexts, batches = options["context"], options["batch"]
    return BenchSettings(
        command=shlex.join(["tsqp", *sys.argv[1:]]),
        policies=tuple((name, load_policy(name)) for name in dict.fromkeys(policies)),
        model=model_directory(model) if model else None,
        shape=shape,
        endpoints=options["gpu"],
        shares_in_the_clear=options["shares_in_the_clear"],
        device=options["device"],
        transport=options["transport"],
        kernels=native.use(options["kernels"]).variant,
        threads=options["threads"] or cores,
        gpu_threads=options["gpu_threads"] or cores,
        dtype=options["dtype"],
        step_tokens=options["step_tokens"],
        micro_batches=options["micro_batches"],
        spin_us=options["spin_us"],
        link_gbps=options["link_gbps"],
        link_rtt_us=options["link_rtt_us"],
        key=options["key"],
        server_model=options["server_model"],
        baselines=options["baselines"],
        plan=Plan(
            prefill=options["prefill"],
            decode=tuple((context, batch) for context in contexts for batch in batches),
            generation=(min(128, max(options["prefill"])), 32),
            repeats=options["repeats"],
            decode_steps=options["decode_steps"],
        ),
        default_prefill="prefill" not in given,
        default_context="context" not in given,
    )


def _say(line: str) -> None:
    click.echo(f"tsqp bench: {line}", err=True)
