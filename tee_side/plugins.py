"""Masks and policies of a user's own, in Python files.

Such a file is code that runs in the TEE with everything it knows. Nothing is found by itself: only
a path that somebody wrote on the command line or in a policy is loaded, or a package installed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from pydantic import ValidationError

from protocol.errors import InputError, TsqpError
from tee_side.refusals import first_problem


class PluginError(InputError):
    """A user's own file or package that cannot be loaded, or lacks what it is loaded for."""


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module, once per process and path. Raises PluginError."""
    resolved = path.resolve()
    name = f"tsqp_plugin_{resolved.as_posix()}"
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
