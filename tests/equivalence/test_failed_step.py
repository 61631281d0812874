"""A step whose round trip fails has changed nothing: repeated, it gives the same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from protocol import messages
from protocol.channel import Exchange
from protocol.errors import DeadlineExceededError, ReplyError
from tee_side.engine.request import Logprob, Request
from tee_side.engine.sampling import SamplingSettings
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.pads.store import PadStore
from tee_side.words import OPERATORS
from tests.equivalence.tolerances import masked_logits
from tests.kit.model import LoopbackChannel, SavedModel, Tee, assemble, token_ids

Models = Callable[..., SavedModel]

PROMPTS = (5, 2)
NEW_TOKENS = 3

OFFLOADING = [name for name in builtin_policies() if load_policy(name).services]


class FailingChannel(LoopbackChannel):
    """Loses the request of the number `fail_at`, or its reply, once."""

    fail_at: int | None = None
    lost = ""

    def submit(self, request: messages.Request, timeout_s: float | None = None) -> int:
        """Lose the chosen one before it is sent."""
        if self.lost == "request":
            self._lose(len(self.requests))
        return super().submit(request, timeout_s)

    def wait(self, request_id: int) -> Exchange:
        """Lose the reply to the chosen one."""
        exchange = super().wait(request_id)
        if self.lost == "reply":
            self._lose(request_id - 1)
        return exchange

    def _lose(self, number: int) -> None:
        if number == self.fail_at:
            self.fail_at = None
            raise DeadlineExceededError("loopback", got="no reply", expected="one")


@dataclass
class Failing:
    """A policy's trusted side, and the services, of which one fails when told to."""

    tee: Tee
    channel: FailingChannel

    @classmethod
    def of(cls, model: SavedModel, name: str, failing: int = 0) -> Failing:
        policy = load_policy(name)
        channels = model.services(policy)
        mask = policy.feature_mask
        channel = FailingChannel(model.provisioned(mask)[0] if mask else model.directory)
        channels[failing] = channel
        return cls(model.tee(policy, channels=channels), channel)

    def run(self, lost: str = "") -> tuple[torch.Tensor, int]:
        """Generate for two sequences in chunks; return sampled logits, and RPCs of the service.

        `lost`: each step fails at its first RPC, is repeated and fails at the next one,
        and so on to its end; "" for steps that do not fail. RPCs are those of what succeeded.
        """
        channel = self.channel
        channel.lost = lost
        engine = self.tee.engine(step_tokens=4)
        for length in PROMPTS:
            engine.add(
                token_ids(length, seed=length),
                max_new_tokens=NEW_TOKENS,
                sampling=SamplingSettings(temperature=1.0, seed=length),
            )
        logits, rpcs, fail_at = [], 0, 0
        while engine.running:
            before = [(list(s.token_ids), s.cache.length) for s in engine.running]
            begun = len(channel.requests)
            channel.fail_at = begun + fail_at if lost else None
            try:
                sampled = engine.step()
            except DeadlineExceededError:
                fail_at += 1
                assert [(list(s.token_ids), s.cache.length) for s in engine.running] == before
                # Neither service is waited for any more.
                assert not any(channel.pending for channel in self.tee.channels)
                continue
            # It failed at every RPC that it has, and not at one that it has not.
            asked = len(channel.requests) - begun
            assert not lost or fail_at == asked
            rpcs, fail_at = rpcs + asked, 0
            logits += [torch.cat((s.logits_V, torch.tensor([float(s.token_id)]))) for s in sampled]
        return torch.stack(logits), rpcs


@pytest.mark.each_value
@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("policy", OFFLOADING)
def test_a_step_that_failed_at_any_rpc_can_be_repeated(
    saved_model: Models, policy: str, lost: str
) -> None:
    failing = Failing.of(saved_model("llama", num_hidden_layers=2), policy)
    tolerance, clear = masked_logits(policy), not load_policy(policy).masks
    expected, rpcs = failing.run()
    assert len(expected) == len(PROMPTS) * NEW_TOKENS
    actual, same = failing.run(lost)
    assert same == rpcs
    if clear:
        assert torch.equal(actual, expected)
    assert torch.equal(actual[:, -1], expected[:, -1])
    tolerance.check(actual, expected)


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_either_of_two_services_may_fail(saved_model: Models, lost: str) -> None:
    failing = Failing.of(saved_model("llama", num_hidden_layers=2), "two-server", failing=1)
    expected, _ = failing.run()
    actual, _ = failing.run(lost)
    assert torch.equal(actual, expected)


def test_a_step_that_failed_in_reading_a_prompt_counts_for_no_sequence(
    saved_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = assemble(saved_model("llama").directory, "tee-only").engine()
    first = engine.add(token_ids(4, seed=1), max_new_tokens=2)
    wanted = Request(prompt_ids=tuple(token_ids(4, seed=2)), max_new_tokens=2, prompt_logprobs=1)
    (second,) = engine.admit(wanted)

    def fail(*_: object) -> list[Logprob]:
        raise ReplyError("logits", got="values that are not finite", expected="finite numbers")

    with monkeypatch.context() as patch:
        patch.setattr(second.reader, "read", fail)
        with pytest.raises(ReplyError):
            engine.step()
    assert [(len(s.token_ids), s.cache.length) for s in (first, second)] == [(0, 0)] * 2
    assert [one.sequence for one in engine.step()] == [first, second]
    assert second.reader is not None
    assert len(second.reader.result().logprobs) == 3


# ---------------------------------------------------------------------------- what pads are left

# Prefill takes pads for one operator, decode for another: neither uses up what it takes.
APART = Policy.model_validate(
    {
        "name": "apart",
        "summary": "test",
        "arithmetic": "int8",
        "operators": {
            **dict.fromkeys(OPERATORS, "tee"),
            "qkv_proj": [
                {"phase": "prefill", "place": "gpu", "mask": "pad", "verify": "none"},
                {"phase": "decode", "place": "tee"},
            ],
            "o_proj": [
                {"phase": "prefill", "place": "tee"},
                {"phase": "decode", "place": "gpu", "mask": "pad", "verify": "none"},
            ],
        },
    }
)


def _store(tee: Tee) -> PadStore:
    (pads,) = tee.assembly.pads.values()
    return pads._store


def _one_row_a_step(tee: Tee, tokens: int) -> None:
    engine = tee.engine()
    engine.add(token_ids(1), max_new_tokens=tokens, eos_token_ids=frozenset())
    while engine.running:
        engine.step()


def test_a_failed_step_of_several_lanes_leaves_the_space_of_its_pads_to_others(
    saved_model: Models,
) -> None:
    """Small steps afterwards have one lane, and the others are never asked again."""
    model = saved_model("llama", num_hidden_layers=2)
    channel = FailingChannel(model.directory)
    tee = model.tee("shielded-prefill", channels=[channel], step_tokens=40, micro_batches=2)
    engine = tee.engine()
    engine.add(token_ids(40), max_new_tokens=1)
    channel.fail_at, channel.lost = 3, "reply"
    with pytest.raises(DeadlineExceededError):
        engine.step()
    store = _store(tee)
    assert store.available + store.room == store.capacity
    _one_row_a_step(tee, store.capacity + 20)


def test_a_phase_that_leaves_sites_out_leaves_the_space_of_its_pads_to_others(
    saved_model: Models,
) -> None:
    tee = saved_model("llama", num_hidden_layers=2).tee(APART, step_tokens=40, micro_batches=2)
    engine = tee.engine()
    engine.add(token_ids(40), max_new_tokens=1)
    engine.step()
    store = _store(tee)
    assert store.available + store.room == store.capacity
    _one_row_a_step(tee, store.capacity + 20)
