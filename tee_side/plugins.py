"""Masks, policies and whatever else is a user's own, in Python files and installed packages.

Such a file is code that runs in the TEE with everything it knows. Nothing is found by itself: only
a path that somebody wrote on the command line or in a policy is loaded, or a package installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeGuard, TypeVar

from pydantic import ValidationError

from protocol.errors import InputError, TsqpError, describe
from tee_side.refusals import first_problem

Base = TypeVar("Base")
_PREFIX = "tsqp_plugin_"


class PluginError(InputError):
    """A user's own file or package that cannot be loaded, or lacks what it is loaded for."""


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module, once per process and path. Raises PluginError."""
    resolved = path.resolve()
    # Without dots, which pickle takes for those of packages.
    name = _PREFIX + resolved.as_posix().replace("%", "%25").replace(".", "%2E")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None or not resolved.is_file():
        raise PluginError(str(path), got="no such file", expected="a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Whatever a user's file raises is the user's to read, as one line.
        del sys.modules[name]
        raise _failure(str(path), error, "a file that runs") from error
    return module


def is_path(name: str) -> bool:
    """Say whether a person means a file, and nothing by its name."""
    return "/" in name or name.endswith(".py")


def loaded_files() -> list[Path]:
    """Return the files that this process has loaded, for one that is to unpickle their classes."""
    return [
        Path(module.__file__)
        for name, module in list(sys.modules.items())
        if name.startswith(_PREFIX) and module.__file__ is not None
    ]


def load_object(path: str, name: str) -> object:
    """Return a module-level object of a Python file. Raises PluginError."""
    module = load_module(Path(path))
    if not hasattr(module, name):
        raise PluginError(path, got=f"nothing named {name}", expected=f"{name} = ...")
    found: object = getattr(module, name)
    return found


def load_entry_point(entry: EntryPoint) -> object:
    """Import what an installed package registered. Raises PluginError."""
    try:
        found: object = entry.load()
    except Exception as error:
        # As of a file: whatever a package raises when it is imported.
        raise _failure(f"entry point {entry.value}", error, "one that loads") from error
    return found


@dataclass(frozen=True)
class Kind(Generic[Base]):
    """Classes that do one thing in different ways: those that ship with us, and a user's own.

    `base`: what all are subclasses of, each with a class attribute `name`, which a family of them
    has not; `word`, `words`: what one is, in an error of class `error`; `package`: ours, a module
    or more of them; `group`: of the entry points by which installed packages bring theirs.
    """

    base: type[Any]
    word: str
    words: str
    error: type[TsqpError]
    package: str
    group: str

    def in_module(self, module: ModuleType) -> list[type[Base]]:
        """Return those that a module defines, in the order of its text."""
        return [
            found
            for found in vars(module).values()
            if self._is_one(found) and found.__module__ == module.__name__ and "name" in vars(found)
        ]

    def _is_one(self, found: object) -> TypeGuard[type[Base]]:
        return inspect.isclass(found) and issubclass(found, self.base)

    @cached_property
    def builtin(self) -> dict[str, type[Base]]:
        """Those that ship with us, by name."""
        names = sorted(entry.name for entry in files(self.package).iterdir())
        modules = [
            importlib.import_module(f"{self.package}.{name.removesuffix('.py')}")
            for name in names
            if name.endswith(".py") and name != "__init__.py"
        ]
        return {vars(one)["name"]: one for module in modules for one in self.in_module(module)}

    def names(self) -> list[str]:
        """Return the names of those that ship with us, and that installed packages bring."""
        return sorted({*self.builtin, *(entry.name for entry in entry_points(group=self.group))})

    def named(self, name: str) -> type[Base]:
        """Return one by its name; a package is imported for a name that is none of ours.

        Raises `error`, and PluginError for a package that does not load.
        """
        if name in self.builtin:
            return self.builtin[name]
        for entry in entry_points(group=self.group):
            if entry.name == name:
                found = load_entry_point(entry)
                if self._is_one(found):
                    return found
                raise self.error(
                    f"entry point {entry.value}",
                    got=describe(found),
                    expected=f"a subclass of {self.words}",
                )
        raise self.error(
            self.word,
            got=repr(name),
            expected=f"one of {', '.join(self.names())}, or a path to a .py file",
        )


def _failure(where: str, error: Exception, expected: str) -> PluginError:
    """Say in one line what went wrong: errors of ours and pydantic's keep their own words."""
    if isinstance(error, ValidationError):
        problem = first_problem(error)
        parts = [where, ".".join(map(str, (error.title, *problem.path))), problem.where]
        return PluginError(
            ": ".join(filter(None, parts)), got=problem.got, expected=problem.expected
        )
    if isinstance(error, TsqpError):
        return PluginError(f"{where}: {error.where}", got=error.got, expected=error.expected)
    text = " ".join(str(error).split())
    return PluginError(where, got=f"{type(error).__name__}: {text}", expected=expected)
