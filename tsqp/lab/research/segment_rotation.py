"""Static rotation of the residual stream, undone in the weights of whole layers at the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch

from protocol.model.config import ModelConfig
from tee_side.protect.masks.mask import KeyedSegment, Masked, SegmentMask
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.rotation import BlockRotation, RotationMask

_NORMS = ("input_layernorm", "post_attention_layernorm")


class SegmentRotation(RotationMask, SegmentMask):
    """Send h Q to a server that holds W diag(g) Q for what reads rows, and Q^T W for what adds.

    RMSNorm(h Q) = RMSNorm(h) Q once the norm's weight g is folded into the products behind it, so
    the server's norms have the weight 1. Embedding, final norm and LM head stay in the TEE.
    `sigma` is in the units of what is sent.
    """

    name: ClassVar[str] = "cloak-segment"
    hides: ClassVar[str] = "single features of the residual stream; by sigma, digits"
    known_break: ClassVar[str] = (
        "W' = W diag(g) Q beside the public W gives Q by least squares; without that, lengths and"
        " inner products of rows stay, so the length of an embedding row names the token, by a"
        " dictionary; and the server computes plain queries, keys, values and products of the MLP"
    )
    source: ClassVar[str] = (
        "Infemeral's cloak, whose published code leaves the weights unrotated; folding as in"
        " QuaRot, arXiv 2404.00456"
    )
    cost: ClassVar[str] = "2 x block operations a feature each way; LM head in the TEE"

    def keyed(self, config: ModelConfig, randomness: Randomness) -> KeyedSegment:
        """Draw the rotation."""
        return _RotatedStream(self, BlockRotation(config.hidden_size, self.block, randomness))

    def epsilon(self, longest: float, rows: int = 1) -> float:
        """Return `rows_epsilon` of rows at most `longest` long; infinite without noise."""
        return self.rows_epsilon(longest, rows)

    def statement(self, longest: float) -> str:
        """Say what the noise guarantees, and what it does not.

        `longest`: length of the longest row of the public embedding.
        """
        one, hundred = self.epsilon(longest), self.epsilon(longest, 100)
        return (
            f"a segment from layer 0: epsilon {one:.4g} at delta {self.delta:g} for one token of a"
            " sequence, also where it is sent again after a loss; tokens that are sampled after it"
            f" depend on it, 100 are epsilon {hundred:.4g}; a segment from a later layer: none, its"
            " rows have no bound; effects of floating point are not counted"
        )


class _RotatedStream(KeyedSegment):
    def __init__(self, mask: SegmentRotation, rotation: BlockRotation) -> None:
        self._sigma, self._rotation = mask.sigma, rotation

    def mask(self, h_TD: torch.Tensor, randomness: Iterator[Randomness]) -> Masked:
        """Rotate, add noise. GPU sees: rotated rows of the same length, up to the noise."""
        sent_TD = self._rotation.apply(h_TD.float())
        if self._sigma:
            T, D = sent_TD.shape
            noise_TD = torch.stack([next(randomness).normal(D) for _ in range(T)])
            sent_TD = sent_TD + self._sigma * noise_TD.float()
        return Masked((sent_TD.to(h_TD.dtype),), self._unmask)

    def _unmask(self, h_ND: torch.Tensor) -> torch.Tensor:
        return self._rotation.undo(h_ND.float()).to(h_ND.dtype)

    def layer(self, index: int, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `KeyedSegment.layer`. What is within a head or the MLP stays as it is."""
        turned = dict(plain)
        for name, tensor in plain.items():
            module = name.split(".")[-2]
            if module in _NORMS:
                turned[name] = torch.ones_like(tensor)
            elif module in ("o_proj", "down_proj"):
                columns = tensor.reshape(len(tensor), -1)
                turned[name] = self._rotation.apply(columns.t()).t().reshape(tensor.shape)
            elif tensor.ndim == 2:
                norm = _NORMS[name.startswith("mlp.")]
                turned[name] = self._rotation.apply(tensor * plain[f"{norm}.weight"])
        return turned
