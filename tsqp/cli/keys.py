"""`tsqp keys`: make and show the keys of a channel."""

from __future__ import annotations

import os
from pathlib import Path

import click

from protocol.errors import SettingsError
from tsqp.cli.settings import CONTEXT, PATH, config_option


@click.group(context_settings=CONTEXT)
@config_option
def keys() -> None:
    """Make and show the keys by which runners and services know each other.

    Each side makes its own pair, keeps NAME.key and gives NAME.pub to the other.
    """


@keys.command(context_settings=CONTEXT)
@click.argument("name", type=click.Path(path_type=Path))
@config_option
def new(name: Path) -> None:
    """Make a key pair: NAME.key, which stays where it is, and NAME.pub, which others need."""
    from tsqp.key_files import new_key_pair

    if not name.name:
        raise SettingsError("NAME", got=f"{str(name)!r}", expected="a file name without .key")
    for path in (name.with_name(f"{name.name}{suffix}") for suffix in (".key", ".pub")):
        # `new_key_pair` would not overwrite it either, and says less.
        if os.path.lexists(path):
            raise SettingsError(
                str(path),
                got="a file that exists",
                expected="none: remove it, or take another NAME",
            )
    secret, public, text = new_key_pair(name)
    click.echo(f"{secret}: stays on this machine, for --identity")
    click.echo(f"{public}: a service's is the runner's --service-key, as a file or by value;")
    click.echo(f"a runner's goes into the service's --allow list: {text}")


@keys.command(context_settings=CONTEXT)
@click.argument("file", type=PATH)
@config_option
def show(file: Path) -> None:
    """Print the public key of a .key or .pub FILE, as a line of an --allow list."""
    from tsqp.key_files import public_key_of

    click.echo(public_key_of(file).decode("ascii"))
