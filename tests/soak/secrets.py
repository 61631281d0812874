"""Random prompts with a fault at every request; nothing of them is anywhere but in the runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from tee_side.protect.calibration import CALIBRATION_FILE
from tests.kit.model import make_model, token_ids
from tests.kit.service import Workers
from tests.kit.service import run as run_program
from tests.soak.canaries import BLOCK, FAULTS, PLACES, POLICIES, REFUSALS, SHARED
from tests.soak.row import RowResult, is_full, note, progress
from tsqp.calibrate import calibrate_on, save_calibration

NAME = "secrets"
TEST = "random canary prompts, also to a server in every field and path, a fault at every RPC"
PASS = "0 hits in logs, metrics, errors, disk and shared memory"
FULL = 10_000
SHORT = 60
MINUTES = 12

# What has to be looked for.
KINDS = {"prompt", "answer", "token ids", "activation", "key"}

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("model", "logs", "work", "home", "tmp", "bank")
_BANK_TOKENS = 4096
# Of a server's own part, which takes longer for each prompt; and how many before it has to die.
_PROMPTS_A_SERVED, _SERVED_BLOCK = 8, 50
# A token of the server's model that stands in no prompt.
_LAST_BYTE = 255
_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def make_place(
    folder: Path, bank_tokens: int = _BANK_TOKENS, eos_token_id: int | None = None
) -> None:
    """Make a model that reads bytes, its calibration, a bank of pads, and the empty folders.

    `bank_tokens`: 0 for no bank. `eos_token_id`: which grammars need.
    """
    for name in _FOLDERS:
        (folder / name).mkdir()
    model = folder / "model"
    make_model(model, seed=3, **_SIZES, eos_token_id=eos_token_id)
    config, checkpoint = read_config(model), Checkpoint(model)
    chunks = [token_ids(100, seed, _SIZES["vocab_size"]) for seed in range(8)]
    save_calibration(calibrate_on(config, checkpoint, chunks), model / CALIBRATION_FILE)
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([], trainer)
    raw.save(str(model / "tokenizer.json"))
    if not bank_tokens:
        return
    made = run_program(
        "tee-runner",
        *("pads", "make", str(model), "--bank", str(folder / "bank" / "bank")),
        "--bank-key-beside-bank",
        *("--tokens", str(bank_tokens)),
    )
    if made.returncode:
        raise RuntimeError(made.stderr)


def find_leaks(
    folder: Path, count: int, seed: int, block: int = BLOCK, *, module: str = "canaries"
) -> dict[str, Any]:
    """Generate from `count` prompts in a process of its own; return what it says that it found.

    `block`: prompts under one policy, after which everything is searched. `module`: of this folder,
    which does it.
    """
    with_metrics = _serves_metrics()
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        endpoints, urls = [], []
        for number in range(2):
            service_log = folder / "logs" / f"service-{number}.log"
            worker = workers.start(
                str(folder / "model"),
                *("--bind", f"unix://{folder / f'service-{number}'}", "--log-level", "debug"),
                *(("--metrics", "127.0.0.1:*") if with_metrics else ()),
                log=service_log,
            )
            endpoints.append(worker.endpoint)
            if with_metrics:
                text = service_log.read_text(encoding="utf-8")
                urls.append(text.split("url=", 1)[1].split()[0].strip('"'))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TSQP_", "TEE_", "GPU_"))},
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(_ROOT),
            "OMP_NUM_THREADS": "1",
        }
        runner_log = stack.enter_context((folder / "logs" / "runner.log").open("ab"))
        command = [
            *(sys.executable, "-m", f"tests.soak.{module}", str(folder), str(count), str(seed)),
            *(str(block), ",".join(endpoints), ",".join(urls)),
        ]
        last = ""
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=runner_log,
            text=True,
            env=environment,
            cwd=folder / "work",
        ) as process:
            for line in process.stdout or ():
                word, _, number_done = line.partition(" ")
                if word == "progress":
                    progress(int(number_done))
                else:
                    last = line
        if process.returncode or not last:
            tail = (folder / "logs" / "runner.log").read_text(encoding="utf-8")[-2000:]
            raise RuntimeError(f"the runner ended with {process.returncode}:\n{tail}")
    found: dict[str, Any] = json.loads(last)
    return found


def _serves_metrics() -> bool:
    return find_spec("prometheus_client") is not None


def expected_places(*, full: bool) -> set[str]:
    """Return where has to be looked: everywhere, and in the short form where there is something."""
    missing = set() if _serves_metrics() else {"metrics"}
    missing |= set() if SHARED.is_dir() else {"shared memory"}
    return set(PLACES) - (set() if full else missing)


def hit_requests(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return, by policy, how many requests of a generation a fault hit, and how many it has."""
    hit = {(policy, at) for policy, _, at, _ in found["faults"]}
    return {
        policy: (sum((policy, at) in hit for at in range(1, requests + 1)), requests)
        for policy, requests in found["requests"].items()
    }


def are_hit(positions: dict[str, tuple[int, int]], *, full: bool) -> bool:
    """Say whether every request of every policy was hit; in the short form, more than the first."""
    return positions.keys() == set(POLICIES) and all(
        hit == requests if full else hit > 1 for hit, requests in positions.values()
    )


def _logs_are_written(logs: Path) -> bool:
    """Say whether the runner and the services wrote of what went wrong."""
    services = [path.read_text(encoding="utf-8") for path in logs.glob("service-*.log")]
    runner = (logs / "runner.log").read_text(encoding="utf-8")
    return "failed" in runner and bool(services) and all("refused" in text for text in services)


def run(count: int) -> RowResult:
    """Generate from so many prompts, and ask a server with some more."""
    began, full = time.monotonic(), is_full(FULL, count)
    with tempfile.TemporaryDirectory() as name:
        make_place(Path(name))
        block = BLOCK if full else max(1, count // len(POLICIES))
        found = find_leaks(Path(name), count, seed=1, block=block)
        complete = _is_complete(found, Path(name) / "logs", full=full)
    with tempfile.TemporaryDirectory() as name:
        make_place(Path(name), bank_tokens=0, eos_token_id=_LAST_BYTE)
        asked = count // _PROMPTS_A_SERVED
        served = find_leaks(
            Path(name), asked, seed=2, block=_SERVED_BLOCK, module="server_canaries"
        )
        complete = _served_all(served, Path(name) / "logs", full=full) and complete
    hits = Counter(found["hits"]) + Counter(served["hits"])
    for leak, times in sorted(hits.items()):
        note(f"{leak}: {times}")
    both, planted = (found, served), [*found["planted"].values(), *served["planted"].values()]
    faults = [sum(times for *_, times in one["faults"]) for one in both]
    positions = hit_requests(found)
    hit = sum(hit for hit, _ in positions.values())
    requests = sum(requests for _, requests in positions.values())
    return RowResult(
        NAME,
        TEST,
        PASS,
        count,
        {
            "prompts": sum(found["ended"].values()),
            "prompts to a server": sum(served["ended"].values()),
            "faults": sum(faults),
            "positions of requests hit": f"{hit} of {requests}",
            "typed errors": sum(found["ended"].values()) - found["ended"].get("right", 0),
            "refused before": sum(found["refused"].values()),
            "refused by the server": sum(served["refused"].values()),
            "crashes of the server": sum(served["crashed"].values()),
            "searched for": sum(one["patterns"] for one in both),
            "planted": len(planted),
            "planted and found": sum(planted),
            "hits": hits.total(),
        },
        time.monotonic() - began,
        passed=not hits
        and complete
        and faults[0] > count // 2
        and faults[1] > (asked // 2 if full else 1),
    )


def _is_complete(found: dict[str, Any], logs: Path, *, full: bool) -> bool:
    """Say whether all happened that can: or there would have been nothing to find, or to search."""
    kinds = {kind for _, kind, _, _ in found["faults"]}
    complete = kinds == set(FAULTS) and set(found["kinds"]) >= KINDS
    complete = complete and are_hit(hit_requests(found), full=full)
    complete = complete and set(found["refused"]) == set(REFUSALS)
    complete = complete and found["ended"].get("right", 0) > 0
    complete = complete and bool(found["ended"].keys() - {"right"})
    # A policy that does not start has sent nothing.
    complete = complete and "SettingsError" not in found["ended"]
    complete = complete and _is_searched(found, full=full) and _logs_are_written(logs)
    if not complete:
        note(f"got {found}; expected every fault, request, kind and place, and logs")
    return complete


def _is_searched(found: dict[str, Any], *, full: bool) -> bool:
    planted = found["planted"]
    return all(planted.values()) and set(planted) >= expected_places(full=full)


def _served_all(served: dict[str, Any], logs: Path, *, full: bool) -> bool:
    """Say the same of a server: it has refused, answered and failed in every way."""
    ways = [*served["refused"].values(), *served["answered"].values(), *served["crashed"].values()]
    complete = all(times == served["blocks"] for times in ways)
    complete = complete and {kind for _, kind, _, _ in served["faults"]} >= (
        set(FAULTS) if full else {"lost connection"}
    )
    complete = complete and set(served["kinds"]) >= KINDS and _is_searched(served, full=full)
    complete = complete and served["ended"].get("right", 0) > 0
    log = (logs / "runner.log").read_text(encoding="utf-8")
    complete = complete and log.count(" engine_died ") == served["blocks"]
    complete = complete and "completion_tokens" in (logs / "audit.log").read_text(encoding="utf-8")
    if not complete:
        note(f"a server: got {served}; expected every fault, refusal, answer, crash, kind, place")
    return complete
