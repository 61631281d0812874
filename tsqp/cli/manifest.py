"""`tsqp manifest`: pin a model directory by digests."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import click

from protocol.errors import SettingsError
from tsqp.cli.program import DEMO, model_directory
from tsqp.cli.settings import CONTEXT, PATH, config_option, model_argument


@click.command(context_settings=CONTEXT)
@model_argument()
@click.option(
    "--output",
    "-o",
    type=PATH,
    metavar="FILE",
    help='Default: manifest.json inside MODEL. Needed for "demo", which is part of this program.',
)
@click.option(
    "--also",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="Pin this file, too, by its name: a policy, settings, the public key of a service, a mask."
    " Repeatable.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@config_option
def manifest(*, model: str, output: Path | None, also: tuple[Path, ...], force: bool) -> None:
    """Write the digests of everything in MODEL that the TEE reads, where you trust the disk.

    MODEL is a Hugging Face directory with safetensors weights, or "demo"; calibrate first, as the
    scales are pinned, too. tee-runner --manifest then refuses a directory that differs in a byte,
    and every policy, settings file, service key and mask of yours that --also did not name.
    Whoever can write to the disk can change a manifest on it: keep the digest that is printed where
    they cannot, and give it to tee-runner --manifest-digest.
    """
    from protocol.model.manifest import MANIFEST_FILE
    from tsqp.manifest import make_manifest

    directory = model_directory(model)
    if output is None and model == DEMO:
        raise SettingsError(
            "--output", got="none", expected="a file: the demo model's directory is the program's"
        )
    path = directory / MANIFEST_FILE if output is None else output
    if path.exists() and not force:
        raise SettingsError(
            str(path), got="a file that exists", expected="none, or --force to overwrite it"
        )
    if not path.parent.is_dir():
        raise SettingsError(str(path), got="no such directory", expected="one to write into")
    with click.progressbar(length=1, label="reading", file=sys.stderr) as bar:

        def progress(_done: int, total: int) -> None:
            bar.length = total
            bar.update(1)

        made = make_manifest(directory, progress, also)
    content = made.to_bytes()
    path.write_bytes(content)
    beside = f", also {', '.join(made.also)}" if made.also else ""
    click.echo(f"{path}: {len(made.files)} files, {len(made.tensors)} tensors{beside}")
    click.echo(f"SHA-256 of it: {hashlib.sha256(content).hexdigest()}")
