"""Finds masks: the modules of this folder, entry points of installed packages, files by path."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from protocol.errors import MaskError
from tee_side.masks.mask import Mask
from tee_side.plugins import load_module

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


def registered_masks() -> dict[str, type[Mask]]:
    """Return built-in masks and those of installed packages, by name. Raises MaskError.

    Ours win: a policy that asks for `pad` gets the one that it was written for.
    """
    found = dict(builtin_masks())
    for entry in entry_points(group=_ENTRY_POINTS):
        if entry.name not in found:
            found[entry.name] = _checked(entry.load(), f"entry point {entry.value}")
    return found


def find_mask(name_or_path: str, folder: Path | None = None) -> type[Mask]:
    """Return a mask class by name, or from a Python file by its path (it has a `/` or `.py`).

    A relative path is looked up from `folder`, which is the policy file's. `FILE.py:Class` picks
    one of several in a file. Raises MaskError, and PluginError for a file that does not load.
    """
    path_text, _, wanted = name_or_path.partition(":")
    if "/" not in path_text and not path_text.endswith(".py"):
        masks = registered_masks()
        if name_or_path not in masks:
            raise MaskError(
                "mask",
                got=repr(name_or_path),
                expected=f"one of {', '.join(masks)}, or a path to a .py file",
            )
        return masks[name_or_path]
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


def _checked(found: object, where: str) -> type[Mask]:
    if inspect.isclass(found) and issubclass(found, Mask):
        return found
    raise MaskError(where, got=type(found).__name__, expected="a subclass of a mask kind")
