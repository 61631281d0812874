"""The one contract suite that every policy passes: it generates, and what it generates is right.

Float policies give transformers' tokens, and its logits within `POLICY_LOGITS`. Integer policies
give the tokens and the bits of `quantized-clear`, which is the same arithmetic without masks.
"""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.keystream import expanded
from tee_side.engine.engine import Engine
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.words import OPERATORS
from tests.equivalence.tolerances import POLICY_LOGITS
from tests.kit.model import Models, SavedModel, Tee, finish, token_ids
from tests.kit.rows import each_row

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [str(path) for path in sorted((ROOT / "docs" / "examples").glob("*polic*"))]

POLICIES = {name: load_policy(name) for name in [*builtin_policies(), *EXAMPLES]}
FLOAT = [name for name, policy in POLICIES.items() if policy.arithmetic == "float"]
INTEGER = [name for name, policy in POLICIES.items() if policy.arithmetic == "int8"]
INTEGERS = [*(name for name in INTEGER if POLICIES[name].masks), "integers-in-tee"]

# More than one query head per key/value head in each; biases, norms of heads, sliding windows.
KINDS: dict[str, dict[str, Any]] = {
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
}
# Of several sequences at once, how many tokens of a prompt and how many new ones; in few steps or
# in many, with prefill in chunks.
SEVERAL = ((3, 6), (12, 4), (1, 9), (14, 5))
STEPS = (4, 512)
PROMPT = token_ids(9)
# As many layers as the examples need.
NEW_TOKENS, LAYERS = 6, 3

INTEGERS_IN_TEE = Policy.model_validate(
    {
        "name": "integers-in-tee",
        "summary": "the arithmetic of shielded, with nothing leaving the TEE",
        "arithmetic": "int8",
        "operators": dict.fromkeys(OPERATORS, "tee"),
    }
)


@pytest.fixture(scope="module")
def models(saved_model: Models) -> Callable[[str], SavedModel]:
    return lambda kind: saved_model(kind.partition("-")[0], **KINDS[kind], num_hidden_layers=LAYERS)


def _tolerance(name: str) -> Any:
    return POLICY_LOGITS.get(name, max(POLICY_LOGITS.values(), key=lambda t: t.atol))


def _run(
    engine: Engine, prompts: list[list[int]], new_tokens: list[int]
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return the greedy tokens of several sequences, and the logits that each was sampled from."""
    sequences = [
        engine.add(prompt, max_new_tokens=count, eos_token_ids=frozenset())
        for prompt, count in zip(prompts, new_tokens, strict=True)
    ]
    logits: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    for sampled in finish(engine):
        logits[id(sampled.sequence)].append(sampled.logits_V)
    return [s.token_ids for s in sequences], [torch.stack(logits[id(s)]) for s in sequences]


def _generate(tee: Tee) -> tuple[list[int], torch.Tensor]:
    tokens, logits = _run(tee.engine(512), [PROMPT], [NEW_TOKENS])
    return tokens[0], logits[0]


def _generate_several(tee: Tee, step_tokens: int) -> tuple[list[list[int]], list[torch.Tensor]]:
    prompts = [token_ids(length, seed=length) for length, _ in SEVERAL]
    return _run(tee.engine(step_tokens), prompts, [count for _, count in SEVERAL])


@each_row(
    ("name", "kind", "step_tokens"),
    zip([*FLOAT[:1] * len(KINDS), *FLOAT[1:]], cycle(KINDS), cycle(STEPS)),
)
def test_a_float_policy_gives_the_tokens_and_logits_of_transformers(
    models: Callable[[str], SavedModel], name: str, kind: str, step_tokens: int
) -> None:
    model, tolerance = models(kind), _tolerance(name)
    tokens, logits = _generate_several(model.tee(POLICIES[name]), step_tokens)
    for (length, count), found, its_logits in zip(SEVERAL, tokens, logits, strict=True):
        prompt = token_ids(length, seed=length)
        expected = model.greedy(prompt, count)
        reference = model.logits([*prompt, *expected[:-1]])[length - 1 :]
        # Guards the test: were two tokens as close as the tolerance, their order would be luck.
        first, second = reference.topk(2).values.unbind(-1)
        assert (first - second).min() > 2 * tolerance.atol
        assert found == expected
        tolerance.check(its_logits, reference)


@each_row(
    ("name", "kind", "step_tokens"),
    zip([*INTEGERS[:1] * len(KINDS), *INTEGERS[1:]], cycle(KINDS), cycle(STEPS)),
)
def test_integers_are_the_same_bits_whatever_hides_them(
    models: Callable[[str], SavedModel], name: str, kind: str, step_tokens: int
) -> None:
    """Steps of both hold the same rows a sequence: a policy with phases splits them otherwise."""
    policy = POLICIES.get(name, INTEGERS_IN_TEE)
    tee = models(kind).tee(policy)
    tokens, logits = _generate_several(tee, step_tokens)
    same, expected = _generate_several(models(kind).tee("quantized-clear"), step_tokens)
    assert tokens == same
    assert all(map(torch.equal, logits, expected))
    assert [len(found) for found in tokens] == [count for _, count in SEVERAL]
    # Guards the test: something was sent, if the policy sends something, and it is ring elements.
    assert len(tee.channels) == policy.services
    for channel in tee.channels:
        assert {expanded(request).elements.dtype for request in channel.requests} == {"int32"}


@each_row("kind", KINDS)
def test_integers_are_close_to_floats(models: Callable[[str], SavedModel], kind: str) -> None:
    """Guards the tests above: all could agree on something that is not the model."""
    model, ids = models(kind), token_ids(40)
    difference = (model.tee("quantized-clear").logits(ids) - model.logits(ids)).abs()
    assert 0 < difference.mean() < 0.15


@each_row(("name", "kind"), zip(cycle(("shielded", "shielded-prefill")), KINDS))
def test_a_run_whose_pads_are_out_continues_in_the_tee_with_the_same_bits(
    models: Callable[[str], SavedModel], name: str, kind: str
) -> None:
    tee = models(kind).tee(name, when_out="tee")
    (pads,) = tee.assembly.pads.values()
    expected_tokens, expected = _generate(models(kind).tee("quantized-clear"))
    tokens, logits = _generate(tee)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    assert not tee.channels[0].requests
    assert pads.in_tee == NEW_TOKENS - (name == "shielded")
    # And one that has pads for a part of the way.
    store = pads.store
    pads.fill(3 if name == "shielded" else 9 + 3)
    tokens, logits = _generate(tee)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    assert store.available == 0
    assert len(tee.channels[0].requests) == (4 * LAYERS + 1) * (3 if name == "shielded" else 4)


def test_a_mixture_of_masks_over_layers_and_phases_is_the_same_bits(saved_model: Models) -> None:
    """Pads in some layers, dealt ones in others, clear and TEE in the rest."""

    def on_gpu(mask: object, **where: object) -> dict[str, object]:
        return {"place": "gpu", "mask": mask, "verify": "none", **where}

    dealt = {"name": "pad", "pads": "dealt"}
    mixed = [
        on_gpu("pad", layers=0),
        on_gpu(dealt, layers=1),
        on_gpu("none", layers=2, phase="prefill"),
        {"layers": 2, "phase": "decode", "place": "tee"},
        on_gpu("pad", layers="3-", phase="decode"),
        on_gpu(dealt, layers="3-", phase="prefill"),
    ]
    linear = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    policy = Policy.model_validate(
        {
            "name": "mixed",
            "summary": "a test",
            "arithmetic": "int8",
            "operators": {**dict.fromkeys(OPERATORS, "tee"), **dict.fromkeys(linear, mixed)},
        }
    )
    model = saved_model("llama", num_hidden_layers=4)
    tee = model.tee(policy)
    assert len(tee.channels) == 2
    tokens, logits = _generate(tee)
    clear_tokens, clear_logits = _generate(model.tee("quantized-clear"))
    assert tokens == clear_tokens
    assert torch.equal(logits, clear_logits)
    first, second = (channel.requests for channel in tee.channels)
    # Prefill: pads, dealt ones twice and clear; then pads twice and dealt ones once, a token.
    assert len(first) == 4 * (4 + 3 * (NEW_TOKENS - 1))
    # Those of the prompt, and those of two layers that are dealt at once for what follows.
    assert len(second) == 4 * (2 + 2)
