"""Settings that stand in a TOML file, and names that no option of a command has.

Such a name may be another command's, which is ignored, or nobody's, which is refused with the
nearest one: to know it, every command of every program is loaded.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from protocol.errors import SettingsError, describe
from tsqp.cli.config import (
    FILES,
    PREFIX,
    PROGRAMS,
    StopText,
    settable,
    variable_of,
)

_OLD_PREFIX = re.compile("(?:TEE_RUNNER_(?:GENERATE|CHAT|PADS_MAKE)|GPU_SERVICE)_")


def check_variable(name: str) -> None:
    """Check a variable that is no option of the command. Raises SettingsError."""
    known = set(map(variable_of, _names_of(PROGRAMS)))
    if name.startswith(f"{PREFIX}_"):
        _require_known(name, name, known)
    elif old := _OLD_PREFIX.match(name):
        now = f"{PREFIX}_{name[old.end() :]}"
        # Others may be no setting of ours: Kubernetes names variables after a service.
        SettingsError.unless(
            now not in {f"{PREFIX}_CONFIG", *known},
            name,
            "a variable of an old name",
            now,
        )


def read_settings(context: click.Context, path: Path) -> dict[str, Any]:
    """Return what a settings file gives a command, by its parameters. Raises SettingsError."""
    own, found = settable(context.command), {}
    for name, (value, where) in _read(context, path).items():
        parameter = own.get(name)
        if parameter is not None and parameter.name is not None:
            found[parameter.name] = _checked_value(parameter, value, where)
    return found


def _names_of(programs: Iterable[str]) -> set[str]:
    """Return the names of all settings of some programs, whose every command is loaded for it."""

    def names(command: click.Command) -> Iterator[str]:
        yield from settable(command)
        if isinstance(command, click.Group):
            with click.Context(command) as context:
                for name in command.list_commands(context):
                    if (found := command.get_command(context, name)) is not None:
                        yield from names(found)

    modules = (import_module(f"tsqp.cli.{PROGRAMS[program]}") for program in programs)
    return {name for module in modules for name in names(module.command)}


def _require_known(where: str, name: str, known: Iterable[str]) -> None:
    """Raise SettingsError, with the nearest name, for one that is not among these."""
    names = sorted(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" (did you mean {near[0]}?)" if near else " (--help lists them)"
        raise SettingsError(where, got="an unknown name", expected=f"that of an option{hint}")


def _read(context: click.Context, path: Path) -> dict[str, tuple[Any, str]]:
    """Read the values of a settings file, and where each stands. Raises SettingsError."""
    try:
        content = path.read_bytes()
        tables = tomllib.loads(content.decode("utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        # ValueError: malformed TOML, text that is not UTF-8, or an integer of thousands of digits.
        got = error.strerror if isinstance(error, OSError) else f"invalid TOML ({error})"
        if isinstance(error, RecursionError):
            got = "TOML that is nested too deeply"
        raise SettingsError(str(path), got=got or "an unreadable file", expected="TOML") from None
    context.meta.setdefault(FILES, []).append((path, content))
    program = context.find_root().command.name or ""
    own = tables.get(program, {})
    flat = {key: value for key, value in tables.items() if key not in PROGRAMS}
    for key in tables.keys() & PROGRAMS.keys():
        SettingsError.unless(
            isinstance(tables[key], dict), f"{path}: {key}", describe(tables[key]), "a table"
        )
    shared = _named(context, flat, str(path), PROGRAMS)
    return shared | _named(context, own, f"{path}: [{program}]", (program,))


def _named(
    context: click.Context, table: dict[str, Any], where: str, programs: Iterable[str]
) -> dict[str, tuple[Any, str]]:
    """Return a table's values by the names of their settings. Raises SettingsError."""
    own = settable(context.command)
    found: dict[str, tuple[Any, str]] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            tables = " and ".join(f"[{program}]" for program in PROGRAMS)
            raise SettingsError(f"{where}: {key}", got="a table", expected=f"none but {tables}")
        if name not in own:
            _require_known(f"{where}: {key}", name, _names_of(programs))
        SettingsError.unless(
            name not in found, f"{where}: {key}", "this setting twice, with - and with _", "it once"
        )
        found[name] = value, f"{where}: {key}"
    return found


def _checked_value(parameter: click.Parameter, value: object, where: str) -> object:
    """Return what click takes. Refuse what it would convert: `true` is no number, and 3 no path."""
    if isinstance(value, int) and value.bit_length() > 63:
        raise SettingsError(where, got="an integer beyond 64 bits", expected="one within")
    expected = _expected(parameter)
    # By type and not isinstance: `true` is an int to Python.
    SettingsError.unless(type(value) in _TOML_TYPES[expected], where, describe(value), expected)
    if not isinstance(parameter, click.Option) or not parameter.multiple:
        return value
    items = value if isinstance(value, list) else [value]
    for item in items:
        SettingsError.unless(
            isinstance(item, str), where, f"{describe(item)} in it", "strings only"
        )
    return items


# What a setting may be in TOML, as an error says it, and the types that fit.
_TOML_TYPES: dict[str, tuple[type, ...]] = {
    "a string": (str,),
    "a string or a list of strings": (str, list),
    "a list of strings": (list,),
    "true or false": (bool,),
    "an integer": (int,),
    "a number": (int, float),
}


def _expected(parameter: click.Parameter) -> str:
    """Return which of `_TOML_TYPES` a parameter takes."""
    if isinstance(parameter, click.Option) and parameter.multiple:
        # Several stop strings are one text elsewhere, so one alone would be ambiguous.
        stop = isinstance(parameter.type, StopText)
        return "a list of strings" if stop else "a string or a list of strings"
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return "true or false"
    if isinstance(parameter.type, click.types.IntParamType):
        return "an integer"
    return "a number" if isinstance(parameter.type, click.types.FloatParamType) else "a string"
