"""Options of commands, made of the fields of the settings models: `@takes(ServeSettings)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from annotated_types import Interval, MinLen
from click.core import ParameterSource

from tsqp.cli.config import (
    FILES,
    PATH,
    PREFIX,
    FiniteFloatRange,
    StopText,
    complete_file,
    complete_policy,
    model_argument,
)
from tsqp.run.settings import (
    DIRECTORY,
    Settings,
    Source,
    TextSettings,
    option_of,
    plain_type,
    said_of,
    settings_of,
)

C = TypeVar("C", bound=Callable[..., Any])

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
            source = Source(tuple(context.meta.get(FILES, ())), frozenset(of_file))
            # A command that has no MODEL asks for nothing that is read from it.
            settings = model(**({"model": ""} | own), source=source)
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
