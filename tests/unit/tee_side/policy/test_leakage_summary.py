"""Policies say what they disclose: everything that leaves, the worst first, and what is checked."""

from __future__ import annotations

from typing import Any

from tee_side.policy.placement import builtin_policies, load_policy
from tee_side.protect.masks.mask import Mask
from tee_side.protect.masks.pad import Pad
from tee_side.protect.masks.shares import Shares
from tee_side.words import OPERATORS, Operator
from tests.kit.model import CLEAR, policy_of
from tests.kit.rows import each_row
from tsqp.lab.research.row_mix import RowMix
from tsqp.lab.research.row_permutation import RowPermutation


class Unbroken(RowMix):
    """A mask without a known attack, which is not the same as uniform numbers."""

    name = "unbroken"
    broken = False


class Other(RowMix):
    """Another broken mask."""

    name = "other"


UNIFORM = "the GPU sees uniform random numbers, lengths and timing"
EACH = "each GPU service sees uniform random numbers, lengths and timing"
HONEST = "; results are not verified, so this holds against a service that computes honestly"
RECOVERED = "from which the prompt and the answer can be recovered"
APART = "as long as the two services do not collude and their links are encrypted"
PUBLIC = "broken where the weights are public (tsqp masks says how)"
SHUFFLED = "the token ids of prompt and answer themselves, in random order among dummies"

LINES: list[tuple[dict[Operator, Mask | None], str]] = [
    ({"o_proj": Pad()}, f"{UNIFORM}{HONEST}"),
    ({"o_proj": Shares()}, f"{EACH}, {APART}{HONEST}"),
    ({"o_proj": Pad(), "down_proj": Shares()}, f"{EACH}, {APART}{HONEST}"),
    (
        {"attn_scores": Unbroken()},
        "the GPU sees activations under unbroken, not known to be broken; lengths and timing"
        f"{HONEST}",
    ),
    (
        {"attn_scores": RowMix(), "attn_values": Other()},
        f"the GPU sees activations under row-mix, other, which are {PUBLIC}",
    ),
    (
        {
            "embedding": RowPermutation(),
            "attn_scores": None,
            "attn_values": RowMix(),
            "o_proj": Pad(),
            "down_proj": Shares(),
        },
        f"the GPU sees {SHUFFLED} (row-permutation); queries and keys in the clear - {RECOVERED};"
        f" activations under row-mix, which is {PUBLIC}; activations under pad, shares, not known"
        f" to be broken, {APART}",
    ),
    (
        {"attn_values": None, "o_proj": Pad()},
        f"the GPU sees attention probabilities and values in the clear - {RECOVERED};"
        " activations under pad, not known to be broken",
    ),
    (
        {"embedding": RowPermutation(), "lm_head": None},
        "the GPU sees the logits in the clear - the logits: the prompt and the answer themselves;"
        f" {SHUFFLED} (row-permutation)",
    ),
    (
        dict.fromkeys(OPERATORS),
        "the GPU sees the token ids, hidden states, queries and keys, attention probabilities and"
        " values, attention outputs, MLP activations, the logits in the clear - the token ids and"
        " the logits: the prompt and the answer themselves",
    ),
    *(({name: None}, "the GPU sees ") for name in OPERATORS),
]


@each_row(("masks", "line"), LINES)
def test_what_a_policy_discloses_is_complete_and_worst_first(
    masks: dict[Operator, Mask | None], line: str
) -> None:
    integer = any(mask is not None and mask.arithmetic == "int8" for mask in masks.values())
    placed = {operator: CLEAR | {"mask": mask or "none"} for operator, mask in masks.items()}
    said = policy_of(placed, arithmetic="int8" if integer else "float").leakage_summary() or ""
    assert said.startswith(f"policy n: {line}")
    assert said == f"policy n: {line}" or line == "the GPU sees "
    assert "\n" not in said


@each_row("name", builtin_policies())
def test_only_policies_of_uniform_masks_claim_uniform_numbers(name: str) -> None:
    policy = load_policy(name)
    line = policy.leakage_summary()
    uniform = bool(policy.masks) and all(type(mask) in (Pad, Shares) for mask in policy.masks)
    assert (line is None) == (not policy.services)
    assert ("uniform random numbers" in (line or "")) == uniform
    assert ("broken" in (line or "")) == (bool(policy.masks) and not uniform)
    assert all(mask.name in (line or "") for mask in policy.masks) or uniform


EXACT = "; results are verified, and a service that lies is asked no more"
NEARLY = (
    "; results are verified within a tolerance, and a service that lies by more is asked no more"
)
WITHIN = "the GPU sees activations under unbroken{}, not known to be broken; lengths and timing"


@each_row(
    ("masks", "verified", "line"),
    [
        ({"o_proj": Pad(), "down_proj": Pad()}, ("o_proj", "down_proj"), UNIFORM + EXACT),
        ({"o_proj": Pad(), "down_proj": Pad()}, ("o_proj",), UNIFORM + HONEST),
        ({"o_proj": Pad(), "down_proj": Pad()}, (), UNIFORM + HONEST),
        # Under a mask of floats a lie within the tolerance is accepted.
        ({"attn_scores": Unbroken()}, ("attn_scores",), WITHIN.format("") + NEARLY),
        (
            {"attn_scores": Unbroken(), "o_proj": Pad()},
            *(("attn_scores", "o_proj"), WITHIN.format(", pad") + NEARLY),
        ),
    ],
)
def test_results_are_said_to_be_verified_only_where_all_of_them_are(
    masks: dict[Operator, Mask], verified: tuple[Operator, ...], line: str
) -> None:
    placed: dict[str, Any] = {
        name: CLEAR | {"mask": mask, "verify": "freivalds" if name in verified else "none"}
        for name, mask in masks.items()
    }
    policy = policy_of(placed, arithmetic="int8" if "o_proj" in masks else "float")
    assert policy.leakage_summary() == f"policy n: {line}"
    assert policy.verified == bool(verified)


def test_links_in_the_clear_are_said_to_give_everything_away() -> None:
    beside = {"attn_scores": CLEAR | {"mask": Unbroken()}, "o_proj": CLEAR | {"mask": Shares()}}
    for policy in (load_policy("two-server"), policy_of(beside, arithmetic="int8")):
        line = policy.leakage_summary(links_encrypted=False) or ""
        assert "an observer of both links, which are NOT encrypted, reads prompt and answer" in line
        assert "as long as" not in line
    shielded = load_policy("shielded")
    assert shielded.leakage_summary(links_encrypted=False) == shielded.leakage_summary()


def test_what_services_prove_is_said() -> None:
    proven, simulated = (
        policy_of({"o_proj": CLEAR}, service={"attested": kind}).leakage_summary() or ""
        for kind in ("snp+nvidia", "simulated")
    )
    assert "; by snp+nvidia evidence each service proves, before anything is sent, what" in proven
    assert simulated.endswith("; services give simulated evidence, which proves nothing")
