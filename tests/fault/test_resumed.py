"""A VM that was resumed from a snapshot: programs end, and say why, whatever they were doing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT, TEE_ONLY, WAIT_S, Forked, running_server, running_service
from tests.tools.kernel_log import PLUGGED, RESUMED

SAID = "tee-runner: error: this VM: got resumed from a snapshot, expected to run on"
# As if there were a device; a named pipe is not to be sought in.
BEFORE = """
import os
from pathlib import Path
from types import SimpleNamespace
from tee_side.protect import resumption
resumption._DRIVERS, resumption._LOG = [Path({0!r})], Path({0!r}) / "log"
resumption.os = SimpleNamespace(**{{**vars(os), "lseek": lambda *_: 0}})
"""


class Log:
    """What the program reads as the kernel's log: each record is read before the next is said."""

    def __init__(self, folder: Path) -> None:
        (folder / "VMGENCTR:00" / "driver").mkdir(parents=True)
        os.mkfifo(folder / "log")
        self.before = BEFORE.format(str(folder))
        self._pipe = os.open(folder / "log", os.O_RDWR)

    def say(self, record: str) -> None:
        os.write(self._pipe, record.encode())

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "vmgenid")
    yield made
    made.close()


def test_an_idle_server_ends_at_once(log: Log) -> None:
    with running_server(*TEE_ONLY, before=log.before) as server:
        log.say(PLUGGED)
        assert server.get("/health")
        log.say(RESUMED)
        assert server.process.wait(WAIT_S) == 2
        (said,) = server.process.stderr.read().splitlines()
        assert said.startswith(SAID)


def test_a_run_ends_before_a_request_leaves(log: Log, tmp_path: Path) -> None:
    log.say(RESUMED)
    with running_service("demo", f"unix://{tmp_path}/s", "--threads", "1") as service:
        given = ("generate", "demo", "--gpu", service.endpoint, "--prompt", "x", "--threads", "1")
        run = Forked("tee-runner", given, ENVIRONMENT, before=log.before)
        _, said = run.communicate(WAIT_S)
    assert run.returncode == 2
    assert said.splitlines()[-1].startswith(SAID)
