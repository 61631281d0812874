"""A policy of my own: all linear operators alike, so that a line places them."""

from pathlib import Path

from protocol.messages import FUSED_MODULES
from tee_side.policy.placement import Placement, Policy
from tee_side.protect.masks.mask import find_mask
from tee_side.words import OPERATORS, LayerRange

FIRST_SENT = 2  # the layers before it stay

Reflection = find_mask(str(Path(__file__).with_name("my_row_mask.py")))
stays = Placement(place="tee")
leaves = (
    Placement(place="tee", layers=LayerRange(0, FIRST_SENT - 1)),
    Placement(
        place="gpu",
        layers=LayerRange(FIRST_SENT, None),
        mask=Reflection(reflections=5),
        verify="none",
    ),
)

POLICY = Policy(
    name="my-policy-in-python",
    summary=f"linear layers from {FIRST_SENT} on the GPU, prefill included, rows reflected",
    operators={op: leaves if op in FUSED_MODULES else (stays,) for op in OPERATORS},
)
