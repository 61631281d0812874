"""What a bank is made for: the mask and the sites of a policy that take pads, and their work."""

from protocol.errors import PolicyError
from protocol.integer import DIGITS
from protocol.model.config import ModelConfig
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.sites import PadLayout

# Tokens in one product: each weight is read from the directory and quantised once for so many. At
# 512 that would take a quarter of the whole (1b shape, 2 cores).
PAD_BATCH = 1024


def pad_layouts(policy: Policy, config: ModelConfig) -> dict[AdditiveMask, PadLayout]:
    """Return the sites under each mask that needs pads."""
    return {
        mask: PadLayout.of(config, policy.sites_under(config.num_hidden_layers, mask))
        for mask in policy.masks
        if isinstance(mask, AdditiveMask)
    }


def padded(policy: Policy, config: ModelConfig) -> tuple[AdditiveMask, PadLayout]:
    """Return the mask that a bank is for, and its sites. Raises PolicyError."""
    found = [
        (mask, layout)
        for mask, layout in pad_layouts(policy, config).items()
        if mask.arithmetic == "int8"
    ]
    names = " and ".join(mask.described() for mask, _ in found)
    PolicyError.unless(
        len(found) == 1,
        f"policy {policy.name}",
        f"masks {names}" if found else "no operator under pads",
        "one mask that needs pads, as in shielded",
    )
    return found[0]


def product_operations(layout: PadLayout) -> int:
    """Return the int8 multiplications and additions behind the pads of one token."""
    return sum(2 * DIGITS * site.in_features * site.out_features for site in layout.sites)
