"""What happens at a linear operator around its product: quantisation, and the bias.

A *site* is one linear operator of one layer. Its input becomes what a product is taken of
(`encode`), and the product becomes the operator's output (`decode`), the same way wherever the
product is computed. Shape suffixes: T rows, I in_features, O out_features of all modules together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch

from protocol.errors import ActivationRangeError
from protocol.messages import FUSED_MODULES, LinearOperator
from protocol.model.checkpoint import Checkpoint, linear_tensors, module_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear
from protocol.model.weights import load_tensor
from tee_side.calibration import Calibration
from tee_side.vocabulary import Site

Biases: TypeAlias = dict[Site, torch.Tensor]


class Sites(Protocol):
    """Turns inputs into what is multiplied, and products into outputs."""

    def encode(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> torch.Tensor:
        """Return what the weight is multiplied by."""
        ...

    def decode(self, layer: int, operator: LinearOperator, y_TO: torch.Tensor) -> torch.Tensor:
        """Return the output, in the model's dtype and with its bias."""
        ...


class FloatSites:
    """Floats as they are; only the bias is left to add."""

    def __init__(self, biases: Biases) -> None:
        self._biases = biases

    def encode(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the input itself."""
        return x_TI

    def decode(self, layer: int, operator: LinearOperator, y_TO: torch.Tensor) -> torch.Tensor:
        """Add the bias."""
        return _with_bias(y_TO, self._biases.get((layer, operator)))


class IntegerSites:
    """Integers in a ring, by scales fixed in advance; see `tee_side.calibration`."""

    def __init__(self, calibration: Calibration, biases: Biases, dtype: torch.dtype) -> None:
        self._calibration = calibration
        self._scales = calibration.sites
        self._biases = biases
        self._dtype = dtype

    def check_weights(self, site: Site, weights: QuantizedLinear) -> None:
        """Check that the scales are those of these weights. Raises CalibrationError."""
        self._calibration.check_weights(site, weights.scale, weights.max_row_norm())

    def encode(self, layer: int, operator: LinearOperator, x_TI: torch.Tensor) -> torch.Tensor:
        """Quantise to int32 [T, I]. Raises ActivationRangeError rather than let a sum wrap."""
        try:
            return self._scales[layer, operator].encode(x_TI)
        except ActivationRangeError as error:
            raise ActivationRangeError(
                f"{operator} in layer {layer}: {error.where}",
                got=error.got,
                expected=f"{error.expected} (calibrate with text more like this one)",
            ) from None

    def decode(self, layer: int, operator: LinearOperator, y_TO: torch.Tensor) -> torch.Tensor:
        """Scale back, and add the bias."""
        y_TO = self._scales[layer, operator].decode(y_TO, self._dtype)
        return _with_bias(y_TO, self._biases.get((layer, operator)))


def load_biases(
    checkpoint: Checkpoint,
    config: ModelConfig,
    operators: Iterable[LinearOperator],
    dtype: torch.dtype,
) -> Biases:
    """Read the biases [O] of some operators, 0 for modules without one. Raises ModelError."""
    biases: Biases = {}
    for operator in operators:
        modules = FUSED_MODULES[operator]
        if not config.biased_modules.intersection(modules):
            continue
        every_layer = [(layer, operator) for layer in range(config.num_hidden_layers)]
        shapes = tensors_of(every_layer, config)
        checkpoint.require({n: shape for n, shape in shapes.items() if n.endswith(".bias")})
        for layer in range(config.num_hidden_layers):
            parts = []
            for module in modules:
                name = f"{module_name(layer, module)}.bias"
                size = config.module_shape(module)[:1]
                parts.append(
                    load_tensor(checkpoint, name, size, dtype=dtype)
                    if module in config.biased_modules
                    else torch.zeros(size, dtype=dtype)
                )
            biases[layer, operator] = torch.cat(parts)
    return biases


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


def _with_bias(y_TO: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    return y_TO if bias_O is None else y_TO + bias_O
