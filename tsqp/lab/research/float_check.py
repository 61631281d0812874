"""Checks products of floats that a service computed: within a tolerance.

An exact check of integers is `tee_side.protect.verification`. Floats are rounded, so a result may
differ from the product by as much as rounding does, and a service that lies may use that room up.
The secret vectors are Gaussian; the bound is derived in docs/verification.md. Registered as the
entry point `float` of the group `tsqp.checks`.

Shape suffixes: T rows, I in_features, O out_features, k secret vectors, U rows that crossed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding

from protocol.errors import ActivationRangeError
from protocol.messages import (
    Columns,
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    part_of,
)
from protocol.model.weights import CPU, load_linear
from protocol.tensors import to_torch
from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.recomputation import Blocks, Claim, InTime, weight_blocks
from tee_side.protect.sites import Weights
from tee_side.words import Site
from tsqp.lab.research.draws import normal

FLOAT_VECTORS = 8
_lengths = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
# Elements of a block of rows in float64: 4 MB, which stay in a cache.
_BLOCK_ELEMENTS = 2**19
# Of an honest result, in units of the limit's scale (`FloatCheck`): rounding of the reply to its
# own dtype, and of sums that are kept in float32. Measured over masks, shapes and outliers: at most
# 0.7 of the first in half precision, and 4.1 of the second in float32.
_REPLY_ROUNDING = 2.0
_SUM_ROUNDING = 16.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an honest result may be from the product of floats, and relative to what.

    `relative`: of rounding, to a row's own size; `declared`: what the mask declares of itself, of
    any single element, to the largest of all rows; `smallest`: what rounding loses where a dtype
    ends; `together`: rows are mixed on the way, so that a small one carries the rounding of the
    largest.
    """

    relative: float
    declared: float
    smallest: float
    together: bool

    @staticmethod
    def of(dtype: torch.dtype, mask: Mask | None) -> Tolerance:
        """Return the tolerance of a dtype under a mask, None for none.

        The reply's own rounding, that of sums in float32, and what the mask declares of itself: a
        mask that keeps its promise raises no alarm.
        """
        reply = torch.finfo(dtype)
        relative = _REPLY_ROUNDING * reply.eps + _SUM_ROUNDING * torch.finfo(torch.float32).eps
        declared = 0.0 if mask is None else mask.tolerance
        together = mask is not None and mask.kind == "row"
        return Tolerance(relative, declared, reply.smallest_normal * reply.eps, together)

    def of_answers(self) -> Tolerance:
        """Return the tolerance for a service's own answers, before they are unmasked.

        Rounding is all that they may be off by, and by half the room of what is refused: a liar at
        the edge of that is not to pass as right here, and leave the blame with the mask.
        """
        return replace(self, relative=self.relative / 2, declared=0.0, together=False)

    def limit(self, size_BT: torch.Tensor, out_features: int) -> torch.Tensor:
        """Return the length that the error of each row [..., T] may have, from the rows' sizes.

        A mask may be off by `declared` in every element at once, which makes sqrt(O) of it in
        length, relative to the largest element, which no row's length is below.
        """
        width = math.sqrt(out_features)
        limit = self.smallest * width + self.relative * (
            size_BT.amax(-1, keepdim=True).expand_as(size_BT)
            if self.together and size_BT.numel()
            else size_BT
        )
        if self.declared and size_BT.numel():
            limit = limit + self.declared * width * size_BT.amax()
        return limit

    def allows(self, error_BT: torch.Tensor, size_BT: torch.Tensor, out_features: int) -> bool:
        """Say whether the length of each row's error is within its limit; False for NaN.

        Raises ActivationRangeError for limits that are not finite, as inputs were not.
        """
        limit_BT = self.limit(size_BT, out_features)
        ActivationRangeError.unless(
            bool(limit_BT.isfinite().all()),
            "input of a product that is to be verified",
            "a row that is not finite",
            "finite numbers",
        )
        # Whatever is not comparable is not below the limit.
        return bool((error_BT <= limit_BT).all())


@dataclass(frozen=True, slots=True, eq=False)
class FloatCheck:
    """The check of one linear operator's, or the LM head's, products of floats.

    With d = y s - x (W s) over the k Gaussian vectors, the root of the mean of d^2 estimates the
    length of y's error. It must not exceed `Tolerance.limit` of the row's size,

        length of x W, estimated by the same vectors + length of what was sent * f

    with f = |W| / sqrt(I), what W does to the length of a vector without a direction. All of that
    is fixed before the reply is read, so that no reply can widen its own limit.
    """

    gain: float
    # As in `ExactCheck`.
    _vectors: torch.Tensor = field(repr=False)
    _products: torch.Tensor = field(repr=False)

    @staticmethod
    def draw(weight_OI: torch.Tensor, randomness: Randomness) -> FloatCheck:
        """Draw vectors for a weight, floats [O, I], in blocks of float64."""
        O, I = weight_OI.shape  # noqa: E741
        s_Ok = normal(randomness, O, FLOAT_VECTORS)
        product_Ik = torch.zeros(I, FLOAT_VECTORS, dtype=torch.float64)
        squares, size = 0.0, max(1, _BLOCK_ELEMENTS // I)
        for s_nk, weight_nI in zip(s_Ok.split(size), weight_OI.split(size), strict=True):
            block_nI = weight_nI.double()
            product_Ik.addmm_(block_nI.t(), s_nk)
            squares += float(block_nI.square().sum())
        return FloatCheck(
            math.sqrt(squares / I), s_Ok.t().contiguous(), product_Ik.t().contiguous()
        )

    def holds(
        self,
        x_TI: torch.Tensor,
        y_TO: torch.Tensor,
        sent: Sequence[torch.Tensor],
        tolerance: Tolerance,
    ) -> bool:
        """Say whether y is x W within a tolerance; False for NaN and infinity.

        `sent`: what crossed instead of x, [U, I] each; as many rows, or `tolerance.together`.
        Raises ActivationRangeError where x is not finite: nothing can be said of its product.
        """
        lengths_U = torch.stack([_lengths(tensor) for tensor in sent]).amax(0)
        if tolerance.together:
            lengths_U = lengths_U.amax().expand(len(x_TI))
        expected_Tk = _in_blocks(x_TI, self._products)
        size_T = root_mean_square(expected_Tk) + self.gain * lengths_U
        error_T = root_mean_square(_in_blocks(y_TO, self._vectors).sub_(expected_Tk))
        return tolerance.allows(error_T, size_T, self._vectors.shape[1])


def within_tolerance(
    x_UI: torch.Tensor,
    blocks: Iterable[tuple[slice, torch.Tensor]],
    y_UO: torch.Tensor,
    tolerance: Tolerance,
) -> bool:
    """Say whether y is x W by multiplying, without secrets: for answers to a refused result.

    `blocks`: columns of y, and the rows of the weight [n, I] behind them, until all that count were
    there. False for NaN and infinity in y. `tolerance`: see `Tolerance.of_answers`. Raises
    ActivationRangeError where x is not finite.
    """
    squares_U, errors_U = torch.zeros(2, len(x_UI), dtype=torch.float64)
    weight_squares, x64_UI = 0.0, x_UI.double()
    for columns, weight_nI in blocks:
        weight64_nI = weight_nI.double()
        expected_Un = x64_UI @ weight64_nI.t()
        squares_U += expected_Un.square().sum(-1)
        errors_U += (y_UO[:, columns].double() - expected_Un).square().sum(-1)
        weight_squares += float(weight64_nI.square().sum())
    gain = math.sqrt(weight_squares / x_UI.shape[1])
    size_U = squares_U.sqrt() + gain * _lengths(x_UI)
    return tolerance.allows(errors_U.sqrt(), size_U, y_UO.shape[1])


def _in_blocks(x_TI: torch.Tensor, secret_kI: torch.Tensor) -> torch.Tensor:
    """Multiply in float64, without a copy of all rows in it."""
    blocks = x_TI.split(max(1, _BLOCK_ELEMENTS // x_TI.shape[1]))
    parts = [x_nI.double() @ secret_kI.t() for x_nI in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Return the root of the mean square over the last axis."""
    root: torch.Tensor = x.square().mean(-1).sqrt()
    return root


class ByAnswer(ABC):
    """A `ResultCheck` that looks at each answer to a refused result by itself."""

    def wrong(self, claims: Sequence[Claim], in_time: InTime) -> Sequence[int]:
        """See `ResultCheck.wrong`."""
        return [index for index, claim in enumerate(claims) if not self._is_right(*claim, in_time)]

    @abstractmethod
    def _is_right(
        self, request: Request, y: torch.Tensor, part: Columns, in_time: InTime
    ) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class FloatProductCheck(ByAnswer):
    """A `ResultCheck` of an operator that multiplies by a weight, without a bias.

    `blocks`: yields what the modules of a request multiply by in a part of their columns, as a
    service holds it.
    `transformed`: services hold other weights than the TEE does, so that none of their answers can
    be computed once more: every one counts as wrong.
    """

    vectors: FloatCheck = field(repr=False)
    tolerance: Tolerance
    blocks: Callable[[Sequence[ModuleName], Columns], Blocks]
    transformed: bool = False

    def holds(self, x_TI: torch.Tensor, y_TO: torch.Tensor, sent: Sequence[torch.Tensor]) -> bool:
        """See `ResultCheck.holds`."""
        return self.vectors.holds(x_TI, y_TO, sent, self.tolerance)

    def _is_right(self, request: Request, y: torch.Tensor, part: Columns, in_time: InTime) -> bool:
        if self.transformed:
            return False
        match request:
            case LinearRequest(module_names=modules, hidden_states=hidden):
                x, blocks = to_torch(hidden), self.blocks(modules, part)
            case LMHeadRequest(hidden_states=hidden):
                x, blocks = to_torch(hidden), self.blocks((), part)
            case _:
                raise LookupError(f"an answer to {request.method} of a product of floats")
        return within_tolerance(x, in_time(blocks, len(x)), y, self.tolerance.of_answers())


# ---------------------------------------------------------- embeddings and products of activations


class EmbeddingCheck(ByAnswer):
    """Compares rows with those of the table."""

    def __init__(self, table_VD: torch.Tensor) -> None:
        self._table_VD = table_VD

    def holds(self, x: torch.Tensor, y: torch.Tensor, sent: Sequence[Any]) -> bool:
        """Say whether these are the rows of the table, which -0.0 for 0.0 is, too."""
        return torch.equal(embedding(x, self._table_VD), y)

    def _is_right(self, request: Request, y: torch.Tensor, part: Columns, in_time: InTime) -> bool:
        if not isinstance(request, EmbeddingRequest):
            return False
        # The output of a part is its own: zeros for other parts' ids.
        mine, ids = part_of(len(self._table_VD), *part), to_torch(request.input_ids)
        theirs = (ids < mine.start) | (ids >= mine.stop)
        rows = embedding(ids, self._table_VD).masked_fill(theirs[..., None], 0)
        return torch.equal(rows, y)


class ProductCheck(ByAnswer):
    """Checks a product of two activations, of which nothing is known ahead."""

    def __init__(self, tolerance: Tolerance, randomness: Randomness) -> None:
        self._tolerance, self._randomness = tolerance, randomness

    def holds(self, x: Sequence[torch.Tensor], y: torch.Tensor, sent: Sequence[Any]) -> bool:
        """Say whether y [B, M, N] is the product of both operands, floats, as `FloatCheck` does.

        The vectors are fresh in every call, as no operand stays. That reads all of b: where a has
        fewer rows than there are vectors, multiplying would have been as cheap. Raises
        ActivationRangeError.
        """
        _, J, N = x[1].shape
        s_Nk = normal(self._randomness, N, FLOAT_VECTORS)
        a64_BMJ, b64_BJN = (operand.double() for operand in x)
        expected_BMk = a64_BMJ @ (b64_BJN @ s_Nk)
        gain_B1 = b64_BJN.square().sum((1, 2)).div(J).sqrt()[:, None]
        size_BM = root_mean_square(expected_BMk) + gain_B1 * a64_BMJ.norm(dim=-1)
        error_BM = root_mean_square(y.double() @ s_Nk - expected_BMk)
        return self._tolerance.allows(error_BM, size_BM, N)

    def _is_right(self, request: Request, y: torch.Tensor, part: Columns, in_time: InTime) -> bool:
        if not isinstance(request, MatmulRequest):
            raise LookupError(f"an answer to {request.method} of an attention product")
        a_BMJ, b_BJN, near = to_torch(request.a), to_torch(request.b), self._tolerance.of_answers()
        return all(
            within_tolerance(a, in_time(iter([(slice(0, b.shape[1]), b.t())]), len(a)), y_MN, near)
            for a, b, y_MN in zip(a_BMJ, b_BJN, y, strict=True)
        )


# ------------------------------------------------------------------------- weights of linear sites


@dataclass(frozen=True, slots=True, eq=False)
class FloatSecrets:
    """The `SiteSecrets` of a linear operator in floats, or of the LM head."""

    vectors: FloatCheck = field(repr=False)
    weights: Weights
    site: Site

    @classmethod
    def draw(cls, site: Site, weights: Weights, randomness: Randomness) -> FloatSecrets:
        """Read the weight of a site, and draw its vectors. Raises ModelError."""
        weight = load_linear(
            weights.checkpoint, weights.config, *site, dtype=weights.dtype, device=CPU
        ).weight
        return cls(FloatCheck.draw(weight, randomness), weights, site)

    def under(self, mask: Mask | None) -> FloatProductCheck:
        """See `SiteSecrets.under`."""
        return FloatProductCheck(
            self.vectors,
            Tolerance.of(self.weights.dtype, mask),
            partial(weight_blocks, self.weights, self.site, integers=False),
            mask is not None and mask.kind == "feature",
        )
