"""What a bank is made for: the mask and the sites of a policy that take pads, and their work.

And who multiplies, where that is not the TEE.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.errors import PolicyError
from protocol.integer import DIGITS
from protocol.model.checkpoint import Checkpoint, linear_digest, model_digest
from protocol.model.config import ModelConfig
from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.protect.pads.bank_files import Purpose
from tee_side.protect.sites import PadLayout

if TYPE_CHECKING:
    from tee_side.remote.call import ChannelsAt
    from tee_side.runner import RunnerSettings

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


def purpose_of(
    checkpoint: Checkpoint,
    config: ModelConfig,
    mask: AdditiveMask,
    layout: PadLayout,
    dealers: tuple[str, ...] = (),
) -> Purpose:
    """Return what pads of a model are made for. Raises ModelError, ManifestError."""
    return Purpose.of(
        layout,
        mask=mask.described(),
        model=checkpoint.directory.resolve().name,
        model_digest=model_digest(config, checkpoint),
        linear_digest=linear_digest(config, checkpoint) or "",
        dealers=dealers,
    )


def product_operations(layout: PadLayout) -> int:
    """Return the int8 multiplications and additions behind the pads of one token."""
    return sum(2 * DIGITS * site.in_features * site.out_features for site in layout.sites)


@contextmanager
def open_dealers(
    settings: RunnerSettings, config: ModelConfig, checkpoint: Checkpoint
) -> Iterator[tuple[tuple[str, ...], ChannelsAt]]:
    """Connect to a policy's dealers alone; yield their names, and the channels of each layer.

    Raises as `Runner`.
    """
    from functools import cache

    from protocol.endpoint import one_for_each
    from protocol.tensors import torch_dtype
    from tee_side.assembly import DEALT_GROUP
    from tee_side.remote.services.connected import Services
    from tee_side.remote.services.member import ServiceCheck
    from tee_side.remote.services.plan import (
        check_links,
        dealer_names,
        largest_reply,
        plan_services,
        read_services,
    )
    from tee_side.runner import connect_options

    policy = settings.policy
    specs = read_services(None, settings.dealers, policy)
    endpoints = [spec.endpoint for spec in specs]
    keys = one_for_each(settings.keys, endpoints)
    check_links(specs, keys, policy, dealer_in_the_clear=settings.dealer_in_the_clear)
    linear = linear_digest(config, checkpoint)
    check = cache(lambda: ServiceCheck(config, checkpoint, arithmetic="int8", linear=linear))
    reply_bytes = largest_reply(policy, config, DEALT_GROUP, torch_dtype(config.dtype))
    key_of = dict(zip(endpoints, keys, strict=True))
    options = connect_options(settings, key_of, reply_bytes, check)
    groups = plan_services(specs, config.num_hidden_layers)
    services = Services(groups, config.num_hidden_layers, options)
    try:
        services.connect(settings.connect_timeout_s)
        yield dealer_names(specs, keys), services.at
    finally:
        services.close()
