"""Sessions of the demo model: a runner, what it should say, and how long each token took."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from protocol.errors import TsqpError
from tee_side.engine.engine import EngineSettings
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import assemble
from tests.kit.service import Worker, Workers
from tests.soak.demo import DEMO, prompt

POLICY = "shielded"


def settings(gpu: Sequence[str], **more: Any) -> RunnerSettings:
    """Return the settings of a runner of the demo model. `more`: other fields of them."""
    policy = load_policy(more.pop("policy", POLICY))
    return RunnerSettings(
        model=DEMO,
        policy=policy,
        gpu=tuple(gpu),
        engine=EngineSettings(step_tokens=64),
        **{"threads": 1, **more},
    )


def start(
    workers: Workers, *arguments: str, bind: str = "tcp://127.0.0.1:*", log: Path | None = None
) -> Worker:
    """Start a gpu-service of the demo model, on loopback."""
    usual = ("demo", "--bind", bind, "--threads", "1")
    return workers.start(*usual, *arguments, log=log)


@cache
def expected(ids: tuple[int, ...], new_tokens: int, policy: str = POLICY) -> tuple[int, ...]:
    """Return what the model says to a prompt, over a service in this process that is well."""
    tee = assemble(DEMO, policy)
    engine = tee.engine(step_tokens=64)
    sequence = engine.add(ids, max_new_tokens=new_tokens)
    while engine.running:
        engine.step()
    tee.assembly.close()
    return tuple(sequence.token_ids)


def prompts(count: int, length: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Return stretches of text, each another."""
    chance = random.Random(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        found[tuple(prompt(length, chance))] = None
    return list(found)


@dataclass(frozen=True)
class Said:
    """A generation: tokens, seconds between them (from the start to the first), and its error."""

    tokens: tuple[int, ...]
    gaps_s: tuple[float, ...]
    error: str | None = None

    @property
    def longest_s(self) -> float:
        """The longest that it stood still."""
        return max(self.gaps_s, default=0.0)

    @property
    def total_s(self) -> float:
        """How long it took."""
        return sum(self.gaps_s)

    def is_right(self, ids: tuple[int, ...], new_tokens: int, policy: str = POLICY) -> bool:
        """Say whether these are the right tokens, all of them."""
        return self.error is None and self.tokens == expected(ids, new_tokens, policy)


def generate(runner: Runner, ids: Sequence[int], new_tokens: int) -> Said:
    """Generate to the end, or to an error of ours."""
    tokens: list[int] = []
    gaps: list[float] = []
    error = None
    last = time.monotonic()
    try:
        for sampled in runner.generate(ids, max_new_tokens=new_tokens, with_text=False).steps():
            tokens.append(sampled.token_id)
            now = time.monotonic()
            gaps.append(now - last)
            last = now
    except TsqpError as found:
        error = type(found).__name__
        gaps.append(time.monotonic() - last)
    return Said(tuple(tokens), tuple(gaps), error)


def asked(runner: Runner) -> str:
    """Return the endpoint of the service that a runner asks at the moment."""
    return str(runner._services.at(0)[0].endpoint)
