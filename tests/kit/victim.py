"""A trusted side that generates one text again and again, and knows what is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from protocol.channel import Channel
from protocol.errors import TsqpError
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.model.operators import MicroBatchOperators
from tests.kit.demo import DEMO, prompt
from tests.kit.model import assemble


class Outcome(NamedTuple):
    """How a step ended: `error` by name, None for a result, which is `right` or not."""

    error: str | None
    right: bool
    seconds: float = 0.0

    @property
    def accepted(self) -> bool:
        return self.error is None and not self.right


class Victim:
    """The trusted side, put together as Runner does it, which generates one text again and again.

    What it computes is compared with what it computed over honest services. `connect`: opens its
    channels; called again when the last ones have failed. `sequences`: how many run side by side.
    """

    def __init__(
        self,
        policy: str,
        connect: Callable[[], Sequence[Channel]],
        *,
        sequences: int = 1,
        micro_batches: int = 1,
    ) -> None:
        self._connect, self._micro_batches = connect, micro_batches
        self._channels: Sequence[Any] = connect()
        tee = assemble(DEMO, policy, channels=list(self._channels), step_tokens=64)
        self.assembly = tee.assembly
        self._engine = Engine(tee.model, self._lanes(), EngineSettings(step_tokens=64))
        chance = random.Random(7)
        self._prompts = [prompt(4, chance) for _ in range(sequences)]
        self._expected: list[list[torch.Tensor]] = []
        self._step = 0
        self._begin()
        while self._engine.running:
            self._expected.append([sampled.logits_V for sampled in self._engine.step()])
        self._begin()

    def close(self) -> None:
        self._disconnect()
        self.assembly.close()

    def _disconnect(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = ()

    def reconnect(self) -> None:
        self._disconnect()
        self._channels = self._connect()
        self._engine.lanes = self._lanes()

    def _lanes(self) -> list[MicroBatchOperators]:
        return self.assembly.lanes(lambda _layer: self._channels, micro_batches=self._micro_batches)

    def step(self) -> Outcome:
        """Run a step. One that fails has changed nothing: the next is the same again."""
        began = time.monotonic()
        try:
            sampled = self._engine.step()
        except TsqpError as error:
            return Outcome(type(error).__name__, False, time.monotonic() - began)
        seconds, expected = time.monotonic() - began, self._expected[self._step]
        logits = [one.logits_V for one in sampled]
        right = len(logits) == len(expected) and all(map(torch.equal, logits, expected))
        self._step += 1
        if self._step == len(self._expected) or not right:
            self._begin()
        return Outcome(None, right, seconds)

    def _begin(self) -> None:
        for running in self._engine.running:
            self._engine.remove(running)
        for ids in self._prompts:
            self._engine.add(ids, max_new_tokens=5, eos_token_ids=frozenset())
        self._step = 0
        for expected in self._expected[:1]:
            logits = [one.logits_V for one in self._engine.step()]
            assert all(map(torch.equal, logits, expected)), "the prompt: got other logits"
            self._step = 1
