"""What the three programs share: settings from three places, errors in one line, exit statuses.

A setting comes from the command line, else from an environment variable (`GPU_SERVICE_BIND`,
`TEE_RUNNER_GENERATE_POLICY`, ...), else from the TOML file that `--config` names, else from its
default. click does all of this; what is added here is that unknown keys in the file are refused.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from protocol.errors import SettingsError, TsqpError

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

C = TypeVar("C", bound=Callable[..., Any])


def run(command: click.Command, name: str, environment_prefix: str) -> NoReturn:
    """Run a program and exit: 0, 1 for a negative verdict, 2 with one line for bad input."""
    # Two torch processes on one machine fight through libgomp's spinning threads; it reads this
    # once, when torch is imported. docs/architecture.md has the measurement.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        status = command.main(
            prog_name=name, auto_envvar_prefix=environment_prefix, standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = EXIT_BAD_INPUT
    except (click.ClickException, TsqpError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"{name}: error: {' '.join(message.split())}", err=True)
        status = EXIT_BAD_INPUT
    except (click.Abort, KeyboardInterrupt):
        click.echo(f"{name}: interrupted", err=True)
        status = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing is left to say, not even at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = EXIT_FAILURE
    sys.exit(status if isinstance(status, int) else 0)


def config_option(command: C) -> C:
    """Add `--config FILE`, which is read before the other settings are."""
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="TOML file with settings; a table per command, keys as the long options.",
    )(command)


def _read_config(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise SettingsError(
            str(path), got=error.strerror or "an unreadable file", expected="a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(str(path), got=f"invalid TOML ({error})", expected="TOML") from None
    context.default_map = {
        **(context.default_map or {}),
        **_known_settings(context.command, content, str(path)),
    }


def _known_settings(command: click.Command, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Turn a TOML table into click's `default_map`. Raises SettingsError for an unknown key."""
    known = {
        parameter.name
        for parameter in command.params
        if parameter.name is not None and parameter.name not in ("config", "help", "version")
    }
    commands = command.commands if isinstance(command, click.Group) else {}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if key in commands and isinstance(value, dict):
            settings[key] = _known_settings(commands[key], value, f"{where}: [{key}]")
        elif name in known and not isinstance(value, dict):
            settings[name] = value
        else:
            expected = sorted(name.replace("_", "-") for name in known | set(commands))
            raise SettingsError(
                f"{where}: {key}",
                got="an unknown table" if isinstance(value, dict) else "an unknown key",
                expected=f"one of {', '.join(expected)}",
            )
    return settings


def model_directory(name: str) -> Path:
    """Return the directory of MODEL: the demo model that ships with us, or a path."""
    if name == "demo":
        return Path(__file__).resolve().parent.parent / "demo_model"
    return Path(name)


def setup_logging(level: str) -> None:
    """Send the log to stderr, one line an event: time, level, event, key=value pairs."""
    from tsqp.cli.logs import configure

    configure(level)


DTYPES = click.Choice(["float32", "bfloat16", "float16"])
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"


def version_option(command: C) -> C:
    """Add `--version`."""
    return click.version_option(package_name="tsqp", message="%(prog)s %(version)s")(command)
