"""`tsqp keys` and `tsqp api-key`: by what runners, services and clients know each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from protocol.errors import SettingsError
from tsqp.cli.config import CONTEXT, PATH, config_option


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

    SettingsError.unless(name.name, "NAME", f"{str(name)!r}", "a file name without .key")
    for path in (name.with_name(f"{name.name}{suffix}") for suffix in (".key", ".pub")):
        # `new_key_pair` would not overwrite it either, and says less.
        SettingsError.unless(
            not os.path.lexists(path),
            str(path),
            "a file that exists",
            "none: remove it, or take another NAME",
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


C = TypeVar("C", bound=Callable[..., Any])

_COUNT = click.IntRange(1, 10**9)


def _limit(name: str, text: str) -> Callable[[C], C]:
    # Of one key each time, and no setting.
    return click.option(name, type=_COUNT, allow_from_autoenv=False, metavar="N", help=text)


@click.command("api-key", context_settings=CONTEXT)
@click.argument("name")
@_limit("--requests-per-minute", "Let in so many requests a minute.")
@_limit("--tokens-per-minute", "So many tokens a minute, of prompts and answers together.")
@_limit("--concurrent", "So many requests at a time.")
@_limit("--max-tokens", "So many tokens in the answer to one request, all samples together.")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    allow_from_autoenv=False,
    metavar="FILE",
    help="New file for the key (mode 0600); default: stderr.",
)
@click.option(
    "--digest",
    is_flag=True,
    allow_from_autoenv=False,
    help="Make a bearer token of a runner, and print a line for gpu-service --http-tokens.",
)
@config_option
def api_key(*, name: str, to: Path | None, digest: bool, **limits: int | None) -> None:
    """Make an API key. Its entry, which is no secret, is printed: append it to the key file.

    The key itself is shown once, and kept nowhere: give it to the client.
    """
    import secrets

    from protocol.curve import SECRET_MODE
    from tee_side.serve.keys import PREFIX, ApiKey, check_name, hash_of
    from tsqp.key_files import write_new

    check_name(name, "NAME")
    key = PREFIX + secrets.token_urlsafe(32)
    entry = ApiKey(name=name, sha256=hash_of(key), **limits).entry()
    if digest:
        SettingsError.unless(
            not any(limits.values()), "--digest", "limits as well", "it without limits"
        )
        entry = f"{hash_of(key)}    # {name}\n"
    if to is None:
        click.echo(key, err=True)
    else:
        write_new(to, f"{key}\n", SECRET_MODE)
    click.echo(entry, nl=False)
