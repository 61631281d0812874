"""Finds masks: `pad` and `shares`, entry points of installed packages, files by path."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import MaskError
from tee_side.plugins import Kind, classes_in, is_path, load_module
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares

MASKS: Kind[Mask] = Kind(
    Mask,
    "mask",
    "a mask kind",
    MaskError,
    group="tsqp.masks",
    builtin={mask.name: mask for mask in (Pad, Shares)},
)


def find_mask(name_or_path: str, folder: Path | None = None) -> type[Mask]:
    """Return a mask class by name, or from a Python file by its path (it has a `/` or `.py`).

    A relative path is looked up from `folder`, which is the policy file's. `FILE.py:Class` picks
    one of several in a file. Of installed packages only the one that brings the name is imported,
    and none for a name of ours: a policy that asks for `pad` gets the one it was written for.
    Raises MaskError, and PluginError for a file or package that does not load.
    """
    path_text, _, wanted = name_or_path.partition(":")
    if not is_path(path_text):
        return MASKS.named(name_or_path)
    path = (folder or Path()) / path_text
    masks = classes_in(load_module(path), Mask)
    found = [mask for mask in masks if wanted in ("", mask.__name__)]
    if len(found) != 1:
        names = ", ".join(mask.__name__ for mask in found) or "none"
        raise MaskError(
            str(path),
            got=f"{len(found)} masks ({names})",
            expected=f"one named {wanted}" if wanted else "one (FILE.py:Class picks one)",
        )
    return found[0]
