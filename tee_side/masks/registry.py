"""Finds masks: the modules of this folder, entry points of installed packages, files by path."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from protocol.errors import MaskError, describe
from tee_side.masks.mask import Mask
from tee_side.plugins import load_entry_point, load_module

_PACKAGE = "tee_side.masks"
_ENTRY_POINTS = "tsqp.masks"


def masks_in(module: ModuleType) -> list[type[Mask]]:
    """Return the masks that a module defines, in the order of its text."""
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found)
        and issubclass(found, Mask)
        and found.__module__ == module.__name__
        and "name" in vars(found)  # kinds have none
    ]


@cache
def builtin_masks() -> dict[str, type[Mask]]:
    """Return the masks that ship with us, by name."""
    names = sorted(entry.name for entry in files(_PACKAGE).iterdir())
    modules = [
        importlib.import_module(f"{_PACKAGE}.{name.removesuffix('.py')}")
        for name in names
        if name.endswith(".py") and name != "__init__.py"
    ]
    return {mask.name: mask for module in modules for mask in masks_in(module)}


def mask_names() -> list[str]:
    """Return the names of built-in masks and of those that installed packages bring."""
    return sorted({*builtin_masks(), *(entry.name for entry in entry_points(group=_ENTRY_POINTS))})


def find_mask(name_or_path: str, folder: Path | None = None) -> type[Mask]:
    """Return a mask class by name, or from a Python file by its path (it has a `/` or `.py`).

    A relative path is looked up from `folder`, which is the policy file's. `FILE.py:Class` picks
    one of several in a file. Of installed packages only the one that brings the name is imported,
    and none for a name of ours: a policy that asks for `pad` gets the one it was written for.
    Raises MaskError, and PluginError for a file or package that does not load.
    """
    path_text, _, wanted = name_or_path.partition(":")
    if "/" not in path_text and not path_text.endswith(".py"):
        return _named(name_or_path)
    path = (folder or Path()) / path_text
    found = [mask for mask in masks_in(load_module(path)) if wanted in ("", mask.__name__)]
    if len(found) != 1:
        names = ", ".join(mask.__name__ for mask in found) or "none"
        raise MaskError(
            str(path),
            got=f"{len(found)} masks ({names})",
            expected=f"one named {wanted}" if wanted else "one (FILE.py:Class picks one)",
        )
    return found[0]


def _named(name: str) -> type[Mask]:
    if name in builtin_masks():
        return builtin_masks()[name]
    for entry in entry_points(group=_ENTRY_POINTS):
        if entry.name == name:
            return _checked(load_entry_point(entry), f"entry point {entry.value}")
    raise MaskError(
        "mask",
        got=repr(name),
        expected=f"one of {', '.join(mask_names())}, or a path to a .py file",
    )


def _checked(found: object, where: str) -> type[Mask]:
    if inspect.isclass(found) and issubclass(found, Mask):
        return found
    raise MaskError(where, got=describe(found), expected="a subclass of a mask kind")
