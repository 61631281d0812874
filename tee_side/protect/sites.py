"""What happens at a linear operator around its product: quantisation, and the bias.

A *site* is one linear operator of one layer. Its input becomes what a product is taken of
(`encode`), and the product becomes the operator's output (`decode`), the same way wherever the
product is computed. Shape suffixes: T rows, I in_features, O out_features of all modules together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, Protocol, TypeAlias

import torch

from protocol.errors import ActivationRangeError
from protocol.integer import digits_below
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.checkpoint import Checkpoint, linear_tensors, module_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear
from protocol.model.weights import load_bias
from protocol.native import compiled_for
from tee_side.native import sites as compiled
from tee_side.protect.calibration import Calibration
from tee_side.words import Site

Biases: TypeAlias = dict[Site, torch.Tensor]


class LinearSite(Protocol):
    """Turns an input into what is multiplied, and the product into the output."""

    def encode(self, x_TI: torch.Tensor, /) -> torch.Tensor:
        """Return what the weight is multiplied by."""
        ...

    def decode(self, y_TO: torch.Tensor, /) -> torch.Tensor:
        """Return the output, in the model's dtype and with its bias."""
        ...


class Sites(Protocol):
    """The sites of a model."""

    def __getitem__(self, site: Site, /) -> LinearSite: ...


class FloatSite:
    """Floats as they are; only the bias is left to add, if there is one."""

    def __init__(self, bias_O: torch.Tensor | None = None) -> None:
        self.bias_O = bias_O

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the input itself."""
        return x_TI

    def decode(self, y_TO: torch.Tensor) -> torch.Tensor:
        """Add the bias."""
        return y_TO if self.bias_O is None else y_TO + self.bias_O


class FloatSites:
    """Sites of a model that is computed in floats."""

    def __init__(self, biases: Biases) -> None:
        self._biases = biases

    def __getitem__(self, site: Site) -> FloatSite:
        return FloatSite(self._biases.get(site))


class IntegerSite:
    """Integers in a ring, by scales fixed in advance; see `tee_side.protect.calibration`."""

    def __init__(self, sites: IntegerSites, site: Site) -> None:
        self.scales = sites.calibration.sites[site]
        self.bias_O = sites.biases.get(site)
        self.dtype = sites.dtype
        self._site = site
        # How many digits hold what `encode` returns, whatever the input is.
        self.digits = digits_below(self.scales.norm_limit)
        self.compiled = compiled_for(sites.dtype)

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Quantise to int32 [T, I]. Raises ActivationRangeError rather than let a sum wrap."""
        try:
            return self.scales.encode(x_TI)
        except ActivationRangeError as error:
            raise self._out_of_range(error) from None

    def refuse(self, norm: float) -> NoReturn:
        """Raise ActivationRangeError for a row with this norm."""
        try:
            self.scales.refuse(norm)
        except ActivationRangeError as error:
            raise self._out_of_range(error) from None

    def _out_of_range(self, error: ActivationRangeError) -> ActivationRangeError:
        layer, operator = self._site
        return ActivationRangeError(
            f"{operator} in layer {layer}: {error.where}",
            got=error.got,
            expected=f"{error.expected} (calibrate with text more like this one)",
        )

    def decode(self, y_TO: torch.Tensor) -> torch.Tensor:
        """Scale back, and add the bias."""
        if self.compiled:
            scaled_TO = compiled.decode(y_TO, None, self.scales.factor_N, self.bias_O, self.dtype)
            if scaled_TO is not None:
                return scaled_TO
        # int32 * float32 is a float32 product of the rounded integer.
        y_TO = (y_TO * self.scales.factor_N).to(self.dtype)
        return y_TO if self.bias_O is None else y_TO + self.bias_O


class IntegerSites:
    """Sites of a model that is computed in integers."""

    def __init__(self, calibration: Calibration, biases: Biases, dtype: torch.dtype) -> None:
        self.calibration = calibration
        self.biases = biases
        self.dtype = dtype

    def check_weights(self, site: Site, weights: QuantizedLinear) -> None:
        """Check that the scales are those of these weights. Raises CalibrationError."""
        self.calibration.check_weights(site, weights.scale, weights.max_row_norm())

    def __getitem__(self, site: Site) -> IntegerSite:
        return IntegerSite(self, site)


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
    shapes = linear_tensors(config, FUSED_MODULES)
    names = [
        f"{module_name(layer, module)}.{kind}"
        for layer, operator in sites
        for module in FUSED_MODULES[operator]
        for kind in ("weight", "bias")
    ]
    return {name: shapes[name] for name in names if name in shapes}
