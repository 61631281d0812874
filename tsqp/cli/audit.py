"""`tsqp audit`: make the key of an audit log, and read the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tsqp.cli.options import use
from tsqp.cli.program import EXIT_FAILURE, complain
from tsqp.cli.settings import CONTEXT, PATH, config_option
from tsqp.tables import open_console, table

# The fields of a request that have columns of their own.
_NUMBERS = ("prompt_tokens", "completion_tokens", "duration_s")
_PIPED_WIDTH = 1000
_COLUMNS = ("time", "kind", "key", "outcome", *_NUMBERS)


@click.group(context_settings=CONTEXT)
@config_option
def audit() -> None:
    """Read the sealed log of tee-runner serve: who was served when, and how much. No text."""


@audit.command("new-key", context_settings=CONTEXT)
@click.argument("file", type=click.Path(path_type=Path))
@config_option
def new_key(file: Path) -> None:
    """Make the key of a log: FILE, which must stay secret, in the TEE and where logs are read."""
    import secrets

    from protocol.curve import SECRET_MODE
    from tee_side.protect.randomness import KEY_BYTES
    from tee_side.serve.audit_log import encode_key
    from tsqp.key_files import write_new

    write_new(file, encode_key(secrets.token_bytes(KEY_BYTES)), SECRET_MODE)
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
@use("json", json={"help": "One JSON object a record on stdout."})
@config_option
@click.pass_context
def show(context: click.Context, /, *, log: Path, key_file: Path, as_json: bool) -> None:
    """Check LOG from its beginning and print its records.

    The last line, on stderr, has the number of records and the chain value: the host can cut
    records off the end, which only a comparison with noted values shows. Exit status 1 if the log
    was changed; records before that place are printed.
    """
    from tee_side.serve.audit_log import AuditLogError, AuditReader, open_log, read_key

    key, rows, changed = read_key(key_file), [], False
    with open_log(log) as file:
        reader = AuditReader(file, key, str(log))
        try:
            for record in reader:
                if as_json:
                    click.echo(json.dumps(record, default=bytes.hex))
                else:
                    rows.append(_row(record))
        except AuditLogError as error:
            complain(f"{error}")
            changed = True
    if not as_json:
        columns = [(name, name in _NUMBERS) for name in (*_COLUMNS, "more")]
        console = open_console()
        if not console.is_terminal:
            # A record stays on a line, for programs that search.
            console.width = _PIPED_WIDTH
        console.print(table("", columns, rows))
    if reader.torn_bytes:
        complain(f"{log}: torn tail: {reader.torn_bytes} bytes of records that were not finished")
    complain(f"{log}: {reader.records} records, chain {reader.chain.hex()}")
    context.exit(EXIT_FAILURE if changed else 0)


def _row(record: dict[str, Any]) -> list[str]:
    """Return the cells of a record; what has no column goes into the last."""
    shown = [str(record.get(name, "")) for name in _COLUMNS]
    more = {name: value for name, value in record.items() if name not in _COLUMNS}
    return [*shown, json.dumps(more, default=bytes.hex)[1:-1]]
