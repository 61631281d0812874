"""Compiles C++ of the package, or about it, with the package's own options."""

import os
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@cache
def options() -> tuple[list[str], list[str]]:
    """Return the options that the package is compiled with, and its sources without the binding."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    given = [option for option in module["extra-compile-args"] if option != "-O3"]
    return given, [source for source in module["sources"] if not source.endswith("module.cpp")]


def checked(sanitizer: str) -> list[str]:
    """Return the options that build under a sanitizer, less optimised."""
    return ["-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]


def compiled(*command: str) -> subprocess.Popen[bytes]:
    """Start the compiler."""
    return subprocess.Popen([str(COMPILER), *command], cwd=ROOT, stderr=subprocess.PIPE)


def must_end(compiling: subprocess.Popen[bytes]) -> None:
    """Wait for the compiler, which must find nothing wrong."""
    _, errors = compiling.communicate()
    assert compiling.returncode == 0, errors.decode()


def skip_without(sanitizer: str, folder: Path) -> None:
    """Skip where nothing compiles, or not under a sanitizer."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    tried = compiled(f"-fsanitize={sanitizer}", str(empty), "-o", str(folder / "empty"))
    if tried.communicate() and tried.returncode:
        pytest.skip(f"{COMPILER} has no -fsanitize={sanitizer}")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run what was built."""
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
