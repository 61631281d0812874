"""`tsqp health`: ask a service how it is, for people and for what watches over it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ProtocolError,
    ReplyError,
    ServiceError,
)
from tsqp.cli.keys import read_client_keys
from tsqp.cli.program import EXIT_FAILURE, complain
from tsqp.cli.settings import IDENTITY, PATH, FiniteFloatRange, config_option


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("endpoint", envvar="TSQP_HEALTH_ENDPOINT")
@IDENTITY
@click.option(
    "--service-key",
    type=PATH,
    metavar="FILE",
    help="Public key of the service: nobody else is asked.",
)
@click.option(
    "--timeout-s",
    type=FiniteFloatRange(0, 3600, min_open=True),
    default=10.0,
    help="How long to wait for the answer: on a CPU it may come only after a product.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a line.")
@config_option
@click.pass_context
def health(
    context: click.Context,
    /,
    *,
    endpoint: str,
    identity: Path | None,
    service_key: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Ask the service at ENDPOINT how it is: its status, how long it runs, and what waits there.

    Exit status 0 where it is ready, 1 where it drains or does not answer, as one that still loads
    its weights does not.
    """
    from protocol.connect import open_channel
    from protocol.endpoint import parse_endpoint
    from protocol.messages import HealthReply, HealthRequest

    services = () if service_key is None else (service_key,)
    keys = read_client_keys({"identity": identity, "service_key": services})
    # What is no endpoint is bad input, and no verdict on a service.
    parse_endpoint(endpoint)
    try:
        channel = open_channel(endpoint, timeout_s=timeout_s, keys=keys[0] if keys else None)
        try:
            reply = channel.call(HealthRequest()).response
        finally:
            channel.close()
        if not isinstance(reply, HealthReply):
            raise ReplyError(endpoint, got=type(reply).__name__, expected=HealthReply.__name__)
    except (
        DeadlineExceededError,
        EndpointError,
        ProtocolError,
        ReplyError,
        ServiceError,
    ) as error:
        complain(f"tsqp: error: {error}")
        context.exit(EXIT_FAILURE)
    if as_json:
        click.echo(json.dumps(reply.model_dump()))
    else:
        click.echo(
            f"{reply.status}, up {reply.uptime_s:.0f} s,"
            f" queued {reply.queued_requests} requests of {reply.queued_bytes} bytes"
        )
    context.exit(0 if reply.status == "ready" else EXIT_FAILURE)
