"""What an accelerator gives: whether its numbers are right, and what steps cost.

    python -m benchmarks.accelerator [--device cuda] [--minutes 9] [--small llama-3.2-1b]
        [--large llama-3.1-8b] [--layers 0] [--json FILE]

benchmarks/accelerator.sh calls it on a host with a GPU. Rows come most important first, each within
a time of its own, and FILE is written after each: what there was no time for is all that is
missing. `make docs` puts benchmarks/results/accelerator.json into docs/benchmarks.md.

`--layers N`: only so many of both shapes. With `--device cpu` it rehearses everything anywhere. The
exit status is 1 where tokens differ from the CPU's, a test fails or a row is missing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

from benchmarks.harness import Fields, Found, Options, Place, main, say
from benchmarks.record import shortened, six_figures
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import describe_machine, write_results
from tsqp.processes import program

# Of the demo model on the accelerator and on the CPU: the same tokens.
SAME = ("shielded", "quantized-clear", "shielded-prefill", "dealt", "attention-in-tee")
_STORY = "--prompt Once --max-new-tokens 40 --temperature 0 --json"
_TESTS = ("tests/unit/gpu_side/test_ring.py", "tests/unit/gpu_side/test_cuda.py")
# Until a program that was interrupted has written what it has; a row with less left is not begun.
_WRITING_S, _LEAST_S = 15.0, 30.0


@dataclass(frozen=True)
class Row:
    """One measurement: `options` of `tsqp bench`, or the GPU alone in these contexts.

    `size`: which of the two shapes.
    """

    name: str
    limit_s: int
    size: Literal["small", "large"]
    options: str
    kind: Literal["bench", "unmasked"] = "bench"


_ONE = "--batch 1 --context 128 --prefill 128 --repeats 2 --decode-steps 16"
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
    Row("1b context", 120, "small", f"--policy shielded {_ONE} --context 2048"),
    Row("8b dealt", 240, "large", f"--policy dealt --batch 1,8 {_ROWS}"),
    Row("8b rows", 240, "large", f"{_BESIDE} --batch 8,32 {_ROWS}"),
)


class _Accelerator:
    """Rows on one device, until the time is over."""

    def __init__(self, options: Options, place: Place) -> None:
        self._options, self._place = options, place
        self._ends = time.monotonic() + 60 * options.minutes
        self.found: Fields = {"device": options.device, "layers": options.layers}

    def tokens(self) -> dict[str, bool]:
        """Say of policies whether the demo model says the same on the device and on the CPU."""
        device, place = self._options.device, self._place
        cpu, gpu, dealer = (place.service("demo", "--device", on) for on in ("cpu", device, device))
        found = {}
        for policy in SAME:
            said = []
            for service in (cpu, gpu):
                second = f"--dealer {dealer} --dealer-in-the-clear" if policy == "dealt" else ""
                words = f"generate demo --policy {policy} --gpu {service} {second} {_STORY}"
                line = self._run([program("tee-runner"), *words.split()], 60, quiet=True)
                said.append(json.loads(line)["token_ids"] if line else [])
            found[policy] = bool(said[0]) and said[0] == said[1]
            say(f"{policy}: {'the same tokens' if found[policy] else 'OTHER TOKENS'} on {device}")
        return found

    def tests(self) -> str:
        """Run the tests of the kernels, and return the last line of what they say."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS]
        lines = self._run(command, 120, quiet=True).splitlines()
        return lines[-1] if lines else "no result"

    def measured(self, row: Row) -> Fields | None:
        """Measure a row; None where there was no time, or it failed."""
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
        return {"unmasked": document} if row.kind == "unmasked" else shortened(document)

    def _run(self, command: list[str], limit_s: float, *, quiet: bool = False) -> str:
        """Run a program for so long, and interrupt it then; return its output if it is `quiet`."""
        limit_s = min(limit_s, self._ends - time.monotonic())
        if limit_s < _LEAST_S:
            return ""
        output = subprocess.PIPE if quiet else None
        with subprocess.Popen(command, stdout=output, text=True) as running:
            try:
                said, _ = running.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGINT)
                try:
                    said, _ = running.communicate(timeout=_WRITING_S)
                except subprocess.TimeoutExpired:
                    running.kill()
                    said, _ = running.communicate()
        return said or ""


def measure(options: Options, place: Place) -> Found:
    """Run all for which there is time. Raises TsqpError."""
    device = _Accelerator(options, place)
    found = device.found

    def note(**more: object) -> None:
        found.update(six_figures(more))
        if options.json is not None:
            write_results({"machine": describe_machine(), **found}, options.json)

    note(tokens=device.tokens())
    note(tests=device.tests())
    reports: Fields = {}
    unmasked: Fields = {}
    for row in ROWS:
        say(row.name)
        one = device.measured(row)
        if one is not None and row.kind == "unmasked":
            unmasked[row.name.split()[0]] = one["unmasked"]
        elif one is not None:
            reports[row.name] = one["report"]
        note(reports=reports, unmasked=unmasked)
    whole = len(reports) + len(unmasked) == len(ROWS)
    return found, whole and all(found["tokens"].values()) and "failed" not in found["tests"]


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "0")
    main(
        __doc__,
        measure,
        device="cuda",
        minutes=9.0,
        small="llama-3.2-1b",
        large="llama-3.1-8b",
        layers=0,
    )
