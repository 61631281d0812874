"""Masks, policies and whatever else is a user's own, in Python files and installed packages.

Such a file is code that runs in the TEE with everything it knows. Nothing is found by itself: only
a path that is written on the command line or in a policy is loaded, or a package installed.
A file is read once: the bytes that were checked are the ones that run, and no cached bytecode is.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import decode_source, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from protocol.errors import ManifestError, PluginError, TsqpError, describe
from protocol.validation import first_problem

Base = TypeVar("Base")
# What packages register is read once: each reading goes through all of them, 10 ms and more.
installed: Callable[[str], EntryPoints] = functools.cache(lambda group: entry_points(group=group))
_PREFIX = "tsqp_plugin_"

FileCheck = Callable[[Path, bytes], None]


def accept_any(_path: Path, _content: bytes) -> None:
    """Accept a file whatever it holds: where there is no manifest."""


_check: ContextVar[FileCheck] = ContextVar("check", default=accept_any)
# Of each of a user's modules, by name: the file that it was loaded from, as it was.
sources: dict[str, bytes] = {}


@contextmanager
def checking_files(check: FileCheck) -> Iterator[None]:
    """Have `check` called with each user's file of this block, before it is used.

    A Python file that is run in it may load others, which are checked as well.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def read_checked(path: Path) -> bytes:
    """Read a user's file and have it checked. Raises OSError, and what the check raises."""
    content = path.read_bytes()
    _check.get()(path, content)
    return content


@dataclass(frozen=True, eq=False, repr=False)
class _CheckedSource(ExecutionLoader):
    """Runs a module from bytes that were read before."""

    _path: str
    _content: bytes

    def get_filename(self, _fullname: str) -> str:
        return self._path

    def get_source(self, _fullname: str) -> str:
        return decode_source(self._content)


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module, once per process and path.

    Raises PluginError, and what the check of `checking_files` raises.
    """
    resolved = path.resolve()
    # Without dots, which pickle takes for those of packages.
    name = _PREFIX + resolved.as_posix().replace("%", "%25").replace(".", "%2E")
    if name in sys.modules:
        _check.get()(path, sources[name])
        return sys.modules[name]
    there = resolved.suffix == ".py" and resolved.is_file()
    PluginError.unless(there, str(path), "no such file", "a Python file (.py)")
    with PluginError.for_os(str(path), "a readable file"):
        content = read_checked(path)
    loader = _CheckedSource(str(resolved), content)
    module = module_from_spec(ModuleSpec(name, loader, origin=str(resolved)))
    module.__file__ = str(resolved)
    sys.modules[name], sources[name] = module, content
    try:
        loader.exec_module(module)
    except Exception as error:
        # Whatever a user's file raises is the user's to read, as one line.
        del sys.modules[name]
        if isinstance(error, ManifestError):
            raise
        raise _failure(str(path), error, "a file that runs") from error
    return module


def load_object(path: str, name: str) -> object:
    """Return a module-level object of a Python file. Raises PluginError."""
    module = load_module(Path(path))
    PluginError.unless(hasattr(module, name), path, f"nothing named {name}", f"{name} = ...")
    return getattr(module, name)


def one_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return what an installed package registered under a name; None if none did.

    Raises PluginError for two: which one runs in the TEE must not depend on their order.
    """
    found = [entry for entry in installed(group) if entry.name == name]
    owners = " and ".join(sorted(entry.value for entry in found))
    where = f"entry points {group}"
    expected = "one of them: uninstall the others"
    PluginError.unless(len(found) <= 1, where, f"{owners} for {name!r}", expected)
    return next(iter(found), None)


def load_entry_point(entry: EntryPoint) -> Any:
    """Import what an installed package registered. Raises PluginError."""
    try:
        return entry.load()
    except Exception as error:
        # As of a file: whatever a package raises when it is imported.
        raise _failure(f"entry point {entry.value}", error, "one that loads") from error


def classes_in(module: ModuleType, base: type[Any]) -> list[type[Any]]:
    """Return the subclasses with a name that a module defines, in the order of its text."""
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found)
        and issubclass(found, base)
        and found.__module__ == module.__name__
        and "name" in vars(found)
    ]


@dataclass(frozen=True)
class Kind(Generic[Base]):
    """Classes that do one thing in different ways: those that ship with us, and a user's own.

    `base`: what all are subclasses of, each with a class attribute `name`, which a family of them
    does not have; `word`, `words`: what one is, in an error of class `error`; `group`: of the entry
    points by which installed packages bring theirs; `builtin`: those that ship with us, by name.
    """

    base: type[Any]
    word: str
    words: str
    error: type[TsqpError]
    group: str
    builtin: Mapping[str, type[Base]]

    def names(self) -> list[str]:
        """Return the names of those that ship with us, and that installed packages bring."""
        return sorted({*self.builtin, *(entry.name for entry in installed(self.group))})

    def named(self, name: str) -> type[Base]:
        """Return one by its name; a package is imported for a name that is none of ours.

        Raises `error`, and PluginError for a package that does not load.
        """
        if name in self.builtin:
            return self.builtin[name]
        if (entry := one_entry_point(self.group, name)) is not None:
            found: type[Base] = load_entry_point(entry)
            if inspect.isclass(found) and issubclass(found, self.base):
                return found
            raise self.error(
                f"entry point {entry.value}", describe(found), f"a subclass of {self.words}"
            )
        raise self.error(
            self.word, repr(name), f"one of {', '.join(self.names())}, or a path to a .py file"
        )


def _failure(where: str, error: Exception, expected: str) -> PluginError:
    """Say in one line what went wrong: errors of ours and pydantic's keep their own words."""
    got = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, ValidationError):
        problem = first_problem(error)
        field = f"{error.title}.{problem.field}" if problem.path else error.title
        where = ": ".join(filter(None, (where, field, problem.where)))
        got = problem.got
        expected = problem.expected
    elif isinstance(error, TsqpError):
        where = f"{where}: {error.where}"
        got = error.got
        expected = error.expected
    return PluginError(where, got, expected)
