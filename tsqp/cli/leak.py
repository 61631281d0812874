"""`tsqp leak`: what the GPU side can really learn under a policy, beside what the policy costs."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, THREADS, config_option, model_argument, use
from tsqp.cli.lab_options import OutputFile, Outputs, complete_shape, numbers_of
from tsqp.extras import needing
from tsqp.run.process import EXIT_FAILURE
from tsqp.run.settings import model_directory

if TYPE_CHECKING:
    from tsqp.lab.leak.attack_runner import LeakProgress
    from tsqp.lab.leak.model import LeakReport
    from tsqp.lab.report import Picture

# From noise that a model survives.
_SIGMAS = "0.3,1,4,8,16,32"
# Enough for a search among tokens that the first layer says are there.
_FEW_CANDIDATES = 64


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@click.option(
    "--shape",
    metavar="NAME",
    shell_complete=complete_shape,
    help="In place of MODEL: the first layer of a known one's shape, with random weights, on random"
    " token ids.",
)
@use(
    "policy",
    policy={
        "multiple": True,
        "default": (),
        "help": "Repeatable. Default: all that are built in, and two that are weakened on purpose.",
    },
)
@click.option(
    "--attack",
    multiple=True,
    metavar="NAME|FILE",
    help="Repeatable. A NAME selects; default: all that are built in, and those of installed"
    " packages. The attacks of a FILE join these.",
)
@click.option(
    "--prompts", type=click.IntRange(2, 100_000), default=40, help="How many, a session each."
)
@click.option(
    "--prompt-tokens", type=click.IntRange(4, 512), default=48, help="Of each prompt, at most."
)
@click.option("--new-tokens", type=click.IntRange(2, 4096), default=72, help="Of each answer.")
@click.option(
    "--text",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="UTF-8 text to cut prompts from: a prompt from the beginning of each paragraph.",
)
@click.option(
    "--public",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="What the attacker has, where MODEL is not public: the model that it was made from.",
)
@use("dealer_in_the_clear")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, 2**62), default=0)
@use("dtype", dtype={"help": "Of both sides; default: the model's own."})
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Policies that are attacked side by side, in processes of their own. Default: one a core,"
    " at most 8.",
)
@click.option("--threads", type=THREADS, default=1, help="Of each worker.")
@click.option(
    "--search-prompts",
    type=click.IntRange(min=1),
    default=2,
    help="Of those that are read by a search through the public model, which takes longer than a"
    " look-up.",
)
@click.option(
    "--search-tokens", type=click.IntRange(min=1), default=96, help="Of each such session."
)
@click.option(
    "--search-candidates",
    type=click.IntRange(min=1),
    help="That it may run for a token, those that the public model expects most. Default: all;"
    f" 256 under noise, where none is certain; with --shape {_FEW_CANDIDATES}, as"
    " random weights expect nothing.",
)
@click.option(
    "--cost",
    default="none",
    metavar="measure|none|FILE",
    help="What each policy costs: measured in the same run, left out, or from FILE, a report of"
    " tsqp bench --json.",
)
@click.option("--curves", is_flag=True, help="Also try strengths of noise, where a mask has any.")
@click.option(
    "--sigma",
    type=numbers_of(float, above=0.0, most=1e4),
    metavar="NUMBER,...",
    help="The strengths to try with --curves, within the bounds of every mask with noise. Default:"
    f" {_SIGMAS}.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Refuse to run with too few tokens for an interval that ends so near above zero, where"
    " nothing is read: 0.005 is half a percentage point.",
)
@click.option(
    "--fail-above",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="Exit status 1 unless, at 95 % confidence, every attack reads less than this share of"
    " tokens beyond chance, and has worked on its control.",
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
    "--plot",
    "plot_path",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Write cost and leakage as SVG.",
)
@click.option(
    "--picture",
    "picture_path",
    type=OutputFile(),
    allow_from_autoenv=False,
    metavar="FILE",
    help="Write a prompt as each policy's best attack reads it, as SVG.",
)
@click.option(
    "--details",
    is_flag=True,
    help="Also print every attack and place, and a prompt as each policy's best attack reads it.",
)
@config_option
@click.pass_context
def leak(
    context: click.Context,
    /,
    *,
    model: str | None,
    shape: str | None,
    json_path: Path | None,
    html_path: Path | None,
    plot_path: Path | None,
    picture_path: Path | None,
    details: bool,
    fail_above: float | None,
    **options: Any,
) -> None:
    """Attack what reaches the GPU side under each policy, and print what is read beside the cost.

    MODEL is a Hugging Face directory, or "demo". Prompts are run under each policy, with services
    in this process that record every byte that reaches them. Each attack gets these bytes and what
    is public: weights, tokenizer, policy and code. Every rate comes with its n and a 95 % interval;
    an attack that does not work where it must is no evidence, and says so.
    """
    with needing("tsqp leak", "the extra bench: pip install '.[bench]'"):
        from tsqp.lab.leak.grids import above
        from tsqp.lab.leak.page import cost_against_leakage, panels, render_html, show, svg
        from tsqp.lab.report import check_installed
        from tsqp.tables import open_console

    if html_path is not None or plot_path is not None:
        check_installed("tsqp leak --html, --plot")
    SettingsError.unless(
        plot_path is None or options["cost"] != "none",
        "--plot",
        "--cost none",
        "--cost measure, or FILE: it is one axis",
    )
    SettingsError.unless(
        options["curves"] or options["sigma"] is None,
        "--sigma",
        "no --curves",
        "it: that is what tries them",
    )
    options["sigma"] = options["sigma"] or tuple(map(float, _SIGMAS.split(",")))
    if shape is not None:
        options["search_candidates"] = options["search_candidates"] or _FEW_CANDIDATES
    console = open_console()
    outputs: Outputs[LeakReport] = Outputs(
        {
            "--json": (json_path, lambda report: report.model_dump_json() + "\n"),
            "--html": (html_path, render_html),
            "--plot": (plot_path, lambda report: _svg(cost_against_leakage(report))),
            "--picture": (picture_path, lambda report: svg(panels(report))),
        },
        _say,
    )
    from tsqp.lab.leak.laboratory import Laboratory, settings_of

    with tempfile.TemporaryDirectory(prefix="tsqp-leak-") as name, _progress() as watch:
        folder = Path(name)
        directory = None if model is None else model_directory(model)
        command = shlex.join(["tsqp", *sys.argv[1:]])
        settings = settings_of(command, directory, shape, folder, fail_above, options)
        laboratory = Laboratory(settings, folder, watch)
        report = outputs.report_of(
            laboratory, lambda report: show(report, console, details=details)
        )
    failed = [] if fail_above is None else above(report, fail_above)
    for line in failed:
        _say(line)
    if failed or not outputs.written:
        context.exit(EXIT_FAILURE)


def _svg(plot: Picture | None) -> str:
    """Return a picture; without a policy whose cost was measured there is none."""
    if plot is None:
        raise SettingsError("--plot", got="no cost of any policy", expected="--cost measure")
    return plot.svg + "\n"


@contextmanager
def _progress() -> Iterator[LeakProgress]:
    """Show a bar on stderr, where that is a terminal; else a line of what is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tsqp.lab.leak.attack_runner import LeakProgress

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield LeakProgress(
            total=lambda total: bar.update(task, total=total),
            doing=lambda what: bar.update(task, description=what),
            step=lambda steps: bar.advance(task, steps),
            # Jobs of a CI that are silent for long are ended.
            done=(lambda _line: None) if console.is_terminal else _say,
            say=_say,
        )


def _say(line: str) -> None:
    click.echo(f"tsqp leak: {line}", err=True)
