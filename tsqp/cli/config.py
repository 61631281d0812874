"""Options of commands, made of the fields of the settings models, and where values come from.

All three programs have one flat set of names. `@takes(ServeSettings)` declares the options.

A setting comes from the command line (`--policy`), else from the environment (`TSQP_POLICY`), else
from the TOML file that `--config` or `TSQP_CONFIG` names (`policy = "..."`), else from its default.
The file's table `[tee-runner]`, `[gpu-service]` or `[tsqp]` goes before its other keys in that
program. A name that another command has is ignored, and one that no command has is refused.
"""

import math
import os
from collections.abc import Callable
from dataclasses import MISSING, Field
from functools import wraps
from importlib import import_module
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

from protocol.errors import SettingsError
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
# Variables that are no option.
OTHER_VARIABLES = {f"{PREFIX}_CONFIG", f"{PREFIX}_DEBUG"}
# What the variables of options began with before they had one set of names.
_OLD_PREFIXES = ("TEE_RUNNER_", "GPU_SERVICE_")
# In the meta of a context: settings files that were read, with their content; the one to read.
FILES, _PATH = f"{__name__}.files", f"{__name__}.path"

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
        """Return a command, or None."""
        if (module := self._modules.get(cmd_name)) is None:
            return super().get_command(ctx, cmd_name)
        found = import_module(f"tsqp.cli.{module}")
        return cast("click.Command", getattr(found, cmd_name.replace("-", "_")))


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
    variables = {variable_of(name): name for name in settable(context.command)}
    for name in os.environ:
        ours = name.startswith(f"{PREFIX}_") and name not in variables.keys() | OTHER_VARIABLES
        if ours or name.startswith(_OLD_PREFIXES):
            from tsqp.cli.settings_file import check_variable

            check_variable(name)
        # click takes it for one that is not set: a check that it asks for would be left out.
        SettingsError.unless(
            name not in variables or os.environ[name],
            name,
            "an empty value",
            "a value, or no variable",
        )
    if path is not None:
        from tsqp.cli.settings_file import read_settings

        context.default_map = read_settings(context, path)


# Read before the other settings are.
config_option = click.option(
    "--config",
    type=PATH,
    is_eager=True,
    expose_value=False,
    callback=_apply,
    help="TOML file with settings, named as the long options (docs/operate/settings.md).",
)


def settable(command: click.Command) -> dict[str, click.Parameter]:
    """Return what the environment and the file may set: by the long option without its dashes."""
    found: dict[str, click.Parameter] = {}
    for parameter in command.params:
        automatic = isinstance(parameter, click.Option) and parameter.allow_from_autoenv
        if (automatic or parameter.envvar) and parameter.name not in ("config", "help", "version"):
            found[max(parameter.opts, key=len).lstrip("-")] = parameter
    return found


def variable_of(name: str) -> str:
    """Return the variable of the environment that gives a setting."""
    return f"{PREFIX}_{name.upper().replace('-', '_')}"


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
