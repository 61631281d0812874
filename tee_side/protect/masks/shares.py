"""Additive shares in the ring, for two services that do not collude."""

from __future__ import annotations

from typing import ClassVar

import torch

from protocol.messages import SEED_BYTES, Arithmetic
from tee_side.protect.masks.mask import Masked, Seed, SharingMask
from tee_side.protect.randomness import Randomness


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
