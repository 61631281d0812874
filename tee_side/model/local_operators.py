"""What the TEE has of a model: norms and RoPE, and the operators that stay with their weights.

A `TeeLayer` has the light operators of one layer, bound to its norms, which never leave. Of the
others it has those that a policy keeps, and no weights besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch.nn.functional import embedding, linear

from protocol.integer import int8_product, ring_product
from protocol.model.checkpoint import (
    EMBEDDING,
    FINAL_NORM,
    Checkpoint,
    light_tensors,
    lm_head_name,
    norm_names,
)
from protocol.model.config import ModelConfig
from protocol.model.forward import Layer, Norm, bound
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.rope import Rope
from protocol.model.weights import CPU, LayerNorms, load_bias, load_linear, load_tensor
from protocol.native import compiled_for
from tee_side.model.kv_cache import KVCache
from tee_side.native import kernels
from tee_side.observer import Observer, timed
from tee_side.policy.placement import Placement, Policy
from tee_side.protect.masks.mask import Mask
from tee_side.protect.sites import DynamicSite, IntegerSite, IntegerSites
from tee_side.remote.call import RunParts
from tee_side.words import PHASES, Operator, Site, is_linear, layer_of

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

# What computes an operator in the TEE, biases included, by layer (None: no layer has it).
LocalOperators: TypeAlias = dict[tuple[int | None, Operator], Product]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeeLayer(Layer):
    """The local operators of one layer, timed where there is an observer.

    `kv_cache`: `KVCache.append` of this layer; `attention`: see `tee_side.model.local_ops`.
    `window`: how many tokens back a token may look, itself included; None for all.
    """

    kv_cache: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    window: int | None


@dataclass(eq=False)
class TeeModel:
    """The part of a model that is needed whatever the placement is.

    `norms`, `final_norm`: the weights; `layers`, `norm`: what the forward pass calls.
    """

    config: ModelConfig
    dtype: torch.dtype
    norms: list[LayerNorms]
    final_norm: torch.Tensor
    rope: Rope
    observer: Observer | None = None
    layers: tuple[TeeLayer, ...] = field(init=False)
    norm: Norm = field(init=False)

    def __post_init__(self) -> None:
        # One of the two is imported: a run does not trust the code of the other.
        found = "native.kernels" if compiled_for(self.dtype) else "model.local_ops"
        ops: Any = import_module(f"tee_side.{found}")
        self.layers = tuple(self._layer(index, ops) for index in range(len(self.norms)))
        norm = partial(ops.rms_norm, weight=self.final_norm, eps=self.config.rms_norm_eps)
        self.norm = timed(norm, self.observer, "rms_norm", None)

    def _layer(self, index: int, ops: Any) -> TeeLayer:
        def told(function: Callable[..., Any], name: Any) -> Callable[..., Any]:
            return timed(function, self.observer, name, index)

        window = self.config.sliding_windows[index]
        return TeeLayer(
            index=index,
            **bound(self.norms[index], self.config, ops, told),
            kv_cache=told(partial(KVCache.append, layer=index), "kv_cache"),
            attention=told(partial(ops.attention, window=window), "attention"),
            window=window,
        )

    def observed(self, observer: Observer | None) -> TeeModel:
        """Return the model with an observer that is told of every local operator."""
        return replace(self, observer=observer)


def load_tee_model(config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> TeeModel:
    """Read the norms; the checkpoint must have been checked for them. Raises ModelError."""
    shapes = light_tensors(config)

    def read(name: str) -> torch.Tensor:
        return load_tensor(checkpoint, name, shapes[name], dtype=dtype)

    norms = [
        LayerNorms(**{short: read(name) for short, name in norm_names(config, layer).items()})
        for layer in range(config.num_hidden_layers)
    ]
    return TeeModel(config, dtype, norms, read(FINAL_NORM), Rope(config, dtype))


def sites_where(policy: Policy, layers: int, placed: Callable[[Placement], bool]) -> list[Site]:
    """Return the sites that are placed so in some phase."""
    return [
        (layer, operator)
        for layer in range(layers)
        for operator in policy.projections
        if is_linear(operator) or layer == layers - 1
        if any(placed(policy.at(operator, layer, phase)) for phase in PHASES)
    ]


def sites_here(policy: Policy, layers: int) -> list[Site]:
    """Return the sites that the TEE computes in some phase, or when pads are not in stock."""
    stock = policy.prefill == "stock"
    return sites_where(policy, layers, lambda p: p.place == "tee" or (stock and p.mask is not None))


def sites_under(policy: Policy, layers: int, mask: Mask) -> list[Site]:
    """Return the sites that are under a mask in some phase."""
    return sites_where(policy, layers, lambda placement: placement.mask == mask)


def load_local_operators(
    parts: RunParts,
    *,
    sites: Iterable[Site],
    integers: IntegerSites | None,
    held: dict[Site, QuantizedLinear],
) -> LocalOperators:
    """Read the weights of `sites`, and what else the policy keeps.

    `integers` is given for policies with int8 arithmetic, and only for them. `held`: gets the
    integers of every site, for who else computes with them. Raises ModelError, CalibrationError.
    """
    policy, config, checkpoint = parts.policy, parts.config, parts.checkpoint
    dtype, local = parts.dtype, LocalOperators()
    kept = {o for o, placed in policy.operators.items() if any(p.place == "tee" for p in placed)}
    vocabulary = (config.vocab_size, config.hidden_size)
    weight: torch.Tensor | None = None
    if "embedding" in kept:
        weight = load_tensor(checkpoint, EMBEDDING, vocabulary, dtype=dtype)
        local[None, "embedding"] = partial(embedding, weight=weight)
    if "lm_head" in kept and policy.arithmetic == "float":
        if weight is None or not config.tie_word_embeddings:
            weight = load_tensor(checkpoint, lm_head_name(config), vocabulary, dtype=dtype)
        local[None, "lm_head"] = partial(linear, weight=weight)
    for site in sites:
        local[layer_of(site), site[1]] = load_site(parts, site, integers, held)
    return local


def load_site(
    parts: RunParts,
    site: Site,
    integers: IntegerSites | None,
    held: dict[Site, QuantizedLinear],
) -> Product:
    """Read the weights of one site. Raises ModelError, CalibrationError."""
    config, checkpoint, dtype = parts.config, parts.checkpoint, parts.dtype
    if parts.policy.arithmetic == "float":
        return load_linear(checkpoint, config, *site, dtype=dtype, device=CPU)
    weights = load_quantized(checkpoint, config, *site)
    if integers is not None:
        held[site] = weights
        integers.check_weights(site, weights)
    if integers is not None and site[1] != "lm_head":
        return partial(_integer_product, weights, IntegerSite(integers, site))
    bias_O = load_bias(checkpoint, config, *site, dtype=dtype)
    return partial(_dynamic_product, weights, DynamicSite(weights.scale, bias_O, dtype))


def not_here(_x: torch.Tensor) -> torch.Tensor:
    """Stand where an operator would, whose weights the TEE does not hold. Raises LookupError."""
    raise LookupError("an operator was called in the TEE that the policy placed on the GPU")


def _dynamic_product(
    weights: QuantizedLinear, site: DynamicSite, x_TI: torch.Tensor
) -> torch.Tensor:
    """Compute in int8, weights and input: one pass over a quarter of float32's bytes.

    Of the LM head alone, eight bits of input cost 0.2 % of the demo model's top-1 agreement
    (benchmarks/accuracy.py), sixteen twice the time.
    """
    if site.compiled:
        return kernels.linear8(x_TI, weights.weight, weights.scale, site.bias_O)
    return site.decode(int8_product(site.to_bytes(x_TI), weights.weight), x_TI)


def _integer_product(
    weights: QuantizedLinear, site: IntegerSite, x_TI: torch.Tensor
) -> torch.Tensor:
    """Compute with the integers that a service would get without a mask; no sum can wrap.

    In as many digits as the calibration's bound needs: the time is the same for every input.
    """
    elements_TI = site.encode(x_TI)
    return site.decode(ring_product(elements_TI, weights.weight, site.digits), x_TI)
