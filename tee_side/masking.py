"""Brings a mask together with what it needs: fresh randomness, factors made ahead, or a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from protocol.errors import PolicyError
from protocol.messages import LinearOperator
from tee_side.masks.mask import (
    AdditiveMask,
    Cloak,
    FeatureMask,
    Mask,
    Masked,
    RowMask,
    SharingMask,
    as_it_is,
)
from tee_side.pads.source import PadLane
from tee_side.randomness import Randomness
from tee_side.vocabulary import Site

# Hides the input of a linear operator; None where no factors are left and the TEE shall compute.
HideLinear: TypeAlias = Callable[[int, LinearOperator, torch.Tensor], Masked | None]


def linear_masking(
    mask: Mask | None,
    randomness: Randomness,
    *,
    pads: PadLane | None = None,
    cloaks: Mapping[Site, Cloak] | None = None,
) -> HideLinear:
    """Return how a mask hides the inputs of linear operators.

    Raises PolicyError for an additive mask without factors, or a feature mask without its key.
    """
    match mask:
        case None:
            return lambda _layer, _operator, x_TI: Masked((x_TI,), as_it_is)
        case RowMask() | SharingMask():
            return lambda _layer, _operator, x_TI: mask.mask(x_TI, randomness)
        case FeatureMask():
            if cloaks is None:
                raise PolicyError(
                    f"mask {mask.name}", got="no key", expected="--key, as tsqp provision wrote it"
                )
            return lambda layer, operator, x_TI: cloaks[layer, operator].mask(x_TI, randomness)
        case AdditiveMask():
            if pads is None:
                raise PolicyError(
                    f"mask {mask.name}", got="no factors", expected="pads made in advance"
                )

            def hide(layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> Masked | None:
                factors = pads.draw(layer, operator, x_TI.shape[0])
                return None if factors is None else mask.mask(x_TI, factors)

            return hide
    raise PolicyError(
        f"mask {mask.name}",
        got=type(mask).__name__,
        expected="a RowMask, FeatureMask, AdditiveMask or SharingMask",
    )
