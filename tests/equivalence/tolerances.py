"""How far results may be apart, each with the reason.

The logits of the random models have a standard deviation of about 1.5.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """A bound on the absolute difference, and why it is not zero."""

    atol: float
    reason: str

    def check(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=0.0, atol=self.atol, msg=lambda text: f"{text}\n{self.reason}"
        )


FLOAT32_LOGITS = Tolerance(
    1e-4,
    "Fused matrices, a scaled q and another order of sums: a few float32 roundings a layer."
    " Measured at most 7e-6 over 3 layers; a wrong operator is off by 1e-1 and more.",
)

FAMILY_LOGITS = Tolerance(
    2e-5,
    "The same, relative to the largest logit. Measured at most 4e-6; a number or a norm that is"
    " left out is off by 1e-2 and more.",
)

FLOAT32_STEPS = Tolerance(
    5e-5, "The same numbers in other batch shapes: the matrix library blocks its sums by shape."
)

_SHUFFLED = Tolerance(
    1e-4,
    "A shuffle of rows changes no number; one of features, or of the inner axis of an attention"
    " product, changes the order of its sums. Measured at most 2e-5.",
)
_ROTATED = Tolerance(
    2e-4,
    "A float32 rotation on each side of every product, and weights rounded to float32 after"
    " theirs. Measured at most 3e-5.",
)
_MIXED = Tolerance(
    3e-4,
    "Rows cross up to four times as large, mixed or with noise as large as they are, or behind two"
    " products with an orthogonal matrix, in float32. Measured at most 4e-5.",
)

# Of each float policy, against transformers in float32: what its masks add to `FLOAT32_LOGITS`.
POLICY_LOGITS: dict[str, Tolerance] = {
    **dict.fromkeys(("tee-only", "published", "attention-in-tee"), FLOAT32_LOGITS),
    **dict.fromkeys(("clear-segment", "attested-segment"), FLOAT32_LOGITS),
    **dict.fromkeys(("published-permuted", "stip", "stip-segment"), _SHUFFLED),
    **dict.fromkeys(("cloak", "cloak-segment"), _ROTATED),
    **dict.fromkeys(("row-mix", "row-rotation", "float-noise"), _MIXED),
}

INTEGER_LOGITS = Tolerance(
    0.0, "The same integers wherever they are multiplied, and the same floats around them."
)


# A prompt in other parts: attention adds up in another order, and what stood at the edge of a step
# of the quantisation falls to its other side.
INTEGER_STEPS = Tolerance(
    0.2,
    "A float32 rounding may move an int8 input by one step, of about a hundred. Measured at most"
    " 0.08; a wrong position or key is off by 1 and more.",
)


def masked_logits(policy: str) -> Tolerance:
    return POLICY_LOGITS.get(policy, INTEGER_LOGITS)


ROPE_FREQUENCIES = Tolerance(
    0.0, "The same float32 expressions as transformers': equal to the last bit."
)

BFLOAT16_LOGITS = Tolerance(
    0.5,
    "8 bits of mantissa, rounded at different places (q is scaled before the product): both are"
    " about as far from float32 as from each other. Measured at most 0.28.",
)

# Against float32, our bfloat16 may be at most so many times as far off on average as
# transformers' own: roundings differ in place, not in number.
BFLOAT16_ERROR_RATIO = 1.25
