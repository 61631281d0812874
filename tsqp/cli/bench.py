"""`tsqp bench`: where each microsecond and byte of a step goes, policy by policy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from tsqp.cli.program import model_directory
from tsqp.cli.runner_options import MODELLED_LINK, SPIN_US
from tsqp.cli.settings import DTYPES, PATH, THREADS, complete_policy, config_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tsqp.bench.model import Report

CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}
DEFAULT_POLICIES = ("attention-in-tee", "shielded")


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers from 1, with commas: `1,128,512`."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Read and sort them, each once."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
            self.fail(f"got {value!r}, expected whole numbers from 1, with commas", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


def _complete_shape(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    from tsqp.bench.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


@click.command(context_settings=CONTEXT)
@click.argument("model", required=False, envvar="TSQP_BENCH_MODEL")
@click.option(
    "--shape",
    metavar="NAME",
    shell_complete=_complete_shape,
    help="In place of MODEL: the shape of a known one, with random weights; nothing is downloaded.",
)
@click.option(
    "--policy",
    multiple=True,
    default=DEFAULT_POLICIES,
    metavar="NAME|FILE",
    shell_complete=complete_policy,
    help="Repeatable.",
)
@click.option(
    "--device",
    default="null",
    help="Of the service: cpu, cuda, null (answers at once: what is left is our own cost), or"
    " model:PROFILE (takes as long as the accelerator described would).",
)
@click.option(
    "--transport",
    type=click.Choice(["tcp", "ipc", "unix"]),
    default="tcp",
    help="tcp and ipc are ZeroMQ's; unix is a stream socket.",
)
@click.option(
    "--gpu", multiple=True, metavar="ENDPOINT", help="Measure services that run, and start none."
)
@click.option("--prefill", type=Numbers(), default="1,128,512", help="Prompt lengths in tokens.")
@click.option("--context", type=Numbers(), default="128", help="Tokens behind a decoded one.")
@click.option("--batch", type=Numbers(), default="1,8", help="Sequences decoded together.")
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=5, help="Of each prompt length at most."
)
@click.option("--decode-steps", type=click.IntRange(1, 10_000), default=24)
@click.option("--step-tokens", type=click.IntRange(min=1), default=512)
@click.option(
    "--micro-batches", type=click.IntRange(1, 64), default=1, help="Into which a step is cut."
)
@click.option("--dtype", type=DTYPES, help="Of both sides; default: the model's own.")
@click.option("--threads", type=THREADS, help="Of the TEE side; default: one a core.")
@click.option("--gpu-threads", type=THREADS, help="Of the service; default: one a core.")
@SPIN_US
@MODELLED_LINK[0]
@MODELLED_LINK[1]
@click.option("--key", type=PATH, metavar="FILE", help="Of a feature mask, by tsqp provision.")
@click.option(
    "--server-model",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="With transformed weights, by tsqp provision.",
)
@click.option(
    "--baselines/--no-baselines",
    default=True,
    help="Also tee-only, transformers, the published client, and raw ping-pong.",
)
@click.option("--json", "json_path", type=PATH, metavar="FILE", help="Write everything to FILE.")
@click.option("--html", "html_path", type=PATH, metavar="FILE", help="Write a page with plots.")
@click.option(
    "--trace", "trace_path", type=PATH, metavar="FILE", help="Write a trace for ui.perfetto.dev."
)
@click.option("--details", is_flag=True, help="Also print every layer.")
@config_option
def bench(
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
    try:
        from tsqp.bench.html import render_html
        from tsqp.bench.run import Bench
        from tsqp.bench.trace import perfetto_json
        from tsqp.cli.tables import open_console
    except ImportError as error:
        raise SettingsError(
            "tsqp bench",
            got=f"no module {error.name}",
            expected="the extra bench: pip install '.[bench]'",
        ) from None
    from tsqp.bench.plot_style import check_installed
    from tsqp.bench.table import show

    if html_path is not None:
        check_installed("tsqp bench --html")
    console = open_console("tsqp bench")
    outputs: list[tuple[Path, Callable[[Report], str]]] = [
        (path, render)
        for path, render in (
            (json_path, lambda report: report.model_dump_json(indent=1) + "\n"),
            (html_path, render_html),
            (trace_path, perfetto_json),
        )
        if path is not None
    ]
    with _writable([path for path, _ in outputs]):
        run = Bench(_settings(model, shape, policy, options), _say)
    try:
        run.run()
    finally:
        report = run.report()
        for path, render in outputs:
            path.write_text(render(report), encoding="utf-8")
        show(report, console, details=details)


def _settings(
    model: str | None, shape: str | None, policies: tuple[str, ...], options: dict[str, Any]
) -> Any:
    import torch

    from tee_side.policy import load_policy
    from tsqp.bench.job import Plan
    from tsqp.bench.settings import BenchSettings

    cores = torch.get_num_threads()
    contexts, batches = options["context"], options["batch"]
    return BenchSettings(
        command=shlex.join(["tsqp", *sys.argv[1:]]),
        policies=tuple((name, load_policy(name)) for name in dict.fromkeys(policies)),
        model=model_directory(model) if model else None,
        shape=shape,
        endpoints=options["gpu"],
        device=options["device"],
        transport=options["transport"],
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
    )


@contextmanager
def _writable(paths: list[Path]) -> Iterator[None]:
    """Refuse files that cannot be written, and leave none behind if the run is refused."""
    made = []
    try:
        for path in paths:
            new = not path.exists()
            try:
                # For appending: a run that is refused leaves an old file as it was.
                path.open("ab").close()
            except OSError as error:
                raise SettingsError(
                    str(path), got=error.strerror or "an error", expected="a file to write"
                ) from None
            made += [path] if new else []
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):
                path.unlink()
        raise


def _say(line: str) -> None:
    click.echo(f"tsqp bench: {line}", err=True)
