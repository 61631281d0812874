"""Checks of requests, and what each asks for: the same for every device, computed or not.

What a request asks for follows from its method, modules, dtypes and shapes, which repeat for every
layer and token, so the answer is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from gpu_side.holdings import OPERATOR_OF, Holdings
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    RingLinearRequest,
)
from protocol.tensors import FLOAT_DTYPES, ITEMSIZE, WireTensor, to_torch

# Everything but Init.
Computed: TypeAlias = (
    EmbeddingRequest | LinearRequest | RingLinearRequest | MatmulRequest | LMHeadRequest
)
Shape: TypeAlias = tuple[int, ...]

_KEPT_PLANS = 1024


@dataclass(frozen=True, slots=True)
class LinearWork:
    """A product with a weight; `integer`: in the ring, with int8 weights."""

    rows: int
    in_features: int
    out_features: int
    integer: bool


@dataclass(frozen=True, slots=True)
class MatmulWork:
    """Products [m, k] @ [k, n], `batch` of them."""

    batch: int
    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True)
class EmbeddingWork:
    """Rows of the embedding."""

    tokens: int
    hidden_size: int


# Compared by identity: a plan is made once for all requests that ask for the same.
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a checked request asks for.

    `shape` and `dtype` are those of the output; `input_bytes` is the size of all input tensors.
    """

    shape: Shape
    dtype: str
    work: LinearWork | MatmulWork | EmbeddingWork
    input_bytes: int

    @property
    def output_bytes(self) -> int:
        """Size of the output on the wire, in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Planner:
    """Says what a request asks for, or refuses it with a ProtocolError."""

    def __init__(self, held: Holdings, max_message_bytes: int) -> None:
        self._held = held
        self._config = held.config
        self._layers = held.held_layers
        self._max_message_bytes = max_message_bytes
        self._linear: Callable[[bool, tuple[ModuleName, ...], str, Shape], Plan] = lru_cache(
            _KEPT_PLANS
        )(self._plan_linear)
        self._embedding: Callable[[str, Shape, str], Plan] = lru_cache(_KEPT_PLANS)(
            self._plan_embedding
        )
        self._matmul: Callable[[str, Shape, str, Shape], Plan] = lru_cache(_KEPT_PLANS)(
            self._plan_matmul
        )
        self._lm_head: Callable[[str, Shape], Plan] = lru_cache(_KEPT_PLANS)(self._plan_lm_head)

    def plan(self, request: Computed) -> Plan:
        """Check a request. Raises ProtocolError: it does not fit, or what it needs is not held."""
        if isinstance(request, LinearRequest):
            return self._linear_plan(request, request.hidden_states, integer=False)
        if isinstance(request, RingLinearRequest):
            return self._linear_plan(request, request.elements, integer=True)
        if isinstance(request, MatmulRequest):
            return self._matmul(request.a.dtype, request.a.shape, request.b.dtype, request.b.shape)
        if isinstance(request, LMHeadRequest):
            return self._lm_head(request.hidden_states.dtype, request.hidden_states.shape)
        ids = request.input_ids
        plan = self._embedding(ids.dtype, ids.shape, request.dtype)
        self._check_ids(ids)
        return plan

    def _linear_plan(
        self, request: LinearRequest | RingLinearRequest, tensor: WireTensor, *, integer: bool
    ) -> Plan:
        if ("int8" if integer else "float") not in self._held.arithmetic:
            raise self._unavailable(request.method, f"{'int8' if integer else 'float'} weights")
        layers = self._config.num_hidden_layers
        if request.layer_idx >= layers:
            where = f"{request.method}.layer_idx"
            raise _refuse(where, str(request.layer_idx), f"0 to {layers - 1}")
        if request.layer_idx not in self._layers:
            raise self._unavailable(request.method, f"layer {request.layer_idx}")
        return self._linear(integer, request.module_names, tensor.dtype, tensor.shape)

    def _plan_linear(
        self, integer: bool, names: tuple[ModuleName, ...], dtype: str, shape: Shape
    ) -> Plan:
        method = (RingLinearRequest if integer else LinearRequest).method
        modules = FUSED_MODULES[OPERATOR_OF[names[0]]]
        if len(names) > 1 and names != modules:
            together = " or ".join(" ".join(m) for m in FUSED_MODULES.values() if len(m) > 1)
            raise _refuse(f"{method}.module_names", " ".join(names), f"one module, or {together}")
        where = f"{method}.{'elements' if integer else 'hidden_states'}"
        if integer and dtype != "int32":
            raise _refuse(where, dtype, "int32")
        if not integer and dtype not in FLOAT_DTYPES:
            raise _refuse(where, dtype, "a float dtype")
        sizes = [self._config.module_shape(name) for name in names]
        in_features, out_features = sizes[0][1], sum(size[0] for size in sizes)
        return self._product(where, dtype, shape, in_features, out_features, integer)

    def _plan_lm_head(self, dtype: str, shape: Shape) -> Plan:
        if not self._held.has_lm_head:
            raise self._unavailable("LMHead", "an LM head")
        where = "LMHead.hidden_states"
        if dtype not in FLOAT_DTYPES:
            raise _refuse(where, dtype, "a float dtype")
        config = self._config
        return self._product(where, dtype, shape, config.hidden_size, config.vocab_size, False)

    def _product(
        self,
        where: str,
        dtype: str,
        shape: Shape,
        in_features: int,
        out_features: int,
        integer: bool,
    ) -> Plan:
        if shape[-1] != in_features:
            raise _refuse(where, f"shape {list(shape)}", f"{in_features} on the last axis")
        rows = math.prod(shape[:-1])
        self._bound_output(where, rows * out_features, dtype)
        work = LinearWork(rows, in_features, out_features, integer)
        size = math.prod(shape) * ITEMSIZE[dtype]
        return Plan((*shape[:-1], out_features), dtype, work, size)

    def _plan_embedding(self, ids_dtype: str, shape: Shape, dtype: str) -> Plan:
        if not self._held.has_embedding:
            raise self._unavailable("Embedding", "an embedding")
        if ids_dtype != "int64":
            raise _refuse("Embedding.input_ids", ids_dtype, "int64")
        if len(shape) > 2:
            raise _refuse("Embedding.input_shape", f"{list(shape)}", "[T] or [batch, T]")
        tokens, hidden_size = math.prod(shape), self._config.hidden_size
        self._bound_output("Embedding.input_ids", tokens * hidden_size, dtype)
        work = EmbeddingWork(tokens, hidden_size)
        return Plan((*shape, hidden_size), dtype, work, tokens * ITEMSIZE["int64"])

    def _check_ids(self, tensor: WireTensor) -> None:
        low, high = (int(bound) for bound in torch.aminmax(to_torch(tensor)))
        if low < 0 or high >= self._config.vocab_size:
            # The ids themselves stay out of the message: messages are logged.
            raise _refuse(
                "Embedding.input_ids",
                "an id outside the vocabulary",
                f"0 to {self._config.vocab_size - 1}",
            )

    def _plan_matmul(self, a_dtype: str, a: Shape, b_dtype: str, b: Shape) -> Plan:
        if a_dtype != b_dtype or a_dtype not in FLOAT_DTYPES:
            raise _refuse("Matmul.dtype", f"{a_dtype} and {b_dtype}", "one float dtype")
        where, got = "Matmul.shape", f"{list(a)} @ {list(b)}"
        if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
            raise _refuse(where, got, "[..., M, K] @ [..., K, N]")
        try:
            leading = tuple(torch.broadcast_shapes(a[:-2], b[:-2]))
        except RuntimeError:
            raise _refuse(where, got, "leading dimensions that broadcast") from None
        M, K, N = *a[-2:], b[-1]
        batch = math.prod(leading)
        # torch.matmul writes out operands that broadcast.
        self._bound_output(where, batch * max(M * N, M * K, K * N), a_dtype)
        size = (math.prod(a) + math.prod(b)) * ITEMSIZE[a_dtype]
        return Plan((*leading, M, N), a_dtype, MatmulWork(batch, M, K, N), size)

    def _unavailable(self, method: str, needed: str) -> ProtocolError:
        held = " and ".join(self._held.arithmetic)
        provision, layers = self._held.provision, ""
        if self._held.layers is not None:
            layers = f" of layers {self._layers[0]} to {self._layers[-1]}"
        mask = "" if provision is None else f", for the mask {provision.mask} alone"
        return ProtocolError(
            method,
            got=f"a request that needs {needed}",
            expected=f"one that {held} linear weights{layers} can answer{mask}",
            code=ErrorCode.UNAVAILABLE,
        )

    def _bound_output(self, where: str, elements: int, dtype: str) -> None:
        """Refuse a request whose small inputs ask for an output that no reply may hold."""
        size = elements * ITEMSIZE[dtype]
        if size > self._max_message_bytes:
            raise ProtocolError(
                where,
                got=f"an output of {size} bytes",
                expected=f"at most {self._max_message_bytes}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )


def _refuse(where: str, got: str, expected: str) -> ProtocolError:
    return ProtocolError(where, got=got, expected=expected, code=ErrorCode.INVALID_FIELD)
