"""Takes packages from folders or from their addresses, and no other content than the lock says."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from protocol.errors import SettingsError
from tsqp.deploy.lock import Artifact

_TIMEOUT_S = 60


def fetch(artifacts: Iterable[Artifact], into: Path, folders: Sequence[Path] = ()) -> None:
    """Put every one into a directory, from the first folder that has it, else from its address.

    Raises SettingsError for one that is nowhere, or has another content.
    """
    into.mkdir(parents=True, exist_ok=True)
    for artifact in artifacts:
        target = into / artifact.file
        if not target.exists():
            _copy(artifact, target, folders)
        with target.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != artifact.sha256:
            target.unlink()
            raise SettingsError(artifact.url, got=f"SHA-256 {got}", expected=artifact.sha256)


def _copy(artifact: Artifact, target: Path, folders: Sequence[Path]) -> None:
    for folder in folders:
        if (folder / artifact.file).exists():
            shutil.copyfile(folder / artifact.file, target)
            return
    if not artifact.url.startswith(("file://", "http://", "https://")):
        raise SettingsError(artifact.file, got="no folder that has it", expected="--packages")
    part = target.with_suffix(".part")
    try:
        with urlopen(artifact.url, timeout=_TIMEOUT_S) as reply, part.open("wb") as file:  # noqa: S310
            shutil.copyfileobj(reply, file)
    except (OSError, HTTPException) as error:
        # Debian keeps no old versions.
        expected = "it there, or in a folder of --packages"
        raise SettingsError(artifact.url, got=str(error), expected=expected) from None
    part.rename(target)
