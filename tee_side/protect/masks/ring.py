"""The exact masks, over the ring of 32-bit integers: the one-time pad, and additive shares."""

from __future__ import annotations

from typing import ClassVar

import torch

from protocol.messages import SEED_BYTES, Arithmetic
from tee_side.protect.masks.mask import AdditiveMask, Factors, Masked, Seed, SharingMask
from tee_side.protect.randomness import Randomness
from tee_side.words import Operator, is_projection


class Pad(AdditiveMask):
    """Send x + r mod 2^32 with r uniform, and subtract r W from the reply.

    What crosses is uniform whatever x is, because r is, and because no r is used twice: the pads'
    index only moves forward. Integers wrap exactly, so the result is that of the plain product.
    """

    name: ClassVar[str] = "pad"
    hides: ClassVar[str] = "every value: what crosses is uniform and independent of the input"
    known_break: ClassVar[str] = (
        "none while every pad is used once; a host that restores an old index file of a pad bank"
        " makes pads repeat (docs/limitations.md); lengths and timing stay visible, and whether and"
        " when the service answers is its own choice; where the policy does not verify results, one"
        " that lies learns from whether the run then fails (activation range, end of text)"
    )
    broken: ClassVar[bool] = False
    uniform: ClassVar[bool] = True
    source: ClassVar[str] = "one-time pad; with precomputed r W: Slalom, arXiv 1806.03287"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "two passes in the TEE; one int8 product a pad, made ahead"
    arithmetic: ClassVar[Arithmetic] = "int8"

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Linear operators and the LM head."""
        return is_projection(operator)

    def draw(self, words_TI: torch.Tensor) -> torch.Tensor:
        """Take the words as they are: uniform over the ring."""
        return words_TI

    def mask(self, x_TI: torch.Tensor, factors: Factors) -> Masked:
        """Add the pad. GPU sees: uniform ring elements."""
        return Masked((x_TI + factors.r,), lambda y_TO: y_TO - factors.u)


class Shares(SharingMask):
    """Send a seed of r to one service, x - r mod 2^32 to another, and add what they reply.

    Each share alone is uniform whatever x is. Two services that compare notes know everything.
    """

    name: ClassVar[str] = "shares"
    hides: ClassVar[str] = "every value from each service alone: its share is uniform"
    known_break: ClassVar[str] = (
        "the two services together: their shares add up to the input; lengths and timing stay"
        " visible, and whether and when a service answers is its own choice; where the policy does"
        " not verify results, one that lies learns from whether the run then fails (activation"
        " range, end of text)"
    )
    broken: ClassVar[bool] = False
    uniform: ClassVar[bool] = True
    source: ClassVar[str] = "additive secret sharing over Z_2^32"
    tolerance: ClassVar[float] = 0.0
    cost: ClassVar[str] = "two passes in the TEE; a seed more to send; products and replies twice"
    arithmetic: ClassVar[Arithmetic] = "int8"

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Split. One service sees: a fresh seed; the other: uniform ring elements."""
        seed = Seed(randomness.bytes(SEED_BYTES), tuple(x_TI.shape))
        sent = seed, x_TI - seed.elements()
        return Masked(sent, lambda first_TO, second_TO: first_TO + second_TO)
