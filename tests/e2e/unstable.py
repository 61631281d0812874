"""Packages of Debian unstable, which the host of a guest needs and no release has yet."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tsqp.deploy.debian import _APT, ARCHIVE, KEYRING

# A mirror may stand still for longer than unstable's index is good for; its signature is checked.
_AT_ANY_TIME = 'Acquire::Check-Valid-Until "false";\n'


def unpack(names: tuple[str, ...], directory: Path) -> Path:
    """Unpack packages, none of which is installed, and return the directory tree of them all."""
    for name in ("state/lists/partial", "cache/archives/partial", "etc", "packages"):
        (directory / name).mkdir(parents=True)
    (directory / "status").touch()
    source = f"deb [signed-by={KEYRING}] {ARCHIVE}/debian sid main\n"
    (directory / "etc" / "sources.list").write_text(source)
    configuration = directory / "apt.conf"
    configuration.write_text(_APT.format(directory) + _AT_ANY_TIME)
    environment = {**os.environ, "APT_CONFIG": str(configuration)}
    packages = directory / "packages"
    for command in (["update"], ["download", *names]):
        subprocess.run(["apt-get", "-qq", *command], cwd=packages, env=environment, check=True)
    for package in packages.iterdir():
        subprocess.run(["dpkg-deb", "--extract", package, directory / "tree"], check=True)
    return directory / "tree"
