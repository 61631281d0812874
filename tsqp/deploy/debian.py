"""Debian's packages: today's versions, a directory tree of given ones."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from protocol.errors import SettingsError
from tsqp.deploy.commands import call
from tsqp.deploy.image import Suite
from tsqp.deploy.lock import Artifact

ARCHIVE = "http://deb.debian.org"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_ESSENTIAL = "?essential"
# Its own version has the name of the kernel in the package's; this one depends on it.
_KERNEL = "linux-image-cloud-amd64"
_KERNEL_SUITE: Suite = "trixie"
_LINE = re.compile(
    r"^'(?P<url>\S+)' (?P<file>\S+) \d+ SHA256:(?P<sha256>[0-9a-f]{64})$", re.MULTILINE
)

# Debian 13's base files have /bin as a link to /usr/bin; those of 12 leave it to the installer, and
# one package only says that it is so.
_MERGE_USR = (
    'for name in bin sbin lib lib64; do mkdir -p "$1/usr/$name"; ln -s "usr/$name" "$1/$name"; done'
)
_MERGED = ("usr-is-merged",)

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

    def __init__(self, suite: Suite, directory: Path, mirror: str = ARCHIVE) -> None:
        for name in ("state/lists/partial", "cache/archives/partial", "etc"):
            (directory / name).mkdir(parents=True)
        (directory / "status").touch()
        signed = f"deb [signed-by={KEYRING}] {mirror}"
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
        wanted = [_ESSENTIAL, *(_MERGED if self._suite == "bookworm" else ()), *names]
        command = ["apt-get", "-y", "--print-uris", "install", *wanted]
        printed = call(command, settings=self._settings).decode()
        found = [_artifact(match) for match in _LINE.finditer(printed)]
        return tuple(sorted(found, key=lambda artifact: artifact.name))


def newest_kernel(directory: Path, mirror: str = ARCHIVE) -> Artifact:
    """Return the package of today's kernel for virtual machines."""
    for artifact in Archive(_KERNEL_SUITE, directory, mirror).resolve([_KERNEL]):
        if re.match(r"linux-image-\d", artifact.name):
            return artifact
    raise SettingsError(_KERNEL, got="no kernel", expected="a package that depends on one")


def _artifact(match: re.Match[str]) -> Artifact:
    name, version, _ = unquote(match["file"]).split("_")
    return Artifact(name=name, version=version, url=match["url"], sha256=match["sha256"])


def install(suite: Suite, packages: Sequence[Artifact], folder: Path, into: Path) -> None:
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


def unpack(package: Path, into: Path) -> None:
    """Unpack a package's files, and run none of its scripts."""
    call(["dpkg-deb", "--extract", package, into])
