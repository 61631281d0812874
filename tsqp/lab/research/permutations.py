"""Static permutations, undone in the weights that the server holds: of sites, of whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from protocol.model.checkpoint import FINAL_NORM
from protocol.model.config import ModelConfig
from tee_side.protect.masks.mask import (
    FeatureMask,
    FeatureSite,
    KeyedSegment,
    KeyedTransform,
    Masked,
    SegmentMask,
)
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import permutation


class FeaturePermutation(FeatureMask):
    """Shuffle the input's features, and each module's outputs, within blocks of the axis.

    `block`: features of a block; None for one block, the whole axis.
    """

    name: ClassVar[str] = "feature-permutation"
    hides: ClassVar[str] = "which hidden feature is which, on the way in and on the way out"
    known_break: ClassVar[str] = (
        "vocabulary matching of sorted vectors (arXiv 2505.18332): 97.6 % of tokens; matching"
        " sorted rows and columns of the public weights with the server's gives the permutation"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = "STIP, arXiv 2312.00025 (hidden axis); Centaur, PermLLM"
    # The same products as in the clear, added up in another order.
    tolerance: ClassVar[float] = 1e-5
    cost: ClassVar[str] = "a gather each way; weights provisioned once; nothing more on the wire"

    block: Annotated[int, Field(ge=2)] | None = None

    def transform(self, site: FeatureSite) -> KeyedTransform:
        """Draw a permutation for the input and one for each module's output."""
        order_I = self._order(site.in_features, site.randomness)
        orders = [self._order(size, site.randomness) for size in site.outputs]
        starts = [sum(site.outputs[:module]) for module in range(len(orders))]
        order_O = torch.cat([start + order for start, order in zip(starts, orders, strict=True)])
        return _ShuffledSite(order_I, order_O)

    def _order(self, size: int, randomness: Randomness) -> torch.Tensor:
        block = self.block or size
        starts = range(0, size, block)
        return torch.cat([at + permutation(randomness, min(block, size - at)) for at in starts])


class _ShuffledSite(KeyedTransform):
    def __init__(self, order_I: torch.Tensor, order_O: torch.Tensor) -> None:
        self._order_I, self._order_O = order_I, order_O
        self._back_O = order_O.argsort()

    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI[self._order_O][:, self._order_I]

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Shuffle. GPU sees: every value of the input, at the place of another feature."""
        return Masked((x_TI[:, self._order_I],), lambda y_TO: y_TO[:, self._back_O])


class SegmentPermutation(SegmentMask):
    """Shuffle the residual stream, and in each layer whatever can be shuffled behind it.

    One permutation of the hidden axis for all layers: residual connections add what they read. Each
    layer has its own of the intermediate features and, within each key/value head and its query
    heads, of the value channels and of the pairs of RoPE. The server turns a pair by its position
    and its place in the model, so `rope_order` tells it the permutation of the pairs. The LM head's
    rows are shuffled, too: logits come back under other token ids.

    Three roles: the developer converts the model, the server holds the result, and the client keeps
    the key, with the configuration, the tokenizer and the embedding.
    """

    name: ClassVar[str] = "stip-segment"
    hides: ClassVar[str] = "which hidden or intermediate feature, value channel or logit is which"
    known_break: ClassVar[str] = (
        "vocabulary matching of sorted vectors (arXiv 2505.18332): 97.6 % of tokens, and all of"
        " them in front of layer 0, where a sorted row is the sorted row of the public embedding;"
        " sorted rows and columns of the public weights beside the server's give the permutations"
    )
    broken: ClassVar[bool] = True
    source: ClassVar[str] = (
        "STIP, arXiv 2312.00025; RoPE, biases, grouped heads and tied weights are ours, which its"
        " published code leaves out"
    )
    # The same products as in the clear, added up in another order.
    tolerance: ClassVar[float] = 1e-5
    cost: ClassVar[str] = "a gather each way a segment; weights provisioned once"
    hides_head: ClassVar[bool] = True

    def keyed(self, config: ModelConfig, randomness: Randomness) -> KeyedSegment:
        """Draw the permutations of the hidden axis and of the vocabulary."""
        return _ShuffledStream(config, randomness)


class _ShuffledStream(KeyedSegment):
    def __init__(self, config: ModelConfig, randomness: Randomness) -> None:
        self._config, self._randomness = config, randomness
        self._order_D = permutation(randomness.derive(b"hidden"), config.hidden_size)
        self._order_V = permutation(randomness.derive(b"vocabulary"), config.vocab_size)
        self._back_D, self._back_V = self._order_D.argsort(), self._order_V.argsort()

    def mask(self, h_TD: torch.Tensor, randomness: Iterator[Randomness]) -> Masked:
        """Shuffle. GPU sees: every value of a row, at the place of another feature."""
        return Masked((h_TD[:, self._order_D],), lambda h_ND: h_ND[:, self._back_D])

    def unmask_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV[:, self._back_V]

    def head(self, norm_D: torch.Tensor, lm_head_VD: torch.Tensor) -> dict[str, torch.Tensor]:
        # Both axes in one gather: no third copy of the largest tensor.
        shuffled_VD = lm_head_VD[self._order_V[:, None], self._order_D]
        return {FINAL_NORM: norm_D[self._order_D], "lm_head.weight": shuffled_VD}

    def layer(self, index: int, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `KeyedSegment.layer`. The layer's permutations are drawn again in every call."""
        H, K, C = self._config.heads
        randomness = self._randomness.derive(f"layer {index}".encode())
        pairs_Kc = torch.stack([permutation(randomness, C // 2) for _ in range(K)])
        values_KC = torch.stack([permutation(randomness, C) for _ in range(K)])
        order_F = permutation(randomness, self._config.intermediate_size)
        # Channels i and i + C/2 are a pair, and move together.
        keys_KC = torch.cat((pairs_Kc, pairs_Kc + C // 2), dim=1)
        queries_HC = keys_KC.repeat_interleave(H // K, dim=0)
        outputs = {
            "q_proj": _side_by_side(queries_HC),
            "k_proj": _side_by_side(keys_KC),
            "v_proj": _side_by_side(values_KC),
            "gate_proj": order_F,
            "up_proj": order_F,
            "q_norm": queries_HC,
            "k_norm": keys_KC,
        }
        inputs = {
            "o_proj": _side_by_side(values_KC.repeat_interleave(H // K, dim=0)),
            "down_proj": order_F,
        }
        shuffled = {"self_attn.rope_order": pairs_Kc.double()}
        for name, tensor in plain.items():
            module = name.split(".")[-2]
            order = outputs.get(module, self._order_D)
            shuffled[name] = tensor[order]
            if tensor.ndim == 2:
                shuffled[name] = tensor[order[:, None], inputs.get(module, self._order_D)]
        return shuffled


def _side_by_side(order_XC: torch.Tensor) -> torch.Tensor:
    """Return the order of the channels of several heads, [X * C], from that within each head."""
    heads, size = order_XC.shape
    return (order_XC + size * torch.arange(heads)[:, None]).flatten()
