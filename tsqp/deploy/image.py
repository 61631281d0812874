"""The files of an image, by name; what differs between two; what it can be made of."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from protocol.errors import SettingsError

Suite: TypeAlias = Literal["trixie", "bookworm"]
# The Python of each suite. Debian 12's user space runs on Debian 13's kernel, too.
PYTHONS: dict[Suite, str] = {"trixie": "3.13", "bookworm": "3.11"}

KERNEL = "vmlinuz"
INITRAMFS = "initrd"
COMMAND_LINE = "cmdline"
FACTS = "image.json"
LOCK = "lock.json"
MEASURED = (KERNEL, INITRAMFS, COMMAND_LINE)


def require_image(directory: Path) -> None:
    """Raise SettingsError for a directory without an image in it."""
    for name in MEASURED:
        if not (directory / name).is_file():
            raise SettingsError(str(directory / name), got="no such file", expected="of an image")


def first_difference(left: Path, right: Path) -> str | None:
    """Return the first file in which two images differ, None for none. Raises SettingsError."""
    for directory in (left, right):
        require_image(directory)
    for name in (*MEASURED, FACTS):
        if (left / name).read_bytes() != (right / name).read_bytes():
            return name
    return None
