"""Finds attacks: the modules of `tsqp/leak/attacks`, entry points of packages, files by path."""

from __future__ import annotations

from pathlib import Path

from tee_side.plugins import Kind, is_path, load_module
from tsqp.leak.attack import Attack, AttackError

ATTACKS: Kind[Attack] = Kind(
    Attack, "attack", "Attack", AttackError, package="tsqp.leak.attacks", group="tsqp.attacks"
)


def find_attacks(name_or_path: str) -> list[type[Attack]]:
    """Return an attack by name, or all of a Python file by its path (it has a `/` or `.py`).

    Raises AttackError, and PluginError for a file or package that does not load.
    """
    if not is_path(name_or_path):
        return [ATTACKS.named(name_or_path)]
    found = ATTACKS.in_module(load_module(Path(name_or_path)))
    if not found:
        raise AttackError(name_or_path, got="no attack", expected="a subclass of Attack")
    return found
