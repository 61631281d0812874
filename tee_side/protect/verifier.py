"""Prepares the checks that a policy asks for.

`Secrets` are drawn once a run, for all linear operators that the policy verifies. A `ResultCheck`
is what the results of one operator under one mask are checked with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from protocol.errors import PolicyError
from protocol.integer import exact_product
from protocol.messages import (
    FUSED_MODULES,
    LinearOperator,
    LinearRequest,
    ModuleName,
    Request,
    RingLinearRequest,
)
from protocol.model.checkpoint import Checkpoint, module_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized, quantize_rows
from protocol.model.weights import CPU, FusedLinear, load_linear
from protocol.tensors import to_torch
from tee_side.protect.masks.mask import FeatureMask, Mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import IntegerSites, tensors_of
from tee_side.protect.verification import ExactCheck, FloatCheck, Tolerance, within_tolerance
from tee_side.words import Site

# Blocks of a weight, and the columns of a product that each makes.
Blocks: TypeAlias = Iterator[tuple[slice, torch.Tensor]]
# Hands blocks on while there is time to multiply so many rows by each.
InTime: TypeAlias = Callable[[Blocks, int], Blocks]


class ResultCheck(Protocol):
    """Checks the results of one operator under one mask."""

    def holds(self, x: Any, y: torch.Tensor, sent: Sequence[Any]) -> bool:
        """Say whether y is the plain result for x. `sent`: what crossed instead of x.

        Raises ActivationRangeError for an input that is not finite.
        """
        ...

    def wrong(
        self, answers: Sequence[tuple[Request, torch.Tensor]], in_time: InTime
    ) -> Sequence[int]:
        """Return which answers to a refused result are wrong, by computing each once more.

        Raises what `in_time` raises; ModelError and ManifestError for weights that cannot be read
        again; ActivationRangeError where what was sent is not finite.
        """
        ...


class Unverified:
    """Stands where a `ResultCheck` would, for what a policy sends with verify = "none"."""

    __slots__ = ()


# Said by name: nothing that is missing by mistake looks like it.
UNVERIFIED = Unverified()


def check_verifiable(
    policy: str, sites: Iterable[Site], config: ModelConfig, checkpoint: Checkpoint
) -> None:
    """Check that the directory has the weights behind all sites that a policy verifies.

    Raises PolicyError that names what is missing, ModelError for a tensor of another shape.
    """
    tensors = tensors_of(sites, config)
    missing = [name for name in tensors if not checkpoint.holds([name])]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PolicyError(
            f'policy {policy}: verify = "freivalds"',
            got=f"no {missing[0]}{more} in {checkpoint.directory}",
            expected="the weights whose products are to be verified",
        )
    checkpoint.require(tensors)


def operator_of(modules: Sequence[ModuleName]) -> LinearOperator:
    """Return the linear operator that modules are a part of."""
    (found,) = (operator for operator, names in FUSED_MODULES.items() if modules[0] in names)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Where weights are read from: kept in memory (`held`, int8), or the model directory."""

    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    held: Mapping[Site, QuantizedLinear]

    def integers(self, layer: int, operator: LinearOperator) -> QuantizedLinear:
        """Return a site's integers. Raises ModelError."""
        found = self.held.get((layer, operator))
        return found or load_quantized(self.checkpoint, self.config, layer, operator)

    def integer_blocks(
        self, layer: int, modules: Sequence[ModuleName]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the integers of some modules side by side, int8 [n, I], and their columns.

        Never all of them at once, where they are not held. Raises ModelError, ManifestError.
        """
        held = self.held.get((layer, operator_of(modules)))
        start = 0
        for module in modules:
            name = f"{module_name(layer, module)}.weight"
            size = self.config.module_shape(module)[0]
            if held is not None:
                yield slice(start, start + size), held.weight[held.rows[module]]
            else:
                for columns, block in self._blocks(name, self.config.module_shape(module), start):
                    yield columns, quantize_rows(block, name)[0]
            start += size

    def float_blocks(
        self, layer: int, modules: Sequence[ModuleName]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the weights of some modules side by side [n, I], as `integer_blocks` does."""
        start = 0
        for module in modules:
            shape = self.config.module_shape(module)
            name = f"{module_name(layer, module)}.weight"
            for columns, block in self._blocks(name, shape, start):
                yield columns, block.to(self.dtype)
            start += shape[0]

    def _blocks(
        self, name: str, shape: tuple[int, ...], start: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows, block in self.checkpoint.blocks(name, shape):
            yield slice(start + rows.start, start + rows.stop), block

    def floats(self, layer: int, operator: LinearOperator) -> FusedLinear:
        """Return a site's weight as a service holds it. Raises ModelError."""
        return load_linear(
            self.checkpoint, self.config, layer, operator, dtype=self.dtype, device=CPU
        )


@dataclass(frozen=True, slots=True, eq=False)
class Secrets:
    """What the linear operators that a policy verifies are checked with; drawn once a run."""

    weights: Weights
    randomness: Randomness = field(repr=False)
    vectors: Mapping[Site, ExactCheck | FloatCheck] = field(repr=False)

    @staticmethod
    def draw(
        sites: Iterable[Site],
        weights: Weights,
        integers: IntegerSites | None,
        randomness: Randomness,
    ) -> Secrets:
        """Read every weight of `sites` that is not held, one at a time, and draw its vectors.

        `integers`: where the policy computes with them; norms of weights and scales are compared,
        which the bounds rest on. Raises ModelError, CalibrationError, KernelError.
        """
        vectors: dict[Site, ExactCheck | FloatCheck] = {}
        for site in sites:
            if integers is None:
                vectors[site] = FloatCheck.draw(weights.floats(*site).weight, randomness)
                continue
            found = weights.integers(*site)
            if site not in weights.held:  # those were checked when they were loaded
                integers.check_weights(site, found)
            vectors[site] = ExactCheck.draw(found.weight, randomness)
        return Secrets(weights, randomness, vectors)

    def check(self, site: Site, mask: Mask | None) -> LinearCheck:
        """Return what checks a site's results under a mask.

        Raises LookupError for a site that the policy does not verify.
        """
        if site not in self.vectors:
            raise LookupError("a linear operator that the policy does not verify")
        vectors, tolerance = self.vectors[site], Tolerance.of(self.weights.dtype, mask)
        return LinearCheck(
            vectors.holds
            if isinstance(vectors, ExactCheck)
            else partial(vectors.holds, tolerance=tolerance),
            self.weights,
            site[0],
            tolerance,
            isinstance(mask, FeatureMask),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LinearCheck:
    """A `ResultCheck` of one linear operator, whose products have no bias.

    `holds`: see `ResultCheck.holds`; x is [T, I], y [T, O]. `tolerance`: of results that are
    floats. `transformed`: services hold other weights than the TEE does, so that none of their
    answers can be computed once more.
    """

    holds: Callable[..., bool] = field(repr=False)
    weights: Weights
    layer: int
    tolerance: Tolerance
    transformed: bool

    def wrong(
        self, answers: Sequence[tuple[Request, torch.Tensor]], in_time: InTime
    ) -> Sequence[int]:
        """See `ResultCheck.wrong`. Of transformed weights, every answer counts as wrong."""
        if self.transformed:
            return range(len(answers))
        # Shares of one product meet each block together: it is read once for all of them.
        products: dict[tuple[ModuleName, ...], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        wrong: set[int] = set()
        for index, (request, y) in enumerate(answers):
            match request:
                case RingLinearRequest():
                    pairs = products.setdefault(request.module_names, {})
                    pairs[index] = to_torch(request.elements), y
                case LinearRequest():
                    x = to_torch(request.hidden_states)
                    blocks = self.weights.float_blocks(self.layer, request.module_names)
                    near = self.tolerance.of_answers()
                    if not within_tolerance(x, in_time(blocks, len(x)), y, near):
                        wrong.add(index)
                case _:
                    raise LookupError(f"an answer to {request.method} of a linear operator")
        for modules, pairs in products.items():
            rows = max(len(x) for x, _ in pairs.values())
            blocks = self.weights.integer_blocks(self.layer, modules)
            wrong |= _wrong_products(pairs, in_time(blocks, rows))
        return sorted(wrong)


def _wrong_products(
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]], blocks: Blocks
) -> set[int]:
    """Return whose elements, int32 [T, I], times the weight are not its output, int32 [T, O].

    Stops where all of them are wrong.
    """
    wrong: set[int] = set()
    for columns, weight_nI in blocks:
        for index in pairs.keys() - wrong:
            elements_TI, output_TO = pairs[index]
            if not torch.equal(exact_product(elements_TI, weight_nI), output_TO[:, columns]):
                wrong.add(index)
        if len(wrong) == len(pairs):
            break
    return wrong
