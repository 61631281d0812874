"""What `pip install .` brings: the four packages with their data, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "tee_side", "gpu_side", "tsqp")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.mark.slow
def test_a_wheel_holds_the_packages_with_their_data(tmp_path: Path) -> None:
    # Of a copy of the tree, made without a network.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (*PACKAGES, "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=_LEFT_OUT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    options = ["--no-build-isolation", "--wheel-dir", str(tmp_path / "wheels"), str(tmp_path)]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
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
