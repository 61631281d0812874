"""Settings from three places, and the types of options that the programs have in common.

A setting comes from the command line, else from an environment variable (`GPU_SERVICE_BIND`,
`TEE_RUNNER_GENERATE_POLICY`, ...), else from the TOML file that `--config` names, else from its
default. click does all of this; what is added here is that the file is checked: an unknown key, a
key given twice and a value of another type than the option's are refused.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, TypeVar, cast

import click

from protocol.errors import SettingsError, describe

C = TypeVar("C", bound=Callable[..., Any])

# Beyond it torch's thread pool ends the process with a segmentation fault.
THREADS = click.IntRange(1, 1024)
PATH = click.Path(dir_okay=False, path_type=Path)
DTYPES = click.Choice(["float32", "bfloat16", "float16"])

Number = TypeVar("Number", int, float)


class Numbers(click.ParamType[tuple[Number, ...]]):
    """Numbers with commas, sorted, each once: `1,128,512`. `each`: the type of one."""

    name = "numbers"

    def __init__(self, each: type[Number], *, above: Number, most: Number) -> None:
        self._each: type[Number] = each
        self._above: Number = above
        self._most: Number = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Number, ...]:
        """Read them."""
        if isinstance(value, tuple):
            return value
        try:
            found = {self._each(part) for part in str(value).split(",")}
        except ValueError:
            found = set()
        if not found or not all(self._above < number <= self._most for number in found):
            kind = "whole numbers" if self._each is int else "numbers"
            self.fail(
                f"got {value!r}, expected {kind} above {self._above}, at most {self._most}, with"
                " commas",
                param,
                ctx,
            )
        return tuple(sorted(found))


# Sizes, in tokens or sequences.
COUNTS: Numbers[int] = Numbers(int, above=0, most=2**31 - 1)

_NO_SETTINGS = ("config", "help", "version")


def complete_policy(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of policies that begin so; paths complete themselves."""
    from tee_side.policy import policy_names

    return [name for name in policy_names() if name.startswith(incomplete)]


def complete_shape(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of models' shapes that begin so."""
    from tsqp.bench.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


class FiniteFloatRange(click.FloatRange):
    """A `FloatRange` that also refuses nan, which no comparison refuses, and infinity."""

    def convert(
        self,
        value: SupportsFloat | SupportsIndex,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Return the number, or fail."""
        # click declares a number here, and takes the text of one.
        number = super().convert(cast("float", value), param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


IDENTITY = click.option(
    "--identity",
    type=PATH,
    metavar="FILE",
    help="Our secret key (tsqp keys new), for services that let in some clients only.",
)
# The default is `protocol.zmq_sockets.DEFAULT_HEARTBEAT_TIMEOUT_S`, which takes long to import.
HEARTBEAT_TIMEOUT_S = click.option(
    "--heartbeat-timeout-s",
    type=FiniteFloatRange(0, 3600),
    default=1.0,
    help="End a tcp:// or ipc:// connection on which nothing has come for so long, though we ask"
    " four times in that time; longer than the largest tensor takes on the link. 0 is off.",
)


class StopText(click.types.StringParamType):
    """A stop string. In the environment they are separated by newlines, as they may have spaces."""

    def convert(
        self, value: str | bytes, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the text, or fail: every text contains the empty one."""
        text: str = super().convert(value, param, ctx)
        if not text:
            self.fail("an empty text would stop at once.", param, ctx)
        return text

    def split_envvar_value(self, rv: str) -> list[str]:
        """Split the value of an environment variable; an empty line is no stop string."""
        return [line for line in rv.split("\n") if line]


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


def version_option(command: C) -> C:
    """Add `--version`."""
    return click.version_option(package_name="tsqp", message="%(prog)s %(version)s")(command)


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
    except RecursionError:
        raise SettingsError(
            str(path), got="TOML that is nested too deeply", expected="settings"
        ) from None
    except ValueError as error:
        # Malformed TOML, text that is not UTF-8, or an integer of thousands of digits.
        raise SettingsError(str(path), got=f"invalid TOML ({error})", expected="TOML") from None
    context.default_map = {
        **(context.default_map or {}),
        **_checked_table(context.command, content, str(path)),
    }


def _checked_table(command: click.Command, table: dict[str, Any], where: str) -> dict[str, Any]:
    """Turn a TOML table into click's `default_map`. Raises SettingsError."""
    known = {
        parameter.name: parameter
        for parameter in command.params
        if parameter.name is not None and parameter.name not in _NO_SETTINGS
    }
    commands = command.commands if isinstance(command, click.Group) else {}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if key in commands and isinstance(value, dict):
            settings[key] = _checked_table(commands[key], value, f"{where}: [{key}]")
        elif name not in known or isinstance(value, dict):
            expected = sorted(name.replace("_", "-") for name in known.keys() | commands.keys())
            raise SettingsError(
                f"{where}: {key}",
                got="an unknown table" if isinstance(value, dict) else "an unknown key",
                expected=f"one of {', '.join(expected)}",
            )
        elif name in settings:
            raise SettingsError(
                f"{where}: {key}", got="this setting twice, with - and with _", expected="it once"
            )
        else:
            settings[name] = _checked_value(known[name], value, f"{where}: {key}")
    return settings


def _checked_value(parameter: click.Parameter, value: object, where: str) -> object:
    """Return what click takes. Refuse what it would convert: `true` is no number, and 3 no path."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise SettingsError(where, got="an integer beyond 64 bits", expected="one within")
    if isinstance(parameter, click.Option) and parameter.multiple:
        return _checked_list(parameter, value, where)
    fits, expected = isinstance(value, str), "a string"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(parameter.type, click.types.IntParamType):
        fits, expected = number and isinstance(value, int), "an integer"
    elif isinstance(parameter.type, click.types.FloatParamType):
        fits, expected = number, "a number"
    if not fits:
        raise SettingsError(where, got=describe(value), expected=expected)
    return value


def _checked_list(parameter: click.Option, value: object, where: str) -> list[str]:
    """Read the value of an option that may be repeated: a list, or one string as it is."""
    # Not of stop strings: elsewhere one text holds several of them.
    alone = not isinstance(parameter.type, StopText)
    if isinstance(value, str) and alone:
        return [value]
    if not isinstance(value, list):
        expected = "a string or a list of strings" if alone else "a list of strings"
        raise SettingsError(where, got=describe(value), expected=expected)
    for item in value:
        if not isinstance(item, str):
            raise SettingsError(where, got=f"{describe(item)} in it", expected="strings only")
    return value
