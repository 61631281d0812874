"""What a policy gives away, in the one line that is printed before anything runs."""

from collections.abc import Sequence
from typing import TypeAlias

from tee_side.protect.masks.mask import Mask
from tee_side.words import LAYERLESS, Attested, Operator

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

# What more is known of services, by the evidence that they have to give.
_BY_EVIDENCE = "; by {} evidence each service proves, before anything is sent, what sees it"
_ATTESTED = {"none": "", "simulated": "; services give simulated evidence, which proves nothing"}

_Masked: TypeAlias = list[tuple[Operator, Mask]]


def leakage_summary(
    name: str,
    leaving: Sequence[tuple[Operator, Mask | None]],
    *,
    verified: bool,
    links_encrypted: bool,
    attested: Attested,
) -> str | None:
    """Say what the GPU side learns under the policy `name`, the worst first; None if nothing.

    `verified`: whether the results of all of it are; `links_encrypted`: whether all links that
    shares depend on are; `attested`: by what evidence services prove what they are.

    Hidden states in the clear give the prompt away to any holder of the public weights
    (vocabulary matching, arXiv 2505.18332). "Uniform random numbers" is said only of a policy
    under which nothing else crosses.
    """
    if not leaving:
        return None
    clear = [operator for operator, mask in leaving if mask is None]
    masked = [(operator, mask) for operator, mask in leaving if mask is not None]
    promised = "results are not verified, so this holds against a service that computes honestly"
    if verified:
        # A lie within the tolerance of floats is accepted.
        floats = any(mask.arithmetic != "int8" for _, mask in masked)
        within, more = (" within a tolerance", " by more") if floats else ("", "")
        promised = f"results are verified{within}, and a service that lies{more} is asked no more"
    shared, apart = any(mask.services > 1 for _, mask in masked), ""
    if shared and links_encrypted:
        apart = ", as long as the two services do not collude and their links are encrypted"
    elif shared:
        apart = ", and an observer of both links, which are NOT encrypted, reads prompt and answer"
    if not clear and all(mask.uniform for _, mask in masked):
        each = "each GPU service" if shared else "the GPU"
        parts = [f"{each} sees uniform random numbers, lengths and timing{apart}", promised]
    else:
        # Whatever order and company ids are sent in: those of the prompt are among them.
        ids = [found for found in masked if found[0] == "embedding" and not found[1].uniform]
        broken = [found for found in masked if found not in ids and found[1].broken]
        others = [found for found in masked if found not in ids and not found[1].broken]
        parts = []
        if ids:
            shuffled = (
                "the token ids of prompt and answer themselves, in random order among dummies"
            )
            parts.append(f"{shuffled} ({', '.join(_names(ids))})")
        if clear:
            seen = ", ".join(dict.fromkeys(SEEN[operator] for operator in clear))
            verdict = "from which the prompt and the answer can be recovered"
            if direct := [SEEN[operator] for operator in LAYERLESS if operator in clear]:
                verdict = f"{' and '.join(direct)}: the prompt and the answer themselves"
            # The logits in the clear are as bad as shuffled ids; hidden states take an attack.
            place = 0 if "lm_head" in clear else len(parts)
            parts.insert(place, f"{seen} in the clear - {verdict}")
        if broken:
            verb = "is" if len(_names(broken)) == 1 else "are"
            where = "broken where the weights are public (tsqp masks says how)"
            parts.append(f"{_under(broken)}, which {verb} {where}")
        if others:
            parts.append(f"{_under(others)}, not known to be broken{apart}")
            # Of the rest more has been said than lengths and lies could tell.
            if len(parts) == 1:
                parts += ["lengths and timing", promised]
        parts[0] = f"the GPU sees {parts[0]}"
    evidence = _ATTESTED.get(attested, _BY_EVIDENCE.format(attested))
    return f"policy {name}: {'; '.join(parts)}{evidence}"


def _under(masked: _Masked) -> str:
    what = (SEEN[one] if one in LAYERLESS else "activations" for one, _ in masked)
    found = sorted(dict.fromkeys(what), key="activations".__eq__)
    return f"{' and '.join(found)} under {', '.join(_names(masked))}"


def _names(masked: _Masked) -> list[str]:
    return list(dict.fromkeys(mask.name for _, mask in masked))
