"""A step whose round trip fails has changed nothing: repeated, it gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError
from protocol.messages import Request
from tee_side.sampling import SamplingSettings
from tests.support import LoopbackChannel, SavedModel, assemble, token_ids

Models = Callable[..., SavedModel]

PROMPTS = (5, 2)
NEW_TOKENS = 3


class FailingChannel(LoopbackChannel):
    """Loses the n-th request, or its reply, once."""

    def __init__(self, directory: Path, fail_at: int | None, lost: str) -> None:
        super().__init__(directory)
        self._fail_at = fail_at
        self._lost = lost
        self.failures = 0

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """Lose the chosen one."""
        if len(self.requests) != self._fail_at or self.failures:
            return super().call(request, timeout_s)
        self.failures += 1
        if self._lost == "reply":
            super().call(request, timeout_s)
        raise DeadlineExceededError("loopback", got="no reply", expected="one")


def _run(directory: Path, policy: str, fail_at: int | None, lost: str) -> tuple[torch.Tensor, int]:
    """Generate for two sequences in chunks; return all sampled logits and the number of RPCs."""
    channel = FailingChannel(directory, fail_at, lost)
    engine = assemble(directory, policy, channel=channel).engine(step_tokens=4)
    for length in PROMPTS:
        engine.add(
            token_ids(length, seed=length),
            max_new_tokens=NEW_TOKENS,
            sampling=SamplingSettings(temperature=1.0, seed=length),
        )
    logits = []
    while engine.running:
        before = [(list(s.token_ids), s.cache.length) for s in engine.running]
        try:
            sampled = engine.step()
        except DeadlineExceededError:
            assert [(list(s.token_ids), s.cache.length) for s in engine.running] == before
            continue
        logits += [torch.cat((s.logits_V, torch.tensor([float(s.token_id)]))) for s in sampled]
    assert channel.failures == (fail_at is not None)
    return torch.stack(logits), len(channel.requests)


@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("policy", ["tsqp", "attention-in-tee"])
def test_a_step_that_failed_at_any_rpc_can_be_repeated(
    saved_model: Models, policy: str, lost: str
) -> None:
    directory = saved_model("llama", num_hidden_layers=2).directory
    expected, rpcs = _run(directory, policy, None, lost)
    assert len(expected) == len(PROMPTS) * NEW_TOKENS
    for fail_at in range(rpcs):
        actual, _ = _run(directory, policy, fail_at, lost)
        assert torch.equal(actual, expected), f"after a failure at RPC {fail_at}"


def test_a_step_that_failed_in_sampling_counts_for_no_sequence(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = assemble(saved_model("llama").directory, "tee-only").engine()
    first, second = (engine.add(token_ids(4, seed=s), max_new_tokens=2) for s in (1, 2))

    def fail(*_: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(second, "sample", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert [(len(s.token_ids), s.cache.length) for s in (first, second)] == [(0, 0)] * 2
    assert [one.sequence for one in engine.step()] == [first, second]
