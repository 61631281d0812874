"""Runs pytest in forks of itself, so that torch is loaded once and not for every mutation.

A script, to load nothing of ours before a fork. Reads a line of JSON with `arguments` for pytest
and the file for its `output`, and answers with pytest's exit status.
"""

import importlib
import json
import os
import resource
import sys
import traceback
from typing import NoReturn

import pytest

for _name in ("torch", "pydantic", "zmq", "msgpack", "transformers.models.llama.modeling_llama"):
    importlib.import_module(_name)


# Neither of pytest's.
_BROKEN = 70
# A mistake that never ends may take memory all the while, up to this.
_MOST_BYTES = 6 * 2**30


def _run(arguments: list[str]) -> NoReturn:
    """Run pytest, and end this process without what the one before it would do at its end."""
    status = _BROKEN
    try:
        status = int(pytest.main(arguments))
    except BaseException:  # noqa: BLE001 - the process that asked is told
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        question = json.loads(line)
        child = os.fork()
        if not child:
            file = os.open(question["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, descriptor in enumerate((nothing, file, file)):
                os.dup2(descriptor, number)
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
            # A script's own folder comes first; the tree's root is meant.
            sys.path[0] = os.getcwd()
            _run(question["arguments"])
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
