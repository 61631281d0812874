"""`tsqp image`: build the guest image of a confidential VM, compare two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click

from protocol.errors import SettingsError
from tsqp.cli.settings import CONTEXT, config_option
from tsqp.cli.status import bytes_for_people
from tsqp.deploy.image import Suite

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_EXISTING = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group(context_settings=CONTEXT)
@config_option
def image() -> None:
    """Make the image that a confidential VM starts: kernel, initramfs, command line."""


@image.command(context_settings=CONTEXT)
@click.argument("arguments", nargs=-1)
@click.option("--output", "-o", type=_DIRECTORY, required=True, help="New directory for the image.")
@click.option(
    "--lock",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What to build it of, by SHA-256; default: today's packages, written to lock.json in it.",
)
@click.option(
    "--packages",
    type=_EXISTING,
    multiple=True,
    metavar="FOLDER",
    help="Saved packages and wheels: taken from here before any archive. Repeatable.",
)
@click.option("--save", type=_DIRECTORY, metavar="FOLDER", help="Keep all packages in this folder.")
@click.option("--small", is_flag=True, help="Without torch and runner: it says how it stands.")
@click.option("--manifest-digest", metavar="HEX", help="The model at /model must be this one.")
@click.option("--suite", type=click.Choice(get_args(Suite)), default="trixie", show_default=True)
@click.option("--torch-index", metavar="URL", help="Of builds of torch without CUDA.")
@click.option("--source", type=_EXISTING, help="Checkout of this project; default: this one's.")
@click.option("--scratch", type=_EXISTING, help="Where 5 GB of temporary files go.")
@click.option("--jobs", type=click.IntRange(min=1), help="Threads; the result is the same.")
@config_option
def build(
    *,
    arguments: tuple[str, ...],
    output: Path,
    lock: Path | None,
    packages: tuple[Path, ...],
    save: Path | None,
    small: bool,
    manifest_digest: str | None,
    suite: Suite,
    torch_index: str | None,
    source: Path | None,
    scratch: Path | None,
    jobs: int | None,
) -> None:
    """Build an image whose runner is started with ARGUMENTS: tsqp image build -o DIR -- serve ...

    Two builds of one lock, one source and the same arguments give the same files, bit by bit. Needs
    root, mmdebstrap and apt.
    """
    from tsqp.deploy.build import Recipe, resolve
    from tsqp.deploy.build import build as run
    from tsqp.deploy.fetch import fetch
    from tsqp.deploy.image import INITRAMFS, LOCK
    from tsqp.deploy.lock import Lock
    from tsqp.deploy.wheels import TORCH_INDEX

    def progress(step: str) -> None:
        click.echo(f"{output}: {step}", err=True)

    checkout = source or Path(__file__).parents[2]
    if not (checkout / "pyproject.toml").is_file():
        raise SettingsError(str(checkout), got="no pyproject.toml", expected="--source: a checkout")
    if lock is not None:
        parts = Lock.load(lock)
        if parts.small != small:
            expected = "--small" if parts.small else "no --small"
            raise SettingsError(str(lock), got="a lock of the other kind", expected=expected)
    else:
        progress("look up today's packages")
        index = torch_index or TORCH_INDEX
        parts = resolve(suite, checkout, small=small, torch_index=index, scratch=scratch)
    if save is not None:
        fetch(parts.artifacts, save, packages)
        packages = (save, *packages)
    recipe = Recipe(
        arguments=arguments,
        manifest_digest=manifest_digest,
        packages=packages,
        jobs=jobs or os.cpu_count() or 1,
        scratch=scratch,
    )
    run(parts, checkout, output, recipe, progress)
    (output / LOCK).write_bytes(parts.to_bytes())
    click.echo(f"{output}: {bytes_for_people((output / INITRAMFS).stat().st_size)} of initramfs")


@image.command(context_settings=CONTEXT)
@click.argument("left", type=_EXISTING)
@click.argument("right", type=_EXISTING)
@config_option
def compare(left: Path, right: Path) -> None:
    """Compare two images, and name the first file that differs."""
    from tsqp.deploy.image import first_difference

    differs = first_difference(left, right)
    if differs is not None:
        raise SettingsError(
            f"{right}: {differs}", got="another content", expected=f"that of {left}"
        )
    click.echo("identical")
