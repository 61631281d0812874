"""Python programs with nothing of ours imported, that need not import torch again.

A process that has imported torch forks one for each: for tests of importing, where `tests.forked`
has imported too much.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.forked import ENVIRONMENT
from tests.tools.closing import Closing

# What follows the loop is run by the process that was forked: to its end, as `python -c` would.
_SERVER = """
import json, os, sys, warnings
import torch
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT), number)
os.chdir(asked["folder"])
sys.path[:] = [*asked["paths"], *(path for path in sys.path if path)]
sys.argv[:] = ["-c", *asked["arguments"]]
if asked["strict"]:
    warnings.simplefilter("error")
exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
"""


class FreshPython(Closing):
    """The process that is forked; it starts with the first program, and ends with the block."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """See `Closing.close`."""
        if self._server is not None:
            self._server.communicate(timeout=30)

    def run(
        self,
        code: str,
        *arguments: str,
        folder: Path,
        paths: Sequence[Path] = (),
        strict: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in a folder, to its end.

        `paths`: where modules are looked for first; `strict`: warnings are errors.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER],
                env=ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        with TemporaryDirectory() as outputs:
            said = [Path(outputs) / name for name in ("stdout", "stderr")]
            asked = {
                "code": code,
                "arguments": arguments,
                "folder": str(folder),
                "paths": [str(path) for path in paths],
                "strict": strict,
                "stdout": str(said[0]),
                "stderr": str(said[1]),
            }
            print(json.dumps(asked), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, *(s.read_text() for s in said))
