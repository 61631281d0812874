"""Row: random prompts with a fault at every request; nothing of them is anywhere but in the server.

`tee-runner serve` is a process with real services and its libraries' logs at debug, a thread of
which is the client. In every block of prompts one generation is longer, as a token or two cannot be
looked for. Then one of each kind of secret is put into each place and looked for again: what is not
found then could not have been found before.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.faults.row import Found, Row
from tests.kit.canary_server import FAULTS, KINDS, PLACES, POLICIES
from tests.kit.model import make_model
from tests.kit.service import ENVIRONMENT, Forked, Workers
from tests.kit.service import run as run_program

# A token of the server's model that stands in no prompt.
_LAST_BYTE = 255

_BEFORE = """
import os, sys
from tests.kit.canary_server import be_process
be_process(*sys.argv[1:])
os._exit(0)
"""


def make_place(folder: Path, bank_tokens: int) -> None:
    """Make a model that reads bytes, a bank of pads, and the empty folders."""
    for name in ("model", "logs", "work", "home", "tmp", "bank"):
        (folder / name).mkdir()
    model = folder / "model"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    make_model(model, seed=3, vocab_size=300, head_dim=8, **sizes, eos_token_id=_LAST_BYTE)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.save(str(model / "tokenizer.json"))
    options = ("--bank", str(folder / "bank" / "bank"), "--bank-key-beside-bank")
    command = ("pads", "make", str(model), *options, "--tokens", str(bank_tokens))
    assert run_program("tee-runner", *command).returncode == 0


def find_leaks(folder: Path, count: int, block: int) -> dict[str, Any]:
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
        arguments = [str(folder), str(count), str(block), "1", ",".join(endpoints), ",".join(urls)]
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
    return found | {"logs": logs, "audit log": audit.read_text()}


@Row(
    "secrets",
    "secrets",
    "random canary prompts to a server, in every field and path, a fault at every RPC",
    "0 hits in logs, metrics, errors, disk and shared memory",
    short=2 * len(POLICIES),
    long=10_000,
    minutes=15,
)
def secrets(count: int, full: bool) -> Found:
    """Ask a server with so many prompts, which is another one under each policy in turn."""
    with tempfile.TemporaryDirectory() as name:
        make_place(Path(name), 4096 if full else 256)
        found = find_leaks(Path(name), count, 200 if full else count // len(POLICIES))
    hits, blocks, requests = Counter(found["hits"]), found["blocks"], found["requests"]
    made = {(policy, at) for policy, _, at, _ in found["faults"]}
    pairs = {(policy, at) for policy in requests for at in range(1, requests[policy] + 1)}
    kinds, planted = {kind for _, kind, _, _ in found["faults"]}, found["planted"]
    ways = [times for name in ("refused", "answered", "crashed") for times in found[name].values()]
    return Found(
        {
            "prompts": sum(found["ended"].values()),
            "faults": sum(times for *_, times in found["faults"]),
            "positions of requests hit": f"{len(made & pairs)} of {len(pairs)}",
            "refused by the server": sum(found["refused"].values()),
            "crashes of the server": sum(found["crashed"].values()),
            "searched for": found["patterns"],
            "planted": len(planted),
            "planted and found": sum(planted.values()),
            "hits": hits.total(),
        },
        {
            f"no secret elsewhere: {dict(hits)}": not hits,
            "everything searched for everywhere": set(found["kinds"]) >= KINDS
            and list(planted) == list(PLACES)
            and all(planted.values()),
            "every fault, every request": kinds >= (set(FAULTS) if full else {"lost connection"})
            and requests.keys() == set(POLICIES)
            and (pairs <= made if full else len(made & pairs) >= len(POLICIES)),
            f"every answer, refusal and crash: {ways}": set(ways) == {blocks},
            "some right": found["ended"].get("right", 0) > 0,
            "logs are written": (all if full else any)("refused" in text for text in found["logs"])
            and found["runner log"].count(" engine_died ") == blocks
            and "completion_tokens" in found["audit log"],
        },
    )
