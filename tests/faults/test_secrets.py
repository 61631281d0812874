"""Row: random prompts with a fault at every request; nothing of them is anywhere but in the runner.

Two processes of their own generate, with real services: a runner, and `tee-runner serve` with its
libraries' logs at debug, a thread of which is the client. In every block of prompts one generation
is longer, as a token or two cannot be looked for. Then one of each kind of secret is put into each
place and looked for again: what is not found then could not have been found before.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from tee_side.protect.calibration import CALIBRATION_FILE
from tests.faults.row import Found, Row
from tests.kit.canaries import FAULTS, KINDS, PLACES
from tests.kit.canary_runner import POLICIES, TEMPLATES
from tests.kit.model import make_model, token_ids
from tests.kit.service import ENVIRONMENT, Forked, Workers
from tests.kit.service import run as run_program
from tsqp.calibrate import calibrate_on, save_calibration

# A token of the server's model that stands in no prompt.
_LAST_BYTE = 255

# ------------------------------------------------------------------------------------- the row


_BEFORE = """
import os, sys
from tests.kit.canary_server import be_process
be_process(*sys.argv[1:])
os._exit(0)
"""


def make_place(folder: Path, bank_tokens: int, eos_token_id: int | None) -> None:
    """Make a model that reads bytes, its calibration, a bank of pads, and the empty folders.

    `bank_tokens`: 0 for no bank. `eos_token_id`: which grammars need.
    """
    for name in ("model", "logs", "work", "home", "tmp", "bank"):
        (folder / name).mkdir()
    model, size = folder / "model", 300
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    make_model(model, seed=3, vocab_size=size, head_dim=8, **sizes, eos_token_id=eos_token_id)
    chunks = [token_ids(100, seed, size) for seed in range(8)]
    calibration = calibrate_on(read_config(model), Checkpoint(model), chunks)
    save_calibration(calibration, model / CALIBRATION_FILE)
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([], trainer)
    raw.save(str(model / "tokenizer.json"))
    if bank_tokens:
        options = ("--bank", str(folder / "bank" / "bank"), "--bank-key-beside-bank")
        command = ("pads", "make", str(model), *options, "--tokens", str(bank_tokens))
        assert run_program("tee-runner", *command).returncode == 0


def find_leaks(folder: Path, count: int, block: int, seed: int, served: str) -> dict[str, Any]:
    """Generate from `count` prompts, `block` under one policy; return what that process found."""
    with Workers() as workers, (folder / "logs" / "runner.log").open("ab") as log:
        endpoints, urls = [], []
        for number in range(2):
            service_log = folder / "logs" / f"service-{number}.log"
            options = ("--log-level", "debug", "--metrics", "127.0.0.1:*")
            bind = ("--bind", f"unix://{folder}/service-{number}")
            made = workers.start(str(folder / "model"), *bind, *options, log=service_log)
            endpoints.append(made.endpoint)
            urls.append(service_log.read_text().split("url=", 1)[1].split()[0].strip('"'))
        home = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        arguments = [str(folder), str(count), str(block), str(seed), served]
        arguments += [",".join(endpoints), ",".join(urls)]
        outputs = {"stdout": log.fileno(), "stderr": log.fileno(), "before": _BEFORE}
        process = Forked("tee-runner", arguments, {**ENVIRONMENT, **home}, **outputs)
        try:
            status = process.wait()
        finally:
            process.kill()
    tail = (folder / "logs" / "runner.log").read_text(encoding="utf-8")[-3000:]
    assert status == 0, f"the runner ended with {status}:\n{tail}"
    found: dict[str, Any] = json.loads((folder / "found").read_text(encoding="utf-8"))
    found["runner log"] = (folder / "logs" / "runner.log").read_text(encoding="utf-8")
    logs = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("logs/*-*.log"))]
    audit = folder / "logs" / "audit.log"
    return found | {"logs": logs, "audit log": audit.read_text() if served else ""}


@Row(
    "secrets",
    "secrets",
    "random canary prompts, also to a server in every field and path, a fault at every RPC",
    "0 hits in logs, metrics, errors, disk and shared memory",
    short=24,
    long=10_000,
    minutes=12,
)
def secrets(count: int, full: bool) -> Found:
    """Generate from so many prompts, and ask a server with some more."""
    both: list[dict[str, Any]] = []
    block = 100 if full else count // len(POLICIES)
    for served, share, each in (("", count, block), ("served", count // 8, 50)):
        with tempfile.TemporaryDirectory() as name:
            tokens = 0 if served else 4096 if full else 256
            make_place(Path(name), tokens, _LAST_BYTE if served else None)
            both.append(find_leaks(Path(name), share, each, len(both) + 1, served))
    ran, served_ = both
    hits = Counter(ran["hits"]) + Counter(served_["hits"])
    faults = [sum(times for *_, times in one["faults"]) for one in both]
    kinds = [{kind for _, kind, _, _ in one["faults"]} for one in both]
    hit, requests = {(policy, at) for policy, _, at, _ in ran["faults"]}, ran["requests"]
    pairs, blocks = (
        {(of, at) for of in requests for at in range(1, requests[of] + 1)},
        served_["blocks"],
    )
    planted = [found for one in both for found in one["planted"].values()]
    ways = [
        times for name in ("refused", "answered", "crashed") for times in served_[name].values()
    ]
    ended = [sum(one["ended"].values()) for one in both]
    return Found(
        {
            "prompts": ended[0],
            "prompts to a server": ended[1],
            "faults": sum(faults),
            "positions of requests hit": f"{len(hit & pairs)} of {len(pairs)}",
            "typed errors": ended[0] - ran["ended"].get("right", 0),
            "refused before": sum(ran["refused"].values()),
            "refused by the server": sum(served_["refused"].values()),
            "crashes of the server": sum(served_["crashed"].values()),
            "searched for": sum(one["patterns"] for one in both),
            "planted": len(planted),
            "planted and found": sum(planted),
            "hits": hits.total(),
        },
        {
            f"no secret elsewhere: {dict(hits)}": not hits,
            "everything searched for everywhere": all(
                set(one["kinds"]) >= KINDS and list(one["planted"]) == list(PLACES) for one in both
            )
            and all(planted),
            "every fault, every request": kinds[0] == set(FAULTS)
            and requests.keys() == set(POLICIES)
            and (pairs <= hit if full else len(hit & pairs) > len(POLICIES))
            and kinds[1] >= (set(FAULTS) if full else {"lost connection"})
            and faults[0] > count // 2
            and faults[1] > (count // 16 if full else 1),
            "every refusal": set(ran["refused"]) == {*TEMPLATES, "not Unicode"},
            f"every answer, refusal and crash of the server: {ways}": set(ways) == {blocks},
            "some right": all(one["ended"].get("right", 0) > 0 for one in both),
            "logs are written": "failed" in ran["runner log"]
            and all("refused" in text for text in ran["logs"])
            and served_["runner log"].count(" engine_died ") == blocks
            and "completion_tokens" in served_["audit log"],
        },
    )
