"""How many Python calls one linear RPC takes: `python -m tests.kit.calls [--json FILE]`.

The real commands run with the demo model under `shielded` over a unix socket, with pads made
before, each process under `sys.setprofile`. A call is a Python function that begins; a coroutine
that goes on is none.

client   from the beginning of `carry_out` to its end, where a socket sends in it
service  from one reply's send to the next one's, the total divided by the number of requests
"""

import dis
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from types import CodeType, FrameType
from typing import Any

# What the forward pass awaits for an operator that leaves the TEE, after one call that makes it.
CLIENT_ENTRY = "carry_out"
PROGRAMS = {"gpu-service": "tsqp.cli.gpu_service", "tee-runner": "tsqp.cli.tee_runner"}
TOKENS = 16
# Left out: connections, memos and plans are warm after so many.
WARM_UP = 120

_SENDS = ("send", "sendmsg", "sendall")
# And by compiled code.
_PUTS = ("stream_put", "lane_put", "lane_publish")
_YIELDS = ("YIELD_VALUE", "SEND")


class Profile:
    """The function for `sys.setprofile`, and what it counts.

    `rpcs`: calls of each `carry_out` that sent something; `sends`: calls before each send.
    """

    def __init__(self) -> None:
        self.rpcs: list[int] = []
        self.sends: list[int] = []
        self._calls = 0
        self._entry: FrameType | None = None
        self._begun = self._sent = 0
        self._bytecode: dict[CodeType, bytes] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._begins(frame):
            if self._entry is None and frame.f_code.co_name == CLIENT_ENTRY:
                self._entry, self._begun, self._sent = frame, self._calls, len(self.sends)
            self._calls += 1
        elif event == "return" and frame is self._entry:
            if dis.opname[frame.f_code.co_code[frame.f_lasti]] in _YIELDS:
                return  # it is suspended
            if len(self.sends) > self._sent:
                self.rpcs.append(self._calls - self._begun)
            self._entry = None
        elif event == "c_call" and (
            argument.__name__ in _PUTS
            or (
                argument.__name__ in _SENDS
                and type(getattr(argument, "__self__", None)).__module__ in ("socket", "_socket")
            )
        ):
            self.sends.append(self._calls)

    def _begins(self, frame: FrameType) -> bool:
        """Say whether this is no coroutine that goes on: RESUME's argument tells them apart."""
        code = frame.f_code
        bytecode = self._bytecode.get(code)
        if bytecode is None:  # each look at co_code makes a copy
            bytecode = self._bytecode[code] = code.co_code
        at = frame.f_lasti
        return at < 0 or dis.opname[bytecode[at]] != "RESUME" or bytecode[at + 1] & 3 == 0


def measure() -> dict[str, float]:
    """Run both programs, and return the mean calls of an RPC of `client` and of `service`."""
    # Not where it runs in the programs' place: nothing of ours but they is loaded there.
    from tests.kit.service import ENVIRONMENT, Service

    with tempfile.TemporaryDirectory() as folder:
        bank = ("--bank", f"{folder}/bank", "--bank-key-beside-bank")
        endpoint = f"unix://{folder}/gpu"
        answers = {program: Path(folder) / f"{program}.json" for program in PROGRAMS}

        def command(program: str, *arguments: str) -> list[str]:
            ours = (sys.executable, "-m", "tests.kit.calls", str(answers[program]))
            return [*ours, program, *arguments]

        def run(*arguments: str) -> None:
            subprocess.run(
                command("tee-runner", *arguments, *bank),
                env=ENVIRONMENT,
                capture_output=True,
                check=True,
                timeout=100,
            )

        run("pads", "make", "demo", "--tokens", "64")
        process = subprocess.Popen(
            command("gpu-service", "demo", "--bind", endpoint, "--dtype", "float32"),
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        service = Service(process, endpoint)
        try:
            for line in process.stderr or ():
                if " ready " in f" {line} ":
                    break
            prompt = ("--prompt", "Once upon a time", "--max-new-tokens", str(TOKENS))
            run("generate", "demo", "--policy", "shielded", "--gpu", endpoint, *prompt)
        finally:
            service.stop()
        client, served = (json.loads(answers[p].read_text()) for p in ("tee-runner", "gpu-service"))
    rpcs, sends = client["rpcs"][WARM_UP:], served["sends"][WARM_UP : len(client["sends"])]
    if len(rpcs) < WARM_UP or len(sends) < WARM_UP:
        raise RuntimeError(f"calls: got {len(rpcs)} RPCs and {len(sends)} replies, expected more")
    return {"client": fmean(rpcs), "service": (sends[-1] - sends[0]) / (len(sends) - 1)}


def _profiled(answer: str, arguments: Sequence[str]) -> None:
    """Run a program under the profile, and write what was counted at its end."""
    main, profile = import_module(PROGRAMS[arguments[0]]).main, Profile()
    sys.argv = list(arguments)
    try:
        sys.setprofile(profile)
        main()
    finally:
        sys.setprofile(None)
        counted = {"rpcs": profile.rpcs, "sends": profile.sends}
        Path(answer).write_text(json.dumps(counted), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] != "--json":
        _profiled(sys.argv[1], sys.argv[2:])
    else:
        measured = measure()
        for name, calls in measured.items():
            print(f"{calls:7.1f}  {name}")  # noqa: T201
        if sys.argv[1:]:
            Path(sys.argv[2]).write_text(json.dumps(measured), encoding="utf-8")
