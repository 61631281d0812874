"""What `pip install .` brings: the four packages with their data, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "tee_side", "gpu_side", "tsqp")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the tree, made without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=_LEFT_OUT)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(source / "wheels"), str(source)]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "wheels").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_a_wheel_holds_the_packages_with_their_data(wheel: zipfile.ZipFile) -> None:
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == expected
    # What is there besides code, so that the comparison is not one of nothing with nothing.
    kinds = {Path(name).suffix for name in found}
    assert {".toml", ".j2", ".typed", ".safetensors", ".json", ".jinja", ".txt"} <= kinds
