"""Checks of requests, and what each asks for: the same for every device, computed or not.

What a request asks for follows from its method, modules, dtypes and shapes, so one check is enough
for all requests with the same header. Only token ids are looked at each time.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_side.weights import OPERATOR_OF, ServedModel
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    FUSED_MODULES,
    SEED_SHAPE,
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    SegmentRequest,
)
from protocol.tensors import ITEMSIZE, MAX_TENSOR_BYTES, WireTensor, to_torch

# Everything but Init, Health, and a seed: what that stands for is computed.
Computed: TypeAlias = (
    EmbeddingRequest
    | LinearRequest
    | RingLinearRequest
    | MatmulRequest
    | LMHeadRequest
    | RingLMHeadRequest
)
Shape: TypeAlias = tuple[int, ...]
_FLOAT_DTYPES = ("float32", "float16", "bfloat16")
# Parts of a Segment, each of which costs the service some time whatever its rows are.
_MOST_PARTS = 2**12
# Numbers of a part, int64 (`gpu_side.sessions.SegmentPart`).
_PART_NUMBERS = 7
_TOGETHER = " or ".join(" ".join(names) for names in FUSED_MODULES.values() if len(names) > 1)


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
class Task:
    """What a checked request asks for.

    `shape` and `dtype` are those of the output; `input_bytes` is the size of all input tensors.
    `work`: of a Segment the products of its layers, beside which there is attention, and perhaps
    that of the LM head; None: the output is rows of the embedding.
    """

    shape: Shape
    dtype: str
    work: LinearWork | MatmulWork | tuple[LinearWork, ...] | None
    input_bytes: int

    @property
    def output_bytes(self) -> int:
        """Size of the output on the wire, in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class RequestChecker:
    """Says what a request asks for, or refuses it with a ProtocolError."""

    def __init__(self, held: ServedModel, max_message_bytes: int) -> None:
        self._held = held
        # Sizes of what it holds of them.
        self._part = held.part
        self._max_message_bytes = max_message_bytes

    def check(self, request: Computed | SeededRingLinearRequest | SegmentRequest) -> Task:
        """Check a request. Raises ProtocolError: it does not fit, or what it needs is not held."""
        match request:
            case LinearRequest(hidden_states=rows) | RingLinearRequest(elements=rows):
                return self._linear(request, rows)
            case SeededRingLinearRequest(method=method):
                # Its elements are checked as if they had come: none are made before.
                _require_form(f"{method}.seed", request.seed, "int32", SEED_SHAPE)
                elements = WireTensor("int32", (request.rows, request.columns), b"")
                task = self._linear(request, elements)
                self._bound(f"{method}.rows", task.input_bytes, "elements")
                return task
            case MatmulRequest(a=a, b=b):
                return self._matmul(a.dtype, a.shape, b.dtype, b.shape)
            case LMHeadRequest(hidden_states=rows) | RingLMHeadRequest(elements=rows):
                integer, held = isinstance(request, RingLMHeadRequest), self._held
                self._require_held(held.has_lm_head, request.method, "an LM head")
                self._require_held(
                    # The float one is there whatever the linear weights are.
                    not integer or "int8" in held.arithmetic,
                    request.method,
                    "int8 weights",
                )
                sizes = self._part.hidden_size, self._part.vocab_size
                return self._product(request.method, rows, *sizes, integer=integer)
            case EmbeddingRequest(input_ids=ids, dtype=dtype):
                self._require_held(self._held.has_embedding, "Embedding", "an embedding")
                require_field(ids.dtype == "int64", "Embedding.input_ids", ids.dtype, "int64")
                require_field(
                    len(ids.shape) <= 2,
                    "Embedding.input_shape",
                    f"{list(ids.shape)}",
                    "[T] or [batch, T]",
                )
                tokens, hidden_size = math.prod(ids.shape), self._held.config.hidden_size
                self._bound("Embedding.input_ids", tokens * hidden_size * ITEMSIZE[dtype])
                return Task((*ids.shape, hidden_size), dtype, None, tokens * ITEMSIZE["int64"])
            case SegmentRequest():
                return self._segment(request)

    def check_ids(self, tensor: WireTensor) -> None:
        """Raise ProtocolError for a token id outside the vocabulary."""
        low, high = (int(bound) for bound in torch.aminmax(to_torch(tensor)))
        size = self._held.config.vocab_size
        require_field(
            low >= 0 and high < size,
            "Embedding.input_ids",
            # The ids themselves stay out of the message: messages are logged.
            "an id outside the vocabulary",
            f"0 to {size - 1}",
        )

    def _linear(
        self,
        request: LinearRequest | RingLinearRequest | SeededRingLinearRequest,
        tensor: WireTensor,
    ) -> Task:
        integer = not isinstance(request, LinearRequest)
        kind = "int8" if integer else "float"
        self._require_held(kind in self._held.arithmetic, request.method, f"{kind} weights")
        method, layer, names = request.method, request.layer_idx, request.module_names
        layers = self._held.config.num_hidden_layers
        require_field(layer < layers, f"{method}.layer_idx", str(layer), f"0 to {layers - 1}")
        self._require_held(layer in self._held.held_layers, method, f"layer {layer}")
        modules = self._part.modules_of(OPERATOR_OF[names[0]])
        require_field(
            names == modules or (len(names) == 1 and names[0] in modules),
            f"{method}.module_names",
            " ".join(names),
            f"one module, or {_TOGETHER}",
        )
        sizes = [self._part.module_shape(name) for name in names]
        in_features, out_features = sizes[0][1], sum(size[0] for size in sizes)
        return self._product(method, tensor, in_features, out_features, integer=integer)

    def _product(
        self, method: str, tensor: WireTensor, in_features: int, out_features: int, *, integer: bool
    ) -> Task:
        where = f"{method}.{'elements' if integer else 'hidden_states'}"
        dtype, shape = tensor.dtype, tensor.shape
        dtypes, expected = (("int32",), "int32") if integer else (_FLOAT_DTYPES, "a float dtype")
        require_field(dtype in dtypes, where, dtype, expected)
        require_field(
            shape[-1] == in_features,
            where,
            f"shape {list(shape)}",
            f"{in_features} on the last axis",
        )
        rows = math.prod(shape[:-1])
        self._bound(where, rows * out_features * ITEMSIZE[dtype])
        work = LinearWork(rows, in_features, out_features, integer)
        size = math.prod(shape) * ITEMSIZE[dtype]
        return Task((*shape[:-1], out_features), dtype, work, size)

    def _segment(self, request: SegmentRequest) -> Task:
        """Check all but the numbers in `parts` and `outputs` (`gpu_side.segment_kernels`)."""
        config, hidden = self._held.config, request.hidden_states
        self._require_held(self._held.has_segments, "Segment", "whole layers")
        first, last, behind = request.first_layer, request.last_layer, config.num_hidden_layers
        require_field(
            first <= last < behind,
            "Segment.last_layer",
            f"layers {first} to {last}",
            f"one from the first on, below {behind}",
        )
        held = self._held.held_layers
        self._require_held(first in held and last in held, "Segment", f"layers {first} to {last}")
        require_field(
            not request.lm_head or last + 1 == behind,
            "Segment.lm_head",
            f"an LM head behind layer {last}",
            f"one behind layer {behind - 1}",
        )
        self._require_held(
            not request.lm_head or self._held.has_segment_head, "Segment", "an LM head"
        )
        where, D = "Segment.hidden_states", config.hidden_size
        require_field(
            hidden.dtype in _FLOAT_DTYPES and len(hidden.shape) == 2 and hidden.shape[1] == D,
            where,
            f"{hidden.dtype} {list(hidden.shape)}",
            f"a float dtype, [rows, {D}]",
        )
        rows, parts, wanted = hidden.shape[0], request.parts.shape[0], request.outputs.shape[0]
        _require_form("Segment.parts", request.parts, "int64", (parts, _PART_NUMBERS))
        _require_form("Segment.outputs", request.outputs, "int64", (min(wanted, rows),))
        require_field(
            parts <= _MOST_PARTS, "Segment.parts", f"{parts} parts", f"at most {_MOST_PARTS}"
        )
        shapes = (config.row_layout(name)[1] for name in FUSED_MODULES)
        works = tuple(LinearWork(rows, inner, outer, integer=False) for outer, inner in shapes)
        # What lies between is as large as what a Linear of these rows would be answered with.
        self._bound(where, rows * max(work.out_features for work in works) * ITEMSIZE[hidden.dtype])
        width = config.vocab_size if request.lm_head else D
        self._bound(where, wanted * width * ITEMSIZE[hidden.dtype])
        works *= last - first + 1
        if request.lm_head:
            works += (LinearWork(wanted, D, width, integer=False),)
        size = sum(one.payload_bytes for one in (hidden, request.parts, request.outputs))
        return Task((wanted, width), hidden.dtype, works, size)

    def _matmul(self, a_dtype: str, a: Shape, b_dtype: str, b: Shape) -> Task:
        require_field(
            a_dtype == b_dtype and a_dtype in _FLOAT_DTYPES,
            "Matmul.dtype",
            f"{a_dtype} and {b_dtype}",
            "one float dtype",
        )
        where = "Matmul.shape"
        got = f"{list(a)} @ {list(b)}"
        require_field(
            len(a) >= 2 and len(b) >= 2 and a[-1] == b[-2], where, got, "[..., M, K] @ [..., K, N]"
        )
        try:
            leading = tuple(torch.broadcast_shapes(a[:-2], b[:-2]))
        except RuntimeError:
            raise ProtocolError(
                where,
                got=got,
                expected="leading dimensions that broadcast",
                code=ErrorCode.INVALID_FIELD,
            ) from None
        M, K, N = *a[-2:], b[-1]
        batch = math.prod(leading)
        # torch.matmul writes out operands that broadcast.
        self._bound(where, batch * max(M * N, M * K, K * N) * ITEMSIZE[a_dtype])
        size = (math.prod(a) + math.prod(b)) * ITEMSIZE[a_dtype]
        return Task((*leading, M, N), a_dtype, MatmulWork(batch, M, K, N), size)

    def _require_held(self, holds: bool, method: str, needed: str) -> None:
        held = " and ".join(self._held.arithmetic)
        provision, layers = self._held.provision, ""
        if self._held.layers is not None:
            layers = f" of layers {self._held.held_layers[0]} to {self._held.held_layers[-1]}"
        mask = "" if provision is None else f", for the mask {provision.mask} alone"
        ProtocolError.unless(
            holds,
            method,
            f"a request that needs {needed}",
            f"one that {held} linear weights{layers} can answer{mask}",
            code=ErrorCode.UNAVAILABLE,
        )

    def _bound(self, where: str, size: int, what: str = "an output") -> None:
        """Refuse a request whose small inputs ask for more than a message may hold."""
        most = min(self._max_message_bytes, MAX_TENSOR_BYTES)
        ProtocolError.unless(
            size <= most,
            where,
            f"{what} of {size} bytes",
            f"at most {most}",
            code=ErrorCode.LIMIT_EXCEEDED,
        )


def require_field(condition: bool, where: str, got: str, expected: str) -> None:
    """Raise ProtocolError unless a field is as it should be."""
    ProtocolError.unless(condition, where, got, expected, code=ErrorCode.INVALID_FIELD)


def _require_form(where: str, tensor: WireTensor, dtype: str, shape: Shape) -> None:
    require_field(
        (tensor.dtype, tensor.shape) == (dtype, shape),
        where,
        f"{tensor.dtype} {list(tensor.shape)}",
        f"{dtype} {list(shape)}",
    )
