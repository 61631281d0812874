"""Runs one of the programs inside the test's process: no second start of Python and torch.

For paths that end before anything is computed. What needs a real process uses `tests.support.run`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
from unittest import mock

from protocol import native
from tests.support import using_kernels
from tests.tools import proven


def call(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `gpu-service`, `tee-runner` or `tsqp` to its exit and return what it printed."""
    from tsqp.cli import gpu_service, main, tee_runner

    entry = {"gpu-service": gpu_service.main, "tee-runner": tee_runner.main, "tsqp": main.main}
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = logging.getLogger().handlers[:]
    try:
        with (
            mock.patch.object(sys, "argv", [program, *arguments]),
            mock.patch.dict(os.environ, environment),
            # This process is the tests', too.
            mock.patch("tsqp.cli.program.keep_memory_private"),
            mock.patch("protocol.integer.check_kernels", proven.check_kernels),
            using_kernels(native.choice().variant),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            entry[program]()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0
    finally:
        logging.getLogger().handlers[:] = handlers
    return subprocess.CompletedProcess(
        [program, *arguments], status, stdout.getvalue(), stderr.getvalue()
    )
