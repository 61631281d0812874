"""The kernels under sanitizers: `make sanitize`.

`driver.cpp` calls every kernel of every variant without Python. It is compiled with the package's
own options, but less optimised, and must end without a report; its deliberate faults must not.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.native.compiling import ROOT, checked, compiled, must_end, options, run, skip_without

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def driver() -> Callable[[str], Path]:
    """Return a function that builds the driver under a sanitizer, once, in build/sanitize."""

    @cache
    def build(sanitizer: str) -> Path:
        folder = ROOT / "build" / "sanitize" / sanitizer
        folder.mkdir(parents=True, exist_ok=True)
        skip_without(sanitizer, folder)
        given, sources = options()
        objects, compiling = [], []
        for source in [*sources, "tests/native/driver.cpp"]:
            objects.append(str(folder / f"{Path(source).stem}.o"))
            compiling.append(compiled(*given, *checked(sanitizer), "-c", source, "-o", objects[-1]))
        for one in compiling:
            must_end(one)
        program = folder / "driver"
        must_end(compiled(f"-fsanitize={sanitizer}", *objects, "-pthread", "-o", str(program)))
        return program

    return build


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_end_without_a_report(sanitizer: str, driver: Callable[[str], Path]) -> None:
    ended = run(driver(sanitizer))
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
    ended = run(driver(sanitizer), fault)
    assert ended.returncode
    assert report in ended.stderr
