"""Finds masks: `pad` and `shares`, entry points of installed packages, files by path."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import MaskError
from tee_side.protect.masks.mask import Mask, Pad, Shares

if TYPE_CHECKING:
    from tee_side.plugins import Kind

BUILTIN: dict[str, type[Mask]] = {mask.name: mask for mask in (Pad, Shares)}


@cache
def all_masks() -> Kind[Mask]:
    """Return what finds masks by name, of installed packages as well."""
    from tee_side.plugins import Kind  # of no use to a run under our own masks

    return Kind(Mask, "mask", "a mask kind", MaskError, group="tsqp.masks", builtin=BUILTIN)


def is_path(name: str) -> bool:
    """Say whether a person means a file, and nothing by its name."""
    return "/" in name or name.endswith(".py")


def find_mask(name_or_path: str, folder: Path | None = None) -> type[Mask]:
    """Return a mask class by name, or from a Python file by its path (it has a `/` or `.py`).

    A relative path is looked up from `folder`, which is the policy file's. `FILE.py:Class` picks
    one of several in a file. Of installed packages only the one that brings the name is imported,
    and none for a name of ours: a policy that asks for `pad` gets the one it was written for.
    Raises MaskError, and PluginError for a file or package that does not load.
    """
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]
    path_text, _, wanted = name_or_path.partition(":")
    if not is_path(path_text):
        return all_masks().named(name_or_path)
    from tee_side.plugins import classes_in, load_module

    path = (folder or Path()) / path_text
    masks = classes_in(load_module(path), Mask)
    found = [mask for mask in masks if wanted in ("", mask.__name__)]
    names = ", ".join(mask.__name__ for mask in found) or "none"
    MaskError.unless(
        len(found) == 1,
        str(path),
        f"{len(found)} masks ({names})",
        f"one named {wanted}" if wanted else "one (FILE.py:Class picks one)",
    )
    return found[0]
