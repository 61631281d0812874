"""The kernels under sanitizers: `make sanitize`.

`driver.cpp` calls every kernel of every variant without Python. It is compiled with the package's
own options, but less optimised, and must end without a report; its deliberate faults must not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = pytest.mark.timeout(600)


@cache
def _options() -> tuple[list[str], list[str]]:
    """Return the options that the package is compiled with, and its sources without the binding."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = project["tool"]["setuptools"]["ext-modules"]
    options = [option for option in module["extra-compile-args"] if option != "-O3"]
    return options, [source for source in module["sources"] if not source.endswith("module.cpp")]


def _compile(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(COMPILER), *command], cwd=ROOT, stderr=subprocess.PIPE)


def _must_end(compiling: subprocess.Popen[bytes]) -> None:
    _, errors = compiling.communicate()
    assert compiling.returncode == 0, errors.decode()


@pytest.fixture(scope="session")
def driver() -> Callable[[str], Path]:
    """Return a function that builds the driver under a sanitizer, once, in build/sanitize."""

    @cache
    def build(sanitizer: str) -> Path:
        folder = ROOT / "build" / "sanitize" / sanitizer
        folder.mkdir(parents=True, exist_ok=True)
        flag = f"-fsanitize={sanitizer}"
        empty = folder / "empty.cpp"
        empty.write_text("int main() {}\n")
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        tried = _compile([flag, str(empty), "-o", str(folder / "empty")])
        if tried.communicate() and tried.returncode:
            pytest.skip(f"{COMPILER} has no {flag}")
        options, sources = _options()
        objects, compiling = [], []
        for source in [*sources, "tests/native/driver.cpp"]:
            objects.append(str(folder / f"{Path(source).stem}.o"))
            checked = ["-O1", "-g", flag, "-fno-sanitize-recover=all"]
            compiling.append(_compile([*options, *checked, "-c", source, "-o", objects[-1]]))
        for one in compiling:
            _must_end(one)
        program = folder / "driver"
        _must_end(_compile([flag, *objects, "-pthread", "-o", str(program)]))
        return program

    return build


def _run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_end_without_a_report(sanitizer: str, driver: Callable[[str], Path]) -> None:
    ended = _run(driver(sanitizer))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("portable: as portable\n")
    assert "differs" not in ended.stdout


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [
        ("address,undefined", "overrun", "heap-buffer-overflow"),
        ("address,undefined", "overflow", "shift exponent 32 is too large"),
        ("thread", "race", "data race"),
    ],
)
def test_a_fault_is_reported(
    sanitizer: str, fault: str, report: str, driver: Callable[[str], Path]
) -> None:
    ended = _run(driver(sanitizer), fault)
    assert ended.returncode
    assert report in ended.stderr
