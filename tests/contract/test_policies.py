"""The one contract suite that every policy passes: it generates, and what it generates is right.

Float policies give transformers' tokens, and its logits within `POLICY_LOGITS`. Integer policies
give the tokens and the bits of `quantized-clear`, which is the same arithmetic without masks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tee_side.engine.engine import Engine
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.words import OPERATORS
from tests.equivalence.tolerances import POLICY_LOGITS
from tests.kit.model import SavedModel, Tee, expanded, token_ids
from tests.kit.rows import each_row

Models = Callable[..., SavedModel]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [str(path) for path in sorted((ROOT / "docs" / "examples").glob("*polic*"))]

POLICIES = {name: load_policy(name) for name in [*builtin_policies(), *EXAMPLES]}
FLOAT = [name for name, policy in POLICIES.items() if policy.arithmetic == "float"]
INTEGER = [name for name, policy in POLICIES.items() if policy.arithmetic == "int8"]
INTEGERS = [*(name for name in INTEGER if POLICIES[name].masks), "integers-in-tee"]

# More than one query head per key/value head in each; biases, norms of heads, sliding windows. The
# first, which most policies have, has a bias at every operator.
KINDS: dict[str, dict[str, Any]] = {
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
}
FIRST = ("llama-biases",)
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
    while engine.running:
        for sampled in engine.step():
            logits[id(sampled.sequence)].append(sampled.logits_V)
    return [s.token_ids for s in sequences], [torch.stack(logits[id(s)]) for s in sequences]


def _generate(tee: Tee, step_tokens: int = 512) -> tuple[list[int], torch.Tensor]:
    tokens, logits = _run(tee.engine(step_tokens), [PROMPT], [NEW_TOKENS])
    return tokens[0], logits[0]


@each_row(("name", "kind"), [*product(FLOAT[:1], KINDS), *product(FLOAT[1:], FIRST)])
def test_a_float_policy_gives_the_tokens_and_logits_of_transformers(
    models: Callable[[str], SavedModel], name: str, kind: str
) -> None:
    model, tolerance = models(kind), _tolerance(name)
    expected = model.greedy(PROMPT, NEW_TOKENS)
    reference = model.logits([*PROMPT, *expected[:-1]])[len(PROMPT) - 1 :]
    # Guards the test: were two tokens as close as the tolerance, their order would be luck.
    first, second = reference.topk(2).values.unbind(-1)
    assert (first - second).min() > 2 * tolerance.atol
    tokens, logits = _generate(model.tee(POLICIES[name]))
    assert tokens == expected
    tolerance.check(logits, reference)


@each_row(("name", "chunk"), zip(FLOAT, cycle((4, 1))))
def test_prefill_in_chunks_equals_prefill_at_once(
    models: Callable[[str], SavedModel], name: str, chunk: int
) -> None:
    model, ids = models("mistral"), token_ids(19, seed=3)
    tee = model.tee(POLICIES[name])
    in_chunks = tee.logits(ids, chunk)
    _tolerance(name).check(in_chunks, tee.logits(ids))
    _tolerance(name).check(in_chunks, model.logits(ids))


@each_row(("name", "step_tokens"), zip(FLOAT, cycle((5, 512))))
def test_several_sequences_at_once_equal_each_alone(
    models: Callable[[str], SavedModel], name: str, step_tokens: int
) -> None:
    model = models("llama")
    prompts, new_tokens = [token_ids(n, seed=n) for n in (3, 12, 1)], [6, 4, 9]
    found, _ = _run(model.tee(POLICIES[name]).engine(step_tokens), prompts, new_tokens)
    assert found == [model.greedy(p, n) for p, n in zip(prompts, new_tokens, strict=True)]


@each_row("name", builtin_policies())
def test_a_policy_runs_in_bfloat16(models: Callable[[str], SavedModel], name: str) -> None:
    model, ids = models("llama"), token_ids(12)
    tee = model.tee(name, "bfloat16")
    logits = tee.logits(ids)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - model.logits(ids)).abs().mean() < 0.15


@pytest.fixture(scope="module")
def clear(models: Callable[[str], SavedModel]) -> Callable[[str], tuple[list[int], torch.Tensor]]:
    """Return what quantized-clear generates with a model, once a kind."""
    made: dict[str, tuple[list[int], torch.Tensor]] = {}

    def get(kind: str) -> tuple[list[int], torch.Tensor]:
        if kind not in made:
            made[kind] = _generate(models(kind).tee("quantized-clear"))
        return made[kind]

    return get


@each_row(("name", "kind"), [*product(INTEGERS[:1], KINDS), *product(INTEGERS[1:], FIRST)])
def test_integers_are_the_same_bits_whatever_hides_them(
    models: Callable[[str], SavedModel], clear: Any, name: str, kind: str
) -> None:
    tee = models(kind).tee(POLICIES.get(name, INTEGERS_IN_TEE))
    tokens, logits = _generate(tee)
    expected_tokens, expected = clear(kind)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    assert len(tokens) == NEW_TOKENS
    # Guards the test: something was sent, if the policy sends something, and it is ring elements.
    sent = [len(channel.requests) for channel in tee.channels]
    assert len(sent) == POLICIES.get(name, INTEGERS_IN_TEE).services
    assert all(sent)
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
    models: Callable[[str], SavedModel], clear: Any, name: str, kind: str
) -> None:
    tee = models(kind).tee(name, when_out="tee")
    (pads,) = tee.assembly.pads.values()
    expected_tokens, expected = clear(kind)
    tokens, logits = _generate(tee)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    assert not tee.channels[0].requests
    assert pads.in_tee == NEW_TOKENS - (name == "shielded")
    # And one that has pads for a part of the way.
    store = pads._store
    assert pads._maker is not None
    pads._maker.fill(store, 3 if name == "shielded" else 9 + 3)
    tokens, logits = _generate(tee)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)
    assert store.available == 0
    assert len(tee.channels[0].requests) == (4 * LAYERS + 1) * (3 if name == "shielded" else 4)


@each_row(
    ("name", "kind", "step_tokens"),
    zip(INTEGERS, cycle(KINDS), cycle((4, 512))),
)
def test_integers_of_several_sequences_are_the_same_bits(
    models: Callable[[str], SavedModel], name: str, kind: str, step_tokens: int
) -> None:
    """Steps of both hold the same rows a sequence: a policy with phases splits them otherwise."""
    model = models(kind)
    prompts, new_tokens = [token_ids(n, seed=n) for n in (3, 12, 1, 14)], [6, 4, 9, 5]
    policy = POLICIES.get(name, INTEGERS_IN_TEE)
    found, logits = _run(model.tee(policy).engine(step_tokens), prompts, new_tokens)
    same, expected = _run(model.tee("quantized-clear").engine(step_tokens), prompts, new_tokens)
    assert found == same
    for one, other in zip(logits, expected, strict=True):
        assert torch.equal(one, other)


def test_a_mixture_of_masks_over_layers_and_phases_is_the_same_bits(
    saved_model: Models,
) -> None:
    """Pads in some layers, shares in others, clear and TEE in the rest."""
    mixed = [
        {"layers": 0, "place": "gpu", "mask": "pad", "verify": "none"},
        {"layers": 1, "place": "gpu", "mask": "shares", "verify": "none"},
        {"layers": 2, "phase": "prefill", "place": "gpu", "mask": "none", "verify": "none"},
        {"layers": 2, "phase": "decode", "place": "tee"},
        {
            "layers": "3-",
            "phase": "decode",
            "place": "gpu",
            "mask": {"name": "pad"},
            "verify": "none",
        },
        {"layers": "3-", "phase": "prefill", "place": "gpu", "mask": "shares", "verify": "none"},
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
    # Prefill: pads and shares twice and clear; then pads twice and shares once, a token.
    assert len(first) == 4 * (4 + 3 * (NEW_TOKENS - 1))
    assert len(second) == 4 * (2 + NEW_TOKENS - 1)
