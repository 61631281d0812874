"""Builds a guest image: kernel, one initramfs that is the whole system, command line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from protocol.errors import SettingsError
from tsqp.deploy import debian, wheels
from tsqp.deploy.command_line import SELF_TEST, command_line
from tsqp.deploy.commands import EPOCH, call_inside
from tsqp.deploy.contents import add_modules, add_units, strip
from tsqp.deploy.fetch import fetch
from tsqp.deploy.image import COMMAND_LINE, FACTS, INITRAMFS, KERNEL, Suite
from tsqp.deploy.lock import Lock

_ROOT = ("kmod", "python3", "systemd", "udev")
_ROOT_RUNNER = ("libstdc++6",)
_TOOLS = ("cpio", "kmod", "zstd")
_TOOLS_RUNNER = ("g++", "libpython3-dev", "python3-pip")
_LEVEL = 15

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is built, beside what the lock says.

    `packages`: folders of saved packages. `scratch`: where temporary files go, some GB.
    """

    packages: Sequence[Path] = ()
    jobs: int = 1
    scratch: Path | None = None


def resolve(
    suite: Suite,
    source: Path,
    *,
    small: bool,
    torch_index: str = wheels.TORCH_INDEX,
    scratch: Path | None = None,
) -> Lock:
    """Return what an image is made of today. Raises SettingsError."""
    with TemporaryDirectory(dir=scratch, prefix="tsqp-resolve-") as name:
        directory = Path(name).resolve()
        archive = debian.Archive(suite, directory / "apt")
        return Lock(
            suite=suite,
            kernel=debian.newest_kernel(directory / "kernel"),
            root=archive.resolve(_ROOT if small else _ROOT + _ROOT_RUNNER),
            tools=archive.resolve(_TOOLS if small else _TOOLS + _TOOLS_RUNNER),
            wheels=() if small else wheels.resolve(source, suite, directory, torch_index),
            build=() if small else wheels.resolve_build(source, suite, directory),
        )


def build(lock: Lock, source: Path, output: Path, recipe: Recipe, progress: Progress) -> None:
    """Build the image of a lock into a new directory. Raises SettingsError.

    Same lock, source and recipe give the same files, whatever the machine. Needs root.
    """
    line = " ".join(SELF_TEST) if lock.small else command_line((), None)
    if os.geteuid() != 0:
        raise SettingsError("tsqp image build", got="another user", expected="root")
    if output.exists():
        raise SettingsError(str(output), got="something that exists", expected="a new directory")
    umask = os.umask(0o022)
    try:
        with TemporaryDirectory(dir=recipe.scratch, prefix="tsqp-image-") as name:
            _build(lock, source, output, recipe, progress, Path(name).resolve(), line)
    finally:
        os.umask(umask)


def _build(
    lock: Lock,
    source: Path,
    output: Path,
    recipe: Recipe,
    progress: Progress,
    scratch: Path,
    line: str,
) -> None:
    packages, tools = scratch / "packages", scratch / "tools"
    root = tools / "image"
    progress(f"fetch {len(lock.artifacts)} packages")
    fetch(lock.artifacts, packages, recipe.packages)
    progress("install the tools")
    debian.install(lock.suite, lock.tools, packages, tools)
    progress("install the system")
    debian.install(lock.suite, lock.root, packages, root)
    debian.unpack(packages / lock.kernel.file, tools / "kernel")
    release = _add_kernel(tools)
    own = None
    if not lock.small:
        progress("build the runner")
        wheel = wheels.build_own(source, tools, lock.build, packages)
        own = hashlib.sha256(wheel.read_bytes()).hexdigest()
        progress("install the runner")
        wheels.install(lock.wheels, wheel, packages, tools)
    strip(root)
    add_units(root)
    progress("pack")
    unpacked = _pack(tools, recipe.jobs)
    made = {
        KERNEL: (tools / "kernel/boot" / f"vmlinuz-{release}").read_bytes(),
        INITRAMFS: (tools / INITRAMFS).read_bytes(),
        COMMAND_LINE: line.encode(),
    }
    facts = {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in made.items()},
        "commit": wheels.commit_of(source),
        "lock": hashlib.sha256(lock.to_bytes()).hexdigest(),
        "runner_wheel": own,
        "unpacked_bytes": unpacked,
    }
    output.mkdir(parents=True)
    for name, content in made.items():
        (output / name).write_bytes(content)
    (output / FACTS).write_text(json.dumps(facts, indent=1) + "\n")


def _add_kernel(tools: Path) -> str:
    """Copy the kernel's modules into the image, and return the kernel's name."""
    kernel = tools / "kernel"
    modules = next(
        path for base in ("usr/lib", "lib") for path in (kernel / base / "modules").glob("*")
    )
    release = modules.name
    call_inside(
        tools, ["depmod", "--basedir", f"/{modules.parents[2].relative_to(tools)}", release]
    )
    add_modules(modules, (modules / "modules.dep").read_text(), tools / "image")
    call_inside(tools, ["depmod", "--basedir", "/image", release])
    return release


def _pack(tools: Path, jobs: int) -> int:
    """Write the image's tree as a compressed archive, and return its size before that, in bytes.

    Names in order of their bytes, one time for all, inode numbers by position. zstd's result is the
    same for any number of threads from one on.
    """
    root = tools / "image"
    paths = sorted(os.fsencode(path.relative_to(root)) for path in root.rglob("*"))
    for path in (*(os.path.join(os.fsencode(root), path) for path in paths), os.fsencode(root)):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
    (tools / "names").write_bytes(b"\0".join(paths) + b"\0")
    archive = tools / "image.cpio"
    copy = "cd /image && cpio --quiet --null --create --format=newc --reproducible </names"
    call_inside(tools, ["sh", "-c", f"{copy} >/{archive.name}"])
    size = archive.stat().st_size
    shutil.rmtree(root)
    squeeze = ["zstd", "--quiet", f"-{_LEVEL}", f"--threads={max(jobs, 1)}", "--rm"]
    call_inside(tools, [*squeeze, f"/{archive.name}", "-o", f"/{INITRAMFS}"])
    return size
