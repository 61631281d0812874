"""Children end with their parent, and get no settings of ours."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tsqp import end_with_parent
from tsqp.processes import child

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child of its parent's end"
)
_PARENT = """
import subprocess, sys
from tsqp.processes import child
code = "import os; print(os.getpid(), flush=True); import signal; signal.pause()"
with child([sys.executable, "-c", code], stdout=subprocess.PIPE) as (process, _):
    print(process.stdout.readline().decode().strip(), flush=True)
    sys.stdin.read()
"""


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


def test_a_child_whose_parent_is_gone_ends_before_it_begins(tmp_path: Path) -> None:
    mark = tmp_path / "begun"
    command = [sys.executable, "-I", "-S", end_with_parent.__file__, "0", "touch", str(mark)]
    ended = subprocess.run(command, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert not mark.exists()


def test_a_child_gets_no_settings_of_ours_and_what_it_is_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TSQP_SEED", "1")
    # Of a shell, because Python ignores these two signals itself.
    script = "echo ${TSQP_SEED:-none}; grep SigIgn /proc/self/status"
    with child(["sh", "-c", script], stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        seed, _name, ignored = process.stdout.read().split()
    bits = [1 << number - 1 for number in (signal.SIGPIPE, signal.SIGXFSZ)]
    assert seed == b"none"
    assert not any(int(ignored, 16) & bit for bit in bits)
    with child(["/no/such/program"], stdout=subprocess.DEVNULL) as (process, errors):
        assert process.wait() == 1
        errors.join(60)
    assert errors.last == "/no/such/program: got No such file or directory, expected a program"
