"""Prepares the checks that a policy asks for, and finds out who computed wrongly.

`Secrets` are drawn once a run, for all that the policy verifies; a `Verifier` is what the operators
under one mask check their results with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.nn.functional import embedding

from protocol.errors import DeadlineExceededError, PolicyError
from protocol.integer import exact_product
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    LinearOperator,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
)
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
from protocol.tensors import to_torch
from tee_side.masks.mask import FeatureMask, Mask
from tee_side.policy import Policy
from tee_side.randomness import Randomness
from tee_side.sites import IntegerSites, tensors_of
from tee_side.verification import (
    ExactCheck,
    FloatCheck,
    Tolerance,
    product_holds,
    within_tolerance,
)
from tee_side.vocabulary import PHASES, Operator, Site

# Layer and modules of a product.
_Product: TypeAlias = tuple[int, tuple[ModuleName, ...]]

# Of a part of a product that is computed once more, after which the clock is looked at: some 0.1 s
# on one core.
_MULTIPLICATIONS = 2**31


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

    def liars(
        self, answers: Sequence[tuple[Request, torch.Tensor]], is_over: Callable[[], bool]
    ) -> list[int]:
        """Return which of the answers to one operator are wrong, after all of it was refused.

        Each is compared with what was asked, by multiplying once more: the weights are read for it,
        a block of rows after the other. None of them is wrong where the result was unmasked
        wrongly. Of services with other weights than the TEE has, all count as wrong.

        `is_over`: asked before every block. Raises DeadlineExceededError once it says so,
        ModelError and ManifestError for weights that cannot be read again, and ActivationRangeError
        where what was sent is not finite.
        """
        if self._cloaked:
            return list(range(len(answers)))
        right: dict[int, bool] = {}
        # Shares of one product meet each block together: it is read once for all of them.
        rings: dict[_Product, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        for index, (request, output) in enumerate(answers):
            if isinstance(request, RingLinearRequest):
                site = request.layer_idx, request.module_names
                rings.setdefault(site, {})[index] = to_torch(request.elements), output
            else:
                right[index] = self._is_right(request, output, is_over)
        for (layer, modules), pairs in rings.items():
            blocks = self._secrets.weights.integer_blocks(layer, modules)
            rows = max(len(elements) for elements, _ in pairs.values())
            wrong = _wrong_products(pairs, _in_time(blocks, rows, is_over))
            right |= {index: index not in wrong for index in pairs}
        return [index for index in range(len(answers)) if not right[index]]

    def _is_right(
        self, request: Request, output: torch.Tensor, is_over: Callable[[], bool]
    ) -> bool:
        """Compare an answer in floats with what was asked, and hidden or not, crossed."""
        weights, tolerance = self._secrets.weights, self._tolerance.of_answers()
        match request:
            case LinearRequest():
                x = to_torch(request.hidden_states)
                blocks = weights.float_blocks(request.layer_idx, request.module_names)
            case LMHeadRequest():
                x = to_torch(request.hidden_states)
                blocks = weights.lm_head_blocks()
            case MatmulRequest():
                a_BMJ, b_BJN = to_torch(request.a), to_torch(request.b)
                return all(
                    within_tolerance(a, _in_time(_whole(b.t()), len(a), is_over), y, tolerance)
                    for a, b, y in zip(a_BMJ, b_BJN, output, strict=True)
                )
            case EmbeddingRequest():
                return self.embedding(to_torch(request.input_ids), output)
            case _:
                raise LookupError(f"an answer to {request.method} that was verified")
        return within_tolerance(x, _in_time(blocks, len(x), is_over), output, tolerance)


def _wrong_products(
    pairs: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    blocks: Iterable[tuple[slice, torch.Tensor]],
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


def _in_time(
    blocks: Iterator[tuple[slice, torch.Tensor]], rows: int, is_over: Callable[[], bool]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Hand blocks of a weight on while there is time, none larger than some 0.1 s of work.

    `rows`: of what each is multiplied by. Raises DeadlineExceededError.
    """
    blocks = iter(blocks)
    while True:
        _require_time(is_over)
        found = next(blocks, None)
        if found is None:
            return
        columns, weight_nI = found
        step = max(1, _MULTIPLICATIONS // max(1, rows * weight_nI.shape[1]))
        for start in range(0, len(weight_nI), step):
            if start:
                _require_time(is_over)
            part = weight_nI[start : start + step]
            begin = columns.start + start
            yield slice(begin, begin + len(part)), part


def _require_time(is_over: Callable[[], bool]) -> None:
    if is_over():
        raise DeadlineExceededError(
            "finding out who computed wrongly",
            got="the end of the request's time",
            expected="time to compute the product once more",
        )


def _whole(weight_OI: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    yield slice(0, len(weight_OI)), weight_OI
