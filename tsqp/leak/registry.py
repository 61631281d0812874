"""Finds attacks: the modules of `tsqp/leak/attacks`, entry points of packages, files by path."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from protocol.errors import describe
from tee_side.plugins import load_entry_point, load_module
from tsqp.leak.attack import Attack, AttackError

_PACKAGE = "tsqp.leak.attacks"
_ENTRY_POINTS = "tsqp.attacks"


def attacks_in(module: ModuleType) -> list[type[Attack]]:
    """Return the attacks that a module defines, in the order of its text."""
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found)
        and issubclass(found, Attack)
        and found.__module__ == module.__name__
        and "name" in vars(found)  # families have none
    ]


@cache
def builtin_attacks() -> dict[str, type[Attack]]:
    """Return the attacks that ship with us, by name."""
    names = sorted(entry.name for entry in files(_PACKAGE).iterdir())
    modules = [
        importlib.import_module(f"{_PACKAGE}.{name.removesuffix('.py')}")
        for name in names
        if name.endswith(".py") and name != "__init__.py"
    ]
    return {attack.name: attack for module in modules for attack in attacks_in(module)}


def attack_names() -> list[str]:
    """Return the names of built-in attacks and of those that installed packages bring."""
    brought = (entry.name for entry in entry_points(group=_ENTRY_POINTS))
    return sorted({*builtin_attacks(), *brought})


def find_attacks(name_or_path: str) -> list[type[Attack]]:
    """Return an attack by name, or all of a Python file by its path (it has a `/` or `.py`).

    Raises AttackError, and PluginError for a file or package that does not load.
    """
    if "/" not in name_or_path and not name_or_path.endswith(".py"):
        return [_named(name_or_path)]
    found = attacks_in(load_module(Path(name_or_path)))
    if not found:
        raise AttackError(name_or_path, got="no attack", expected="a subclass of Attack")
    return found


def _named(name: str) -> type[Attack]:
    if name in builtin_attacks():
        return builtin_attacks()[name]
    for entry in entry_points(group=_ENTRY_POINTS):
        if entry.name == name:
            found = load_entry_point(entry)
            if inspect.isclass(found) and issubclass(found, Attack):
                return found
            raise AttackError(
                f"entry point {entry.value}",
                got=describe(found),
                expected="a subclass of Attack",
            )
    raise AttackError(
        "attack",
        got=repr(name),
        expected=f"one of {', '.join(attack_names())}, or a path to a .py file",
    )
