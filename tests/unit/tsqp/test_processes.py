"""Children end with their parent, and what they say is passed on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tsqp.processes import ProcessError, child, failure, start_service

_PARENT = """
import subprocess, sys
from tsqp.processes import child
code = "import os; print(os.getpid(), flush=True); import signal; signal.pause()"
with child([sys.executable, "-c", code], stdout=subprocess.PIPE) as (process, _):
    print(process.stdout.readline().decode().strip(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a child of its parent's end")
def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        # Readable once the process has ended, by whomever it is waited for.
        try:
            assert select.select([descriptor], [], [], 30)[0]
        finally:
            os.close(descriptor)


def test_a_child_gets_no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEE_RUNNER_SEED", "1")
    code = "import os; print('TEE_RUNNER_SEED' in os.environ)"
    with child([sys.executable, "-c", code], stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        assert process.stdout.read() == b"False\n"


@pytest.mark.parametrize(
    ("status", "last", "message"),
    [
        (-9, "loading", "w: got a process killed by SIGKILL, expected e"),
        (-99, "loading", "w: got a process killed by signal 99, expected e"),
        (1, "ImportError: no torch", "w: got ImportError: no torch, expected e"),
        (2, "gpu-service: error: --bind: got 'x', expected y", "w: --bind: got 'x', expected y"),
        (1, "protocol.errors.ModelError: m: got a, expected b", "w: m: got a, expected b"),
        (None, "m: got a, expected b", "w: m: got a, expected b"),
    ],
)
def test_an_error_of_ours_is_passed_on_as_it_is(
    status: int | None, last: str, message: str
) -> None:
    assert str(failure("w", status, last, expected="e")) == message


def test_a_service_that_does_not_start_says_why() -> None:
    with ExitStack() as running, pytest.raises(ProcessError) as refused:
        start_service(running, ["demo", "--device", "model:nothing"])
    assert refused.value.where == "gpu-service: accelerator profile"
    assert refused.value.got == "'nothing'"
