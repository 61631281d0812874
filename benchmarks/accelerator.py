"""What an accelerator gives: whether its numbers are right, and what steps cost.

    python -m benchmarks.accelerator [--device cuda] [--minutes 9] [--small llama-3.2-1b]
        [--large llama-3.1-8b] [--layers 0] [--json FILE]

benchmarks/accelerator.sh calls it on a host with a GPU. Parts come most important first, each
within a time of its own, and FILE is written after each: what there was no time for is all that is
missing, and the next call goes on there. `make docs` puts benchmarks/results/accelerator.json into
docs/benchmarks.md.

`--layers N`: only so many of both shapes. With `--device cpu` it rehearses everything anywhere. The
exit status is 1 where tokens differ from the CPU's, a test fails or is skipped, or a row lacks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.harness import Fields, Found, Options, Place, main, say
from benchmarks.record import shortened, six_figures
from protocol import native
from protocol.errors import TsqpError
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import describe_machine, write_results
from tsqp.processes import program

# Of the demo model on the accelerator and on the CPU: the same tokens.
SAME = ("shielded", "quantized-clear", "shielded-prefill", "dealt", "attention-in-tee")
_STORY = "--prompt Once --max-new-tokens 40 --temperature 0 --json"
_TESTS = ("tests/unit/gpu_side/test_ring.py", "tests/unit/gpu_side/test_cuda.py")
# Until a program that was interrupted has written what it has.
_WRITING_S = 15.0
# With less a part is not begun; of the large shape its weights are written first, 16 GB.
_LEAST_S = {"small": 30.0, "large": 90.0}


@dataclass(frozen=True)
class Row:
    """One measurement: `options` of `tsqp bench`, or of the GPU alone. `size`: of two shapes."""

    name: str
    limit_s: int
    size: Literal["small", "large"]
    options: str
    kind: Literal["bench", "unmasked"] = "bench"


_ONE = "--batch 1 --context 128 --prefill 128 --repeats 2 --decode-steps 16"
_LATER = "--batch 1 --context 2048 --prefill 128 --repeats 2 --decode-steps 12"
_ROWS = "--context 128 --prefill 512 --repeats 2 --decode-steps 12"
_BESIDE = "--policy shielded --policy tee-only-int8"
ROWS = (
    Row("1b token", 110, "small", f"{_BESIDE} {_ONE}"),
    Row("1b unmasked", 40, "small", "--context 128,2048", "unmasked"),
    Row("1b rows", 130, "small", f"{_BESIDE} --batch 8,32 {_ROWS}"),
    Row("8b token", 180, "large", f"{_BESIDE} {_ONE}"),
    Row("8b unmasked", 60, "large", "--context 128,2048", "unmasked"),
    Row("1b dealt", 150, "small", f"--policy dealt --batch 1,8,32 {_ROWS}"),
    Row("1b prompt", 150, "small", f"--policy shielded-prefill --batch 1 {_ROWS}"),
    Row("1b context", 120, "small", f"--policy shielded {_LATER}"),
    Row("8b dealt", 240, "large", f"--policy dealt --batch 1,8 {_ROWS}"),
    Row("8b rows", 240, "large", f"{_BESIDE} --batch 8,32 {_ROWS}"),
    Row("8b context", 200, "large", f"--policy shielded {_LATER}"),
    Row("8b prompt", 240, "large", f"--policy shielded-prefill --batch 1 {_ROWS}"),
)


class _Accelerator:
    """Parts on one device, until the time is over."""

    def __init__(self, options: Options, place: Place) -> None:
        self._options, self._place = options, place
        self._ends = time.monotonic() + 60 * float(options.minutes)

    @property
    def left_s(self) -> float:
        """How much time is left."""
        return self._ends - time.monotonic()

    def compare_tokens(self) -> dict[str, str]:
        """Say of policies whether the demo model says the same on the device and on the CPU."""
        device, place = self._options.device, self._place
        cpu, gpu, dealer = (place.service("demo", "--device", on) for on in ("cpu", device, device))
        found = {}
        for policy in SAME:
            said: list[Any] = []
            for service in (cpu, gpu):
                second = f"--dealer {dealer} --dealer-in-the-clear" if policy == "dealt" else ""
                words = f"generate demo --policy {policy} --gpu {service} {second} {_STORY}"
                status, line = self._run([program("tee-runner"), *words.split()], 30)
                said.append(json.loads(line)["token_ids"] if status == 0 else None)
            here, there = said
            found[policy] = "same" if here == there else "others"
            if None in said:
                found[policy] = "not compared"
            say(f"{policy}: on {device} tokens are {found[policy]}")
        return found

    def run_tests(self) -> Fields:
        """Run the tests of the kernels; return the exit status and the last line of what is said.

        In Triton's interpreter where there is no GPU to run them.
        """
        interpret = str(int(not self._options.device.startswith("cuda")))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS]
        status, said = self._run(command, 120, TRITON_INTERPRET=interpret)
        return {"status": status, "said": (said.splitlines() or ["nothing"])[-1]}

    def measure(self, row: Row) -> Any:
        """Measure a row; return its document, which may be incomplete, or None."""
        if self.left_s < _LEAST_S[row.size]:
            return None
        shape = find_shape(getattr(self._options, row.size))
        if self._options.layers:
            shape = shape.with_layers(self._options.layers)
        model = str(self._place.model(shape, linear=True))
        result = self._place.folder / "row.json"
        result.unlink(missing_ok=True)
        options = ["--device", self._options.device, *row.options.split(), "--json", str(result)]
        if row.kind == "unmasked":
            command = [sys.executable, "-m", "tsqp.lab.bench.unmasked_gpu", model]
        else:
            command = [program("tsqp"), "bench", model, "--transport", "shm", "--spin-us", "300"]
            options.append("--no-baselines")
        self._run(command + options, row.limit_s)
        if not result.exists():
            return None
        document = json.loads(result.read_text(encoding="utf-8"))
        return document if row.kind == "unmasked" else shortened(document)["report"]

    def _run(self, command: list[str], limit_s: float, **environment: str) -> tuple[int, str]:
        """Run a program for so long, interrupt it then; return its exit status and its output."""
        limit_s = min(limit_s, self.left_s)
        if limit_s < 1:
            return -1, ""
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        ) as running:
            for more_s, then in ((limit_s, signal.SIGINT), (_WRITING_S, signal.SIGKILL)):
                try:
                    said, _ = running.communicate(timeout=more_s)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, then)
                else:
                    return running.returncode, said
            running.wait()
        return running.returncode, ""


def measure(options: Options, place: Place) -> Found:
    """Go through all parts for which there is time."""
    device = _Accelerator(options, place)
    found: Fields = {"tokens": {}, "tests": {}, "reports": {}, "unmasked": {}}
    if options.json is not None and options.json.exists():
        found |= json.loads(options.json.read_text(encoding="utf-8"))
    cuda = torch.cuda.is_available() and options.device.startswith("cuda")
    found |= {
        "machine": describe_machine(),
        "device": torch.cuda.get_device_name() if cuda else options.device,
        "cuda": str(torch.version.cuda),
        "kernels": native.use().variant,
        "layers": options.layers,
    }

    def part(name: str, work: Callable[[], Any], where: Fields, key: str) -> None:
        say(f"{name}: {device.left_s:.0f} s left")
        try:
            result = work() if device.left_s > 0 else None
        except (TsqpError, OSError, ValueError) as error:
            say(f"{name}: error: {error}")
            return
        if result is None:
            say(f"{name}: no result")
            return
        where[key] = six_figures(result)
        if options.json is not None:
            behind = options.json.with_suffix(".part")
            write_results(found, behind)
            behind.replace(options.json)

    if not found["tokens"] or "not compared" in found["tokens"].values():
        part("tokens", device.compare_tokens, found, "tokens")
    if not found["tests"]:
        part("tests", device.run_tests, found, "tests")
    for row in ROWS:
        alone = row.kind == "unmasked"
        where, key = (
            (found["unmasked"], row.name.split()[0]) if alone else (found["reports"], row.name)
        )
        if key not in where or (not alone and where[key].get("incomplete")):
            part(row.name, partial(device.measure, row), where, key)
    complete = len(found["reports"]) + len(found["unmasked"]) == len(ROWS) and not any(
        report.get("incomplete") for report in found["reports"].values()
    )
    tests = found["tests"] or {"status": -1, "said": ""}
    tested = tests["status"] == 0 and "skipped" not in tests["said"]
    same = bool(found["tokens"]) and {*found["tokens"].values()} == {"same"}
    return found, complete and tested and same


if __name__ == "__main__":
    # Started in the background, this process would ignore it, and so would those that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(
        __doc__,
        measure,
        device="cuda",
        minutes=9.0,
        small="llama-3.2-1b",
        large="llama-3.1-8b",
        layers=0,
    )
