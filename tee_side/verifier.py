"""Prepares the checks that a policy asks for, and makes them.

`Secrets` are drawn once a run, for all that the policy verifies; a `Verifier` is what the operators
under one mask check their results with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding

from protocol.errors import PolicyError
from protocol.messages import FUSED_MODULES, LinearOperator, ModuleName
from protocol.model.checkpoint import (
    EMBEDDING,
    Checkpoint,
    light_tensors,
    lm_head_name,
    module_name,
)
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized, quantize_rows
from protocol.model.weights import CPU, FusedLinear, load_linear, load_tensor
from tee_side.masks.mask import FeatureMask, Mask
from tee_side.policy import Policy
from tee_side.randomness import Randomness
from tee_side.sites import IntegerSites, tensors_of
from tee_side.verification import ExactCheck, FloatCheck, Tolerance, product_holds
from tee_side.vocabulary import PHASES, Operator, Site


def verified_sites(policy: Policy, layers: int) -> list[Site]:
    """Return the linear operators whose results are checked, in some phase."""
    return [
        (layer, operator)
        for layer in range(layers)
        for operator in FUSED_MODULES
        if any(policy.at(operator, layer, phase).verify != "none" for phase in PHASES)
    ]


def check_verifiable(policy: Policy, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Check that the directory has the weights behind all that a policy verifies.

    Raises PolicyError that names what is missing, ModelError for a tensor of another shape.
    """
    tensors = tensors_of(verified_sites(policy, config.num_hidden_layers), config)
    missing = [name for name in tensors if not checkpoint.holds([name])]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise PolicyError(
            f'policy {policy.name}: verify = "freivalds"',
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

    def lm_head_blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the LM head [n, D], as `integer_blocks` does."""
        name = lm_head_name(self.config)
        for columns, block in self._blocks(name, light_tensors(self.config)[name], 0):
            yield columns, block.to(self.dtype)

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

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the vocabulary's size. Raises ModelError."""
        shape = light_tensors(self.config)[name]
        return load_tensor(self.checkpoint, name, shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Secrets:
    """What everything that a policy verifies is checked with; drawn once, never shown.

    `embedding`: the table itself, as a lookup has nothing to be checked with that is smaller.
    """

    weights: Weights
    randomness: Randomness = field(repr=False)
    exact: Mapping[Site, ExactCheck] = field(repr=False)
    floats: Mapping[Site, FloatCheck] = field(repr=False)
    lm_head: FloatCheck | None = field(repr=False)
    embedding: torch.Tensor | None = field(repr=False)

    @staticmethod
    def draw(
        policy: Policy, weights: Weights, integers: IntegerSites | None, randomness: Randomness
    ) -> Secrets:
        """Read every weight that is not held, one at a time, and draw its vectors.

        `integers`: where the policy computes with them; norms of weights and scales are compared,
        which the bounds rest on. Raises ModelError, CalibrationError, KernelError.
        """
        exact: dict[Site, ExactCheck] = {}
        floats: dict[Site, FloatCheck] = {}
        for layer, operator in verified_sites(policy, weights.config.num_hidden_layers):
            site: Site = (layer, operator)
            if integers is None:
                floats[site] = FloatCheck.draw(weights.floats(layer, operator).weight, randomness)
                continue
            found = weights.integers(layer, operator)
            if site not in weights.held:  # those were checked when they were loaded
                integers.check_weights(site, found)
            exact[site] = ExactCheck.draw(found.weight, randomness)
        lm_head: FloatCheck | None = None
        if _verified(policy, "lm_head"):
            head = weights.tensor(lm_head_name(weights.config))
            lm_head = FloatCheck.draw(head, randomness)
        table = weights.tensor(EMBEDDING) if _verified(policy, "embedding") else None
        return Secrets(weights, randomness, exact, floats, lm_head, table)

    def under(self, mask: Mask | None) -> Verifier:
        """Return what checks results that crossed under a mask."""
        return Verifier(self, Tolerance.of(self.weights.dtype, mask), isinstance(mask, FeatureMask))


def _verified(policy: Policy, operator: Operator) -> bool:
    return any(placement.verify != "none" for placement in policy.operators[operator])


class Unverified:
    """Stands where a `Verifier` would, for what a policy sends with verify = "none"."""

    __slots__ = ()


# Said by name: nothing that is missing by mistake looks like it.
UNVERIFIED = Unverified()


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Checks results under one mask. `cloaked`: services hold other weights than the TEE does.

    `tolerance`: of results that are floats; of a service's own answers it is `of_answers`.

    Raises ActivationRangeError for floats that are not finite, LookupError for what the policy
    does not verify.
    """

    _secrets: Secrets
    tolerance: Tolerance
    cloaked: bool

    @property
    def weights(self) -> Weights:
        """The TEE's own weights, for who computes a product once more."""
        return self._secrets.weights

    def linear(
        self,
        layer: int,
        operator: LinearOperator,
        x_TI: torch.Tensor,
        y_TO: torch.Tensor,
        sent: Sequence[torch.Tensor],
    ) -> bool:
        """Say whether y is x W, without a bias. `sent`: what crossed instead of x."""
        if x_TI.dtype is torch.int32:
            return self._secrets.exact[layer, operator].holds(x_TI, y_TO)
        return self._secrets.floats[layer, operator].holds(x_TI, y_TO, sent, self.tolerance)

    def embedding(self, ids_T: torch.Tensor, y_TD: torch.Tensor) -> bool:
        """Say whether these are the rows of the table, which -0.0 for 0.0 is, too."""
        table = self._secrets.embedding
        if table is None:
            raise LookupError("a lookup that the policy does not verify")
        return torch.equal(embedding(ids_T, table), y_TD)

    def lm_head(self, h_ND: torch.Tensor, y_NV: torch.Tensor, sent: torch.Tensor) -> bool:
        """Say whether these are the logits. `sent`: what crossed instead of h."""
        check = self._secrets.lm_head
        if check is None:
            raise LookupError("an LM head that the policy does not verify")
        return check.holds(h_ND, y_NV, (sent,), self.tolerance)

    def product(self, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> bool:
        """Say whether y is a @ b."""
        return product_holds(a, b, y, self.tolerance, self._secrets.randomness)
