"""`tsqp calibrate`: make the file of activation scales that integer arithmetic needs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from protocol.errors import PromptError, SettingsError
from tsqp.cli.program import model_directory
from tsqp.cli.prompts import decode
from tsqp.cli.settings import CONTEXT, config_option, model_argument

_MAX_TOKENS = 65_536


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option(
    "--text",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="UTF-8 text of the kind that the model will see; default: one of many kinds of ours.",
)
@click.option(
    "--token-ids",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Token ids instead of a text, for a model without tokenizer.json: numbers between spaces"
    " and line breaks, or a JSON list of lists, each a sequence of its own.",
)
@click.option(
    "--tokens",
    type=click.IntRange(2, _MAX_TOKENS),
    default=2048,
    help="How many of it to run; memory grows with them.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write; default: calibration.safetensors in MODEL.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@config_option
def calibrate(
    *,
    model: str,
    text: Path | None,
    token_ids: Path | None,
    tokens: int,
    output: Path | None,
    force: bool,
) -> None:
    """Choose the activation scales of MODEL, for policies with integer arithmetic.

    MODEL is a Hugging Face directory with safetensors weights, or "demo". Runs a text through it
    here, in float32, and writes a small file. A model whose activations do not fit the integers
    is refused.
    """
    from tee_side.protect.calibration import CALIBRATION_FILE
    from tsqp.calibrate import SiteResult, parse_ids, save_calibration, site_name
    from tsqp.calibrate import calibrate as run_calibration

    directory = model_directory(model)
    path = directory / CALIBRATION_FILE if output is None else output
    # Before minutes of work, not after them.
    if path.exists() and not force:
        raise SettingsError(
            str(path), got="a file that exists", expected="none, or --force to overwrite it"
        )
    if not path.parent.is_dir():
        raise SettingsError(str(path), got="no such directory", expected="one to write into")
    if text is not None and token_ids is not None:
        raise SettingsError("--token-ids", got="--text, too", expected="one of them")
    content = None if text is None else _read_text(text, "--text")
    chunks = None
    if token_ids is not None:
        chunks = parse_ids(_read_text(token_ids, "--token-ids"), f"--token-ids {token_ids}")
    results: list[SiteResult] = []
    with click.progressbar(length=1, label="calibrating", file=sys.stderr) as bar:

        def progress(result: SiteResult) -> None:
            results.append(result)
            bar.length = result.total
            bar.update(1)

        calibration = run_calibration(directory, content, tokens, progress, chunks=chunks)
    save_calibration(calibration, path)
    tightest = min(results, key=lambda result: result.headroom)
    worst = max(results, key=lambda result: result.error)
    click.echo(f"{path}: {len(results)} sites, {calibration.tokens} tokens")
    click.echo(
        f"least headroom: {tightest.headroom:.1f} times the largest row seen,"
        f" at {site_name(tightest.site)}"
    )
    click.echo(f"largest error of a product: {worst.error:.2%}, at {site_name(worst.site)}")


def _read_text(path: Path, option: str) -> str:
    """Read a text file. Raises PromptError."""
    try:
        return decode(path.read_bytes(), f"{option} {path}")
    except OSError as error:
        raise PromptError(
            f"{option} {path}", got=error.strerror or "an unreadable file", expected="a text file"
        ) from None
