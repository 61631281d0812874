"""Prepares the checks that a policy asks for, and finds out who computed wrongly.

`Secrets` are drawn once a run, for all that the policy verifies; a `Verifier` is what the operators
under one mask check their results with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding

from protocol.errors import PolicyError
from protocol.messages import (
    FUSED_MODULES,
    LinearOperator,
    LinearRequest,
    Request,
    RingLinearRequest,
)
from protocol.model.checkpoint import EMBEDDING, Checkpoint, light_tensors, lm_head_name
from protocol.model.config import ModelConfig
from protocol.model.quantized import QuantizedLinear, load_quantized
from protocol.model.weights import CPU, FusedLinear, load_linear, load_tensor
from protocol.tensors import to_torch
from tee_side.masks.mask import FeatureMask, Mask
from tee_side.policy import Policy
from tee_side.randomness import Randomness
from tee_side.sites import IntegerSites, tensors_of
from tee_side.verification import ExactCheck, FloatCheck, Tolerance, is_near, product_holds
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


class Believed:
    """Stands where a `Verifier` would, for what a policy sends with verify = "none"."""

    __slots__ = ()


# Said by name: nothing that is missing by mistake looks like it.
BELIEVED = Believed()


@dataclass(frozen=True, slots=True, eq=False)
class Verifier:
    """Checks results under one mask. `cloaked`: services hold other weights than the TEE does.

    Raises ActivationRangeError for floats that are not finite, LookupError for what the policy
    does not verify.
    """

    _secrets: Secrets
    _tolerance: Tolerance
    _cloaked: bool

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
        return self._secrets.floats[layer, operator].holds(x_TI, y_TO, sent, self._tolerance)

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
        return check.holds(h_ND, y_NV, (sent,), self._tolerance)

    def product(self, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> bool:
        """Say whether y is a @ b."""
        return product_holds(a, b, y, self._tolerance, self._secrets.randomness)

    def liars(self, answers: Sequence[tuple[Request, torch.Tensor]]) -> list[int]:
        """Return which of the answers to one operator are wrong, after all of it was refused.

        Integers are multiplied here once more: the weights are read for it, which takes about as
        long as loading a layer. None of them is wrong where the result was unmasked wrongly. Of
        floats a single answer is to blame; of several those that are off by themselves, or all.
        """
        if all(isinstance(request, RingLinearRequest) for request, _ in answers):
            return [
                index
                for index, (request, output) in enumerate(answers)
                if isinstance(request, RingLinearRequest) and not self._is_product(request, output)
            ]
        wrong = []
        if len(answers) > 1 and not self._cloaked:
            wrong = [
                index
                for index, (request, output) in enumerate(answers)
                if isinstance(request, LinearRequest) and not self._is_close(request, output)
            ]
        return wrong or list(range(len(answers)))

    def _is_product(self, request: RingLinearRequest, output: torch.Tensor) -> bool:
        operator = _operator_of(request)
        weights = self._secrets.weights.integers(request.layer_idx, operator)
        expected = weights.product(to_torch(request.elements), request.module_names)
        return torch.equal(expected, output)

    def _is_close(self, request: LinearRequest, output: torch.Tensor) -> bool:
        fused = self._secrets.weights.floats(request.layer_idx, _operator_of(request))
        weight_OI = torch.cat([fused.weight[fused.rows[name]] for name in request.module_names])
        return is_near(to_torch(request.hidden_states), weight_OI, output, self._tolerance)


def _operator_of(request: LinearRequest | RingLinearRequest) -> LinearOperator:
    (found,) = (op for op, names in FUSED_MODULES.items() if request.module_names[0] in names)
    return found
