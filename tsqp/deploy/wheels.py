"""Wheels of an image: resolved, this project's built from source, installed by hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import SettingsError
from tsqp.deploy.commands import call, call_inside, own_environment
from tsqp.deploy.image import PYTHONS, Suite
from tsqp.deploy.lock import Artifact

TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_EXTRAS = ("serve", "attest")
_OURS = (*("protocol", "tee_side", "gpu_side", "tsqp"), "pyproject.toml", "README.md", "LICENSE")
# Of the system in the image; glibc of Debian 12 is the older one.
_PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014")
_GLIBC_MINORS = range(5, 37)
_LIBRARIES = "/image/usr/lib/python3/dist-packages"
_KERNELS = "_native.abi3.so"


def resolve(source: Path, suite: Suite, scratch: Path, index: str) -> tuple[Artifact, ...]:
    """Return the wheels that the runner needs: of the versions in the source's constraints.txt.

    torch is a build without CUDA, from `index` or where pip is set up to look.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(name for extra in _EXTRAS for name in extras[extra])]
    constraints = scratch / "constraints.txt"
    constraints.write_text(_without_cuda((source / "constraints.txt").read_text()))
    return _resolved([*wanted, "-c", str(constraints), "--extra-index-url", index], suite, scratch)


def resolve_build(source: Path, suite: Suite, scratch: Path) -> tuple[Artifact, ...]:
    """Return the wheels that build this project's."""
    system = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]
    return _resolved(system["requires"], suite, scratch)


def _without_cuda(constraints: str) -> str:
    lines = constraints.splitlines()
    return "\n".join(f"{line}+cpu" if line.startswith("torch==") else line for line in lines)


def _resolved(arguments: Sequence[str], suite: Suite, scratch: Path) -> tuple[Artifact, ...]:
    platforms = [*_PLATFORMS, *(f"manylinux_2_{minor}" for minor in _GLIBC_MINORS)]
    report = scratch / "report.json"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
    command += [
        "--only-binary=:all:",
        f"--python-version={PYTHONS[suite]}",
        "--report",
        str(report),
    ]
    command += [f"--platform={name}_x86_64" for name in platforms]
    # The index of torch may be out of reach where pip knows another place for it.
    command += ["--retries=1", "--target", str(scratch / "none"), *arguments]
    call(command, settings=own_environment())
    found = [_artifact(item) for item in json.loads(report.read_bytes())["install"]]
    return tuple(sorted(found, key=lambda artifact: artifact.name))


def _artifact(item: dict[str, dict[str, object]]) -> Artifact:
    metadata, info = item["metadata"], item["download_info"]
    hashes = info["archive_info"]["hashes"]  # type: ignore[index]
    return Artifact.model_validate(
        {
            "name": metadata["name"],
            "version": metadata["version"],
            "url": info["url"],
            "sha256": hashes["sha256"],
        }
    )


def build_own(source: Path, tools: Path, build: Sequence[Artifact], folder: Path) -> Path:
    """Build this project's wheel inside `tools`, and return it.

    Compiled by the tools' compiler, for any processor; same source and tools give the same bits.
    Raises SettingsError where the compiled kernels are not in it.
    """
    copy = tools / "source"
    for name in _tracked(source):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy / name)
    _same_modes(copy)
    for needed in build:
        shutil.unpack_archive(folder / needed.file, tools / "build-wheels", "zip")
    (tools / "wheels").mkdir()
    call_inside(
        tools,
        [
            "sh",
            "-c",
            "cd /source && python3 -c 'from setuptools import build_meta as backend;"
            ' backend.build_wheel("/wheels")\'',
        ],
        PYTHONPATH="/build-wheels",
        CFLAGS="-g0",
        LDFLAGS="-s",
    )
    wheel = next((tools / "wheels").glob("tsqp-*.whl"))
    if not any((copy / "build").rglob(_KERNELS)):
        raise SettingsError(wheel.name, got="no compiled kernels", expected=_KERNELS)
    return wheel


def commit_of(source: Path) -> str | None:
    """Return the commit of a checkout; it ends in -changed where a file differs from it.

    None for a tree without history.
    """
    if not (source / ".git").exists():
        return None
    commit = _git(source, "rev-parse", "HEAD").strip()
    changed = _git(source, "status", "--porcelain", "--untracked-files=no", "--", *_OURS)
    return f"{commit}-changed" if changed else commit


def _tracked(source: Path) -> list[str]:
    """Return the files of a checkout that are ours: what lies beside them is in no image."""
    if not (source / ".git").exists():
        every = (path for name in _OURS for path in (source / name, *(source / name).rglob("*")))
        return [
            str(path.relative_to(source))
            for path in sorted(every)
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts
        ]
    return _git(source, "ls-files", "-z", "--", *_OURS).rstrip("\0").split("\0")


def _git(source: Path, *words: str) -> str:
    # Whoever owns the checkout, as root reads it here.
    command = ["git", "-C", str(source), "-c", "safe.directory=*", *words]
    return call(command, settings=own_environment()).decode()


def _same_modes(tree: Path) -> None:
    """Set permissions that git does not keep: a wheel has them."""
    for path in tree.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def install(wheels: Sequence[Artifact], own: Path, folder: Path, tools: Path) -> None:
    """Install wheels into the image inside `tools`, each by its hash; nothing else is looked at.

    Raises SettingsError, also where one needs what none of them is.
    """
    lines = [f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wheels]
    version = own.name.split("-")[1]
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    lines.append(f"tsqp=={version} --hash=sha256:{digest}")
    (tools / "requirements.txt").write_text("\n".join(lines) + "\n")
    for wheel in wheels:
        os.link(folder / wheel.file, tools / "wheels" / wheel.file)
    pip = ["python3", "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    chosen = ["--no-index", "--find-links=/wheels", "--require-hashes", "--no-deps", "--no-compile"]
    where = [f"--target={_LIBRARIES}", "--requirement=/requirements.txt"]
    call_inside(tools, [*pip, "install", *chosen, *where])
    call_inside(tools, ["python3", "-c", _COMPLETE, _LIBRARIES])
    shutil.rmtree(tools / "wheels")


# What `pip check` says, of a directory: requirements whose markers hold for the image's Python.
_COMPLETE = """
import sys
from importlib.metadata import distributions
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
found = {canonicalize_name(d.name): d for d in distributions(path=sys.argv[1:])}
for name, d in found.items():
    for need in map(Requirement, d.requires or ()):
        other = found.get(canonicalize_name(need.name))
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        if other is None or not need.specifier.contains(other.version, prereleases=True):
            sys.exit(f"{name} needs {need}, and it is not there")
"""
