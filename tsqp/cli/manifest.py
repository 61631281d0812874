"""`tsqp manifest`: pin a model directory by digests; and reading what it wrote."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError, describe
from tsqp.cli.program import DEMO, model_directory
from tsqp.cli.settings import PATH, config_option

if TYPE_CHECKING:
    from protocol.model.manifest import Manifest

# For every command that reads a model in the TEE.
MANIFEST = (
    click.option(
        "--manifest",
        type=PATH,
        metavar="FILE",
        help="What MODEL must hold, byte for byte, as tsqp manifest wrote it.",
    ),
    click.option(
        "--manifest-digest",
        metavar="HEX",
        help="SHA-256 of the manifest: needed where it lies on a disk that is not trusted.",
    ),
)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("model", envvar="TSQP_MANIFEST_MODEL")
@click.option(
    "--output",
    "-o",
    type=PATH,
    metavar="FILE",
    help='Default: manifest.json inside MODEL. Needed for "demo", which is part of this program.',
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@config_option
def manifest(*, model: str, output: Path | None, force: bool) -> None:
    """Write the digests of everything in MODEL that the TEE reads, where you trust the disk.

    MODEL is a Hugging Face directory with safetensors weights, or "demo"; calibrate first, as the
    scales are pinned, too. tee-runner --manifest then refuses a directory that differs in a byte.
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

        made = make_manifest(directory, progress)
    content = made.to_bytes()
    path.write_bytes(content)
    click.echo(f"{path}: {len(made.files)} files, {len(made.tensors)} tensors")
    click.echo(f"SHA-256 of it: {hashlib.sha256(content).hexdigest()}")


def load_manifest(directory: Path, settings: Mapping[str, Any]) -> Manifest | None:
    """Read what `--manifest` and `--manifest-digest` say; None without them.

    Says on stderr what a manifest inside MODEL is worth. Raises SettingsError, ManifestError.
    """
    path, digest = settings["manifest"], settings["manifest_digest"]
    if digest is not None and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise SettingsError(
            "--manifest-digest", got=describe(digest), expected="64 hexadecimal digits"
        )
    if path is None:
        if digest is not None:
            raise SettingsError(
                "--manifest-digest", got="no --manifest", expected="the file that it is of"
            )
        return None
    from protocol.model.manifest import Manifest

    found = Manifest.load(path, digest)
    if digest is None and path.resolve().parent == directory.resolve():
        click.echo(
            f"{path} lies in the model's directory, and is taken without --manifest-digest: it"
            " shows damage, but nothing that was changed on purpose",
            err=True,
        )
    return found
