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
from tsqp.cli.options import use
from tsqp.cli.program import EXIT_FAILURE, complain
from tsqp.cli.settings import CONTEXT, FiniteFloatRange, config_option
from tsqp.cli.trust import read_client_keys, read_http_access


@click.command(context_settings=CONTEXT)
@click.argument("endpoint")
@use(
    *("identity", "service-key", "http-token", "http-ca", "json"),
    service_key={"multiple": False, "help": "Public key of the service: no other one is asked."},
    http_token={"multiple": False, "help": "Bearer token by which a service with a URL knows us."},
)
@click.option(
    "--timeout-s",
    type=FiniteFloatRange(0, 3600, min_open=True),
    default=10.0,
    help="How long to wait for the answer: on a CPU it may come only after a product.",
)
@config_option
@click.pass_context
def health(
    context: click.Context,
    /,
    *,
    endpoint: str,
    identity: Path | None,
    service_key: str | None,
    http_token: Path | None,
    http_ca: Path | None,
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
    keys = read_client_keys({"identity": identity, "service_key": services}, None)
    # What is no endpoint is bad input, and no verdict on a service.
    parse_endpoint(endpoint)
    tokens = () if http_token is None else (http_token,)
    named = {"gpu": [endpoint], "http_token": tokens, "http_ca": http_ca}
    http = read_http_access(named, None).get(endpoint)
    own = keys[0] if keys else None
    try:
        channel = open_channel(endpoint, timeout_s=timeout_s, keys=own, http=http)
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
