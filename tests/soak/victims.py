"""A session that is lied to: one step of the engine for each lie, and its outcome.

`Victim` is the trusted side of the demo model under a policy, put together as Runner does it, over
channels that are replaced when a lie has ended them. What it computes is compared, bit by bit, with
what it computed over honest services: integers leave no room for rounding.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from tee_side.assembly import Assembly, MaskSettings
from tee_side.engine.engine import Engine, EngineSettings
from tee_side.engine.engine import Sequence as Running
from tee_side.model.layers import load_tee_model
from tee_side.model.operators import MicroBatchOperators
from tee_side.policy.placement import load_policy
from tests.soak.demo import DEMO, prompt

_PROMPT_TOKENS = 4
_NEW_TOKENS = 24


@dataclass(frozen=True)
class Outcome:
    """How a step ended: `error` by name, None for a result, which is `right` or not."""

    error: str | None
    right: bool
    seconds: float

    @property
    def accepted(self) -> bool:
        """Whether a wrong result was taken."""
        return self.error is None and not self.right


class Victim:
    """An engine that generates one text again and again.

    `connect`: opens a channel a share; called again when the last ones have failed. `sequences`:
    how many run side by side. Close it after use.
    """

    def __init__(
        self,
        policy: str,
        connect: Callable[[], Sequence[Channel]],
        *,
        sequences: int = 1,
        micro_batches: int = 1,
    ) -> None:
        config, checkpoint = read_config(DEMO), Checkpoint(DEMO)
        self._connect = connect
        self._channels: Sequence[Channel] = connect()
        model = load_tee_model(config, checkpoint, torch.float32)
        self.assembly = Assembly(
            load_policy(policy), config, checkpoint, model, MaskSettings(), step_tokens=64
        )
        self._micro_batches = micro_batches
        self._engine = Engine(model, self._lanes(), EngineSettings(step_tokens=64))
        chance = random.Random(7)
        self._prompts = [prompt(_PROMPT_TOKENS, chance) for _ in range(sequences)]
        self._expected: list[list[torch.Tensor]] = []
        self._step = 0
        self._begin()
        while self._engine.running:
            self._expected.append([sampled.logits_V for sampled in self._engine.step()])
        self._begin()

    def close(self) -> None:
        """Disconnect."""
        self.disconnect()
        self.assembly.close()

    def disconnect(self) -> None:
        """Close the channels; `reconnect` opens others."""
        for channel in self._channels:
            channel.close()
        self._channels = ()

    def reconnect(self) -> None:
        """Open channels of its own again."""
        self.disconnect()
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
            return Outcome(type(error).__name__, right=False, seconds=time.monotonic() - began)
        seconds = time.monotonic() - began
        expected = self._expected[self._step]
        right = len(sampled) == len(expected) and all(
            torch.equal(one.logits_V, logits_V)
            for one, logits_V in zip(sampled, expected, strict=True)
        )
        self._step += 1
        if self._step == len(self._expected) or not right:
            self._begin()
        return Outcome(None, right, seconds)

    def _begin(self) -> None:
        """Run the prompts, which no lie is told about."""
        for running in self._engine.running:
            self._engine.remove(running)
        for ids in self._prompts:
            self._add(ids)
        self._step = 0
        for expected in self._expected[:1]:
            sampled = self._engine.step()
            if not all(map(torch.equal, [one.logits_V for one in sampled], expected)):
                raise RuntimeError("the prompt: got other logits, expected those of before")
            self._step = 1

    def _add(self, ids: Sequence[int]) -> Running:
        return self._engine.add(ids, max_new_tokens=_NEW_TOKENS, eos_token_ids=frozenset())
