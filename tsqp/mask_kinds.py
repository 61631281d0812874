"""The base classes of row, feature and segment masks.

They compute in floats, so that results are equal within a tolerance.

A new mask of one of these kinds is a subclass. Shape suffixes: T rows, I in_features,
O out_features; B heads, and M, J, N for the product [B, M, J] x [B, J, N]. Those of segments are
`protocol.model.forward`'s.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from protocol.errors import MaskError, PolicyError, SettingsError
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.architectures import NormName
from protocol.model.checkpoint import Checkpoint, norm_name
from protocol.model.config import ModelConfig
from protocol.model.weights import LightWeights
from tee_side.protect.masks.mask import Given, Hide, Mask, Masked, MaskKey, ProvisionedMask
from tee_side.protect.randomness import Randomness
from tee_side.words import PRODUCTS, Operator, Site
from tsqp.feature_key import FeatureKey

# The RMSNorm in front of an operator; o_proj and down_proj have none.
GAINS: dict[LinearOperator, NormName] = {
    "qkv_proj": "input_layernorm",
    "gate_up_proj": "post_attention_layernorm",
}


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

    def hiding(self, given: Given) -> Hide:
        """See `Mask.hiding`."""
        return lambda x_TI: self.mask(x_TI, given.randomness)

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


class StaticMask(ProvisionedMask):
    """Made once by `tsqp provision`, from a key that stays in the TEE."""

    def load_key(
        self,
        path: Path | None,
        config: ModelConfig,
        checkpoint: Checkpoint,
        light: Sequence[LightWeights],
    ) -> MaskKey:
        """See `ProvisionedMask.load_key`."""
        if path is None:
            raise SettingsError(
                "--key", "none", f"the key that tsqp provision --mask {self.name} wrote"
            )
        key = FeatureKey.load(path)
        key.check(config, checkpoint, self)
        return self.bind(key, config, light)

    @abstractmethod
    def bind(self, key: FeatureKey, config: ModelConfig, light: Sequence[LightWeights]) -> MaskKey:
        """Make the maps of a key that fits. Raises MaskError for a norm that cannot be folded."""


class FeatureMask(StaticMask):
    """Acts on the hidden axis, by a map that the server's weights have undone in advance."""

    kind: ClassVar[Literal["feature"]] = "feature"

    def bind(self, key: FeatureKey, config: ModelConfig, light: Sequence[LightWeights]) -> MaskKey:
        """See `StaticMask.bind`."""
        seed = bytes.fromhex(key.seed)
        transforms: dict[Site, Callable[[torch.Tensor, Randomness], Masked]] = {
            (layer, operator): site_transform(self, config, seed, layer, operator, gain).mask
            for layer, one in enumerate(light)
            for operator in FUSED_MODULES
            for gain in [gain_of(config, one, operator)]
        }
        return MaskKey(key.provision_id, key.server_linear_digest, transforms)

    def hiding(self, given: Given) -> Hide:
        """See `Mask.hiding`. Raises PolicyError without the key."""
        if given.key is None:
            raise PolicyError(f"mask {self.name}", "no key", "--key, as tsqp provision wrote it")
        transform = given.key.transforms[given.site]
        return lambda x_TI: transform(x_TI, given.randomness)

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


class SegmentMask(StaticMask):
    """Acts on the residual stream through whole layers, which the server computes by itself.

    `hides_head`: whether the server can compute the LM head, too.
    """

    kind: ClassVar[Literal["segment"]] = "segment"
    hides_head: ClassVar[bool] = False

    @abstractmethod
    def keyed(self, config: ModelConfig, randomness: Randomness) -> KeyedSegment:
        """Make the map; `randomness`: the same at provisioning and in the TEE."""

    def bind(self, key: FeatureKey, config: ModelConfig, light: Sequence[LightWeights]) -> MaskKey:
        """See `StaticMask.bind`."""
        keyed = keyed_segment(self, config, bytes.fromhex(key.seed))
        digests = key.provision_id, key.server_linear_digest
        return MaskKey(*digests, {}, keyed.mask, keyed.unmask_logits)

    @property
    def verifiable(self) -> bool:
        """Nothing checks what whole layers and a cache at the server give."""
        return False

    @classmethod
    def supports(cls, operator: Operator) -> bool:
        """Whole layers, and the LM head behind them where the mask hides its output."""
        return operator == "segment" or (operator == "lm_head" and cls.hides_head)


def gain_of(
    config: ModelConfig, light: LightWeights, operator: LinearOperator
) -> torch.Tensor | None:
    """Return what an operator's input was multiplied by last; None where that cannot be folded."""
    norm = light.norms.get(GAINS[operator]) if operator in GAINS else None
    return norm.weight if norm is not None and config.table.norm == "rms" else None


def keyed_segment(mask: SegmentMask, config: ModelConfig, seed: bytes) -> KeyedSegment:
    """Make the map of the residual stream, the same one each time.

    Raises MaskError for an architecture whose layers do something else than Llama's.
    """
    MaskError.unless(
        config.like_llama,
        f"mask {mask.name}",
        f"{config.architecture}, in whose layers it does not hold",
        "layers like Llama's: see docs/models.md",
    )
    return mask.keyed(config, Randomness(seed).derive(b"segment"))


def site_transform(
    mask: FeatureMask,
    config: ModelConfig,
    seed: bytes,
    layer: int,
    operator: LinearOperator,
    gain: torch.Tensor | None,
) -> KeyedTransform:
    """Make one site's map, the same each time. Raises MaskError that names the gain's tensor."""
    shapes = [config.module_shape(module) for module in config.modules_of(operator)]
    outputs = tuple(shape[0] for shape in shapes)
    randomness = Randomness(seed).derive(f"feature {layer} {operator}".encode())
    try:
        return mask.transform(FeatureSite(shapes[0][1], outputs, gain, randomness))
    except MaskError as error:
        norm = GAINS.get(operator)
        site = f"{norm_name(layer, norm)}.weight" if norm else f"{operator} in layer {layer}"
        raise MaskError(
            f"mask {mask.name}: {site}: {error.where}", got=error.got, expected=error.expected
        ) from None
