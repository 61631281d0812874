"""Lock files of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from tests.kit.rows import each_row
from tsqp.deploy.lock import Artifact, Lock

KERNEL = Artifact(
    name="linux", version="6", url="http://archive.invalid/linux_6%2b1.deb", sha256="a" * 64
)
SMALL = Lock(suite="trixie", kernel=KERNEL, root=(KERNEL,), tools=())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_bytes(SMALL.to_bytes())
    assert Lock.load(path) == SMALL
    assert (SMALL.small, SMALL.artifacts, KERNEL.file) == (True, (KERNEL,), "linux_6+1.deb")


def _changed(**values: Any) -> bytes:
    return json.dumps(json.loads(SMALL.to_bytes()) | values).encode()


def _kernel(**values: Any) -> bytes:
    return _changed(kernel=KERNEL.model_dump() | values)


@each_row(
    ("content", "message"),
    [
        (b"{", "got another content, expected JSON"),
        (b"\xff", "got another content, expected JSON"),
        (_changed(suite="sid"), "suite"),
        (_changed(mirror="x"), "mirror"),
        (_kernel(sha256="A" * 64), "kernel"),
        (_kernel(url="http://archive.invalid/a%2f.deb/"), "kernel"),
        (_kernel(url="http://archive.invalid/..%2fx.deb"), "kernel"),
        (_kernel(url="http://archive.invalid/x.sh"), "kernel"),
    ],
)
def test_a_malformed_one_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        Lock.load(path)
    assert message in str(refused.value)


def test_a_missing_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="expected a lock file"):
        Lock.load(tmp_path / "none")
