"""Attacks, each of a way to read what crossed, and the registry that finds one by its name.

An attack is a class in a module of this folder, in a package that registers it as an entry point
of `tsqp.attacks`, or in a Python file that is named by its path.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from tee_side.plugins import Kind, classes_in, load_module
from tee_side.protect.masks.mask import is_path
from tsqp.lab.leak.attack import Attack, AttackError

ATTACKS: Kind[Attack] = Kind(
    Attack,
    "attack",
    "Attack",
    AttackError,
    group="tsqp.attacks",
    builtin={
        found.name: found
        for module in iter_modules(__path__)
        for found in classes_in(import_module(f"{__name__}.{module.name}"), Attack)
    },
)


def find_attacks(name_or_path: str) -> list[type[Attack]]:
    """Return an attack by name, or all of a Python file by its path (it has a `/` or `.py`).

    Raises AttackError, and PluginError for a file or package that does not load.
    """
    if not is_path(name_or_path):
        return [ATTACKS.named(name_or_path)]
    found = classes_in(load_module(Path(name_or_path)), Attack)
    AttackError.unless(found, name_or_path, "no attack", "a subclass of Attack")
    return found
