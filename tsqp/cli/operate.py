"""`tsqp doctor`, `health`, `audit`, `keys` and `api-key`: what operators ask and hand out.

How a machine, a service and a server's log stand; by what runners, services and clients know each
other.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ProtocolError,
    ReplyError,
    ServiceError,
    SettingsError,
)
from tsqp.cli.config import (
    CONTEXT,
    PATH,
    C,
    FiniteFloatRange,
    config_option,
    model_argument,
    takes,
    use,
)
from tsqp.run.load import BANK, load_manifest, read_client_keys, read_http_access
from tsqp.run.process import EXIT_FAILURE, complain
from tsqp.run.settings import RunSettings, model_directory, option_of

_OF_A_RUN = (
    *("gpu", "dealer", "policy", *BANK),
    *("identity", "service_key", "service_appraisal", "dealer_in_the_clear"),
    *("http_token", "http_ca", "manifest", "manifest_digest"),
)


@click.command(context_settings=CONTEXT)
@model_argument(required=False)
@takes(RunSettings, *_OF_A_RUN)
@use("as_json")
@click.option(
    "--timeout-s",
    type=FiniteFloatRange(0, 3600, min_open=True),
    default=5.0,
    help="How long to wait for each service.",
)
@config_option
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    settings: RunSettings,
    model: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Say what this machine has and lacks; with MODEL, whether a run with these options starts.

    MODEL is a Hugging Face directory, or "demo". Of what is missing, the command that makes it is
    said as well. Exit status 1 if something is missing that the run needs. No prompt is sent.
    """
    from tsqp.doctor import examine, render

    findings = examine()
    if model is None:
        for name in (*_OF_A_RUN, "timeout_s"):
            SettingsError.unless(
                context.get_parameter_source(name) is not ParameterSource.COMMANDLINE,
                option_of(name),
                "no MODEL",
                "the model of the run",
            )
    else:
        from tsqp.preflight import Start, examine_start

        directory, settings = model_directory(model), replace(settings, model=model)
        start = Start(directory, settings, load_manifest(directory, settings), timeout_s)
        findings = examine_start(start) + findings
    click.echo(render(findings, as_json=as_json))
    lacking = any(found.topic == "run" and found.state == "missing" for found in findings)
    context.exit(EXIT_FAILURE if lacking else 0)


@click.command(context_settings=CONTEXT)
@click.argument("endpoint")
@use(
    *("identity", "service_key", "http_token", "http_ca", "as_json"),
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
    from protocol.endpoint import parse_endpoint
    from protocol.messages import HealthReply, HealthRequest
    from protocol.transport import open_channel

    settings = RunSettings(
        model="",
        gpu=(endpoint,),
        identity=identity,
        service_key=() if service_key is None else (service_key,),
        http_token=() if http_token is None else (http_token,),
        http_ca=http_ca,
    )
    keys = read_client_keys(settings, None)
    # What is no endpoint is bad input, and no verdict on a service.
    parse_endpoint(endpoint)
    http = read_http_access(settings, None).get(endpoint)
    try:
        with open_channel(
            endpoint, timeout_s=timeout_s, keys=keys[0] if keys else None, http=http
        ) as channel:
            reply = channel.call(HealthRequest()).response
        if not isinstance(reply, HealthReply):
            raise ReplyError(endpoint, got=type(reply).__name__, expected=HealthReply.__name__)
    except (DeadlineExceededError, EndpointError, ProtocolError, ReplyError, ServiceError) as error:
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


# The fields of a request that have columns of their own.
_NUMBERS = ("prompt_tokens", "completion_tokens", "duration_s")
_COLUMNS = ("time", "kind", "key", "outcome", *_NUMBERS)


@click.group(context_settings=CONTEXT)
@config_option
def audit() -> None:
    """Read the sealed log of tee-runner serve: which key was served when, and how much. No text."""


@audit.command("new-key", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@config_option
def new_audit_key(file: Path) -> None:
    """Make the key of a log: FILE, which must stay secret, in the TEE and where logs are read."""
    from tsqp.key_files import AUDIT_KEY

    AUDIT_KEY.new(file)
    click.echo(f"{file}: without it nothing in the log can be read; keep a copy in a safe place")


@audit.command(context_settings=CONTEXT)
@click.argument("log", type=PATH)
@click.option(
    "--key",
    "key_file",
    type=PATH,
    required=True,
    allow_from_autoenv=False,  # elsewhere it is the key of a feature mask
    metavar="FILE",
    help="Key of the log, of tsqp audit new-key.",
)
@use("as_json", as_json={"help": "One JSON object a record on stdout."})
@config_option
@click.pass_context
def show(context: click.Context, /, *, log: Path, key_file: Path, as_json: bool) -> None:
    """Check LOG from its beginning and print its records.

    The last line, on stderr, has the number of records and the chain value: the host can cut
    records off the end, which only a comparison with noted values shows. Exit status 1 if the log
    was changed; records before that place are printed.
    """
    from tee_side.serve.audit_log import AuditLogError, AuditReader, open_log
    from tsqp.key_files import AUDIT_KEY
    from tsqp.tables import open_console, table

    key, rows, changed = AUDIT_KEY.read(key_file), [], False
    with open_log(log) as file:
        reader = AuditReader(file, key, str(log))
        try:
            for record in reader:
                if as_json:
                    click.echo(json.dumps(record, default=bytes.hex))
                else:
                    shown = [str(record.get(name, "")) for name in _COLUMNS]
                    # What has no column of its own goes into the last.
                    more = {name: value for name, value in record.items() if name not in _COLUMNS}
                    rows.append([*shown, json.dumps(more, default=bytes.hex)[1:-1]])
        except AuditLogError as error:
            complain(f"{error}")
            changed = True
    if not as_json:
        columns = [(name, name in _NUMBERS) for name in (*_COLUMNS, "more")]
        console = open_console()
        if not console.is_terminal:
            # A record stays on a line, for programs that search.
            console.width = 1000
        console.print(table("", columns, rows))
    if reader.torn_bytes:
        complain(f"{log}: torn tail: {reader.torn_bytes} bytes of records that were not finished")
    complain(f"{log}: {reader.records} records, chain {reader.chain.hex()}")
    context.exit(EXIT_FAILURE if changed else 0)


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


@keys.command("show", context_settings=CONTEXT)
@click.argument("file", type=PATH)
@config_option
def show_key(file: Path) -> None:
    """Print the public key of a .key or .pub FILE, as a line of an --allow list."""
    from tsqp.key_files import public_key_of

    click.echo(public_key_of(file).decode("ascii"))


def _limit(name: str, text: str) -> Callable[[C], C]:
    # Of one key each time, and no setting.
    return click.option(
        name, type=click.IntRange(1, 10**9), allow_from_autoenv=False, metavar="N", help=text
    )


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
