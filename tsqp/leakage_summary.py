"""What a policy gives away, in the one line that is printed before anything runs."""

from collections.abc import Sequence
from typing import TypeAlias

from tee_side.policy.placement import Placement, Policy
from tee_side.protect.masks.mask import AdditiveMask, Mask
from tee_side.words import LAYERLESS, Operator

# What the GPU side sees of an operator that is sent to it in the clear.
SEEN: dict[Operator, str] = {
    "embedding": "the token ids",
    "qkv_proj": "hidden states",
    "attn_scores": "queries and keys",
    "attn_values": "attention probabilities and values",
    "o_proj": "attention outputs",
    "gate_up_proj": "hidden states",
    "down_proj": "MLP activations",
    "lm_head": "the logits",
    "segment": "hidden states, keys and values",
}

# By whether all results are verified, and how: a lie within the tolerance of floats is accepted.
_BELIEVED = "results are not verified, so this holds against a service that computes honestly"
_VERIFIED = "results are verified{}, and a service that lies{} is asked no more"

# What dealt pads depend on, by whether all links are encrypted.
_APART = {
    True: "as long as service and dealer do not collude, now or later, and links are encrypted",
    False: "and an observer of all links, which are NOT encrypted, reads prompt and answer",
}

# What more is known of services, by the evidence that they have to give.
_BY_EVIDENCE = "; by {} evidence each service proves, before anything is sent, what sees it"
_ATTESTED = {"none": "", "simulated": "; services give simulated evidence, which proves nothing"}

_Masked: TypeAlias = list[tuple[Operator, Mask]]


def leakage_summary(policy: Policy, *, links_encrypted: bool = True) -> str | None:
    """Say what the GPU side learns under a policy, the worst first; None if nothing.

    `links_encrypted`: whether all links that dealt pads depend on are.

    Hidden states in the clear give the prompt away to any holder of the public weights
    (vocabulary matching, arXiv 2505.18332). "Uniform random numbers" is said only of a policy
    under which nothing else crosses.
    """
    if not (leaving := [*policy.leaving()]):
        return None
    seen, attested = _seen(leaving, links_encrypted=links_encrypted), policy.service.attested
    return f"policy {policy.name}: {seen}{_ATTESTED.get(attested, _BY_EVIDENCE.format(attested))}"


def _seen(leaving: Sequence[tuple[Operator, Placement]], *, links_encrypted: bool) -> str:
    clear = [operator for operator, placed in leaving if placed.mask is None]
    masked = [(operator, placed.mask) for operator, placed in leaving if placed.mask is not None]
    verified = all(placed.verify != "none" for _, placed in leaving)
    within = (
        (" within a tolerance", " by more")
        if any(mask.arithmetic != "int8" for _, mask in masked)
        else ("", "")
    )
    promised = _VERIFIED.format(*within) if verified else _BELIEVED
    dealt = any(isinstance(mask, AdditiveMask) and mask.dealt for _, mask in masked)
    apart = f", {_APART[links_encrypted]}" if dealt else ""
    if not clear and all(mask.uniform for _, mask in masked):
        each = "each of GPU and dealer" if dealt else "the GPU"
        seen = f"{each} sees uniform random numbers, lengths and timing{apart}"
        return f"{seen}; {promised}"
    # Whatever order and company ids are sent in: those of the prompt are among them.
    ids = [found for found in masked if found[0] == "embedding" and not found[1].uniform]
    broken = [found for found in masked if found not in ids and found[1].broken]
    others = [found for found in masked if found not in ids and not found[1].broken]
    parts = []
    if ids:
        shuffled = "the token ids of prompt and answer themselves, in random order among dummies"
        parts.append(f"{shuffled} ({', '.join(_names(ids))})")
    if clear:
        # The logits in the clear are as bad as shuffled ids; hidden states take an attack.
        parts.insert(0 if "lm_head" in clear else len(parts), _in_the_clear(clear))
    if broken:
        verb = "is" if len(_names(broken)) == 1 else "are"
        where = "broken where the weights are public (tsqp masks says how)"
        parts.append(f"{_under(broken)}, which {verb} {where}")
    if others:
        parts.append(f"{_under(others)}, not known to be broken{apart}")
        # Of the rest more has been said than lengths and lies could tell.
        if len(parts) == 1:
            parts += ["lengths and timing", promised]
    return f"the GPU sees {'; '.join(parts)}"


def _in_the_clear(operators: Sequence[Operator]) -> str:
    seen = ", ".join(dict.fromkeys(SEEN[operator] for operator in operators))
    verdict = "from which the prompt and the answer can be recovered"
    if direct := [SEEN[operator] for operator in LAYERLESS if operator in operators]:
        verdict = f"{' and '.join(direct)}: the prompt and the answer themselves"
    return f"{seen} in the clear - {verdict}"


def _under(masked: _Masked) -> str:
    what = (SEEN[one] if one in LAYERLESS else "activations" for one, _ in masked)
    found = sorted(dict.fromkeys(what), key="activations".__eq__)
    return f"{' and '.join(found)} under {', '.join(_names(masked))}"


def _names(masked: _Masked) -> list[str]:
    return list(dict.fromkeys(mask.name for _, mask in masked))
