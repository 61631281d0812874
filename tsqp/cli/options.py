"""Options that several commands have, each declared once: `@use("policy", "threads")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tsqp.cli.program import DEFAULT_ENDPOINT, DEFAULT_POLICY
from tsqp.cli.settings import (
    DTYPES,
    KERNELS,
    PATH,
    PREFIX,
    THREADS,
    FiniteFloatRange,
    StopText,
    complete_file,
    complete_policy,
)

C = TypeVar("C", bound=Callable[..., Any])


def _row(of: Any, default: Any, text: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": of, "help": text, **({} if default is None else {"default": default}), **more}


def _file(text: str, **more: Any) -> dict[str, Any]:
    return _row(PATH, None, text, metavar="FILE", **more)


_COUNT, _AT_LEAST_0 = click.IntRange(min=1), click.IntRange(min=0)
_MICROSECONDS = FiniteFloatRange(0, 1e6)
_SECONDS = FiniteFloatRange(0, 3600, min_open=True)

OPTIONS: dict[str, dict[str, Any]] = {
    # What is talked to, and how it is known.
    "gpu": _row(
        str,
        (DEFAULT_ENDPOINT,),
        "A gpu-service, of some layers (0-7, 8-) or all of them. Repeatable: those of the same"
        " layers stand in for each other. Where a policy needs two that do not collude, the first"
        " gets share 1; with more than two for the same layers, share= says which.",
        multiple=True,
        metavar="ENDPOINT[=LAYERS][,share=1|2]",
    ),
    "identity": _file("Our secret key (tsqp keys new): services know us by it."),
    "service-key": _row(
        str,
        None,
        "Public key of the service (40 characters, or its file): no other one is talked to. Once"
        " for all, or once for each --gpu in order.",
        multiple=True,
        metavar="KEY|FILE",
        shell_complete=complete_file,
    ),
    "http-token": _file(
        "Bearer token by which a service with a URL knows us, one line (mode 0600). Once for each"
        " URL of --gpu in order, or once for all where they have one host and port.",
        multiple=True,
    ),
    "http-ca": _file("CAs (PEM) by which https:// services are known; default: the system's."),
    # The default is `protocol.liveness.DEFAULT_HEARTBEAT_TIMEOUT_S`, which takes long to import.
    "heartbeat-timeout-s": _row(
        FiniteFloatRange(0, 3600),
        1.0,
        "End a tcp:// or ipc:// connection on which nothing has come for so long, though we ask"
        " four times in that time; longer than the largest tensor takes on the link. 0 is off.",
    ),
    "connect-timeout-s": _row(_SECONDS, 10.0, "Wait so long for services at the start."),
    "request-timeout-s": _row(_SECONDS, 60.0, "Wait so long for a result, or a lost service."),
    "max-message-mib": _row(click.IntRange(1, 4096), 512, "Larger messages are refused."),
    "spin-us": _row(
        _MICROSECONDS,
        0.0,
        "Look for a message so long before sleeping, where the last one came as soon: faster, and"
        " keeps a core busy.",
    ),
    "link-gbps": _row(
        FiniteFloatRange(0, 1e6, min_open=True),
        None,
        "Take as long as a link of this bandwidth would (10^9 bit/s each way).",
    ),
    "link-rtt-us": _row(
        FiniteFloatRange(0, 1e7), 0.0, "Take as long as a link with this round-trip time would."
    ),
    "shares-in-the-clear": _row(
        None,
        False,
        "Let a policy with two services use links of this machine without keys. An observer of both"
        " links, such as root on this machine, then reads prompt and answer.",
        is_flag=True,
    ),
    # What leaves, and under what.
    "policy": _row(
        str,
        DEFAULT_POLICY,
        "What leaves the TEE, and masked how; tsqp policies lists them.",
        metavar="NAME|FILE",
        shell_complete=complete_policy,
    ),
    "service-appraisal": _file(
        "What services must be whose policy has them prove it: an appraisal policy, in TOML."
    ),
    "manifest": _file("What MODEL must hold, byte for byte, as tsqp manifest wrote it."),
    "manifest-digest": _row(
        str,
        None,
        "SHA-256 of the manifest: needed where it lies on a disk that is not trusted.",
        metavar="HEX",
    ),
    "seal-key": _file("MODEL is sealed (tsqp seal): the key that opens it."),
    "seal-key-fd": _row(_AT_LEAST_0, None, "An open file, such as a pipe, that has this key."),
    "seal-key-command": _row(
        str,
        None,
        "A command, run without a shell, whose stdout is this key: of a key service's tool.",
        metavar="COMMAND",
    ),
    "seal-digest": _row(
        str,
        None,
        "SHA-256 that tsqp seal printed: no older seal, and no other model's, is taken.",
        metavar="HEX",
    ),
    "calibration": _file(
        "Activation scales for int8 policies; default: calibration.safetensors in MODEL."
    ),
    "key": _file("Key of a feature mask, of tsqp provision."),
    "bank": _file("Pads made ahead by tee-runner pads make; default: made in memory, on the way."),
    "bank-key": _file(
        "Key of the bank, for the TEE alone, on another file system than the bank's, best one in"
        " memory; default: the bank's name and .key."
    ),
    "bank-index": _file(
        "What of the bank is used up, where the host cannot restore an old copy, as the key;"
        " default: the bank's name and .index."
    ),
    "bank-witness": _file(
        "Copy of the index, by which an index that was put back is noticed; default: in memory"
        " (within /dev/shm)."
    ),
    "bank-key-beside-bank": _row(
        None,
        False,
        "Allow key and index on the bank's own file system: a copy of it, with recorded traffic,"
        " then gives every row away.",
        is_flag=True,
    ),
    "when-out": _row(
        click.Choice(["wait", "tee", "fail"]),
        "wait",
        "With no pads left: make more, compute in the TEE, or give up.",
    ),
    # What is said.
    "max-new-tokens": _row(_COUNT, 256),
    "temperature": _row(FiniteFloatRange(0, 100), 0.0, "0 is greedy."),
    "top-k": _row(_AT_LEAST_0, 0, "0 is off."),
    "top-p": _row(FiniteFloatRange(0, 1, min_open=True), 1.0),
    "min-p": _row(FiniteFloatRange(0, 1), 0.0),
    "repetition-penalty": _row(FiniteFloatRange(0.01, 100), 1.0),
    "seed": _row(click.IntRange(0, 2**63 - 1), None, "Default: a fresh one."),
    "stop": _row(
        StopText(),
        None,
        "Stop string; repeatable, and one a line in the environment. Text is then decoded between"
        " tokens (docs/limitations.md).",
        multiple=True,
        metavar="TEXT",
    ),
    "stats": _row(
        None, True, "Show tokens, times and traffic on stderr.", param=("--stats/--no-stats",)
    ),
    "json": _row(
        None,
        False,
        "One JSON object on stdout.",
        param=("--json", "as_json"),
        is_flag=True,
        envvar=f"{PREFIX}_JSON",
    ),
    # How it is computed.
    "dtype": _row(DTYPES, None, "Default: the model's own."),
    "kernels": _row(
        click.Choice(KERNELS),
        "auto",
        "Instructions that the CPU computes with: the best that give right results, torch's, or"
        " these.",
    ),
    "threads": _row(
        THREADS,
        None,
        "CPU threads; default: one a core, less one that reads --bank where there are four.",
    ),
    "step-tokens": _row(_COUNT, 512, "Tokens in one step: longer prompts are prefilled in chunks."),
    "micro-batches": _row(
        click.IntRange(1, 64),
        1,
        "Cut a step into so many parts that overlap: the TEE works on one while the services work"
        " on others.",
    ),
    "max-kv-mib": _row(
        _COUNT,
        None,
        "Memory for keys and values of all sequences; default: 80 % of what is available.",
    ),
}


def use(*names: str, **changed: dict[str, Any]) -> Callable[[C], C]:
    """Add options to a command. `changed`: what differs for it, by parameter name."""

    def add(command: C) -> C:
        for name in reversed(names):
            settings = OPTIONS[name] | changed.get(name.replace("-", "_"), {})
            declared = settings.pop("param", (f"--{name}",))
            command = click.option(*declared, **settings)(command)
        return command

    return add
