"""Each attack reads what its mask leaves, to the last token, and claims nothing of uniform rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tee_side.policy.layer_range import LayerRange
from tee_side.policy.placement import Policy, load_policy
from tests.kit.leaks import (
    FIRST_PLACE,
    begun,
    first_view,
    leak_of,
    linear,
    policy_of,
    recorded,
    run_of,
    scores_of,
    uniform,
    view_of,
)
from tests.kit.model import SavedModel
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import View
from tsqp.lab.leak.laboratory import weakened_policies
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import Recording
from tsqp.lab.leak.registry import ATTACKS
from tsqp.lab.leak.trace import Trace

# Tokens of two prompts, and of two answers but for the one that is sampled last.
PROMPTS, ANSWERS = 9 + 6, 3 + 3
PLACES = [
    f"layer {layer} {operator}"
    for layer in (0, 1)
    for operator in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
]
# What is read of prompts and of answers, by place.
Read = Mapping[str, tuple[int, int]]
ALL: Read = dict.fromkeys(PLACES, (PROMPTS, ANSWERS))
FIRST: Read = {FIRST_PLACE: (PROMPTS, ANSWERS)}
SEGMENT: Read = {"layer 0 segment": (PROMPTS, ANSWERS)}
# Rows in no order are a set in the first layer; a row alone is not.
SETS: Read = {**ALL, FIRST_PLACE: (0, ANSWERS)}
SET_OF_SEGMENT: Read = {"layer 0 segment": (0, ANSWERS)}
# Tokens that were sampled, the last one of each answer included.
SAMPLED: Read = {"lm_head": (0, ANSWERS + 2)}
KEYS: Read = {"layer 0 attn_scores": (PROMPTS, ANSWERS)}
DISK: Read = {"cache on disk": (PROMPTS, ANSWERS)}

LEAKS: list[tuple[str, str, Read]] = [
    ("token-ids", "tsqp", {"embedding": (PROMPTS, ANSWERS)}),
    ("logits", "tsqp", SAMPLED),
    *(("logits", name, SAMPLED) for name in ("clear-segment", "attested-segment", "stip-segment")),
    *(("nearest-embedding", name, FIRST) for name in ("attention-in-tee", "row-mix")),
    ("nearest-embedding", "quantized-clear", FIRST),
    ("nearest-embedding", "clear-segment", SEGMENT),
    ("vocabulary", "attention-in-tee", ALL),
    ("vocabulary", "quantized-clear", ALL),
    ("vocabulary", "clear-segment", SEGMENT),
    ("vocabulary-rows", "tsqp-permuted", SETS),
    ("vocabulary-features", "stip", ALL),
    ("vocabulary-features", "stip-segment", SEGMENT),
    ("vocabulary-both", "tsqp-permuted", SETS),
    ("vocabulary-both", "stip", SETS),
    ("subspace", "row-rotation", SETS),
    ("subspace", "row-mix", SETS),
    ("subspace", "clear-segment", SET_OF_SEGMENT),
    ("noise-averaging", "attention-in-tee", {**FIRST, "all places": (PROMPTS, ANSWERS)}),
    ("noise-averaging", "float-noise", {**FIRST, "all places": (PROMPTS, ANSWERS)}),
    ("attention-keys", "tsqp", KEYS),
    ("attention-keys", "tsqp-permuted", KEYS),
    ("attention-keys", "row-mix", KEYS),
    ("norms", "cloak", ALL),
    ("norms", "stip-segment", SEGMENT),
    *(("gram", name, FIRST) for name in ("attention-in-tee", "cloak", "stip")),
    ("gram", "cloak-segment", SEGMENT),
    ("column-matching", "stip", ALL),
    ("column-matching", "stip-segment", SEGMENT),
    ("eigenvectors", "cloak", ALL),
    ("eigenvectors", "stip", ALL),
    ("eigenvectors", "cloak-segment", SEGMENT),
    *(("cache-at-rest", name, DISK) for name in ("clear-segment", "stip-segment", "cloak-segment")),
    ("pad-reuse", "pad-reused", FIRST),
    # The first token of each session is not read but assumed.
    ("pad-basis", "pad-low-dimensional", {FIRST_PLACE: (13 * 3, 13 * 3)}),
]
# What an attack does not know hides its tokens from it.
HIDDEN = [
    ("nearest-embedding", "cloak"),
    ("nearest-embedding", "stip-segment"),
    ("vocabulary", "stip"),
    ("vocabulary-rows", "cloak"),
    ("vocabulary-features", "cloak-segment"),
    ("vocabulary-both", "shielded-prefill"),
    ("vocabulary", "two-server"),
    ("subspace", "shielded-prefill"),
    ("norms", "row-rotation"),
    ("gram", "row-rotation"),
    ("column-matching", "cloak"),
    ("pad-reuse", "shielded-prefill"),
    ("pad-reuse", "two-server"),
]


Recorded = Callable[[str], Recording]


@pytest.fixture(scope="module")
def recording(model: SavedModel, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return what records a policy, once for all rows."""
    folder = tmp_path_factory.mktemp("recordings")
    weakened = {Path(path).stem: path for path in weakened_policies()}
    made: dict[str, Recording] = {}

    def record(policy: str) -> Recording:
        if policy not in made:
            # A basis of ten pads is learnt from twelve rows of the token in front.
            prompts = begun(*[4] * 13) if policy == "pad-low-dimensional" else begun(9, 6)
            path = weakened.get(policy, policy)
            made[policy] = recorded(model, path, folder / policy, prompts)
        return made[policy]

    return record


def read(attack: str, view: View, played: Recording) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Return hits and tries of prompts and answers by place, and whether that is above chance."""
    truths = [session.truth for session in played.sessions]
    found = scores_of(ATTACKS.builtin[attack](), view, truths)
    made = leak_of(run_of(attack, *found.values()), blind=1 / view.public.vocab_size)
    counts = {
        where: (one.prompt.hits, one.prompt.n, one.answer.hits, one.answer.n)
        for where, one in found.items()
    }
    return counts, made.above_chance


@each_row(("attack", "policy", "expected"), LEAKS, ids=lambda row: f"{row[0]} on {row[1]}")
def test_a_leak_is_read_to_the_last_token(
    public: PublicModel, recording: Recorded, attack: str, policy: str, expected: Read
) -> None:
    played = recording(policy)
    counts, above_chance = read(attack, first_view(public, played), played)
    assert counts == {place: (p, p, a, a) for place, (p, a) in expected.items()}
    assert above_chance


@each_row(("attack", "policy"), dict.fromkeys(row[:2] for row in LEAKS), ids=" on ".join)
def test_nothing_is_claimed_of_uniform_rows(
    public: PublicModel, recording: Recorded, attack: str, policy: str
) -> None:
    """What is read elsewhere is read from the rows, and from nothing else that the attack gets."""
    played = recording(policy)
    view = first_view(public, played)
    files = tuple(disk.encrypted for disk in played.disks)
    view = replace(view, traces=tuple(map(uniform, view.traces)), disks=files)
    counts, above_chance = read(attack, view, played)
    assert counts
    assert not above_chance, counts


@each_row(("attack", "policy"), HIDDEN, ids=" on ".join)
def test_a_mask_that_an_attack_does_not_know_hides_the_tokens(
    public: PublicModel, recording: Recorded, attack: str, policy: str
) -> None:
    played = recording(policy)
    counts, above_chance = read(attack, first_view(public, played), played)
    assert counts
    assert not above_chance, counts


def test_every_attack_has_a_leak_and_is_recorded_where_it_must_work() -> None:
    tried = {(attack, policy) for attack, policy, _ in LEAKS}
    controls = {(one.name, Path(one.control).stem) for one in ATTACKS.builtin.values()}
    assert controls - tried == {
        ("vocabulary-rows", "attention-in-tee"),
        ("vocabulary-features", "attention-in-tee"),
        ("vocabulary-both", "attention-in-tee"),
        ("norms", "attention-in-tee"),
    }
    assert {attack for attack, _ in tried} == set(ATTACKS.builtin)


# ------------------------------------------------------------------------------------- refusals

REFUSED = [
    ("token-ids", "attention-in-tee", "embedding stays"),
    ("logits", "attention-in-tee", "lm_head stays"),
    ("logits", "cloak-segment", "lm_head stays"),
    ("logits", "nothing", "lm_head stays"),
    ("nearest-embedding", "deeper", "layer 0 stays"),
    ("vocabulary", "nothing", "no activations crossed"),
    ("subspace", "nothing", "no activations crossed"),
    ("subspace", "stip-segment", "the hidden axis is transformed"),
    ("norms", "nothing", "no activations crossed"),
    ("norms", "quantized-clear", "integers"),
    ("gram", "quantized-clear", "integers"),
    ("gram", "deeper", "layer 0 stays"),
    ("gram", "decode", "no session's beginning crossed"),
    ("noise-averaging", "nothing", "no activations crossed"),
    ("noise-averaging", "clear-segment", "no linear operator crossed"),
    ("noise-averaging", "quantized-clear", "integers"),
    ("noise-averaging", "row-rotation", "neither clear nor under noise"),
    ("attention-keys", "attention-in-tee", "no keys of layer 0 crossed"),
    ("column-matching", "attention-in-tee", "weights are not cloaked"),
    ("eigenvectors", "attention-in-tee", "weights are not cloaked"),
    ("eigenvectors", "nothing of a cloak", "no activations crossed"),
    ("cache-at-rest", "attention-in-tee", "no cache is at the service"),
    ("pad-reuse", "attention-in-tee", "floats"),
    ("pad-reuse", "deeper", "layer 0 stays"),
    ("pad-basis", "deeper", "layer 0 stays"),
    ("pad-basis", "shielded-prefill", "only 2 rows of a known token crossed"),
    ("pad-basis", "shielded", "no row of a known token crossed"),
]
# Where the attacker lacks linear weights, or a token that every prompt begins with.
LACKING = [
    ("norms", "cloak", "has_layers", "no public weights to compare with"),
    ("gram", "cloak", "has_layers", "no public weights to compare with"),
    ("gram", "cloak", "first_id", "no token that every prompt begins with"),
    ("eigenvectors", "cloak", "has_layers", "no public weights to compare with"),
    ("attention-keys", "tsqp", "has_layers", "no public weights to compare with"),
    ("cache-at-rest", "clear-segment", "has_layers", "no public weights to compare with"),
    ("pad-basis", "pad-reused", "first_id", "the tokenizer puts no token in front"),
]


@each_row(("attack", "policy", "reason"), REFUSED, ids=lambda row: f"{row[0]} on {row[1]}")
def test_where_there_is_nothing_to_read_an_attack_says_why(
    public: PublicModel, recording: Recorded, attack: str, policy: str, reason: str
) -> None:
    places: dict[str, tuple[Policy | str, Trace]] = {
        "nothing": ("clear-segment", Trace(())),
        "nothing of a cloak": ("cloak", Trace(())),
        "deeper": ("attention-in-tee", Trace((linear((1, "o_proj"), torch.ones(1, 96)),))),
        "decode": (
            policy_of("qkv_proj", phase="decode"),
            Trace((linear((0, "qkv_proj"), torch.ones(1, 48)),)),
        ),
    }
    if policy in places:
        placed, trace = places[policy]
        view = view_of(public, trace, policy=placed)
    else:
        view = first_view(public, recording(policy))
    assert ATTACKS.builtin[attack]().refuses(view) == reason


@each_row(("attack", "policy", "lacking", "reason"), LACKING, ids=lambda row: f"{row[0]}: {row[2]}")
def test_an_attack_that_needs_more_than_is_public_says_so(
    public: PublicModel, recording: Recorded, attack: str, policy: str, lacking: str, reason: str
) -> None:
    view = first_view(public, recording(policy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PublicModel, lacking, None)
        assert ATTACKS.builtin[attack]().refuses(view) == reason


def test_a_cache_without_the_first_layer_is_refused(
    public: PublicModel, recording: Recorded
) -> None:
    later = load_policy("clear-segment")
    (placed,) = later.operators["segment"]
    moved = placed.model_copy(update={"layers": LayerRange(1, None)})
    later = later.model_copy(update={"operators": {**later.operators, "segment": (moved,)}})
    view = replace(first_view(public, recording("clear-segment")), policy=later)
    assert ATTACKS.builtin["cache-at-rest"]().refuses(view) == "layer 0 stays"


@pytest.mark.parametrize("attack", ["vocabulary", "noise-averaging"])
def test_without_linear_weights_the_first_layer_alone_is_read(
    public: PublicModel, recording: Recorded, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    played = recording("attention-in-tee")
    monkeypatch.setattr(PublicModel, "has_layers", False)
    counts, _ = read(attack, first_view(public, played), played)
    assert counts == {FIRST_PLACE: (PROMPTS, PROMPTS, ANSWERS, ANSWERS)}
