"""Options of commands, made of the fields of the settings models, and where values come from.

All three programs have one flat set of names. `@takes(ServeSettings)` declares the options.

A setting comes from the command line (`--policy`), else from the environment (`TSQP_POLICY`), else
from the TOML file that `--config` or `TSQP_CONFIG` names (`policy = "..."`), else from its default.
The file's table `[tee-runner]`, `[gpu-service]` or `[tsqp]` goes before its other keys in that
program. A name that another command has is ignored, and one that no command has is refused.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field
from functools import wraps
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import (
    Any,
    Literal,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import click
from annotated_types import Interval, MinLen
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from protocol.errors import SettingsError, describe
from tsqp.run.settings import (
    DEMO,
    DIRECTORY,
    Settings,
    TextSettings,
    option_of,
    plain_type,
    said_of,
    settings_of,
)

C = TypeVar("C", bound=Callable[..., Any])

PREFIX = "TSQP"
# Of every command: without the prefix, click would put the command's name into the variable's.
CONTEXT = {
    "show_default": True,
    "help_option_names": ["-h", "--help"],
    "auto_envvar_prefix": PREFIX,
}
PROGRAMS = {"gpu-service": "gpu_service", "tee-runner": "tee_runner", "tsqp": "main"}
# What the variables of options began with before they had one set of names.
_OLD_PREFIX = re.compile("(?:TEE_RUNNER_(?:GENERATE|CHAT|PADS_MAKE)|GPU_SERVICE)_")
# Variables that are no option.
_CONFIG = f"{PREFIX}_CONFIG"
_OTHER_VARIABLES = {_CONFIG, f"{PREFIX}_DEBUG"}
# In the meta of a context: settings files that were read, with their content; the one to read.
FILES, _PATH = f"{__name__}.files", f"{__name__}.path"

# Names of before, and what is expected in their place.
_GONE = dict.fromkeys(
    ("calibrate", "calibration"),
    "nothing: each row of integers has a scale of its own (tsqp accuracy says how good they are)",
) | {"shares-in-the-clear": "--dealer-in-the-clear"}

# Beyond it torch's thread pool ends the process with a segmentation fault.
THREADS = click.IntRange(1, 1024)
PATH = click.Path(dir_okay=False, path_type=Path)


class Commands(click.Group):
    """A group of commands, each in a module of its own, which is loaded when the command is."""

    def __init__(self, *args: Any, modules: dict[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *self._modules})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None. Raises SettingsError for one of before."""
        _require_still_there(cmd_name, cmd_name)
        if (module := self._modules.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        found = import_module(f"tsqp.cli.{module}")
        name = cmd_name.replace("-", "_") + "_" * iskeyword(cmd_name)
        return cast("click.Command", getattr(found, name))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. Raises SettingsError for an option of before."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            _require_still_there(error.option_name, error.option_name.lstrip("-"))
            raise


class Model(click.types.StringParamType):
    """A Hugging Face directory, or "demo"."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave directories to the shell, and offer the demo model beside them."""
        demo = [CompletionItem(DEMO)] if DEMO.startswith(incomplete) else []
        return [CompletionItem(incomplete, type="dir"), *demo]


def model_argument(*, required: bool = True) -> Callable[[C], C]:
    """Add MODEL. One that is optional is a choice for this command, and no setting."""
    return click.argument(
        "model", type=Model(), required=required, envvar=f"{PREFIX}_MODEL" if required else None
    )


def complete_policy(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of policies that begin so; without any, leave files to the shell."""
    from tee_side.policy.placement import policy_names

    names = [CompletionItem(name) for name in policy_names() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_file(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Leave it to the shell to complete a path, where a value is possible as well."""
    return [CompletionItem(incomplete, type="file")]


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


def read_listen(
    _context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, int] | None:
    """Read HOST:PORT to listen at; an IPv6 address is in brackets. Raises SettingsError."""
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(parameter.opts[0], got=describe(text), expected="HOST:PORT")
    return host.strip("[]"), int(port)


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


version_option = click.version_option(package_name="tsqp", message="%(prog)s %(version)s")


def _apply(context: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Check the environment, and give a command the settings of the file.

    `--config` may stand before or after the name of a command. Raises SettingsError.
    """
    typed = context.get_parameter_source("config") is ParameterSource.COMMANDLINE
    path = path if typed else context.meta.get(_PATH, path)
    context.meta[_PATH] = path
    if isinstance(context.command, click.Group):
        return
    known = {_name(parameter): parameter for parameter in _settable(context.command)}
    variables = {_variable(name): name for name in known}
    for name in os.environ:
        if name.startswith(f"{PREFIX}_") and name not in variables.keys() | _OTHER_VARIABLES:
            _require_known(name, name, map(_variable, _names_of(PROGRAMS)))
        if old := _OLD_PREFIX.match(name):
            now = f"{PREFIX}_{name[old.end() :]}"
            # Others may be no setting of ours: Kubernetes names variables after a service.
            SettingsError.unless(
                now not in {_CONFIG, *map(_variable, _names_of(PROGRAMS))},
                name,
                "a variable of an old name",
                now,
            )
        # click takes it for one that is not set: a check that it asks for would be left out.
        SettingsError.unless(
            name not in variables or os.environ[name],
            name,
            "an empty value",
            "a value, or no variable",
        )
    found: dict[str, Any] = {}
    for name, (value, where) in _read(context, path).items() if path else ():
        parameter = known.get(name)
        if parameter is not None and parameter.name is not None:
            found[parameter.name] = _checked_value(parameter, value, where)
    context.default_map = found


# Read before the other settings are.
config_option = click.option(
    "--config",
    type=PATH,
    is_eager=True,
    expose_value=False,
    callback=_apply,
    help="TOML file with settings, named as the long options (docs/operate/settings.md).",
)


def _settable(command: click.Command) -> Iterator[click.Parameter]:
    """Yield the parameters that the environment and the file may set."""
    for parameter in command.params:
        automatic = isinstance(parameter, click.Option) and parameter.allow_from_autoenv
        if (automatic or parameter.envvar) and parameter.name not in ("config", "help", "version"):
            yield parameter


def _name(parameter: click.Parameter) -> str:
    """Return the name of a setting: the long option without its dashes."""
    return max(parameter.opts, key=len).lstrip("-")


def _variable(name: str) -> str:
    return f"{PREFIX}_{name.upper().replace('-', '_')}"


def _names_of(programs: Iterable[str]) -> set[str]:
    """Return the names of all settings of some programs, whose every command is loaded for it."""

    def names(command: click.Command) -> Iterator[str]:
        yield from map(_name, _settable(command))
        if isinstance(command, click.Group):
            with click.Context(command) as context:
                for name in command.list_commands(context):
                    if (found := command.get_command(context, name)) is not None:
                        yield from names(found)

    modules = (import_module(f"tsqp.cli.{PROGRAMS[program]}") for program in programs)
    return {name for module in modules for name in names(module.command)}


def _require_still_there(where: str, name: str) -> None:
    """Raise SettingsError for a name of before, with what to do."""
    name = name.replace("_", "-")
    if name in _GONE:
        raise SettingsError(where, got="a name of before", expected=_GONE[name])


def _require_known(where: str, name: str, known: Iterable[str]) -> None:
    """Raise SettingsError, with the nearest name, for one that is not among these."""
    _require_still_there(where, name.removeprefix(f"{PREFIX}_").lower())
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
    own = {_name(parameter) for parameter in _settable(context.command)}
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


_COMPLETES = {None: None, "file": complete_file, "policy": complete_policy}


def takes(
    model: type[Settings], *names: str, **changed: dict[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the settings of a model as options, and one argument `settings` for them.

    `names`: of these settings alone; all others have their defaults. `changed`: what differs for
    the command, by the name of the setting.
    """
    known = settings_of(model)
    chosen = {name: known[name] for name in known if name in names or not names}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            own = {name: given.pop(name) for name in chosen}
            context = click.get_current_context()
            of_file = {
                name
                for name in own
                if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
            }
            # A command that has no MODEL asks for nothing that is read from it.
            settings = model(
                **({"model": ""} | own),
                read_files=tuple(context.meta.get(FILES, ())),
                of_files=frozenset(of_file),
            )
            return function(settings=settings, **given)

        return _declared(called, chosen, changed)

    return add


def use(*names: str, **changed: dict[str, Any]) -> Callable[[C], C]:
    """Add some settings of a run as options to a command that has parameters of its own for them.

    `changed`: what differs, by the name of the setting.
    """
    known = settings_of(TextSettings)
    chosen = {name: known[name] for name in names}

    def add(command: C) -> C:
        return _declared(command, chosen, changed)

    return add


def _declared(
    command: C, chosen: dict[str, tuple[Field[Any], Any]], changed: dict[str, dict[str, Any]]
) -> C:
    """Declare settings, whose first one `--help` shows first."""
    for name, (known, annotation) in reversed(chosen.items()):
        command = _option(name, known, annotation, changed.get(name, {}))(command)
    return command


def _option(
    name: str, known: Field[Any], annotation: Any, changed: dict[str, Any]
) -> Callable[[C], C]:
    """Return the decorator that declares one setting."""
    if name == "model":
        return model_argument()
    said, (one, limits, several) = said_of(known), plain_type(annotation)
    option, flag = option_of(said.option or name), one is bool
    # A flag that is on by default, or that has a third state, can be turned off.
    off = f"/--no-{option.removeprefix('--')}" if flag and known.default is not False else ""
    facts: dict[str, Any] = {
        "help": said.help,
        "metavar": said.metavar,
        "show_default": said.show_default,
        "multiple": several,
        "shell_complete": _COMPLETES[said.complete],
        "envvar": said.option and f"{PREFIX}_{said.option.upper()}",
        "allow_from_autoenv": said.variable,
    }
    facts |= {"is_flag": True} if flag else {"type": _type_of(one, limits)}
    if flag or known.default not in (MISSING, None, ()):
        facts["default"] = known.default
    return click.option(option + off, name, **(facts | changed))


def _type_of(one: Any, limits: tuple[Any, ...]) -> Any:
    """Return the type by which click reads one value."""
    if get_origin(one) is Literal:
        return click.Choice(get_args(one))
    if one is Path:
        return click.Path(file_okay=False, path_type=Path) if DIRECTORY in limits else PATH
    if any(isinstance(limit, MinLen) for limit in limits):
        return StopText()
    bounds: Any = next((limit for limit in limits if isinstance(limit, Interval)), None)
    if bounds is None:
        return one
    kind = click.IntRange if one is int else FiniteFloatRange
    least = bounds.ge if bounds.gt is None else bounds.gt
    return kind(least, bounds.le, min_open=bounds.gt is not None)
