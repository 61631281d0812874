"""What pads of a bank are for, and what they take to make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import PolicyError

if TYPE_CHECKING:
    from protocol.model.config import ModelConfig
    from tee_side.policy.placement import Policy
    from tee_side.protect.masks.mask import AdditiveMask
    from tee_side.protect.pads.layout import PadLayout

# Tokens in one product: each weight is read from the directory and quantised once for so many. At
# 512 that would take a quarter of the whole (1b shape, 2 cores).
BATCH_TOKENS = 1024


def padded(policy: Policy, config: ModelConfig) -> tuple[AdditiveMask, PadLayout]:
    """Return the mask that a bank is for, and its sites. Raises PolicyError."""
    from tee_side.model.local_operators import sites_under
    from tee_side.protect.masks.mask import AdditiveMask
    from tee_side.protect.pads.layout import PadLayout

    found = [m for m in policy.masks if isinstance(m, AdditiveMask) and m.arithmetic == "int8"]
    names = " and ".join(mask.described() for mask in found)
    PolicyError.unless(
        len(found) == 1,
        f"policy {policy.name}",
        f"masks {names}" if found else "no operator under pads",
        "one mask that needs pads, as in shielded",
    )
    sites = sites_under(policy, config.num_hidden_layers, found[0])
    return found[0], PadLayout.of(config, sites)


def product_operations(layout: PadLayout) -> int:
    """Return the int8 multiplications and additions behind the pads of one token."""
    from protocol.integer import DIGITS

    return sum(2 * DIGITS * site.in_features * site.out_features for site in layout.sites)
