"""Options that all commands of `tee-runner` have in common, and some that other tools share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tsqp.cli.manifest import MANIFEST
from tsqp.cli.pads import BANK_FILES
from tsqp.cli.program import DEFAULT_ENDPOINT, DEFAULT_POLICY
from tsqp.cli.settings import (
    DTYPES,
    HEARTBEAT_TIMEOUT_S,
    IDENTITY,
    PATH,
    THREADS,
    FiniteFloatRange,
    StopText,
    complete_policy,
)

C = TypeVar("C", bound=Callable[..., Any])

SPIN_US = click.option(
    "--spin-us",
    type=FiniteFloatRange(0, 1e6),
    default=0.0,
    help="Look for a reply so long before sleeping, where the last one came as soon: faster, and"
    " keeps a core busy.",
)
KEYS = (
    IDENTITY,
    click.option(
        "--service-key",
        type=PATH,
        multiple=True,
        metavar="FILE",
        help="Public key of the service: nobody else is talked to. Once for all, or once for each"
        " --gpu in order.",
    ),
    HEARTBEAT_TIMEOUT_S,
)
MODELLED_LINK = (
    click.option(
        "--link-gbps",
        type=FiniteFloatRange(0, 1e6, min_open=True),
        help="Take as long as a link of this bandwidth would (10^9 bit/s each way).",
    ),
    click.option(
        "--link-rtt-us",
        type=FiniteFloatRange(0, 1e7),
        default=0.0,
        help="Take as long as a link with this round-trip time would.",
    ),
)


def shared_options(command: C) -> C:
    """Add the settings that generate and chat have in common."""
    options = [
        click.option(
            "--gpu",
            multiple=True,
            default=(DEFAULT_ENDPOINT,),
            metavar="ENDPOINT[=LAYERS][,share=1|2]",
            help="A gpu-service, of some layers (0-7, 8-) or all of them. Repeatable: those of the"
            " same layers stand in for each other; where a policy needs two that do not collude,"
            " they take turns unless share= says who gets which.",
        ),
        click.option(
            "--policy",
            default=DEFAULT_POLICY,
            metavar="NAME|FILE",
            shell_complete=complete_policy,
            help="What leaves the TEE, and masked how; tsqp policies lists them.",
        ),
        *KEYS,
        *MANIFEST,
        click.option(
            "--calibration",
            type=PATH,
            metavar="FILE",
            help="Activation scales for int8 policies; default: calibration.safetensors in MODEL.",
        ),
        click.option(
            "--key", type=PATH, metavar="FILE", help="Key of a feature mask, of tsqp provision."
        ),
        click.option(
            "--bank",
            type=PATH,
            metavar="FILE",
            help="Pads made ahead by tee-runner pads make; default: made in memory, on the way.",
        ),
        *BANK_FILES,
        click.option(
            "--when-out",
            type=click.Choice(["wait", "tee", "fail"]),
            default="wait",
            help="With no pads left: make more, compute in the TEE, or give up.",
        ),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=256),
        click.option(
            "--temperature", type=FiniteFloatRange(0, 100), default=0.0, help="0 is greedy."
        ),
        click.option("--top-k", type=click.IntRange(min=0), default=0, help="0 is off."),
        click.option("--top-p", type=FiniteFloatRange(0, 1, min_open=True), default=1.0),
        click.option("--min-p", type=FiniteFloatRange(0, 1), default=0.0),
        click.option("--repetition-penalty", type=FiniteFloatRange(0.01, 100), default=1.0),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Default: a fresh one."),
        click.option(
            "--stop",
            type=StopText(),
            multiple=True,
            metavar="TEXT",
            help="Stop string; repeatable, and one a line in the environment.",
        ),
        click.option("--dtype", type=DTYPES, help="In the TEE; default: the model's own dtype."),
        click.option("--threads", type=THREADS, help="CPU threads for torch."),
        click.option(
            "--step-tokens",
            type=click.IntRange(min=1),
            default=512,
            help="Tokens in one step: longer prompts are prefilled in chunks.",
        ),
        click.option(
            "--micro-batches",
            type=click.IntRange(1, 64),
            default=1,
            help="Cut a step into so many parts that overlap: the TEE works on one while the"
            " services work on others.",
        ),
        SPIN_US,
        *MODELLED_LINK,
        click.option(
            "--connect-timeout-s", type=FiniteFloatRange(0, 3600, min_open=True), default=10.0
        ),
        click.option(
            "--request-timeout-s", type=FiniteFloatRange(0, 3600, min_open=True), default=60.0
        ),
        click.option(
            "--max-kv-mib",
            type=click.IntRange(min=1),
            help="Memory for keys and values of all sequences; default: 80 % of what is available.",
        ),
        click.option(
            "--max-message-mib",
            type=click.IntRange(1, 4096),
            default=512,
            help="Larger messages are neither sent nor taken; the service has its own limit.",
        ),
        click.option("--json", is_flag=True, help="One JSON object instead of text."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
