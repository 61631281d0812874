"""What `make demo` does not show of `tsqp demo`: that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.service import ENVIRONMENT


@pytest.mark.slow
def test_a_signal_ends_the_service_too() -> None:
    program = Path(sys.executable).parent / "tsqp"
    with subprocess.Popen(
        [str(program), "demo", "--policy", "attention-in-tee"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("gpu-service: process "))
        service = int(line.split()[2].rstrip(","))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(service, 0)
