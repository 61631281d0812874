"""Finds the compiled library, and says why one that is there is of no use."""

from __future__ import annotations

import importlib
import importlib.util
import struct
from pathlib import Path
from typing import Any


def load(name: str) -> tuple[Any, str]:
    """Import a compiled module by its name: itself and "", or None and what is wrong with it.

    None and "" where there is none.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None, ""
    try:
        if not _is_whole(Path(found.origin)):
            return None, "cut short, or no library"
        return importlib.import_module(name), ""
    except OSError:
        return None, "cannot be read"
    except ImportError:  # its text is the system's: a loader that quotes the file
        return None, "built for another processor or system"


def _is_whole(path: Path) -> bool:
    """Say whether an ELF file is as long as its header says: one cut short kills its process."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02"):
        return False
    sections, size, count = struct.unpack_from("=40xQ10x2H", head)
    return bool(path.stat().st_size >= sections + size * count)
