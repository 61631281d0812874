"""Static rotation of the hidden axis, undone in the weights that the server holds."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from protocol.errors import MaskError
from tee_side.protect.masks.mask import FeatureMask, FeatureSite, KeyedTransform, Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.rotation import BlockRotation, RotationMask

# Smaller gains count as this part of the largest: 0 cannot be divided by, and no row gets longer.
_SMALLEST_GAIN = 1e-3


class FeatureRotation(RotationMask, FeatureMask):
    """Send x diag(g)^-1 Q to a server that holds W diag(g) Q; g: weight of the RMSNorm in front.

    Every module's output comes back rotated, too, by a rotation of its own. `sigma` is relative to
    a row's RMS.
    """

    name: ClassVar[str] = "feature-rotation"
    hides: ClassVar[str] = "single features; behind an RMSNorm the norms of rows; by sigma, digits"
    known_break: ClassVar[str] = (
        "eigenvectors of the server's W' W'^T beside those of the public W give the rotations; and"
        " without that: inner products X X^T stay, and the norm of each module's output (and of"
        " o_proj's and down_proj's input), which names the token in layer 0 by a dictionary"
    )
    source: ClassVar[str] = "Infemeral's cloak, made exact; folding as in QuaRot, arXiv 2404.00456"
    cost: ClassVar[str] = "2 x block operations a feature each way; weights provisioned once"

    @property
    def verifiable(self) -> bool:
        """Noise makes results inexact, by more than a check can allow."""
        return self.sigma == 0

    def transform(self, site: FeatureSite) -> KeyedTransform:
        """Draw a rotation of the input and one of each module's output. Raises MaskError."""
        return _RotatedSite(self, site)

    def epsilon(self, in_features: int, rows: int = 1) -> float:
        """Return `rows_epsilon`, behind an RMSNorm: no row is longer than sqrt(in_features)."""
        return self.rows_epsilon(math.sqrt(in_features), rows)

    def statement(self, in_features: int) -> str:
        """Say what the noise guarantees, and what it does not."""
        one, hundred = self.epsilon(in_features), self.epsilon(in_features, 100)
        return (
            f"qkv_proj and gate_up_proj: epsilon {one:.4g} at delta {self.delta:g} for one row of"
            " one call; a token is many rows (every layer, both operators, and all later tokens"
            f" that see it), 100 rows are epsilon {hundred:.4g}; o_proj and down_proj: none, their"
            " rows have no bound, so none for a policy that sends them; effects of floating point"
            " are not counted"
        )


class _RotatedSite(KeyedTransform):
    def __init__(self, mask: FeatureRotation, site: FeatureSite) -> None:
        self._sigma, self._normed = mask.sigma, site.gain is not None
        self._fold_I = torch.ones(site.in_features) if site.gain is None else _fold(site.gain)
        self._input = BlockRotation(site.in_features, mask.block, site.randomness)
        self._outputs = [BlockRotation(n, mask.block, site.randomness) for n in site.outputs]
        self._sizes = site.outputs

    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        turned_OI = self._input.apply(weight_OI * self._fold_I)
        parts = zip(self._outputs, turned_OI.split(self._sizes), strict=True)
        return torch.cat([output.apply(part.t()).t() for output, part in parts])

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Fold, rotate, add noise. GPU sees: rotated rows, of norm sqrt(I) behind an RMSNorm."""
        sent_TI = self._input.apply(x_TI.float() / self._fold_I)
        if self._sigma:
            rms_T1 = sent_TI.square().mean(-1, keepdim=True).sqrt()
            noise_TI = self._sigma * randomness.normal(*sent_TI.shape).float()
            # Behind a norm rows are cut to the length that epsilon is stated for: rounding of
            # bfloat16 can make them longer. Elsewhere the noise is as large as the row.
            sent_TI = (
                sent_TI / rms_T1.clamp(min=1) + noise_TI
                if self._normed
                else sent_TI + rms_T1 * noise_TI
            )
        return Masked((sent_TI.to(x_TI.dtype),), self._unmask)

    def _unmask(self, y_TO: torch.Tensor) -> torch.Tensor:
        parts = zip(self._outputs, y_TO.float().split(self._sizes, dim=-1), strict=True)
        return torch.cat([output.undo(part) for output, part in parts], dim=-1).to(y_TO.dtype)


def _fold(gain_I: torch.Tensor) -> torch.Tensor:
    """Return what to divide by: the gain, kept away from 0. Raises MaskError."""
    gain_I = gain_I.float()
    largest = float(gain_I.abs().max())
    if not 1e-30 < largest < math.inf:
        raise MaskError("gain", got=f"values up to {largest}", expected="one above 0, all finite")
    return gain_I.abs().clamp(min=_SMALLEST_GAIN * largest).copysign(gain_I)
