"""Placement policies say what they disclose: everything that leaves, the worst first."""

from __future__ import annotations

import pytest

from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.words import OPERATORS, Operator
from tests.kit.rows import each_row
from tests.unit.tee_side.policy_texts import CLEAR, policy_of
from tsqp.lab.research.row_mix import RowMix
from tsqp.lab.research.row_permutation import RowPermutation


def test_nothing_is_disclosed_where_nothing_leaves() -> None:
    assert load_policy("tee-only").leakage_summary() is None


def test_the_published_placement_says_that_it_gives_everything_away() -> None:
    line = load_policy("tsqp").leakage_summary()
    assert line == (
        "policy tsqp: the GPU sees the token ids, hidden states, queries and keys, attention"
        " probabilities and values, attention outputs, MLP activations, the logits in the clear -"
        " the token ids and the logits: the prompt and the answer themselves"
    )


def test_hidden_states_are_said_to_be_enough_to_recover_the_prompt() -> None:
    line = load_policy("attention-in-tee").leakage_summary()
    assert line is not None
    assert line.endswith("from which the prompt and the answer can be recovered")
    assert "token ids" not in line
    assert "\n" not in line


@each_row("operator", OPERATORS)
def test_every_operator_that_leaves_is_disclosed(operator: Operator) -> None:
    operators = {**dict.fromkeys(OPERATORS, "tee"), operator: CLEAR}
    policy = Policy.model_validate({"name": "n", "summary": "s", "operators": operators})
    line = policy.leakage_summary()
    assert line is not None
    assert line.startswith("policy n: the GPU sees ")


@each_row("name", builtin_policies())
def test_only_policies_of_uniform_masks_claim_uniform_numbers(name: str) -> None:
    line, policy = load_policy(name).leakage_summary(), load_policy(name)
    safe = policy.masks and all(type(mask) in (Pad, Shares) for mask in policy.masks)
    assert ("uniform random numbers" in (line or "")) == bool(safe)
    if policy.masks and not safe:
        assert line is not None
        assert "broken" in line
        assert all(mask.name in line for mask in policy.masks)


class Unbroken(RowMix):
    """A mask that nobody has broken yet, which is not the same as uniform numbers."""

    name = "unbroken"
    broken = False


class Other(RowMix):
    """Another broken mask."""

    name = "other"


HONEST = "; results are not verified, so this holds against a service that computes honestly"


RECOVERED = "from which the prompt and the answer can be recovered"


APART = "as long as the two services do not collude and their links are encrypted"


PUBLIC = "broken where the weights are public (tsqp masks says how)"


LINES: dict[str, tuple[dict[Operator, Mask | None], str]] = {
    "pads": (
        {"o_proj": Pad()},
        f"the GPU sees uniform random numbers, lengths and timing{HONEST}",
    ),
    "shares": (
        {"o_proj": Shares()},
        f"each GPU service sees uniform random numbers, lengths and timing, {APART}{HONEST}",
    ),
    "pads and shares": (
        {"o_proj": Pad(), "down_proj": Shares()},
        f"each GPU service sees uniform random numbers, lengths and timing, {APART}{HONEST}",
    ),
    "a mask that is only not known to be broken": (
        {"attn_scores": Unbroken()},
        f"the GPU sees activations under unbroken, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "such a mask beside pads": (
        {"attn_scores": Unbroken(), "o_proj": Pad()},
        "the GPU sees activations under unbroken, pad, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "such a mask on the logits": (
        {"lm_head": Unbroken()},
        "the GPU sees the logits under unbroken, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    "two broken masks": (
        {"attn_scores": RowMix(), "attn_values": Other()},
        f"the GPU sees activations under row-mix, other, which are {PUBLIC}",
    ),
    "all of them": (
        {
            "embedding": RowPermutation(),
            "attn_scores": None,
            "attn_values": RowMix(),
            "o_proj": Pad(),
            "down_proj": Shares(),
        },
        "the GPU sees the token ids of prompt and answer themselves, in random order among dummies"
        f" (row-permutation); queries and keys in the clear - {RECOVERED}; activations under"
        f" row-mix, which is {PUBLIC}; activations under pad, shares, not known to be broken,"
        f" {APART}",
    ),
    "clear beside pads": (
        {"attn_values": None, "o_proj": Pad()},
        f"the GPU sees attention probabilities and values in the clear - {RECOVERED};"
        " activations under pad, not known to be broken",
    ),
    "clear logits beside shuffled ids": (
        {"embedding": RowPermutation(), "lm_head": None},
        "the GPU sees the logits in the clear - the logits: the prompt and the answer themselves;"
        " the token ids of prompt and answer themselves, in random order among dummies"
        " (row-permutation)",
    ),
    "shuffled ids and logits": (
        {"embedding": RowPermutation(), "lm_head": RowPermutation()},
        "the GPU sees the token ids of prompt and answer themselves, in random order among dummies"
        f" (row-permutation); the logits under row-permutation, which is {PUBLIC}",
    ),
}


@each_row("case", LINES)
def test_what_a_policy_discloses_is_complete_and_worst_first(case: str) -> None:
    masks, line = LINES[case]
    integer = any(mask is not None and mask.arithmetic == "int8" for mask in masks.values())
    placed = {
        operator: {"place": "gpu", "mask": mask or "none", "verify": "none"}
        for operator, mask in masks.items()
    }
    policy = policy_of(placed, arithmetic="int8" if integer else "float")
    assert policy.leakage_summary() == f"policy n: {line}"


VERIFIED = "; results are verified, and a service that lies is asked no more"


NEARLY = (
    "; results are verified within a tolerance, and a service that lies by more is asked no more"
)


BOTH: dict[Operator, Mask] = {"o_proj": Pad(), "down_proj": Pad()}


@pytest.mark.parametrize("operators", [("o_proj",), ("o_proj", "down_proj"), ()])
def test_results_are_said_to_be_verified_only_where_all_of_them_are(
    operators: tuple[Operator, ...],
) -> None:
    placed = {
        operator: {
            "place": "gpu",
            "mask": mask,
            "verify": "freivalds" if operator in operators else "none",
        }
        for operator, mask in BOTH.items()
    }
    policy = policy_of(placed, arithmetic="int8")
    seen = "policy n: the GPU sees uniform random numbers, lengths and timing"
    assert policy.leakage_summary() == seen + (VERIFIED if len(operators) == 2 else HONEST)
    assert policy.verified == bool(operators)


def test_a_mask_that_is_only_not_known_to_be_broken_may_be_verified_too() -> None:
    placed = {"attn_scores": {"place": "gpu", "mask": Unbroken(), "verify": "freivalds"}}
    line = policy_of(placed).leakage_summary()
    assert line is not None
    # A mask of floats: whoever stays within the tolerance may lie.
    assert line.endswith(f"under unbroken, not known to be broken; lengths and timing{NEARLY}")


def test_one_float_among_integers_is_verified_within_a_tolerance() -> None:
    placed = {
        operator: {"place": "gpu", "mask": mask, "verify": "freivalds"}
        for operator, mask in (("attn_scores", Unbroken()), ("o_proj", Pad()))
    }
    line = policy_of(placed, arithmetic="int8").leakage_summary()
    assert line is not None
    assert line.endswith(f"under unbroken, pad, not known to be broken; lengths and timing{NEARLY}")


@each_row("name", builtin_policies())
def test_what_protects_a_prompt_is_verified_and_baselines_are_not(name: str) -> None:
    policy = load_policy(name)
    protects = name in ("shielded", "shielded-prefill", "two-server")
    assert {p.verify for _, p in policy.leaving()} <= {"freivalds" if protects else "none"}
    assert policy.verified == protects


def test_a_placement_says_that_it_is_verified() -> None:
    policy = load_policy("shielded")
    assert [str(p) for p in policy.operators["o_proj"]] == [
        "prefill tee",
        "decode gpu under pad verified",
    ]


def test_the_published_placement_under_permutations_gives_the_ids_away() -> None:
    assert load_policy("tsqp-permuted").leakage_summary() == (
        "policy tsqp-permuted: the GPU sees the token ids of prompt and answer themselves, in"
        " random order among dummies (row-permutation); the logits and activations under"
        f" row-permutation, which is {PUBLIC}"
    )


def test_links_in_the_clear_are_said_to_give_everything_away() -> None:
    for policy in (load_policy("two-server"), policy_of({**BESIDE}, arithmetic="int8")):
        line = policy.leakage_summary(links_encrypted=False)
        assert line is not None
        assert "an observer of both links, which are NOT encrypted, reads prompt and answer" in line
        assert "as long as" not in line
    assert load_policy("shielded").leakage_summary(links_encrypted=False) == (
        load_policy("shielded").leakage_summary()
    )


BESIDE = {
    "attn_scores": {"place": "gpu", "mask": Unbroken(), "verify": "none"},
    "o_proj": {"place": "gpu", "mask": Shares(), "verify": "none"},
}
