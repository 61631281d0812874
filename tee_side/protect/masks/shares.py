"""Additive shares in the ring, for two services that do not collude."""

from __future__ import annotations

from typing import ClassVar

import torch

from protocol.messages import Arithmetic
from tee_side.protect.masks.mask import Masked, SharingMask
from tee_side.protect.randomness import Randomness


class Shares(SharingMask):
    """Send r to one service and x - r mod 2^32 to another, and add what they reply.

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
    cost: ClassVar[str] = "two passes in the TEE; everything twice on the wire and at the services"
    arithmetic: ClassVar[Arithmetic] = "int8"

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Split. Each service sees: uniform ring elements."""
        r = randomness.ring(*x_TI.shape)
        return Masked((r, x_TI - r), lambda first_TO, second_TO: first_TO + second_TO)
