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

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.harness import (
    CORES,
    TRANSPORTS,
    Fields,
    Found,
    Options,
    Place,
    Repeated,
    chosen,
    main,
    noted,
    transports,
)
from gpu_side.devices import DeviceProfile
from protocol.errors import SettingsError
from protocol.messages import FUSED_MODULES
from protocol.model.config import ModelConfig
from protocol.tensors import ITEMSIZE
from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import load_policy
from tee_side.runner import RunnerSettings
from tee_side.words import Phase
from tsqp.lab.bench.shapes import find_shape
from tsqp.lab.measure import in_turns

POLICY = "attention-in-tee"
# Of a profile: as good as no time at all, and still a rate that it may have.
_ENDLESS = 1e8
_WARM_UP = 2


@dataclass(frozen=True)
class StepKind:
    """A kind of step. `tokens`: of the prompt, or behind each of `batch` decoded ones.

    `micro_batches`: into which it is cut.
    """

    case: str
    phase: Phase
    tokens: int
    batch: int
    bound: Literal["arithmetic", "memory"]
    micro_batches: int = 2


CASES = (
    StepKind("prefill-512", "prefill", 512, 1, "arithmetic"),
    # Operators take the TEE and the accelerator unequally long: more parts even that out.
    StepKind("prefill-512", "prefill", 512, 1, "arithmetic", micro_batches=3),
    StepKind("prefill-512", "prefill", 512, 1, "arithmetic", micro_batches=4),
    StepKind("decode-8", "decode", 64, 8, "arithmetic"),
    StepKind("decode-8-memory", "decode", 64, 8, "memory"),
)


def gpu_us(profile: DeviceProfile, config: ModelConfig, rows: int) -> float:
    """Return what an accelerator takes for the linear modules of a step of so many rows."""
    itemsize, total_us = ITEMSIZE[config.dtype], 0.0
    for operator in FUSED_MODULES:
        _, (height, width) = config.row_layout(operator)
        total_us += profile.linear_us(rows, width, height, itemsize)
        total_us += profile.transfer_us(rows * width * itemsize)
        total_us += profile.transfer_us(rows * height * itemsize)
    return config.num_hidden_layers * total_us


def matching_profile(config: ModelConfig, rows: int, target_us: float, bound: str) -> DeviceProfile:
    """Return an accelerator that takes `target_us` for a step of so many rows.

    Raises SettingsError if no rate does that: the other parts alone take longer.
    """
    rates = {"launch_us": 0.0, **dict.fromkeys(("int8_tops", "pcie_gb_per_s"), _ENDLESS)}
    fields = ("tflops", "gb_per_s") if bound == "arithmetic" else ("gb_per_s", "tflops")

    def at(rate: float) -> DeviceProfile:
        chosen = dict(zip(fields, (rate, _ENDLESS), strict=True))
        return DeviceProfile(name=f"as-slow-as-the-tee-{bound}", **rates, **chosen)

    # Time is (what the bus takes) + (a constant / rate); two rates give both.
    slow_us, fast_us = gpu_us(at(1.0), config, rows), gpu_us(at(2.0), config, rows)
    bus_us = 2 * fast_us - slow_us
    SettingsError.unless(
        target_us > bus_us,
        "overlap",
        f"a TEE time of {target_us:.3f} us",
        f"more than {bus_us:.3f}",
    )
    return at((slow_us - bus_us) / (target_us - bus_us))


def measure_case(model: Path, case: StepKind, transport: str, options: Options) -> Fields:
    """Measure one case over one transport: medians of steps that took turns. Raises TsqpError.

    `gpu_ms`: what the profile takes for the step by its own account, undivided and cut. `ratio`:
    serial / overlapped. `balance`: how far T was, while they took turns, from what the profile was
    made for.
    """
    prefill = case.phase == "prefill"
    repeats = options.repeats if prefill else options.decode_steps
    with Place() as place:

        def contender(device: str, micro_batches: int) -> Repeated:
            how = ("--device", device, "--arithmetic", "float")
            endpoint = place.service(model, *how, transport=transport)
            settings = RunnerSettings(
                model=model,
                policy=load_policy(POLICY),
                gpu=(endpoint,),
                threads=options.threads,
                micro_batches=micro_batches,
                # One step for the prompts, whatever their length: all begin to decode in one.
                engine=EngineSettings(step_tokens=case.tokens * case.batch),
            )
            # The first one has two medians.
            steps = 0 if prefill else 2 * (_WARM_UP + repeats)
            return Repeated(place, settings, tokens=case.tokens, batch=case.batch, steps=steps)

        null = contender("null", 1)
        config = null.runner.config
        target_ms = median(ms for (ms,) in in_turns([null.timed_ms], repeats, _WARM_UP))
        rows = case.tokens if prefill else case.batch
        profile = matching_profile(config, rows, target_ms * 1e3, case.bound)
        fields = profile.model_dump()
        file = place.folder / "profile.toml"
        file.write_text("".join(f"{key} = {json.dumps(fields[key])}\n" for key in fields))
        serial = contender(f"model:{file}", 1)
        overlapped = contender(f"model:{file}", case.micro_batches)
        three = [null, serial, overlapped]
        timed = in_turns([one.timed_ms for one in three], repeats, _WARM_UP)
        null_ms, serial_ms, overlapped_ms = (median(row[n] for row in timed) for n in range(3))
    bounds = [rows * part // case.micro_batches for part in range(case.micro_batches + 1)]
    cut_us = sum(gpu_us(profile, config, stop - start) for start, stop in pairwise(bounds))
    return {
        **asdict(case),
        "transport": transport,
        "null_ms": null_ms,
        "serial_ms": serial_ms,
        "overlapped_ms": overlapped_ms,
        "gpu_ms": [gpu_us(profile, config, rows) / 1e3, cut_us / 1e3],
        "runs": repeats,
        "balance": null_ms / target_ms - 1,
        "ratio": serial_ms / overlapped_ms,
        "profile": fields,
    }


def measure(options: Options, place: Place) -> Found:
    """Measure every case. Raises TsqpError."""
    over = transports(options.transports)
    names = chosen("--case", options.case, (case.case for case in CASES))
    model = place.model(find_shape(options.shape), linear=False)
    line = (
        "{case} in {micro_batches} over {transport}: T {null_ms:.1f} ms, undivided"
        " {serial_ms:.1f} ms, cut {overlapped_ms:.1f} ms: {ratio:.2f} times"
    )
    results = [
        noted(line, measure_case(model, case, transport, options))
        for case in CASES
        if case.case in names
        for transport in over
    ]
    return {
        "shape": options.shape,
        "policy": POLICY,
        "tee_threads": options.threads,
        "results": results,
    }, True


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        shape="llama-3.2-1b",
        transports=",".join(TRANSPORTS),
        case=[],
        repeats=7,
        decode_steps=15,
        threads=max(1, CORES - 1),
    )
