"""Row: spoilt model directories, read as either side does: refused soon, in little, by name."""

import json
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from gpu_side.weights import load_weights
from protocol.errors import TsqpError
from protocol.model.checkpoint import SINGLE_FILE, Checkpoint, light_tensors, linear_tensors
from protocol.model.config import read_config
from tee_side.engine.tokenizer import Tokenizer
from tee_side.model.operators import load_local_operators, load_tee_model
from tee_side.policy.placement import load_policy
from tee_side.remote.call import RunParts
from tests.faults.row import Found, Row, note
from tests.kit.demo import DEMO
from tests.kit.spoilt import BASE, CASES, CONFIG, GENERATION, GOOD, TOKENIZER, Draft


def tee(directory: Path) -> None:
    """Read as a runner that keeps everything."""
    policy, dtype = load_policy("tee-only"), torch.float32
    config, checkpoint = read_config(directory), Checkpoint(directory)
    checkpoint.require(light_tensors(config) | linear_tensors(config))
    checkpoint.refuse_extra(config)
    load_tee_model(config, checkpoint, dtype)
    sites = policy.sites_here(config.num_hidden_layers)
    parts = RunParts(policy, config, checkpoint, dtype)
    load_local_operators(parts, sites=sites, integers=None)
    Tokenizer(directory)


def service(directory: Path) -> None:
    load_weights(directory, device=torch.device("cpu"), dtype=torch.float32)


class Reading(NamedTuple):
    """How a reading ended. `error`: the type that was raised, "" if the directory was accepted."""

    error: str
    where: str = ""
    text: str = ""
    seconds: float = 0.0
    peak_mib: float = 0.0


# One that takes so long hangs; it is killed. Beyond so much memory an allocation fails, so that a
# mistake does not take the machine down.
_HANGS_AFTER_S, _ADDRESS_SPACE = 20, 4 * 2**30


def _memory_kib(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"\n{name}:")[2].split()[0])


def _measured(read: Callable[[Path], object], directory: Path) -> Reading:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, began = _memory_kib("VmRSS"), time.perf_counter()
    error, where, text = "", "", ""
    try:
        read(directory)
    except TsqpError as refusal:
        error, where, text = type(refusal).__name__, refusal.where, str(refusal)
    except BaseException as wrong:  # noqa: BLE001 - a panic of a library is none of Exception
        error, text = f"untyped {type(wrong).__name__}", str(wrong)[:300]
    seconds = time.perf_counter() - began
    return Reading(error, where, text, seconds, max(0, _memory_kib("VmHWM") - before) / 1024)


def reading(read: Callable[[Path], object], directory: Path) -> Reading:
    """Fork, read there, and return what the child says; or that it was killed."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(out)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a panic says
            signal.alarm(_HANGS_AFTER_S)
            space = _memory_kib("VmSize") * 1024 + _ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (space, space))
            with os.fdopen(into, "w") as pipe:
                pipe.write(json.dumps(_measured(read, directory)))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Reading(*json.loads(answer)) if answer else Reading(f"ended with {status}")


def fault_of(found: Reading, parts: tuple[str, ...]) -> str:
    """Say what is wrong with how a spoilt directory was refused; "" if nothing is."""
    if found.error not in ("ModelError", "ManifestError"):
        return "untyped" if found.error else "accepted"
    # A message is one line that any terminal can show.
    shown = found.text.isprintable() and len(found.text) < 2000
    return "" if shown and all(part in found.where for part in parts) else "unnamed"


@Row(
    "model_directories",
    "model directories",
    f"directories spoilt in {len(CASES)} ways at random (weights cut, lying headers and offsets,"
    " sizes, JSON, links, pipes, pickles), each read by the TEE and by the service in a fresh"
    " process",
    "refused in <= 2 s and <= 256 MiB by a typed error that names file and field",
    short=len(CASES),
    long=500,
    minutes=2,
)
def model_directories(count: int, full: bool) -> Found:
    """Spoil and read so many directories. Memory is judged in the short run, too."""
    torch.set_num_threads(1)  # the readers are forks: a pool of threads would not be in them
    faults, readings, refused = Counter[str](), list[Reading](), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = Draft(folder / "base", 0)
        base.directory.mkdir()
        base.raw(CONFIG, json.dumps(BASE).encode())
        config, generator = read_config(base.directory), torch.Generator().manual_seed(0)
        shapes = light_tensors(config) | linear_tensors(config)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file(tensors, base / SINGLE_FILE)
        base.raw(GENERATION, b'{"eos_token_id": 1}')
        shutil.copyfile(DEMO / TOKENIZER, base / TOKENIZER)

        def copy(number: int) -> Draft:
            shutil.copytree(base.directory, folder / f"{number}" / "model")
            return Draft(folder / f"{number}" / "model", number)

        for number, leave in enumerate(GOOD):
            draft = copy(count + number)
            leave(draft)
            for read in (tee, service):
                if (found := reading(read, draft.directory)).error:
                    refused += 1
                    note(f"good directory {number}: {read.__name__}: {found}")
        for number in range(count):
            draft, case = copy(number), list(CASES)[number % len(CASES)]
            parts = CASES[case](draft)
            # A service reads no tokenizer.
            for read in (tee, service) if TOKENIZER not in parts else (tee,):
                readings.append(found := reading(read, draft.directory))
                faults[fault := fault_of(found, parts)] += 1
                if fault:
                    note(f"{case} {number}: {read.__name__}: {fault}: {found}, {parts}")
            shutil.rmtree(draft.directory.parent)
    slowest, largest = (max(n) for n in zip(*(r[3:] for r in readings), strict=True))
    return Found(
        {
            "readings": len(readings),
            "accepted": faults["accepted"],
            "refused without naming the place": faults["unnamed"],
            "untyped errors, crashes and hangs": faults["untyped"],
            "slowest refusal, s": round(slowest, 2),
            "largest peak above the process, MiB": round(largest, 1),
            "good directories refused": refused,
        },
        {
            "all refused by name": faults[""] == len(readings),
            "no good one refused": not refused,
            "memory": largest <= 256,
        },
        {"time": slowest <= 2},
    )
