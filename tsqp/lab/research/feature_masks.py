"""Static maps of the hidden axis, undone in the weights that the server holds.

Permutations, and rotations with Gaussian noise if it is asked for, of single sites or of whole
layers. A rotation of a long axis costs O(size x block): it is a permutation, then blocks.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from protocol.errors import MaskError
from protocol.model.checkpoint import FINAL_NORM
from protocol.model.config import ModelConfig
from tee_side.protect.masks.mask import Mask, Masked
from tee_side.protect.randomness import Randomness
from tsqp.lab.research.draws import normal, orthogonal, permutation
from tsqp.mask_kinds import (
    FeatureMask,
    FeatureSite,
    KeyedSegment,
    KeyedTransform,
    SegmentMask,
)

_HALVINGS = 80
# Smaller gains count as this part of the largest: 0 cannot be divided by, and no row gets longer.
_SMALLEST_GAIN = 1e-3
_NORMS = ("input_layernorm", "post_attention_layernorm")


# -------------------------------------------------------------------------------------------- maps


class BlockPermutation:
    """Features in another order, within blocks of `block`, the last one smaller if need be."""

    def __init__(self, size: int, block: int, randomness: Randomness) -> None:
        starts = range(0, size, block)
        blocks = [at + permutation(randomness, min(block, size - at)) for at in starts]
        self.order = torch.cat(blocks)
        self._back = self.order.argsort()

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, size] with their features at other places."""
        return rows[:, self.order]

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, size] with their features back."""
        return rows[:, self._back]


class BlockRotation(BlockPermutation):
    """Rows times P Q: P a permutation of the axis, Q orthogonal and block-diagonal.

    Haar-distributed blocks of `block` features, the last one smaller where `block` does not divide
    `size`. Kept in float32: as orthogonal as the rounding of what it multiplies.
    """

    def __init__(self, size: int, block: int, randomness: Randomness) -> None:
        super().__init__(size, size, randomness)
        block = min(block, size)
        # The last block is filled up with zeros, so that one batched product does all of them.
        self._blocks = torch.zeros(-(-size // block), block, block)
        for start, matrix in zip(range(0, size, block), self._blocks, strict=True):
            side = min(block, size - start)
            matrix[:side, :side] = orthogonal(randomness, side)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows P Q: float [T, size] in and out."""
        return self._turned(super().apply(rows), self._blocks)

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows Q^T P^T: float [T, size] in and out."""
        return super().undo(self._turned(rows, self._blocks.mT))

    @staticmethod
    def _turned(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        size, (count, block, _) = rows.shape[1], blocks.shape
        padded = torch.nn.functional.pad(rows, (0, count * block - size))
        parts = padded.unflatten(1, (count, block)).transpose(0, 1)
        turned: torch.Tensor = (parts @ blocks.to(rows.dtype)).transpose(0, 1).flatten(1)
        return turned[:, :size]


class _MappedSite(KeyedTransform):
    """A map of the input, and one of each module's output, in blocks of `block` or in one (None).

    Rows are divided by `fold_I` before, and get noise of deviation `sigma`, relative to their RMS.
    """

    def __init__(
        self,
        site: FeatureSite,
        kind: type[BlockPermutation],
        block: int | None,
        fold_I: torch.Tensor,
        sigma: float = 0.0,
    ) -> None:
        self._sigma, self._normed = sigma, site.gain is not None
        self._fold_I = fold_I
        self._input = kind(site.in_features, block or site.in_features, site.randomness)
        self._outputs = [kind(size, block or size, site.randomness) for size in site.outputs]
        self._sizes = site.outputs

    def weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        turned_OI = self._input.apply(weight_OI * self._fold_I)
        parts = zip(self._outputs, turned_OI.split(self._sizes), strict=True)
        return torch.cat([output.apply(part.t()).t() for output, part in parts])

    def mask(self, x_TI: torch.Tensor, randomness: Randomness) -> Masked:
        """Fold, map, add noise. GPU sees: mapped rows, of norm sqrt(I) behind a folded RMSNorm."""
        sent_TI = self._input.apply(x_TI.float() / self._fold_I)
        if self._sigma:
            rms_T1 = sent_TI.square().mean(-1, keepdim=True).sqrt()
            noise_TI = self._sigma * normal(randomness, *sent_TI.shape).float()
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


class _MappedStream(KeyedSegment):
    """A map of the residual stream, and noise of deviation `sigma` on what is sent."""

    def __init__(self, hidden: BlockPermutation, sigma: float = 0.0) -> None:
        self._hidden, self._sigma = hidden, sigma

    def mask(self, h_TD: torch.Tensor, randomness: Iterator[Randomness]) -> Masked:
        """Map, add noise. GPU sees: mapped rows, of the same length up to the noise."""
        sent_TD = self._hidden.apply(h_TD.float())
        if self._sigma:
            T, D = sent_TD.shape
            noise_TD = torch.stack([normal(next(randomness), D) for _ in range(T)])
            sent_TD = sent_TD + self._sigma * noise_TD.float()
        return Masked((sent_TD.to(h_TD.dtype),), self._unmask)

    def _unmask(self, h_ND: torch.Tensor) -> torch.Tensor:
        return self._hidden.undo(h_ND.float()).to(h_ND.dtype)


# ------------------------------------------------------------------------------------ permutations


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
        return _MappedSite(site, BlockPermutation, self.block, torch.ones(site.in_features))


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


class _ShuffledStream(_MappedStream):
    def __init__(self, config: ModelConfig, randomness: Randomness) -> None:
        D, V = config.hidden_size, config.vocab_size
        super().__init__(BlockPermutation(D, D, randomness.derive(b"hidden")))
        self._config, self._randomness = config, randomness
        self._vocabulary = BlockPermutation(V, V, randomness.derive(b"vocabulary"))

    def unmask_logits(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.undo(logits_NV)

    def head(self, norm_D: torch.Tensor, lm_head_VD: torch.Tensor) -> dict[str, torch.Tensor]:
        # Both axes in one gather: no third copy of the largest tensor.
        order_D, order_V = self._hidden.order, self._vocabulary.order
        return {
            FINAL_NORM: norm_D[order_D],
            "lm_head.weight": lm_head_VD[order_V[:, None], order_D],
        }

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
            order = outputs.get(module, self._hidden.order)
            shuffled[name] = tensor[order]
            if tensor.ndim == 2:
                shuffled[name] = tensor[order[:, None], inputs.get(module, self._hidden.order)]
        return shuffled


def _side_by_side(order_XC: torch.Tensor) -> torch.Tensor:
    """Return the order of the channels of several heads, [X * C], from that within each head."""
    heads, size = order_XC.shape
    return (order_XC + size * torch.arange(heads)[:, None]).flatten()


# --------------------------------------------------------------------------------------- rotations


class RotationMask(Mask):
    """A mask that rotates features, and adds Gaussian noise if it is asked to.

    `block`: how many features each block of a rotation mixes, after a shuffle. `sigma`: deviation
    of the noise; with it results are inexact. `delta`: see `epsilon`.
    """

    broken: ClassVar[bool] = True
    # At sigma 0. Weights in bfloat16 are rounded after the rotation: as many digits, but others.
    tolerance: ClassVar[float] = 2e-5

    block: Annotated[int, Field(ge=2, le=4096)] = 128
    sigma: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    delta: Annotated[float, Field(ge=1e-12, lt=1)] = 1e-5

    # What the noise guarantees and what it does not, of `one` row and of a `hundred`.
    says: ClassVar[str]

    def longest_row(self, config: ModelConfig, embedding: Callable[[], float]) -> float:
        """Return how long a row may be whose noise has an epsilon.

        Of a site the rows behind an RMSNorm count, of a segment those of the embedding: `embedding`
        returns the length of the longest one.
        """
        return math.sqrt(config.hidden_size) if self.kind == "feature" else embedding()

    def epsilon(self, longest: float, rows: int = 1) -> float:
        """Return epsilon at `delta` of the noise (differential privacy); infinite without noise.

        Neighbours: `rows` of all rows that ever cross differ, each at most `longest` long, so
        together by 2 sqrt(rows) longest. Gaussian noise composes so: arXiv 1905.02383.
        """
        if self.sigma == 0:
            return math.inf
        return gaussian_epsilon(2 * math.sqrt(rows) * longest / self.sigma, self.delta)


def noise_of(mask: Mask, config: ModelConfig, embedding: Callable[[], float]) -> str | None:
    """Say what the noise of a mask guarantees for a model; None without noise.

    `embedding`: see `RotationMask.longest_row`.
    """
    if not isinstance(mask, RotationMask) or mask.sigma == 0:
        return None
    longest = mask.longest_row(config, embedding)
    one, hundred = (f"{mask.epsilon(longest, rows):.4g}" for rows in (1, 100))
    return mask.says.format(one=one, hundred=hundred, delta=f"{mask.delta:g}")


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at `delta` of Gaussian noise; `mu`: sensitivity / deviation.

    The analytic Gaussian mechanism, arXiv 1805.06530, theorem 8, solved by bisection from above:
    delta = Phi(a) - exp(epsilon) Phi(-b) with a, b = mu/2 -+ epsilon/mu. exp(epsilon) is far
    beyond a float for the mu of a hidden state; it goes away in
    exp(epsilon) Phi(-b) = exp(-a^2/2) erfcx(b / sqrt 2) / 2.
    """

    def exceeds(epsilon: float) -> bool:
        a, b = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
        scaled = float(torch.special.erfcx(torch.tensor(b / math.sqrt(2), dtype=torch.float64)))
        return (math.erfc(-a / math.sqrt(2)) - math.exp(-a * a / 2) * scaled) / 2 > delta

    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


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
    says: ClassVar[str] = (
        "qkv_proj and gate_up_proj: epsilon {one} at delta {delta} for one row of one call; a token"
        " is many rows (every layer, both operators, and all later tokens that see it), 100 rows"
        " are epsilon {hundred}; o_proj and down_proj: none, their rows have no bound, so none for"
        " a policy that sends them; effects of floating point are not counted"
    )

    @property
    def verifiable(self) -> bool:
        """Noise makes results inexact, by more than a check can allow."""
        return self.sigma == 0

    def transform(self, site: FeatureSite) -> KeyedTransform:
        """Draw a rotation of the input and one of each module's output. Raises MaskError."""
        fold_I = torch.ones(site.in_features)
        if site.gain is not None:
            # The gain, kept away from 0: rows are divided by it.
            gain_I = site.gain.float()
            largest = float(gain_I.abs().max())
            MaskError.unless(
                1e-30 < largest < math.inf,
                "gain",
                f"values up to {largest}",
                "one above 0, all finite",
            )
            fold_I = gain_I.abs().clamp(min=_SMALLEST_GAIN * largest).copysign(gain_I)
        return _MappedSite(site, BlockRotation, self.block, fold_I, self.sigma)


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
    says: ClassVar[str] = (
        "a segment from layer 0: epsilon {one} at delta {delta} for one token of a sequence, also"
        " where it is sent again after a loss; tokens that are sampled after it depend on it, 100"
        " are epsilon {hundred}; a segment from a later layer: none, its rows have no bound;"
        " effects of floating point are not counted"
    )

    def keyed(self, config: ModelConfig, randomness: Randomness) -> KeyedSegment:
        """Draw the rotation."""
        return _RotatedStream(BlockRotation(config.hidden_size, self.block, randomness), self.sigma)


class _RotatedStream(_MappedStream):
    def layer(self, index: int, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `KeyedSegment.layer`. What is within a head or the MLP stays as it is."""
        turned = dict(plain)
        for name, tensor in plain.items():
            module = name.split(".")[-2]
            if module in _NORMS:
                turned[name] = torch.ones_like(tensor)
            elif module in ("o_proj", "down_proj"):
                columns = tensor.reshape(len(tensor), -1)
                turned[name] = self._hidden.apply(columns.t()).t().reshape(tensor.shape)
            elif tensor.ndim == 2:
                norm = _NORMS[name.startswith("mlp.")]
                turned[name] = self._hidden.apply(tensor * plain[f"{norm}.weight"])
        return turned
