"""A step whose round trip fails has changed nothing: repeated, it gives the same result."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import torch

from protocol import messages
from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError
from tee_side.engine.sampling import SamplingSettings
from tee_side.policy.placement import builtin_policies, load_policy
from tests.equivalence.tolerances import masked_logits
from tests.kit.model import LoopbackChannel, Models, Tee, token_ids
from tests.kit.rows import each_row

PROMPTS = (5, 2)
NEW_TOKENS = 2

LOST = ("request", "reply")
OFFLOADING = [name for name in builtin_policies() if load_policy(name).services]


class FailingChannel(LoopbackChannel):
    """Loses the request of the number `fail_at`, or its reply, once."""

    fail_at: int | None = None
    lost = ""

    def submit(self, request: messages.Request, timeout_s: float | None = None) -> int:
        self._lose("request", len(self.requests))
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        exchange = super().wait(request_id)
        self._lose("reply", request_id - 1)
        return exchange

    def _lose(self, what: str, number: int) -> None:
        if (what, number) == (self.lost, self.fail_at):
            self.fail_at = None
            raise DeadlineExceededError("loopback", got="no reply", expected="one")


def _run(tee: Tee, every: int, lost: str = "") -> tuple[torch.Tensor, int]:
    """Generate for two sequences in chunks; return sampled logits, and RPCs of the last service.

    `lost`: each step fails at its first RPC, is repeated and fails `every` RPCs later, and so on to
    its end; "" for steps that do not fail. RPCs are those of what succeeded.
    """
    channel: Any = tee.channels[-1]
    channel.lost = lost
    engine = tee.engine(step_tokens=4 * every)
    for length in PROMPTS:
        sampling = SamplingSettings(temperature=1.0, seed=length)
        prompt = token_ids(length * every, seed=length)
        engine.add(prompt, max_new_tokens=NEW_TOKENS, sampling=sampling)
    logits, rpcs, fail_at = [], 0, 0
    while engine.running:
        before = [(list(s.token_ids), s.cache.length) for s in engine.running]
        begun = len(channel.requests)
        channel.fail_at = begun + fail_at if lost else None
        try:
            sampled = engine.step()
        except DeadlineExceededError:
            fail_at += every
            assert [(list(s.token_ids), s.cache.length) for s in engine.running] == before
            # Neither service is waited for any more.
            assert not any(channel.pending for channel in tee.channels)
            continue
        # It failed at every RPC that it has, and not at one that it has not.
        asked = len(channel.requests) - begun
        assert not lost or 0 <= fail_at - asked < every
        rpcs, fail_at = rpcs + asked, 0
        logits += [torch.cat((s.logits_V, torch.tensor([float(s.token_id)]))) for s in sampled]
    return torch.stack(logits), rpcs


@each_row(
    ("policy", "lost", "micro_batches"),
    [
        *zip(OFFLOADING, cycle(LOST), cycle((1,))),
        # A wavefront that stopped anywhere: some layers hold rows of both parts, some of one.
        ("attention-in-tee", "request", 3),
        ("shielded-prefill", "reply", 3),
    ],
    slow=[
        *product(("two-server",), LOST, (1,)),
        *product(("tsqp", "attention-in-tee", "shielded-prefill", "two-server"), LOST, (3,)),
    ],
)
def test_a_step_that_failed_at_any_rpc_can_be_repeated(
    saved_model: Models, policy: str, lost: str, micro_batches: int
) -> None:
    """Of several services the last one fails; of several parts not at every RPC."""
    model, loaded = saved_model("llama", num_hidden_layers=2), load_policy(policy)
    channels, mask = model.services(loaded), loaded.feature_mask
    channels[-1] = FailingChannel(model.provisioned(mask)[0] if mask else model.directory)
    tee = model.tee(loaded, channels=channels, micro_batches=micro_batches)
    expected, rpcs = _run(tee, micro_batches)
    assert len(expected) == len(PROMPTS) * NEW_TOKENS
    actual, same = _run(tee, micro_batches, lost)
    assert same == rpcs
    if not loaded.masks:
        assert torch.equal(actual, expected)
    assert torch.equal(actual[:, -1], expected[:, -1])
    masked_logits(policy).check(actual, expected)
