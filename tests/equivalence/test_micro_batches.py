"""Into how many micro-batches a step is cut does not change what comes out of it."""

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch

from protocol import messages
from protocol.errors import DeadlineExceededError
from protocol.prepared import Exchange
from tee_side.engine.engine import Engine
from tee_side.engine.request import SamplingSettings
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.pads.source import WhenOut
from tests.equivalence.tolerances import FLOAT32_STEPS, INTEGER_STEPS, Tolerance, masked_logits
from tests.kit.model import (
    POLICIES,
    LoopbackChannel,
    Models,
    Tee,
    assemble,
    finish,
    stocked,
    token_ids,
)
from tests.kit.rows import each_row

LAYERS = {"num_hidden_layers": 2}
# A sliding window smaller than a part; a RoPE whose frequencies change with the length.
DYNAMIC = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sliding window": ("mistral", {"sliding_window": 5}),
    "dynamic RoPE": ("llama", DYNAMIC),
    "norms of q and k": ("qwen3", {}),
}


def _steps(policy: Policy) -> Tolerance:
    """Return what other parts of a prompt may change: other shapes, so other orders of sums."""
    return INTEGER_STEPS if policy.arithmetic == "int8" else FLOAT32_STEPS


def _run(
    engine: Engine, requests: Sequence[tuple[list[int], int]]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    sequences = [
        engine.add(prompt, max_new_tokens=new, eos_token_ids=frozenset())
        for prompt, new in requests
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in sequences]
    for sampled in finish(engine):
        seen[sequences.index(sampled.sequence)].append(sampled.logits_V)
    return [s.token_ids for s in sequences], [torch.stack(logits) for logits in seen]


ATTENTION = [
    (name, variant, 2 + (number + place) % 2)
    for number, name in enumerate(("published", "attention-in-tee", "tee-only", "shielded-prefill"))
    for place, variant in enumerate(VARIANTS)
]


@each_row(("name", "variant", "micro_batches"), ATTENTION[::5], slow=ATTENTION)
def test_every_kind_of_attention_runs_as_a_wavefront(
    saved_model: Models, name: str, variant: str, micro_batches: int
) -> None:
    kind, settings = VARIANTS[variant]
    policy, model, ids = load_policy(name), saved_model(kind, **LAYERS, **settings), token_ids(30)
    tee, whole = model.tee(policy, micro_batches=micro_batches), model.tee(policy)
    logits = tee.logits(ids)
    _steps(policy).check(logits, whole.logits(ids))
    if policy.arithmetic == "float":
        torch.testing.assert_close(logits, model.logits(ids), rtol=0, atol=1e-4)
    # Beyond the positions after which dynamic RoPE changes.
    prompt, new_tokens = token_ids(30, seed=1), 4
    assert tee.greedy(prompt, new_tokens) == whole.greedy(prompt, new_tokens)


@each_row(
    ("name", "micro_batches", "step_tokens"),
    # Of the last one a part comes to keys that are not written yet, and waits.
    [*zip(builtin_policies()[::3], cycle((3, 2, 5)), cycle((9, 24, 512))), ("published", 2, 512)],
    slow=zip(builtin_policies(), cycle((3, 2, 5)), cycle((9, 9, 9, 24, 24, 24, 512, 512, 512))),
)
def test_a_step_in_parts_computes_what_one_part_computes(
    saved_model: Models, name: str, micro_batches: int, step_tokens: int
) -> None:
    """Each part of a prompt runs a little behind the one whose keys it looks at.

    A part may hold the end of one prompt and the beginning of the next, or tokens beside it. Parts
    then wait for different numbers of replies where attention is asked for: a later one must not
    get ahead of keys that it looks at.
    """
    policy, model, ids = load_policy(name), saved_model("llama", **LAYERS), token_ids(23)
    whole, cut = model.tee(policy), model.tee(policy, micro_batches=micro_batches)
    tolerance = _steps(policy)
    if policy.arithmetic == "float" and policy.masks:
        tolerance = masked_logits(name)
    # The second step is behind what is in the cache already.
    tolerance.check(cut.logits(ids, chunk=12), whole.logits(ids))
    runs = []
    for tee in (whole, cut):
        engine = tee.engine(step_tokens)
        sequences = [
            engine.add(token_ids(length, seed=length), max_new_tokens=5, eos_token_ids=frozenset())
            for length in (5, 2, 3)
        ]
        engine.step()
        for length in (22, 11):
            prompt = token_ids(length, seed=length)
            sequences.append(engine.add(prompt, max_new_tokens=3, eos_token_ids=frozenset()))
            engine.step()
        finish(engine)
        runs.append([sequence.token_ids for sequence in sequences])
    assert runs[0] == runs[1]


@each_row("name", ["attention-in-tee", "quantized-clear", "shielded-prefill"])
def test_while_one_part_is_computed_a_request_of_the_other_is_under_way(
    saved_model: Models, name: str
) -> None:
    under_way: list[int] = []
    wait = LoopbackChannel.wait

    def noted(channel: LoopbackChannel, request_id: int) -> Exchange:
        under_way.append(channel.pending)
        return wait(channel, request_id)

    # Parts of four and of five rows.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopbackChannel, "wait", noted)
        saved_model("llama").tee(name, micro_batches=2).logits(token_ids(9))
    # But for the first reply, where the second part has not begun, and the last two, where the
    # first has ended. Of shielded-prefill the LM head leaves.
    waits = 2 * (4 * 3 + (name == "shielded-prefill"))
    assert under_way == [1, *[2] * (waits - 3), 1, 1]


# Of nine sequences, a token each.
ONE_EACH = [(token_ids(1, seed=s), 4) for s in range(9)]


@each_row(
    ("when_out", "tokens"),
    [("wait", 15), *product(("tee",), (0, 3, 7, 35, 36))],
    slow=product(("wait", "tee"), range(0, 40, 3)),
)
def test_pads_that_end_in_the_middle_of_a_step_change_no_bit(
    saved_model: Models, when_out: WhenOut, tokens: int
) -> None:
    """One part has pads and another has none: it is computed in the TEE, or waited for."""
    model = saved_model("llama", **LAYERS)
    expected_tokens, expected = _run(model.tee("quantized-clear").engine(), ONE_EACH)
    tee = model.tee("shielded-prefill", micro_batches=2, when_out=when_out)
    pads = stocked(tee, tokens)
    found_tokens, found = _run(tee.engine(), ONE_EACH)
    assert found_tokens == expected_tokens
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    if when_out == "tee":
        # Parts of four and five rows, four times: what is left when neither fits stays.
        assert pads.store.available < 4
        assert (pads.in_tee > 0) == (tokens < 36)
    else:
        assert pads.in_tee == 0


@each_row(("policy", "step_tokens"), zip(cycle(POLICIES), (1, 3, 7, 512)))
def test_sequences_in_one_batch_equal_each_alone(
    saved_model: Models, policy: str, step_tokens: int
) -> None:
    # A window smaller than the prompt makes chunks see different parts of the cache.
    model = saved_model("mistral", sliding_window=5)
    tee = assemble(model.directory, policy)
    requests = [(token_ids(length, seed=length), 4 + length % 5) for length in (1, 3, 19, 8)]
    engine = tee.engine(step_tokens)
    sequences = [engine.add(prompt, max_new_tokens=new) for prompt, new in requests]
    finish(engine)
    for sequence, (prompt, new) in zip(sequences, requests, strict=True):
        assert sequence.token_ids == model.greedy(prompt, new)
        assert sequence.finish_reason == "length"


PROMPT, NEW_TOKENS, STEP_TOKENS = token_ids(13), 4, 16
# A quarter of the 128 tokens that pads are kept ready for in memory.
LEFT_TO_DECODE = 32


STOCK = load_policy("shielded-prefill").model_copy(
    update={"name": "from-stock", "prefill": "stock", "decode_share": 0.25}
)


def _logits(tee: Tee, prompt: list[int] = PROMPT) -> tuple[torch.Tensor, list[int]]:
    engine = tee.engine(STEP_TOKENS)
    sequence = engine.add(prompt, max_new_tokens=NEW_TOKENS, eos_token_ids=frozenset())
    logits, asked, before = [], [], 0
    while sequence.finish_reason is None:
        logits += [sampled.logits_V for sampled in engine.step()]
        asked.append(len(tee.channels[0].requests) - before)
        before += asked[-1]
    return torch.stack(logits), asked


@each_row(("spare", "micro_batches"), product((-1, 0), (1, 2)))
def test_a_prompt_leaves_where_decode_keeps_its_share(
    saved_model: Models, spare: int, micro_batches: int
) -> None:
    model = saved_model("llama")
    tee = model.tee(STOCK, step_tokens=STEP_TOKENS, micro_batches=micro_batches)
    pads = stocked(tee, LEFT_TO_DECODE + len(PROMPT) + spare)
    found, asked = _logits(tee)
    token = 3 * 4 + 1
    if spare < 0:
        assert asked == [0, token, token, token]
        assert pads.store.available == LEFT_TO_DECODE + len(PROMPT) - 1 - 3
    else:
        # Of a prompt in two parts, one has the row that logits are wanted of.
        assert asked[0] == micro_batches * 3 * 4 + 1
        assert asked[1:] == [token, token, token]
        assert pads.store.available == LEFT_TO_DECODE - 3
    assert torch.equal(found, _logits(model.tee("quantized-clear"))[0])


def test_each_step_of_a_long_prompt_asks_anew(saved_model: Models) -> None:
    model, prompt = saved_model("llama"), token_ids(40)
    tee = model.tee(STOCK, step_tokens=STEP_TOKENS)
    stocked(tee, LEFT_TO_DECODE + 2 * STEP_TOKENS)
    found, asked = _logits(tee, prompt)
    # The last eight find what is left to decode, and no more.
    assert [count > 0 for count in asked] == [True, True, False, True, True, True]
    assert torch.equal(found, _logits(model.tee("quantized-clear"), prompt)[0])


LENGTHS = (5, 2)
NEW = 2

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


def _run_failing(tee: Tee, every: int, lost: str = "") -> tuple[torch.Tensor, int]:
    """Generate for two sequences in chunks; return sampled logits, and RPCs of what fails.

    `lost`: each step fails at its first RPC, is repeated and fails `every` RPCs later, and so on to
    its end; "" for steps that do not fail. RPCs are those of what succeeded.
    """
    (channel,) = [one for one in tee.channels if isinstance(one, FailingChannel)]
    channel.lost = lost
    engine = tee.engine(step_tokens=4 * every)
    for length in LENGTHS:
        sampling = SamplingSettings(temperature=1.0, seed=length)
        prompt = token_ids(length * every, seed=length)
        engine.add(prompt, max_new_tokens=NEW, sampling=sampling)
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
        *product(("dealt",), LOST, (1,)),
        *product(("published", "attention-in-tee", "shielded-prefill", "dealt"), LOST, (3,)),
    ],
)
def test_a_step_that_failed_at_any_rpc_can_be_repeated(
    saved_model: Models, policy: str, lost: str, micro_batches: int
) -> None:
    """Of service and dealer the service fails; of several parts not at every RPC."""
    model, loaded = saved_model("llama", num_hidden_layers=2), load_policy(policy)
    channels, mask = model.services(loaded), loaded.feature_mask
    channels[0] = FailingChannel(model.provisioned(mask)[0] if mask else model.directory)
    tee = model.tee(loaded, channels=channels, micro_batches=micro_batches)
    expected, rpcs = _run_failing(tee, micro_batches)
    assert len(expected) == len(LENGTHS) * NEW
    actual, same = _run_failing(tee, micro_batches, lost)
    assert same == rpcs
    if not loaded.masks:
        assert torch.equal(actual, expected)
    assert torch.equal(actual[:, -1], expected[:, -1])
    masked_logits(policy).check(actual, expected)
