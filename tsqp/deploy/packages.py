"""Packages of Debian and wheels: today's versions, trees of given ones, this project's wheel.

Every program that a build runs has an environment that is the same on every machine.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from protocol.errors import SettingsError
from tsqp.deploy.image import PYTHONS, Artifact, Suite

# Every time in an image: 2026-01-01. A constant, as two builds of one lock must be identical.
EPOCH = 1_767_225_600

_FIXED = {
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "SOURCE_DATE_EPOCH": str(EPOCH),
    "TZ": "UTC",
}

# Of what a program that failed has said last.
_SHOWN_LINES = 8


def call(command: Sequence[str | Path], *, settings: Mapping[str, str] | None = None) -> bytes:
    """Run a program and return its stdout. Raises SettingsError with the end of its stderr.

    `settings`: variables on top of the fixed environment; of programs that ask a network, all of
    this process's own but its language.
    """
    program = str(command[0])
    with SettingsError.instead_of(FileNotFoundError, program, "no such program", "it installed"):
        done = subprocess.run(
            [str(word) for word in command],
            env=_FIXED | dict(settings or {}),
            capture_output=True,
            check=False,
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
        raise SettingsError(
            program,
            got=f"exit status {done.returncode}: {' | '.join(said)}",
            expected="exit status 0",
        )
    return done.stdout


def call_inside(root: Path, command: Sequence[str], **settings: str) -> bytes:
    """Run a program of the directory `root` in it. Raises SettingsError."""
    return call(["chroot", root, *command], settings=settings)


ARCHIVE = "http://deb.debian.org"

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Its own version has the name of the kernel in the package's; this one depends on it.
_KERNEL = "linux-image-cloud-amd64"

_LINE = re.compile(
    r"^'(?P<url>\S+)' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})$", re.MULTILINE
)

# Debian 13's base files have /bin as a link to /usr/bin; those of 12 leave it to the installer, and
# one package only says that it is so.
_MERGE_USR = (
    'for name in bin sbin lib lib64; do mkdir -p "$1/usr/$name"; ln -s "usr/$name" "$1/$name"; done'
)

_APT = """\
Dir "{0}";
Dir::State "{0}/state";
Dir::State::status "{0}/status";
Dir::Cache "{0}/cache";
Dir::Etc "{0}/etc";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::ForceHash "SHA256";
"""


class Archive:
    """A suite of Debian and its security updates, as they are today, read into a directory."""

    def __init__(self, suite: Suite, directory: Path) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "etc"):
            (directory / name).mkdir(parents=True)
        (directory / "status").touch()
        signed = f"deb [signed-by={KEYRING}] {ARCHIVE}"
        (directory / "etc" / "sources.list").write_text(
            f"{signed}/debian {suite} main\n{signed}/debian-security {suite}-security main\n"
        )
        self._suite = suite
        configuration = directory / "apt.conf"
        configuration.write_text(_APT.format(directory))
        self._settings = {"APT_CONFIG": str(configuration)}
        call(["apt-get", "-qq", "--error-on=any", "update"], settings=self._settings)

    def resolve(self, names: Sequence[str]) -> tuple[Artifact, ...]:
        """Return packages, with what they need and what every system has, by name."""
        wanted = ["?essential", *(["usr-is-merged"] if self._suite == "bookworm" else []), *names]
        command = ["apt-get", "-y", "--print-uris", "install", *wanted]
        printed = call(command, settings=self._settings).decode()
        found = [_package(match) for match in _LINE.finditer(printed)]
        return tuple(sorted(found, key=lambda artifact: artifact.name))


def newest_kernel(directory: Path) -> Artifact:
    """Return the package of today's kernel for virtual machines."""
    for artifact in Archive("trixie", directory).resolve([_KERNEL]):
        if re.match(r"linux-image-\d", artifact.name):
            return artifact
    raise SettingsError(_KERNEL, got="no kernel", expected="a package that depends on one")


def _package(match: re.Match[str]) -> Artifact:
    name, version, _ = unquote(match["file"]).split("_")
    return Artifact(name=name, version=version, url=match["url"], sha256=match["sha256"])


def install_packages(suite: Suite, packages: Sequence[Artifact], folder: Path, into: Path) -> None:
    """Make a directory tree of packages that lie in a folder, and of no others."""
    repository = into.with_name(f"{into.name}.packages")
    repository.mkdir(parents=True)
    stanzas = []
    for package in packages:
        path = repository / package.file
        shutil.copyfile(folder / package.file, path)
        size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        fields = call(["dpkg-deb", "--field", path]).decode()
        stanzas.append(f"{fields}Filename: ./{package.file}\nSize: {size}\nSHA256: {sha256}\n")
    (repository / "Packages").write_text("\n".join(stanzas))
    call(
        [
            "mmdebstrap",
            "--mode=root",
            "--variant=custom",
            "--format=directory",
            '--aptopt=APT::Sandbox::User "root"',
            *([f"--setup-hook={_MERGE_USR}"] if suite == "bookworm" else []),
            f"--include={','.join(package.name for package in packages)}",
            "tsqp",  # the repository has no suites
            into,
            f"deb [trusted=yes] copy:{repository} ./",
        ]
    )
    shutil.rmtree(repository)


TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


_OURS = (*("protocol", "tee_side", "gpu_side", "tsqp"), "pyproject.toml", "README.md", "LICENSE")

# Of the system in the image; glibc of Debian 12 is the older one.
_PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014")

_GLIBC_MINORS = range(5, 37)

_LIBRARIES = "/image/usr/lib/python3/dist-packages"

_KERNELS = "_native.abi3.so"


def resolve_wheels(
    source: Path, suite: Suite, scratch: Path, index: str
) -> tuple[tuple[Artifact, ...], tuple[Artifact, ...]]:
    """Return the wheels that the runner needs, and those that build this project's.

    Those of the runner are of the versions in the source's constraints.txt; its torch is a build
    without CUDA, from `index` or where pip is set up to look.
    """
    content = tomllib.loads((source / "pyproject.toml").read_text())
    project, extras = content["project"], content["project"]["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(name for extra in ("serve", "attest") for name in extras[extra]),
    ]
    constraints = scratch / "constraints.txt"
    lines = (source / "constraints.txt").read_text().splitlines()
    constraints.write_text(
        "\n".join(f"{line}+cpu" if line.startswith("torch==") else line for line in lines)
    )
    wanted += ["-c", str(constraints), "--extra-index-url", index]
    build = _resolved(content["build-system"]["requires"], suite, scratch)
    return _resolved(wanted, suite, scratch), build


def _resolved(arguments: Sequence[str], suite: Suite, scratch: Path) -> tuple[Artifact, ...]:
    platforms = [*_PLATFORMS, *(f"manylinux_2_{minor}" for minor in _GLIBC_MINORS)]
    report = scratch / "report.json"
    command = [
        *(sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"),
        *("--only-binary=:all:", f"--python-version={PYTHONS[suite]}", "--report", str(report)),
        *(f"--platform={name}_x86_64" for name in platforms),
        # The index of torch may be out of reach where pip knows another place for it.
        *("--retries=1", "--target", str(scratch / "none"), *arguments),
    ]
    call(command, settings={**os.environ, "LC_ALL": _FIXED["LC_ALL"]})
    found = [
        Artifact(
            name=item["metadata"]["name"],
            version=item["metadata"]["version"],
            url=item["download_info"]["url"],
            sha256=item["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for item in json.loads(report.read_bytes())["install"]
    ]
    return tuple(sorted(found, key=lambda artifact: artifact.name))


def build_own(source: Path, tools: Path, build: Sequence[Artifact], folder: Path) -> Path:
    """Build this project's wheel inside `tools`, and return it.

    Compiled by the tools' compiler, for any processor; same source and tools give the same bits.
    Raises SettingsError where the compiled kernels are not in it.
    """
    copy = tools / "source"
    for name in _tracked(source):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy / name)
    for path in copy.rglob("*"):
        # git does not keep all of them, and a wheel has them.
        path.chmod(0o755 if path.is_dir() else 0o644)
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
    SettingsError.unless(
        any((copy / "build").rglob(_KERNELS)), wheel.name, "no compiled kernels", _KERNELS
    )
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
    # Root reads the checkout here, and another user may own it.
    command = ["git", "-C", str(source), "-c", "safe.directory=*", *words]
    return call(command, settings={**os.environ, "LC_ALL": _FIXED["LC_ALL"]}).decode()


def install_wheels(wheels: Sequence[Artifact], own: Path, folder: Path, tools: Path) -> None:
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
    call_inside(
        tools,
        [
            *("python3", "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"),
            *("install", "--no-index", "--find-links=/wheels", "--require-hashes", "--no-deps"),
            *("--no-compile", f"--target={_LIBRARIES}", "--requirement=/requirements.txt"),
        ],
    )
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
