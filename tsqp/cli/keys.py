"""`tsqp keys`: make and show the keys of a channel; and read those that a runner was given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from protocol.errors import SettingsError
from tsqp.cli.settings import PATH, config_option

if TYPE_CHECKING:
    from protocol.curve import ClientKeys

CONTEXT = {"show_default": True, "help_option_names": ["-h", "--help"]}


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
    from protocol.curve import new_key_pair

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
    click.echo(f"{public}: a service's is the runner's --service-key; a runner's goes into the")
    click.echo(f"service's --allow list: {text}")


@keys.command(context_settings=CONTEXT)
@click.argument("file", type=PATH)
@config_option
def show(file: Path) -> None:
    """Print the public key of a .key or .pub FILE, as a line of an --allow list."""
    from protocol.curve import public_key_of

    click.echo(public_key_of(file).decode("ascii"))


def warn_without_keys(endpoints: Sequence[str]) -> None:
    """Say on stderr, in one line, which of these services are reached over a network in the open.

    `endpoints`: as `ServiceSpec.parse` reads them; all are reached without keys.
    """
    from protocol.curve import is_beyond_loopback
    from tee_side.services.plan import ServiceSpec

    known = [ServiceSpec.parse(text).endpoint for text in endpoints]
    exposed = [endpoint for endpoint in known if is_beyond_loopback(endpoint)]
    if exposed:
        click.echo(
            f"{', '.join(exposed)}: the connection is not encrypted, and anyone may answer"
            " (--identity and --service-key; tsqp keys new makes keys)",
            err=True,
        )


def read_client_keys(settings: dict[str, Any]) -> tuple[ClientKeys, ...]:
    """Read what --identity and --service-key name. Raises KeyFileError and SettingsError."""
    from protocol.curve import ClientKeys

    identity: Path | None = settings["identity"]
    services: tuple[Path, ...] = settings["service_key"]
    if identity is None and not services:
        return ()
    if identity is None or not services:
        given, missing = "--identity", "--service-key"
        if identity is None:
            given, missing = missing, given
        raise SettingsError("keys", got=f"{given} alone", expected=f"{missing} as well, or neither")
    return tuple(ClientKeys.read(identity, service) for service in services)
