"""The bases of row, feature and segment masks, which trade exactness or secrecy for speed.

A run under pads or shares imports none of this. Shape suffixes: T rows, I in_features,
O out_features; B heads, and M, J, N for the product [B, M, J] x [B, J, N]. Those of segments are
`protocol.model.forward`'s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch

from protocol.errors import FeatureKeyError, SettingsError
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from tee_side.plugins import load_entry_point, one_entry_point
from tee_side.protect.masks.mask import Mask, Masked
from tee_side.protect.randomness import Randomness
from tee_side.words import PRODUCTS, Operator, Site


@dataclass(frozen=True, slots=True)
class MaskedProduct:
    """The two operands that cross, and how to turn their product into the plain one.

    `unmask`: as in `Masked`.
    """

    a: torch.Tensor
    b: torch.Tensor
    unmask: Callable[[torch.Tensor], torch.Tensor]


class RowMask(Mask):
    """Acts on the token axis: any map of the rows that a product on the right leaves alone.

    Fresh randomness in every call, from `randomness` alone.
    """

    kind: ClassVar[Literal["row"]] = "row"

    @abstractmethod
    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Hide the rows of a linear operator's input. GPU sees: `Masked.sent`.

        The sent tensor may have more rows than T; `unmask` gets that many and returns T. Floats in
        and out; the bias is added afterwards, in the TEE.
        """

    def mask_ids(self, ids_T: torch.Tensor, vocab_size: int, randomness: Randomness) -> Masked:
        """Hide token ids, int64 [T]. GPU sees: `Masked.sent`. Override to support it."""
        raise NotImplementedError

    def mask_product(
        self, a_BMJ: torch.Tensor, b_BJN: torch.Tensor, randomness: Randomness
    ) -> MaskedProduct:
        """Hide both operands of an attention product. Override to support it."""
        raise NotImplementedError

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Linear operators and the LM head; others if their method is there."""
        if operator == "embedding":
            return cls.mask_ids is not RowMask.mask_ids
        if operator in PRODUCTS:
            return cls.mask_product is not RowMask.mask_product
        return operator != "segment"


@dataclass(frozen=True, slots=True)
class FeatureSite:
    """What a feature mask gets to know of the operator that it transforms.

    `outputs`: sizes of the modules side by side, whose rows must stay together. `gain`: the weight
    [I] of the RMSNorm in front, None where there is none. `randomness`: of this site alone, the
    same at provisioning and in the TEE.
    """

    in_features: int
    outputs: tuple[int, ...]
    gain: torch.Tensor | None
    randomness: Randomness


class KeyedTransform:
    """A static linear map of one site's input and output, as a feature mask prepares it."""

    @abstractmethod
    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Transform the weight for the server, float64 in and out."""

    @abstractmethod
    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Hide the input. GPU sees: `Masked.sent`. `randomness`: fresh, for noise."""


class FeatureMask(Mask):
    """Acts on the hidden axis, by a map that the server's weights have undone in advance.

    Static: made once by `tsqp provision`, from a key that stays in the TEE.
    """

    kind: ClassVar[Literal["feature"]] = "feature"

    @abstractmethod
    def transform(self, site: FeatureSite) -> KeyedTransform:
        """Make the map of a site."""


class KeyedSegment:
    """A static map of the residual stream, the same in front of and behind every layer."""

    @abstractmethod
    def mask(self, h_TD: torch.Tensor, randomness: Iterator[Randomness]) -> Masked:
        """Hide hidden states. GPU sees: `Masked.sent`. `randomness`: for the noise of each row.

        It is the same where a row is sent again: fresh noise could be averaged away. `unmask` maps
        the reply, hidden states [N, D] of rows behind any later layer, back.
        """

    def unmask_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the plain logits. Override it, and `head`, where the mask has `hides_head`."""
        raise NotImplementedError

    @abstractmethod
    def layer(self, index: int, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Transform tensors of a layer for the server, float64 in and out.

        `plain`: the layer's norms and any of its modules, by their names within the layer, such as
        `self_attn.q_proj.weight`. The same names come back; `self_attn.q_norm.weight` may be
        [H, C] and `k_norm` [K, C], and `self_attn.rope_order` [K, C / 2] may say which pair of
        RoPE stands at each pair's place in a key/value head and its query heads.
        """

    def head(self, norm_D: torch.Tensor, lm_head_VD: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `model.norm.weight` and `lm_head.weight` for the server, of the dtypes given."""
        raise NotImplementedError


class SegmentMask(Mask):
    """Acts on the residual stream through whole layers, which the server computes by itself.

    Static: made once by `tsqp provision`, from a key that stays in the TEE. `hides_head`: whether
    the server can compute the LM head, too.
    """

    kind: ClassVar[Literal["segment"]] = "segment"
    hides_head: ClassVar[bool] = False

    @abstractmethod
    def keyed(self, config: ModelConfig, randomness: Randomness) -> KeyedSegment:
        """Make the map; `randomness`: the same at provisioning and in the TEE."""

    @property
    def verifiable(self) -> bool:
        """Nothing checks what whole layers and a cache at the server give."""
        return False

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Whole layers, and the LM head behind them where the mask hides its output."""
        return operator == "segment" or (operator == "lm_head" and cls.hides_head)


# Of the kinds in `PROVISIONED`.
ProvisionedMask: TypeAlias = FeatureMask | SegmentMask


class TransformKey(Protocol):
    """The key of a feature or segment mask: it undoes the weights of a provisioned server.

    Secret but for `provision_id`, the name that the server repeats, and `server_linear_digest`,
    that of the weights that the server got (both SHA-256 in hex). The code that makes and reads
    such keys is an installed package's: the entry point `feature` of the group `tsqp.keys`.
    """

    provision_id: str
    server_linear_digest: str

    @classmethod
    def load(cls, path: Path) -> TransformKey:
        """Read a key. Raises FeatureKeyError."""

    def check(self, config: ModelConfig, checkpoint: Checkpoint, mask: ProvisionedMask) -> None:
        """Check that the key is one of this model and mask. Raises FeatureKeyError."""

    def transforms(
        self,
        mask: FeatureMask,
        config: ModelConfig,
        gains: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[Site, KeyedTransform]:
        """Make every site's transform.

        `gains`: of each layer, the weights [D] of `input_layernorm` and `post_attention_layernorm`.
        Raises FeatureKeyError for another mask, MaskError for a gain that the mask cannot fold.
        """

    def segment(self, mask: SegmentMask, config: ModelConfig) -> KeyedSegment:
        """Make the residual stream's map. Raises FeatureKeyError for another mask."""


def load_key(
    path: Path | None, mask: ProvisionedMask, config: ModelConfig, checkpoint: Checkpoint
) -> TransformKey:
    """Read the key of a mask through the package that makes such keys.

    Raises SettingsError for no path, FeatureKeyError, and PluginError for a package that does not
    load.
    """
    if path is None:
        raise SettingsError(
            "--key", "none", f"the key that tsqp provision --mask {mask.name} wrote"
        )
    if (entry := one_entry_point("tsqp.keys", "feature")) is None:
        raise FeatureKeyError(
            str(path),
            "no package that reads keys of such masks",
            "one that registers 'feature' in the entry points tsqp.keys, as tsqp does",
        )
    key: TransformKey = load_entry_point(entry).load(path)
    key.check(config, checkpoint, mask)
    return key
