"""`tsqp seal`: encrypt a model directory, make the key for it, change to another key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tsqp.cli.options import use
from tsqp.cli.program import model_directory
from tsqp.cli.settings import CONTEXT, PATH, config_option, model_argument
from tsqp.cli.status import bytes_for_people

_to = click.option(
    "--to",
    type=PATH,
    required=True,
    allow_from_autoenv=False,  # to whom is said each time
    metavar="KEYFILE",
    help="Key that opens it from now on, of tsqp seal new-key.",
)


class _ModelFirst(click.Group):
    """A group in which `model` may be left out: `tsqp seal MODEL` is `tsqp seal model MODEL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the command where the first argument is an option of its own."""
        first = args[0].partition("=")[0] if args else ""
        if first.startswith("-") and first not in {"-h", "--help", "--config"}:
            args = ["model", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, `model` where the first argument names none."""
        named = args[0] in self.commands
        return super().resolve_command(ctx, args if named else ["model", *args])


@click.group(cls=_ModelFirst, context_settings=CONTEXT)
@config_option
def seal() -> None:
    """Encrypt a model directory, so that its disk learns no more than names and sizes of files.

    tsqp seal MODEL --to KEYFILE -o DIR; "model" may be left out.
    """


@seal.command(context_settings=CONTEXT)
@model_argument()
@_to
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    required=True,
    allow_from_autoenv=False,
    metavar="DIR",
    help="New directory, with the same names of files, for tee-runner --seal-key.",
)
@config_option
def model(*, model: str, to: Path, output: Path) -> None:
    """Encrypt the files of MODEL into the directory DIR.

    MODEL is a Hugging Face directory, or "demo"; calibrate first. Run it where model and key may be
    seen. Whoever can write to the disk can put an older seal back: keep the digest that is printed
    where they cannot, and give it to tee-runner --seal-digest.
    """
    from tsqp.seal import seal_model
    from tsqp.seal_keys import read_key

    key = read_key(to)
    with click.progressbar(length=1, label=f"seal {model}", file=sys.stderr) as bar:

        def progress(sealed: int, total: int) -> None:
            bar.length = total
            bar.update(sealed)

        made = seal_model(model_directory(model), key, output, progress)
    if made.skipped:
        click.echo(f"left out, as they are no files: {', '.join(made.skipped)}", err=True)
    click.echo(f"{output}: {made.files} files, {bytes_for_people(made.plain_bytes)}, sealed")
    click.echo(f"SHA-256 of the seal: {made.digest}")


@seal.command("new-key", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@config_option
def new_key(file: Path) -> None:
    """Make a key: FILE, which must stay secret, in the TEE and where models are sealed."""
    import secrets

    from protocol.curve import SECRET_MODE
    from protocol.model.sealed import KEY_BYTES, key_id
    from tsqp.key_files import write_new
    from tsqp.seal_keys import encode_key

    key = secrets.token_bytes(KEY_BYTES)
    write_new(file, encode_key(key), SECRET_MODE)
    click.echo(
        f"{file}: key {key_id(key)}; without it no model that is sealed to it can be read: keep a"
        " copy in a safe place"
    )


@seal.command(context_settings=CONTEXT)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@use("seal-key", "seal-key-fd", "seal-key-command")
@_to
@config_option
def rewrap(*, directory: Path, to: Path, **settings: Any) -> None:
    """Have the sealed DIRECTORY opened by another key: only sealed.tsqp is written again.

    The digest stays. Whoever kept the old sealed.tsqp and the old key can open it still: where that
    matters, seal the model again.
    """
    from tsqp.seal import rewrap as run
    from tsqp.seal_keys import provided_key, read_key

    digest = run(directory, provided_key(settings), read_key(to))
    click.echo(f"{directory}: for the key of {to} from now on")
    click.echo(f"SHA-256 of the seal, as before: {digest}")
