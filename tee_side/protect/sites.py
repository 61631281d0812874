"""What happens at a linear operator around its product: quantisation, and the bias.

A *site* is one linear operator of one layer, or the LM head. Its input becomes what a product is
taken of (`encode`), and the product becomes the operator's output (`decode`), the same way wherever
the product is computed. Shape suffixes: T rows, I in_features, O out_features of all modules.

The sites that are padded are a `PadLayout`: what the pads of one token consist of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NoReturn, TypeAlias

import torch

from protocol.errors import ActivationRangeError, CalibrationError
from protocol.integer import digits_below
from protocol.messages import LinearOperator, Projection
from protocol.model.checkpoint import Checkpoint, light_tensors, linear_tensors
from protocol.model.config import ModelConfig
from protocol.model.weights import INT8_MAX, QuantizedLinear, load_bias, weight_rows
from protocol.native import compiled_for
from tee_side.native import kernels as compiled
from tee_side.protect.calibration import MAX_SUM, Calibration, SiteScales
from tee_side.words import PROJECTIONS, Site

Biases: TypeAlias = dict[Site, torch.Tensor]

# Of an element of r or u.
WORD_BYTES = 4

# What is left of a limit after rounding. A float32 sum of K squares, in any order, is off by less
# than K * 2^-24 of itself, its root by half of that: 2^-8 for the largest K of an int8 product.
_MARGIN = 0.995


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FloatSite:
    """Floats as they are; only the bias is left to add, if there is one."""

    bias_O: torch.Tensor | None = None

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the input itself."""
        return x_TI

    def decode(self, y_TO: torch.Tensor, _x_TI: torch.Tensor) -> torch.Tensor:
        """Add the bias."""
        return y_TO if self.bias_O is None else y_TO + self.bias_O


class IntegerSite:
    """Integers in a ring, by scales fixed in advance; see `tee_side.protect.calibration`.

    `dtype`: of outputs; `where`: how messages begin.
    """

    largest = 0.0

    def __init__(
        self,
        scales: SiteScales,
        bias_O: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        where: str = "",
    ) -> None:
        self.step, self.factor_O = scales.input_scale, scales.factor_N
        self.row_limit = scales.norm_limit * _MARGIN
        self.bias_O, self.dtype = bias_O, dtype
        self._where = where
        # How many digits hold what `encode` returns, whatever the input is.
        self.digits = digits_below(scales.norm_limit)
        self.compiled = compiled_for(dtype)

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Quantise a float input [T, I] to int32 [T, I]: round(x / step), ties to even.

        Elementwise float32, so that a row's integers do not depend on the rows beside it. Raises
        ActivationRangeError for a row whose product could wrap, and for values that are not finite.

        GPU sees: the result, where a policy sends it in the clear; under a pad or shares, nothing.
        """
        if compiled_for(x_TI.dtype):
            scaled_TI, _, norm, *_ = compiled.encode(x_TI, self.step, None)
        else:
            scaled_TI = x_TI.to(torch.float32).div(self.step).round_()
            # A norm that is NaN is the largest of all, and is refused.
            norm = torch.linalg.vector_norm(scaled_TI, dim=-1).amax().item()
        if not norm <= self.row_limit:
            self.refuse(norm)
        # Whole numbers from here on: a float32 that has been rounded converts exactly.
        return scaled_TI.to(torch.int32)

    def refuse(self, norm: float) -> NoReturn:
        """Raise ActivationRangeError for a row with this norm."""
        # In whole multiples: an exact norm would name the token to a reader of the log.
        times = norm / self.row_limit
        finite = math.isfinite(times)
        raise ActivationRangeError(
            f"{self._where}length of an input row",
            f"less than {math.floor(times) + 1} times" if finite else "one that is not finite",
            "at most once what cannot wrap in the ring (calibrate with text more like this one)",
        )

    def decode(self, y_TO: torch.Tensor, _x_TI: torch.Tensor) -> torch.Tensor:
        """Scale back, and add the bias."""
        return _scaled_back(y_TO, None, self)


class DynamicSite:
    """Integers up to `largest`, each row under a scale of its own, which never leaves the TEE.

    No sum of such a product can wrap, where `largest` is `largest_input` or less. `factor_O`:
    float32, what one step of an output's weights stands for; `dtype`: of inputs and outputs.
    """

    step = None
    row_limit = math.inf

    def __init__(
        self, factor_O: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype, largest: int
    ) -> None:
        self.factor_O, self.bias_O, self.dtype = factor_O, bias_O, dtype
        # What a row's largest element becomes.
        self.largest = float(largest)
        self.digits = digits_below(largest)
        self.compiled = compiled_for(dtype)

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Quantise to int32 [T, I]. Raises ActivationRangeError for what is not finite."""
        if not self._scales(x_TI).isfinite().all():
            self.refuse(math.nan)
        return self.quantise(x_TI)

    def quantise(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Quantise to int32 [T, I]; of a row that is not finite to anything: so is its output."""
        return x_TI.float().div(self._scales(x_TI)).round_().to(torch.int32)

    def decode(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """Scale back by the scales of the rows of x, and add the bias."""
        return _scaled_back(y_TO, self._scales(x_TI), self)

    def _scales(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the scale under which each row fits, its largest element / `largest`: [T, 1]."""
        # The smallest normal number: a row of zeros stays one.
        smallest = torch.finfo(torch.float32).tiny
        return (x_TI.float().abs().amax(-1, keepdim=True) / self.largest).clamp_min_(smallest)

    def refuse(self, _norm: float) -> NoReturn:
        """Raise ActivationRangeError for a row that is not finite."""
        raise ActivationRangeError("lm_head: input row", "not finite", "finite numbers")


# Each turns an input [T, I] into what the weight is multiplied by (`encode`), and the product and
# that input into the output, in the model's dtype and with its bias (`decode`).
LinearSite: TypeAlias = FloatSite | IntegerSite | DynamicSite


def largest_input(in_features: int) -> int:
    """Return the largest integer that inputs may have whatever the int8 weights are.

    No sum of so many products wraps in the ring, and two digits hold it, which is what the TEE
    pays for: 32,639 up to 518 in_features, 8,256 for 2,048, 2,064 for 8,192.
    """
    return min(127 * 257, MAX_SUM // (INT8_MAX * in_features))


def _scaled_back(
    y_TO: torch.Tensor, scale_T1: torch.Tensor | None, site: IntegerSite | DynamicSite
) -> torch.Tensor:
    """Return the product under the scales of its rows and outputs, and the bias added."""
    if site.compiled:
        scaled_TO = compiled.decode(y_TO, None, scale_T1, site.factor_O, site.bias_O, site.dtype)
        if scaled_TO is not None:
            return scaled_TO
    # int32 * float32 is a float32 product of the rounded integer.
    scaled_TO = y_TO * (site.factor_O if scale_T1 is None else scale_T1)
    if scale_T1 is not None:
        scaled_TO.mul_(site.factor_O)
    scaled_TO = scaled_TO.to(site.dtype)
    return scaled_TO if site.bias_O is None else scaled_TO + site.bias_O


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IntegerSites:
    """Sites of a model that is computed in integers.

    `head`: the LM head's; None where it does not leave.
    """

    calibration: Calibration
    biases: Biases
    dtype: torch.dtype
    head: DynamicSite | None = None

    def check_weights(self, site: Site, weights: QuantizedLinear) -> None:
        """Check that the scales are those of these weights. Raises CalibrationError."""
        if site[1] != "lm_head":
            self.calibration.check_weights(site, weights.scale, weights.max_row_norm())
        elif self.head is not None and not weights.scale.equal(self.head.factor_O):
            raise CalibrationError(
                "lm_head: weight scales", "others", "those that were read at the start"
            )

    def layer_site(self, site: Site) -> IntegerSite:
        """Return the site of an operator of a layer."""
        layer, operator = site
        where = f"{operator} in layer {layer}: "
        return IntegerSite(self.calibration.sites[site], self.biases.get(site), self.dtype, where)

    def __getitem__(self, site: Site) -> IntegerSite | DynamicSite:
        if site[1] != "lm_head":
            return self.layer_site(site)
        if self.head is None:
            raise LookupError("an LM head that does not leave")
        return self.head


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What is known of a model's weights: integers in memory (`held`), and the model directory.

    `dtype`: that services hold floats in. `integers`: where the policy computes with them.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    held: Mapping[Site, QuantizedLinear]
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
