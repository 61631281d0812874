"""Operators that run in the TEE, with the weights that they need and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch.nn.functional import embedding, linear

from protocol.integer import int8_product, ring_product
from protocol.model.checkpoint import EMBEDDING, Checkpoint, lm_head_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import (
    INT8_MAX,
    QuantizedLinear,
    load_quantized,
    load_quantized_lm_head,
)
from protocol.model.weights import CPU, load_linear, load_tensor
from tee_side.policy.placement import Policy
from tee_side.protect.sites import IntegerSite, IntegerSites
from tee_side.threads import TorchThreads
from tee_side.words import PHASES, Operator, Site, is_linear

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T")


class LocalOperators:
    """Computes in the TEE. Holds only the weights of operators that are asked for here.

    `products`: the linear operators that stay, by site; `token_embedding` and `lm_head` likewise.
    """

    def __init__(
        self,
        products: Mapping[Site, Product],
        token_embedding: torch.Tensor | None = None,
        lm_head: Product | None = None,
    ) -> None:
        self._products = products
        self._embedding = token_embedding
        self._lm_head = lm_head
        # A small step leaves all but one to others; what is large is read with all of them.
        self._threads = torch.get_num_threads()

    def embedding(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Look up [T, D]."""
        return embedding(token_ids_T, _held(self._embedding))

    def function(self, operator: Operator, layer: int | None) -> Product:
        """Return what computes an operator of a layer, or of none."""
        if layer is not None and is_linear(operator):
            return self.linear((layer, operator))
        return self.embedding if operator == "embedding" else self.lm_head

    def linear(self, site: Site) -> Product:
        """Return what computes a linear operator, biases included."""

        def product(x_TI: torch.Tensor) -> torch.Tensor:
            compute = _held(self._products.get(site))
            with TorchThreads(self._threads):
                return compute(x_TI)

        return product

    def lm_head(self, h_ND: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V]."""
        lm_head = _held(self._lm_head)
        with TorchThreads(self._threads):
            return lm_head(h_ND)


def sites_here(policy: Policy, config: ModelConfig) -> list[Site]:
    """Return the linear operators that the policy keeps, in some phase."""
    return [
        (layer, operator)
        for operator in policy.operators
        if is_linear(operator)
        for layer in range(config.num_hidden_layers)
        if any(policy.at(operator, layer, phase).place == "tee" for phase in PHASES)
    ]


def load_local_operators(
    config: ModelConfig,
    checkpoint: Checkpoint,
    policy: Policy,
    dtype: torch.dtype,
    *,
    sites: Iterable[Site],
    integers: IntegerSites | None,
    held: dict[Site, QuantizedLinear] | None = None,
) -> LocalOperators:
    """Read the weights of the linear operators at `sites`, and what else the policy keeps.

    `integers` is given for policies with int8 arithmetic, and only for them. `held`: gets the
    integers of every site, for who else computes with them. Raises ModelError, CalibrationError.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    token_embedding: torch.Tensor | None = None
    lm_head: Product | None = None
    if not all(p.place == "gpu" for p in policy.operators["embedding"]):
        token_embedding = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=dtype)
    if not all(p.place == "gpu" for p in policy.operators["lm_head"]):
        if integers is not None:
            lm_head = _IntegerLMHead(load_quantized_lm_head(checkpoint, config))
        else:
            weight = token_embedding
            if weight is None or not config.tie_word_embeddings:
                name = lm_head_name(config)
                weight = load_tensor(checkpoint, name, vocabulary, dtype=dtype)
            lm_head = partial(linear, weight=weight)
    products: dict[Site, Product] = {}
    for layer, operator in sites:
        if integers is None:
            products[layer, operator] = load_linear(
                checkpoint, config, layer, operator, dtype=dtype, device=CPU
            )
        else:
            weights = load_quantized(checkpoint, config, layer, operator)
            integers.check_weights((layer, operator), weights)
            products[layer, operator] = _IntegerProduct(weights, integers[layer, operator])
            if held is not None:
                held[layer, operator] = weights
    return LocalOperators(products, token_embedding, lm_head)


class _IntegerLMHead:
    """The LM head in int8, weights and input: one pass over a quarter of the bytes of float32.

    It never leaves the TEE, so that each row may have a scale of its own. Eight bits of input cost
    0.2 % of the demo model's top-1 agreement (benchmarks/accuracy.py), sixteen twice the time.
    """

    def __init__(self, weights: QuantizedLinear) -> None:
        self._weights = weights

    def __call__(self, h_ND: torch.Tensor) -> torch.Tensor:
        h32_ND = h_ND.float()
        # The smallest normal number: a row of zeros stays one.
        smallest = torch.finfo(torch.float32).tiny
        scale_N1 = (h32_ND.abs().amax(-1, keepdim=True) / INT8_MAX).clamp_min_(smallest)
        x_ND = h32_ND.div(scale_N1).round_().to(torch.int8)
        y_NV = int8_product(x_ND, self._weights.weight).float()
        return y_NV.mul_(scale_N1).mul_(self._weights.scale).to(h_ND.dtype)


class _IntegerProduct:
    """The integers that a service would compute, without a mask; no sum can wrap.

    In as many digits as the calibration's bound needs: the time is the same for every input.
    """

    def __init__(self, weights: QuantizedLinear, site: IntegerSite) -> None:
        self._weights = weights
        self._site = site

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        x_TI = self._site.encode(x_TI)
        return self._site.decode(ring_product(x_TI, self._weights.weight, self._site.digits))


def _held(value: T | None) -> T:
    """Narrow a weight that is never asked for unless the policy keeps its operator here."""
    if value is None:
        raise LookupError("an operator was called in the TEE that the policy placed on the GPU")
    return value
