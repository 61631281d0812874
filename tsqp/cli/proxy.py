"""`tsqp proxy`: an address on this machine that leads to a server which proves what it is."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import click

from tsqp.cli.appraising import appraisal_options, read_appraisal
from tsqp.cli.settings import CONTEXT, FiniteFloatRange, config_option, read_listen


@click.command(context_settings=CONTEXT)
@click.argument("url")
@appraisal_options
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    callback=read_listen,
    metavar="HOST:PORT",
    help="Port 0: a free one.",
)
@click.option(
    "--again-minutes",
    type=FiniteFloatRange(0, 1440, min_open=True),
    default=10.0,
    help="After how many the server must prove itself again; else connections are cut.",
)
@config_option
def proxy(
    *,
    url: str,
    policy: Path | None,
    mode: str | None,
    listen: tuple[str, int],
    again_minutes: float,
) -> None:
    """Listen on this machine, and carry each connection to the server at URL over attested TLS.

    URL is https://HOST:PORT. Programs use http://127.0.0.1:8080/v1 as they would use the server.
    What comes in is in the clear: listen on an address of this machine alone.
    """
    from tsqp.client.attested_tls import Address, AttestedContext
    from tsqp.client.proxy import Proxy

    appraisal = read_appraisal(policy, mode)
    context = AttestedContext(appraisal, again_minutes * 60)
    say = partial(click.echo, err=True)
    made = Proxy(listen, Address.of(url), context, say)
    with closing(made):
        say(f"ready: http://{Address(listen[0], made.port)}/v1 leads to {url}, which is verified")
        made.serve_forever()
