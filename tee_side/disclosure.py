"""What a policy gives away, in the one line that is printed before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tee_side.masks.mask import Mask
from tee_side.vocabulary import Operator

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
}

_HONEST = "results are not verified, so this holds against a service that computes honestly"

_VERIFIED = "results are verified, and a service that lies is asked no more"

# Of floats: whoever stays within it may lie.
_NEARLY_VERIFIED = (
    "results are verified within a tolerance, and a service that lies by more is asked no more"
)

Masking = tuple[Operator, Mask]


def disclosure(
    name: str, leaving: Sequence[tuple[Operator, Mask | None]], *, verified: bool
) -> str | None:
    """Say what the GPU side learns under the policy `name`, the worst first; None if nothing.

    `verified`: whether the results of all of it are.

    Hidden states in the clear give the prompt away to whoever holds the public weights
    (vocabulary matching, arXiv 2505.18332). "Uniform random numbers" is said only of a policy
    under which nothing else crosses.
    """
    if not leaving:
        return None
    clear = [operator for operator, mask in leaving if mask is None]
    masked = [(operator, mask) for operator, mask in leaving if mask is not None]
    if not clear and all(mask.uniform for _, mask in masked):
        shared = _shared(masked)
        each = "each GPU service" if shared else "the GPU"
        alone = ", as long as the two do not collude" if shared else ""
        seen = f"{each} sees uniform random numbers, lengths and timing{alone}"
        return f"policy {name}: {seen}; {_promised(masked, verified)}"
    # Whatever order and company ids are sent in: those of the prompt are among them.
    ids = [(op, mask) for op, mask in masked if op == "embedding" and not mask.uniform]
    broken = [found for found in masked if found not in ids and found[1].broken]
    others = [found for found in masked if found not in ids and not found[1].broken]
    parts = [_shuffled_ids(ids)] if ids else []
    if clear:
        # The logits in the clear are as bad as shuffled ids; hidden states take an attack.
        parts.insert(0 if "lm_head" in clear else len(parts), _in_the_clear(clear))
    if broken:
        verb = "is" if len(_names(broken)) == 1 else "are"
        parts.append(
            f"{_under(broken)}, which {verb} broken where the weights are public"
            " (tsqp masks says how)"
        )
    if others:
        parts.append(
            f"{_under(others)}, not known to be broken"
            + (" as long as the two services do not collude" if _shared(others) else "")
        )
        # Of the rest more has been said than lengths and lies could tell.
        if len(parts) == 1:
            parts += ["lengths and timing", _promised(masked, verified)]
    return f"policy {name}: the GPU sees {'; '.join(parts)}"


def _promised(masked: Sequence[Masking], verified: bool) -> str:
    if not verified:
        return _HONEST
    exact = all(mask.arithmetic == "int8" for _, mask in masked)
    return _VERIFIED if exact else _NEARLY_VERIFIED


def _in_the_clear(operators: Iterable[Operator]) -> str:
    seen = list(dict.fromkeys(SEEN[operator] for operator in operators))
    direct = [what for what in (SEEN["embedding"], SEEN["lm_head"]) if what in seen]
    verdict = (
        f"{' and '.join(direct)}: the prompt and the answer themselves"
        if direct
        else "from which the prompt and the answer can be recovered"
    )
    return f"{', '.join(seen)} in the clear - {verdict}"


def _shuffled_ids(masked: Sequence[Masking]) -> str:
    names = ", ".join(_names(masked))
    return f"the token ids of prompt and answer themselves, in random order among dummies ({names})"


def _under(masked: Sequence[Masking]) -> str:
    direct = {"embedding", "lm_head"}
    what = [SEEN[operator] for operator, _ in masked if operator in direct]
    what += ["activations"] if any(operator not in direct for operator, _ in masked) else []
    return f"{' and '.join(dict.fromkeys(what))} under {', '.join(_names(masked))}"


def _names(masked: Sequence[Masking]) -> list[str]:
    return list(dict.fromkeys(mask.name for _, mask in masked))


def _shared(masked: Sequence[Masking]) -> bool:
    return any(mask.services > 1 for _, mask in masked)
