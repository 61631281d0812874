"""`tsqp keyserver`: give the key of sealed models to programs that prove what they run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from tsqp.cli.appraising import appraisal_options, read_appraisal
from tsqp.cli.settings import CONTEXT, PATH, config_option, read_listen


@click.command(context_settings=CONTEXT)
@click.argument("keyfile", type=PATH)
@appraisal_options
@click.option(
    "--listen",
    default="127.0.0.1:8090",
    callback=read_listen,
    metavar="HOST:PORT",
    help="Port 0: a free one.",
)
@config_option
def keyserver(
    *, keyfile: Path, policy: Path | None, mode: str | None, listen: tuple[str, int]
) -> None:
    """Give the key in KEYFILE (tsqp seal new-key) to programs that pass an appraisal policy.

    They are started with tee-runner serve --attest ... --seal-key-server http://HOST:PORT, and
    print the digests that the policy names. Each decision is a line on stderr. The key goes out
    sealed to the program that proved itself: the network may be anyone's.
    """
    from tsqp.client.attested_tls import Address
    from tsqp.keyserver import KeyRelease, KeyServer
    from tsqp.seal_keys import read_key

    key, appraisal = read_key(keyfile), read_appraisal(policy, mode)
    say = partial(click.echo, err=True)
    release = KeyRelease(key, appraisal, say)
    with KeyServer(listen, release, say) as server:
        say(f"ready: http://{Address(listen[0], server.port)}")
        server.serve_forever()
