"""What happens at a linear operator around its product: quantisation, and the bias.

A *site* is one linear operator of one layer, or the LM head. Its input becomes what a product is
taken of (`encode`), and the product becomes the operator's output (`decode`), the same way wherever
the product is computed. Shape suffixes: T rows, I in_features, O out_features of all modules.

The sites that are padded are a `PadLayout`: what the pads of one token consist of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NoReturn, TypeAlias, cast

import torch

from protocol.errors import ActivationRangeError, ModelError
from protocol.integer import digits_below
from protocol.keystream import WORD_BYTES
from protocol.messages import LinearOperator, Projection
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import ModelConfig
from protocol.model.weights import QuantizedLinear, load_bias, load_quantized, weight_rows
from protocol.native import compiled_for
from tee_side.native import kernels as compiled
from tee_side.words import PROJECTIONS, Site

Biases: TypeAlias = dict[Site, torch.Tensor]

# Sums must fit a signed 32-bit integer, or they could not be told from what they wrapped to.
MAX_SUM = 2**31 - 1
# What two digits hold, as the TEE multiplies each digit.
LARGEST_INPUT = 127 * 257


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FloatSite:
    """Floats as they are; only the bias is left to add, if there is one."""

    bias_O: torch.Tensor | None = None

    def encode(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the input itself."""
        return x_TI, None

    def decode(self, y_TO: torch.Tensor, _: None) -> torch.Tensor:
        """Add the bias."""
        return y_TO if self.bias_O is None else y_TO + self.bias_O


class IntegerSite:
    """Integers in a ring, each row under a scale of its own, which never leaves the TEE.

    A row's largest element becomes `largest` in magnitude, or less where its scale would be no
    normal number, so that no sum of its product wraps (`largest_input`), and nothing about inputs
    need be known in advance. `factor_O`: float32, what one step of an output's weights stands for;
    `bias_O`: of the outputs, None for none; `dtype`: of inputs and outputs; `where`: how messages
    begin.
    """

    def __init__(
        self,
        factor_O: torch.Tensor,
        bias_O: torch.Tensor | None,
        dtype: torch.dtype,
        largest: int,
        where: str = "",
    ) -> None:
        self.factor_O, self.bias_O, self.dtype = factor_O, bias_O, dtype
        self.largest = float(largest)
        self._where = where
        # How many digits hold what `encode` returns, whatever the input is.
        self.digits = digits_below(largest)
        self.compiled = compiled_for(dtype)

    def encode(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise to round(x / scale), ties to even: int32 [T, I], and float32 scales [T, 1].

        Elementwise float32, so that a row's integers do not depend on the rows beside it. Raises
        ActivationRangeError for what is not finite.

        GPU sees: the integers, where a policy sends them in the clear; under a pad or shares,
        nothing; the scales never.
        """
        if compiled_for(x_TI.dtype):
            q_TI, is_finite, scale_T, _ = compiled.encode(x_TI, self.largest, None)
            scale_T1 = scale_T[:, None]
        else:
            q_TI, scale_T1 = self.quantise(x_TI)
            is_finite = bool(scale_T1.isfinite().all())
        if not is_finite:
            self.refuse()
        return q_TI, scale_T1

    def quantise(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `encode` does, with torch.

        Integers of a row that is not finite mean nothing; its scale, and what `decode` makes of
        it, are not finite either.
        """
        wide_TI = x_TI.float()
        # The smallest normal number: a row of zeros stays one.
        smallest = torch.finfo(torch.float32).tiny
        scale_T1 = (wide_TI.abs().amax(-1, keepdim=True) / self.largest).clamp_min_(smallest)
        return wide_TI.div(scale_T1).round_().to(torch.int32), scale_T1

    def decode(self, y_TO: torch.Tensor, scale_T1: torch.Tensor) -> torch.Tensor:
        """Return the product under the scales of its rows and outputs, and the bias added."""
        if self.compiled:
            of_site = self.factor_O, self.bias_O, self.dtype
            # Nothing is checked, so nothing is refused.
            return cast("torch.Tensor", compiled.decode(y_TO, None, scale_T1, *of_site))
        # int32 * float32 is a float32 product of the rounded integer.
        scaled_TO = (y_TO * scale_T1).mul_(self.factor_O).to(self.dtype)
        return scaled_TO if self.bias_O is None else scaled_TO + self.bias_O

    def refuse(self) -> NoReturn:
        """Raise ActivationRangeError for a row that is not finite."""
        raise ActivationRangeError(f"{self._where}input row", "not finite", "finite numbers")


# Each turns an input [T, I] into what the weight is multiplied by, and what else it must remember
# (`encode`); and with that the product into the output, in the model's dtype and with its bias
# (`decode`).
LinearSite: TypeAlias = FloatSite | IntegerSite


def largest_input(max_row_sum: int) -> int:
    """Return the largest integer that an input may have beside these int8 weights.

    By Hoelder |x . w_j| <= max |x| * sum |w_j|, which this keeps below 2^31. `max_row_sum`: of all
    outputs the largest sum of magnitudes, at most 127 for each input feature.
    """
    return min(LARGEST_INPUT, MAX_SUM // max(1, max_row_sum))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IntegerSites:
    """Sites of a model that is computed in integers, and their weights.

    `held`: integers that stay in memory; those of other sites are read whenever they are needed.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    biases: Biases
    dtype: torch.dtype
    held: dict[Site, QuantizedLinear] = field(default_factory=dict, init=False)
    _found: dict[Site, IntegerSite] = field(default_factory=dict, init=False)

    def weights(self, site: Site) -> QuantizedLinear:
        """Return a site's integers. Raises ModelError, also where their scales have changed."""
        if (held := self.held.get(site)) is not None:
            return held
        weights = load_quantized(self.checkpoint, self.config, *site)
        self.take_scales(site, weights)
        return weights

    def hold(self, site: Site) -> QuantizedLinear:
        """Return a site's integers, which stay in memory from now on. Raises as `weights`."""
        self.held[site] = self.weights(site)
        return self.held[site]

    def take_scales(self, site: Site, weights: QuantizedLinear) -> None:
        """Take the scales of a site's weights; raise ModelError where they were others before."""
        layer, operator = site
        where = "lm_head: " if operator == "lm_head" else f"{operator} in layer {layer}: "
        if (known := self._found.get(site)) is None:
            largest = largest_input(weights.max_row_sum())
            of_site = weights.scale, self.biases.get(site), self.dtype
            known = self._found[site] = IntegerSite(*of_site, largest, where)
        ModelError.unless(
            weights.scale.equal(known.factor_O),
            f"{self.checkpoint.directory}: {where}scales of the weights",
            "others than at the start",
            "a directory that nothing changes while it is in use",
        )

    def __getitem__(self, site: Site) -> IntegerSite:
        if site not in self._found:
            self.weights(site)
        return self._found[site]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What is known of a model's weights: the model directory, and integers where there are any.

    `dtype`: that services hold floats in. `integers`: where the policy computes with them.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    integers: IntegerSites | None = None


def load_biases(
    checkpoint: Checkpoint,
    config: ModelConfig,
    operators: Iterable[LinearOperator],
    dtype: torch.dtype,
) -> Biases:
    """Read the biases [O] of some operators, 0 for modules without one. Raises ModelError."""
    every = [(layer, name) for name in operators for layer in range(config.num_hidden_layers)]
    shapes = tensors_of(every, config)
    checkpoint.require({name: shapes[name] for name in shapes if name.endswith(".bias")})
    found = {site: load_bias(checkpoint, config, *site, dtype=dtype) for site in every}
    return {site: bias_O for site, bias_O in found.items() if bias_O is not None}


def tensors_of(sites: Iterable[Site], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the weights and biases of some sites."""
    shapes = linear_tensors(config) | light_tensors(config)
    weights = [name for site in sites for name in weight_rows(config, *site)]
    names = chain.from_iterable((name, f"{name.removesuffix('weight')}bias") for name in weights)
    return {name: shapes[name] for name in names if name in shapes}


def site_number(layer: int, operator: Projection) -> int:
    """Return layer * 5 + the operator's place in `PROJECTIONS`."""
    return layer * len(PROJECTIONS) + PROJECTIONS.index(operator)


@dataclass(frozen=True)
class SiteShape:
    """One operator of a layer, or the LM head. `out_features`: of all modules side by side."""

    layer: int
    operator: Projection
    in_features: int
    out_features: int

    @cached_property
    def number(self) -> int:
        """The site's number, as of `site_number`."""
        return site_number(self.layer, self.operator)

    @property
    def site(self) -> Site:
        """Layer and operator."""
        return self.layer, self.operator

    def __str__(self) -> str:
        return f"layer {self.layer} {self.operator}"


@dataclass(frozen=True)
class PadLayout:
    """The sites of one model, each once, in the order of their numbers; at least one.

    A token takes r, uint32 [in_features], and u = r W, uint32 [out_features], at every site.
    Raises ValueError for sites out of order, repeated or none.
    """

    sites: tuple[SiteShape, ...]

    def __post_init__(self) -> None:
        numbers = [site.number for site in self.sites]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"pad layout: got sites {numbers[:8]}, expected ascending numbers")

    @classmethod
    def of(cls, config: ModelConfig, placed: Iterable[Site]) -> PadLayout:
        """Return the layout of some (layer, operator) pairs of a model."""
        sites = []
        for layer, operator in placed:
            _, (outputs, inputs) = config.row_layout(operator)
            sites.append(SiteShape(layer, operator, inputs, outputs))
        return cls(tuple(sorted(sites, key=lambda site: site.number)))

    @cached_property
    def by_number(self) -> dict[int, SiteShape]:
        """Sites by their numbers."""
        return {site.number: site for site in self.sites}

    @property
    def token_bytes(self) -> int:
        """Bytes of u of one token at all sites; r is computed again, never kept."""
        return sum(site.out_features for site in self.sites) * WORD_BYTES
