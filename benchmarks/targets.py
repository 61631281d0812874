"""The targets of the page of figures, and what it means to reach one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

OVERHEAD_TARGETS = {"tcp": {1: 4.0, 128: 10.0, 512: 15.0}, "unix": {1: 7.0, 128: 10.0, 512: 15.0}}
NEW_TOKENS_AFTER = 64
RPC_TARGET = 1.3
CPU_TARGET = 1.15
TOGETHER, TOGETHER_TARGET = 8, 4.0
OVERLAP_TARGET = 1.6
MEMORY_TARGET_BYTES = 300e6

# Why a target is missed and what the floor is, by the key of its section; shown only then.
REASONS: Mapping[str, str] = {
    "overhead": (
        "One token over a Unix stream, both sides spinning, on a quiet machine: light operators"
        " 3.1 ms (some 65 calls of torch a layer, each 3 to 5 us, two to five times what it takes"
        " in a loop of its own), headers and checks 1.3 ms, sending and the service 2.5 ms, and"
        " about 3 ms of Python around 64 requests. The transport's floor is 64 raw round trips; the"
        " rest needs less Python per request. Prompts are attention and transport: at 512 tokens"
        " 200 to 230 ms and 150 to 180 ms, for 620 MB through a socket; at 128 tokens 25 to 32 ms"
        " and 37 to 51 ms. With all else free, they would be 15 to 16 and 8 to 9 times less than"
        " the published client."
    ),
    "rpc": (
        "A request costs about 25 us of Python at either end (messages, checks, bookkeeping), of"
        " which headers are 8 us together: less than a raw round trip over ZeroMQ, and more than"
        " one over a Unix stream. An end that blocks sleeps and wakes up on another core; a raw"
        " ping-pong stays on one core. From 1 MiB on, copies count more than that."
    ),
    "cpu": (
        "Over ZeroMQ, a decoded token has 64 round trips whose hand-offs between threads meet"
        " sleeping cores; over a Unix stream it is as fast as transformers."
    ),
    "overlap": (
        "Operators take the TEE and the accelerator unequally long (attention in the TEE; gate and"
        " up at the accelerator), so a part's turns do not fit into the other's waits. With"
        " measured segments and free transport, two parts reach 1.57, three 1.7 and four 1.9;"
        " unequal parts no more. The difference is the first and last turns, where one part is"
        " alone, and the LM head, which is half of a decode step and does not overlap."
    ),
    "verify": "Most of it is reading the secrets, 25 MB a token, and refilling caches.",
    "memory": "The benchmark's process also holds its measurements and buffers of 512-token steps.",
}


@dataclass(frozen=True)
class Check:
    """One figure against its target. `ok`: None where there is only something to state."""

    what: str
    wanted: str
    reached: str
    ok: bool | None


def at_least(what: str, value: float | None, target: float) -> Check:
    """Compare a ratio that is to be large; None: it could not be worked out.

    It is rounded down, so that one that misses the target does not read as the target.
    """
    ok = value is not None and value >= target
    return Check(what, f">= {target:g}", hundredths(value, math.floor), ok)


def at_most(what: str, value: float | None, target: float) -> Check:
    """Compare a ratio that is to be small, as `at_least` does; it is rounded up."""
    ok = value is not None and value <= target
    return Check(what, f"<= {target:g}", hundredths(value, math.ceil), ok)


def hundredths(value: float | None, rounding: Callable[[float], int] = round) -> str:
    """Render a ratio with two decimals, rounded as `rounding` does; None: it has none."""
    if value is None:
        return "not measurable"
    # 1.2 is a little more in binary, and still not 1.21.
    return f"{rounding(round(value * 100, 6)) / 100:.2f}"


def divided(a: float | None, b: float | None) -> float | None:
    """Return a / b; None where one of them was not measured, or is no time."""
    return a / b if a is not None and b is not None and a > 0 and b > 0 else None


def verdict(check: Check) -> str:
    """Return what a cell says of a check: empty where there is only something to state."""
    return "" if check.ok is None else "yes" if check.ok else "**no**"
