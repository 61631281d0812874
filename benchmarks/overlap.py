"""Micro-batches beside an undivided step, where the accelerator takes as long as the TEE.

    python -m benchmarks.overlap [--shape llama-3.2-1b] [--transports unix,tcp] [--case NAME ...]
        [--repeats 7] [--decode-steps 15] [--threads N] [--json FILE]

First a step runs against `--device null`: that is the TEE's time T, the transport in it. From it
comes a `DeviceProfile` of which the same step takes exactly T as well: it has no launch time, and
one rate, T's; everything else of it takes no time. `arithmetic`: that rate is `tflops`, so half the
rows take half as long. `memory`: it is `gb_per_s`, so the weights are read again for every
micro-batch, however few its rows; it is there to say what overlap cannot do.

Then three run in turns, one step each, against services of their own: undivided with `null`,
undivided with the profile, and cut with the profile. An undivided step should take 2 T, and
nothing can be faster than T. Policy `attention-in-tee`. The service stands for another machine, so
one core is left to it: `--threads`, of the TEE, is one less than there are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

# Read once, when torch is imported: the programs have it too (tsqp/cli/program.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

from gpu_side.profiles import DeviceProfile
from protocol.errors import SettingsError, TsqpError
from protocol.messages import FUSED_MODULES
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import ITEMSIZE
from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tee_side.words import Phase
from tsqp.lab.bench import prepare
from tsqp.lab.bench.machine import describe_machine
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import Collector
from tsqp.processes import start_service

Bound: TypeAlias = Literal["arithmetic", "memory"]

POLICY = "attention-in-tee"
BINDS = {"unix": "unix://{folder}/{name}.sock", "tcp": "tcp://127.0.0.1:*"}
# Of a profile: as good as no time at all, and still a rate that it may have.
_ENDLESS = 1e8
_WARM_UP = 2
_OBSERVED = 3


@dataclass(frozen=True)
class Case:
    """A kind of step. `tokens`: of the prompt, or behind each of `batch` decoded ones.

    `micro_batches`: into which it is cut.
    """

    name: str
    phase: Phase
    tokens: int
    batch: int
    bound: Bound
    micro_batches: int = 2


CASES = (
    Case("prefill-512", "prefill", 512, 1, "arithmetic"),
    # Operators take the TEE and the accelerator unequally long: more parts even that out.
    Case("prefill-512", "prefill", 512, 1, "arithmetic", micro_batches=3),
    Case("prefill-512", "prefill", 512, 1, "arithmetic", micro_batches=4),
    Case("decode-8", "decode", 64, 8, "arithmetic"),
    Case("decode-8-memory", "decode", 64, 8, "memory"),
)


@dataclass(frozen=True)
class Result:
    """One case over one transport; medians of steps that took turns.

    `gpu_ms`: what the profile takes for the step by its own account, undivided and cut;
    `gpu_claimed_ms`: what the service says that it took. `vocabulary_ms`: of the step, Embedding
    and LM head in the TEE, undivided and cut. `ratio`: serial / overlapped. `balance`: how far
    T was, while they took turns, from what the profile was made for.
    """

    case: str
    phase: Phase
    tokens: int
    batch: int
    bound: Bound
    micro_batches: int
    transport: str
    null_ms: float
    serial_ms: float
    overlapped_ms: float
    gpu_ms: tuple[float, float]
    gpu_claimed_ms: tuple[float, float]
    vocabulary_ms: tuple[float, float]
    runs: int
    balance: float
    ratio: float
    profile: dict[str, Any]


def gpu_us(profile: DeviceProfile, config: ModelConfig, rows: int) -> float:
    """Return what an accelerator takes for the linear modules of a step of so many rows."""
    itemsize = ITEMSIZE[config.dtype]
    total_us = 0.0
    for modules in FUSED_MODULES.values():
        shapes = [config.module_shape(module) for module in modules]
        (width,) = {in_features for _, in_features in shapes}
        height = sum(out_features for out_features, _ in shapes)
        total_us += profile.linear_us(rows, width, height, itemsize)
        total_us += profile.transfer_us(rows * width * itemsize)
        total_us += profile.transfer_us(rows * height * itemsize)
    return config.num_hidden_layers * total_us


def matching_profile(
    config: ModelConfig, rows: int, target_us: float, bound: Bound
) -> DeviceProfile:
    """Return an accelerator that takes `target_us` for a step of so many rows.

    Raises SettingsError if no rate does that: the other parts alone take longer.
    """
    field = "tflops" if bound == "arithmetic" else "gb_per_s"
    rates = {"tflops": _ENDLESS, "int8_tops": _ENDLESS, "gb_per_s": _ENDLESS}
    bus = {"launch_us": 0.0, "pcie_gb_per_s": _ENDLESS}

    def at(rate: float) -> DeviceProfile:
        return DeviceProfile(name=f"as-slow-as-the-tee-{bound}", **{**rates, **bus, field: rate})

    # Time is (what the bus takes) + (a constant / rate); two rates give both.
    slow_us, fast_us = gpu_us(at(1.0), config, rows), gpu_us(at(2.0), config, rows)
    bus_us = 2 * fast_us - slow_us
    if target_us <= bus_us:
        raise SettingsError(
            "overlap", got=f"a TEE time of {target_us:.3f} us", expected=f"more than {bus_us:.3f}"
        )
    return at((slow_us - bus_us) / (target_us - bus_us))


class Contender:
    """A TEE side that repeats one case's step."""

    def __init__(
        self,
        closing: ExitStack,
        model: Path,
        case: Case,
        endpoint: str,
        *,
        micro_batches: int,
        threads: int,
        steps: int,
    ) -> None:
        policy = load_policy(POLICY)
        settings = RunnerSettings(
            model=model,
            policy=policy,
            gpu=(endpoint,),
            threads=threads,
            micro_batches=micro_batches,
            # One step for the prompts, whatever their length: all begin to decode in the same one.
            engine=EngineSettings(step_tokens=case.tokens * case.batch),
        )
        self._runner = runner = closing.enter_context(Runner(settings))
        generator = torch.Generator().manual_seed(0)
        size = (case.batch, case.tokens)
        prompts = torch.randint(runner.config.vocab_size, size, generator=generator).tolist()
        self.step: Callable[[], None] = runner.step
        if case.phase == "prefill":
            self.step = lambda: self._prompt(prompts[0])
            return
        running = [
            runner.generate(prompt, max_new_tokens=steps + 1, with_text=False) for prompt in prompts
        ]
        for one in running:
            closing.callback(one.close)
        runner.step()
        if not all(one.arrived for one in running):
            raise RuntimeError(f"{case.name}: got no token of some, expected one step for all")

    def _prompt(self, prompt: list[int]) -> None:
        for _ in self._runner.generate(prompt, max_new_tokens=1, with_text=False).steps():
            pass

    def timed_ms(self) -> float:
        """Run a step."""
        started_ns = time.perf_counter_ns()
        self.step()
        return (time.perf_counter_ns() - started_ns) / 1e6

    def observed_ms(self) -> tuple[float, float]:
        """Return ms a step of Embedding and LM head in the TEE, and of the GPU as it claims."""
        collector = Collector()
        self._runner.observe(collector)
        for _ in range(_OBSERVED):
            self.step()
        self._runner.observe(None)
        costs = collector.costs(_OBSERVED)
        heavy = [c for c in costs if c.operator in ("embedding", "lm_head") and c.place == "tee"]
        return (
            sum(c.stages.tee_us for c in heavy) / 1e3,
            sum(c.stages.gpu_us for c in costs) / 1e3,
        )


def _steps(repeats: int) -> int:
    """Return how many steps a contender runs at most: the first one has two medians."""
    return 2 * (_WARM_UP + repeats) + _OBSERVED + 2


def check_positions(config: ModelConfig, case: Case, repeats: int) -> None:
    """Raise SettingsError if sequences would end early: an empty step takes no time."""
    needed = case.tokens + (1 if case.phase == "prefill" else _steps(repeats) + 1)
    if needed > config.context_length:
        raise SettingsError(
            case.name,
            got=f"{config.context_length} positions",
            expected=f"at least {needed} for {repeats} steps of each",
        )


def measure(model: Path, case: Case, transport: str, *, repeats: int, threads: int) -> Result:
    """Measure one case over one transport. Raises TsqpError."""
    config = read_config(model)
    check_positions(config, case, repeats)
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tsqp-overlap-")))

        def contender(name: str, device: str, micro_batches: int) -> Contender:
            bind = BINDS[transport].format(folder=folder, name=name)
            command = [str(model), "--device", device, "--bind", bind, "--threads", "1"]
            _, endpoint = start_service(closing, [*command, "--arithmetic", "float"])
            return Contender(
                closing,
                model,
                case,
                endpoint,
                micro_batches=micro_batches,
                threads=threads,
                steps=_steps(repeats),
            )

        null = contender("null", "null", 1)
        for _ in range(_WARM_UP):
            null.step()
        target_ms = statistics.median(null.timed_ms() for _ in range(repeats))
        rows = case.tokens if case.phase == "prefill" else case.batch
        profile = matching_profile(config, rows, target_ms * 1e3, case.bound)
        file = folder / "profile.toml"
        fields = profile.model_dump()
        file.write_text(
            "".join(f"{key} = {json.dumps(fields[key])}\n" for key in fields), encoding="utf-8"
        )
        serial = contender("serial", f"model:{file}", 1)
        overlapped = contender("overlapped", f"model:{file}", case.micro_batches)
        null_ms, serial_ms, overlapped_ms = in_turns([null, serial, overlapped], repeats)
        (serial_heavy, serial_gpu), (heavy, gpu) = serial.observed_ms(), overlapped.observed_ms()
    bounds = [rows * part // case.micro_batches for part in range(case.micro_batches + 1)]
    return Result(
        **asdict_of(case),
        transport=transport,
        null_ms=null_ms,
        serial_ms=serial_ms,
        overlapped_ms=overlapped_ms,
        gpu_ms=(
            gpu_us(profile, config, rows) / 1e3,
            sum(gpu_us(profile, config, stop - start) for start, stop in pairwise(bounds)) / 1e3,
        ),
        gpu_claimed_ms=(serial_gpu, gpu),
        vocabulary_ms=(serial_heavy, heavy),
        runs=repeats,
        balance=null_ms / target_ms - 1,
        ratio=serial_ms / overlapped_ms,
        profile=fields,
    )


def asdict_of(case: Case) -> dict[str, Any]:
    """Return a case's fields as a result has them."""
    fields = asdict(case)
    return {"case": fields.pop("name"), **fields}


def in_turns(contenders: Sequence[Contender], repeats: int) -> list[float]:
    """Return the median of so many steps of each, in ms; they take turns, a step each."""
    found: list[list[float]] = [[] for _ in contenders]
    for one in contenders:
        for _ in range(_WARM_UP):
            one.step()
    gc.collect()
    gc.freeze()  # as tee-runner does
    try:
        for _ in range(repeats):
            for one, times_ms in zip(contenders, found, strict=True):
                times_ms.append(one.timed_ms())
    finally:
        gc.unfreeze()
    return [statistics.median(times_ms) for times_ms in found]


def _say(line: str) -> None:
    print(f"overlap: {line}", file=sys.stderr, flush=True)


def _cases(names: Sequence[str] | None) -> list[Case]:
    return [case for case in CASES if not names or case.name in names]


def _repeats(case: Case, options: argparse.Namespace) -> int:
    repeats: int = options.repeats if case.phase == "prefill" else options.decode_steps
    return repeats


def _measure_all(options: argparse.Namespace) -> list[Result]:
    transports = options.transports.split(",")
    for transport in transports:
        if transport not in BINDS:
            raise SettingsError("--transports", got=repr(transport), expected=f"of {list(BINDS)}")
    config = find_shape(options.shape).config()
    cases = [(case, _repeats(case, options)) for case in _cases(options.case)]
    for case, repeats in cases:
        check_positions(config, case, repeats)
    results = []
    with tempfile.TemporaryDirectory(prefix="tsqp-overlap-") as folder:
        _say(f"making random weights of {options.shape}")
        prepare.random_model(Path(folder), options.shape, linear=False)
        for case, repeats in cases:
            for transport in transports:
                _say(f"{case.name} over {transport}")
                results.append(
                    measure(Path(folder), case, transport, repeats=repeats, threads=options.threads)
                )
                _show(results[-1])
    return results


def _show(found: Result) -> None:
    print(
        f"{found.case:16} {found.transport:5} T {found.null_ms:8.1f} ms, undivided"
        f" {found.serial_ms:8.1f} ms, in {found.micro_batches} {found.overlapped_ms:8.1f} ms:"
        f" {found.ratio:.2f} times"
        f" (T moved by {found.balance:+.0%})",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--transports", default=",".join(BINDS))
    parser.add_argument(
        "--case", action="append", choices=sorted({case.name for case in CASES}), help="repeatable"
    )
    parser.add_argument("--repeats", type=int, default=7, help="of a prompt")
    parser.add_argument("--decode-steps", type=int, default=15)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="of the TEE")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    try:
        results = _measure_all(options)
    except TsqpError as error:
        sys.exit(f"overlap: error: {error}")
    if options.json:
        document = {
            "machine": describe_machine(),
            "shape": options.shape,
            "policy": POLICY,
            "tee_threads": options.threads,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
