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
    PATH,
    PREFIX,
    FiniteFloatRange,
    StopText,
    complete_file,
    complete_policy,
    model_argument,
    settings_files,
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
S = TypeVar("S", bound=Settings)

_COMPLETES = {"file": complete_file, "policy": complete_policy}


def takes(
    model: type[S], *names: str, **changed: dict[str, Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the settings of a model as options, and one argument `settings` for them.

    `names`: of these settings alone; all others have their defaults. `changed`: what differs for
    the command, by the name of the setting.
    """
    chosen = {
        name: found for name, found in settings_of(model).items() if name in names or not names
    }

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            own = {name: given.pop(name) for name in chosen}
            return function(settings=_made(model, own), **given)

        command: Callable[..., Any] = called
        for name, (known, annotation) in reversed(chosen.items()):
            command = _declare(name, known, annotation, changed.get(name, {}))(command)
        return command

    return add


def use(*names: str, **changed: dict[str, Any]) -> Callable[[C], C]:
    """Add some options of a run to a command that has parameters of its own for them.

    `names`: as options, without the dashes. `changed`: what differs, by parameter name.
    """
    known = settings_of(TextSettings)
    by_option = {said_of(one).option or name: name for name, (one, _) in known.items()}

    def add(command: C) -> C:
        for option in reversed(names):
            name = by_option[option.replace("-", "_")]
            command = _declare(name, *known[name], changed.get(option.replace("-", "_"), {}))(
                command
            )
        return command

    return add


def read(model: type[S], context: click.Context) -> S:
    """Return the settings that a command was given; what it has no option for is as by default."""
    with context:
        given = {
            name: context.params[name] for name in settings_of(model) if name in context.params
        }
        return _made(model, given)


def _made(model: type[S], given: dict[str, Any]) -> S:
    context = click.get_current_context()
    of_file = {
        name for name in given if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
    }
    source = Source(tuple(settings_files()), frozenset(of_file))
    # A command that has no MODEL asks for nothing that is read from it.
    return model(**({"model": ""} | given), source=source)


def _declare(
    name: str, known: Field[Any], annotation: Any, changed: dict[str, Any]
) -> Callable[[C], C]:
    """Return the decorator that declares one setting."""
    if name == "model":
        return model_argument()
    said, (one, limits, several) = said_of(known), plain_type(annotation)
    option = option_of(said.option or name)
    declared = (option,) if said.option is None else (option, name)
    facts: dict[str, Any] = {"help": said.help}
    for key in ("metavar", "show_default"):
        if (value := getattr(said, key)) is not None:
            facts[key] = value
    if said.complete is not None:
        facts["shell_complete"] = _COMPLETES[said.complete]
    if said.option is not None:
        facts["envvar"] = f"{PREFIX}_{said.option.upper()}"
    if not said.variable:
        facts["allow_from_autoenv"] = False
    if one is bool:
        if known.default is False:
            facts["is_flag"] = True
        else:
            declared = (f"{option}/--no-{name.replace('_', '-')}",)
    else:
        facts["type"] = _type_of(one, limits)
    if several:
        facts["multiple"] = True
    if known.default is not MISSING and (one is bool or known.default not in (None, ())):
        facts["default"] = known.default
    return click.option(*declared, **(facts | changed))


def _type_of(one: Any, limits: tuple[Any, ...]) -> Any:
    """Return the type by which click reads one value."""
    if get_origin(one) is Literal:
        return click.Choice(get_args(one))
    if one is Path:
        return click.Path(file_okay=False, path_type=Path) if DIRECTORY in limits else PATH
    if any(isinstance(limit, MinLen) for limit in limits):
        return StopText()
    for limit in limits:
        if isinstance(limit, Interval):
            open_at = limit.gt is not None
            least: Any = limit.gt if open_at else limit.ge
            most: Any = limit.le
            kind = click.IntRange if one is int else FiniteFloatRange
            return kind(least, most, min_open=open_at)
    return one
