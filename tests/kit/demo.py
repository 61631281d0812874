"""Sessions of the demo model: what they ask, what the model says to it, what they send, and when.

For tests and rows of real processes. What the model says is computed in this process, over a
service in it that is well: integers leave no room for rounding.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from protocol.errors import TsqpError
from protocol.messages import InitRequest, Request
from protocol.pending import PendingChannel
from tee_side import runner as runner_module
from tee_side.engine.engine import EngineSettings
from tee_side.engine.tokenizer import Tokenizer
from tee_side.policy.placement import load_policy
from tee_side.runner import Runner, RunnerSettings
from tests.kit.model import assemble
from tests.kit.service import Service, Workers
from tsqp.cli.program import model_directory

DEMO = model_directory("demo")
POLICY = "shielded"
Tokens = tuple[int, ...]


@cache
def _text_ids() -> Tokens:
    """Return the token ids of a text that the demo model was never trained on."""
    text = (DEMO / "validation.txt").read_text(encoding="utf-8")
    return tuple(Tokenizer(DEMO).encode(text[:40_000]))


def prompt(length: int, chance: random.Random) -> Tokens:
    start = chance.randrange(len(_text_ids()) - length)
    return _text_ids()[start : start + length]


def prompts(count: int, length: int, seed: int = 1) -> list[Tokens]:
    chance = random.Random(seed)
    found: dict[Tokens, None] = {}
    while len(found) < count:
        found[prompt(length, chance)] = None
    return list(found)


def settings(gpu: Sequence[str], **more: Any) -> RunnerSettings:
    """Return the settings of a runner of the demo model. `more`: other fields of them."""
    policy, engine = load_policy(POLICY), EngineSettings(step_tokens=64)
    given = {"threads": 1, "policy": policy, "engine": engine, **more}
    return RunnerSettings(model=DEMO, gpu=tuple(gpu), **given)


def start(
    workers: Workers, *arguments: str, bind: str = "tcp://127.0.0.1:*", log: Path | None = None
) -> Service:
    return workers.start("demo", "--bind", bind, "--threads", "1", *arguments, log=log)


@cache
def expected(ids: Tokens, new_tokens: int) -> Tokens:
    """Return what the model says to a prompt: the same as under pads, in less time."""
    tee = assemble(DEMO, "quantized-clear")
    engine = tee.engine(step_tokens=64)
    sequence = engine.add(ids, max_new_tokens=new_tokens)
    while engine.running:
        engine.step()
    tee.assembly.close()
    return tuple(sequence.token_ids)


@dataclass(frozen=True)
class Said:
    """A generation: tokens, seconds between them (from the start to the first), and its error."""

    tokens: Tokens
    gaps_s: tuple[float, ...]
    error: str | None = None

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def is_right(self, ids: Tokens, new_tokens: int) -> bool:
        return self.error is None and self.tokens == expected(ids, new_tokens)


def generate(runner: Runner, ids: Tokens, new_tokens: int) -> Said:
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


class Sent(threading.local):
    """What the runners of this thread hand to their transports. `log`: where, and what."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Request]] = []
        self._due: Mapping[tuple[int, bool], Callable[[], object]] = {}
        self._count = 0

    def to(self, *endpoints: str) -> list[Request]:
        """Return what services were sent, or these, but for Init."""
        return [
            request
            for where, request in self.log
            if not isinstance(request, InitRequest) and (not endpoints or where in endpoints)
        ]

    def strike(self, due: Mapping[tuple[int, bool], Callable[[], object]]) -> None:
        """Do something before (False) the request with this number is sent, or behind it (True).

        No Init is counted, and nothing before this call, which is forgotten.
        """
        self.log.clear()
        self._count, self._due = 0, due

    def carry(self, endpoint: str, request: Request, send: Callable[[], int]) -> int:
        counts = not isinstance(request, InitRequest)
        if counts and (before := self._due.get((self._count, False))):
            before()
        request_id = send()
        self.log.append((endpoint, request))
        if counts:
            self._count += 1
            if behind := self._due.get((self._count - 1, True)):
                behind()
        return request_id


@contextmanager
def watched() -> Iterator[Sent]:
    """Look at what all runners send that connect in the block."""
    kept, connect = Sent(), runner_module.open_channel

    def watching(endpoint: str, **given: Any) -> PendingChannel:
        channel = connect(endpoint, **given)
        submit, begin = channel.submit, channel.start

        def submitted(request: Request, *arguments: Any, **more: Any) -> int:
            return kept.carry(endpoint, request, lambda: submit(request, *arguments, **more))

        def started(prepared: Any, payload: Any, timeout_s: float | None = None) -> int:
            request = prepared.request(payload)
            return kept.carry(endpoint, request, lambda: begin(prepared, payload, timeout_s))

        channel.submit, channel.start = submitted, started  # type: ignore[method-assign]
        return channel

    with mock.patch.object(runner_module, "open_channel", watching):
        yield kept
