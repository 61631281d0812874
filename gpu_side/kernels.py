"""What answers a checked request: torch on a device, or nothing at all.

Checks are the same for both (`gpu_side.tasks`) and are done before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch.nn.functional import embedding, linear

from gpu_side.devices import DeviceProfile, NullDevice, multiplies_bfloat16
from gpu_side.served_model import OPERATOR_OF, ServedModel
from gpu_side.tasks import Computed, EmbeddingWork, LinearWork, MatmulWork, SegmentWork, Task
from gpu_side.transfer import Kernel, Result, Working, transfer_to
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.integer import exact_product
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    TensorReply,
    tensor_reply,
)
from protocol.tensors import ITEMSIZE, WireTensor, raw_bytes, short_name, to_torch, torch_dtype

T = TypeVar("T")

# What is multiplied by a weight.
WeightRequest: TypeAlias = LinearRequest | RingLinearRequest | LMHeadRequest | RingLMHeadRequest

_SMALLEST_ZEROS = 2**16


class Kernels(Protocol):
    """Computes. Stateless between requests."""

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """Return what computes all requests that have this one's header.

        Its output has the task's shape and dtype, and is complete once its work has ended.
        """


class TorchKernels:
    """Applies requests to the weights, on their device.

    Floats are computed in the weights' dtype, and outputs converted back to the dtype of the
    request, so a client that sends float32 gets float32 whatever the service computes in. Elements
    of the ring are never rounded. Other ranks use `product` and `reply` by themselves.
    """

    def __init__(self, weights: ServiceWeights, spin_us: float = 0.0) -> None:
        self._weights = weights
        self._transfer = transfer_to(weights.device, spin_us)
        # Whether one row is better multiplied as two of the same. On processors with AVX512-BF16,
        # oneDNN reads a bfloat16 matrix a tenth faster for two rows than for one, with the same
        # numbers. For float32 and float16 two rows take twice as long as one.
        on_cpu = weights.device.type == "cpu" and weights.dtype is torch.bfloat16
        self._twice = on_cpu and multiplies_bfloat16()

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `Kernels.prepare`."""
        to_host, dtype, shape = self._transfer.to_host, torch_dtype(task.dtype), task.shape
        product = self.product(request, task)

        def kernel(request: Request, _incoming: Incoming | None) -> Result:
            # As `reply`, in one call less.
            output, work = to_host(product(request), dtype)
            tensor = WireTensor(task.dtype, shape, raw_bytes(output))
            return tensor_reply({"output": tensor}), work

        return kernel

    def reply(self, output: torch.Tensor, task: Task) -> Result:
        """Return a product as the reply that the task asks for."""
        output, work = self._transfer.to_host(output, torch_dtype(task.dtype))
        tensor = WireTensor(task.dtype, task.shape, raw_bytes(output))
        return tensor_reply({"output": tensor}), work

    def product(self, request: Computed, task: Task) -> Callable[[Any], torch.Tensor]:
        """Return what computes all requests that have this one's header, and leaves it there.

        The output has the task's shape, and the dtype of the weights; int32 in the ring.
        """
        floats, to_device, shape = self._floats, self._transfer.to_device, task.shape
        match request:
            case LinearRequest() | LMHeadRequest():
                matrix, bias = weight_of(self._weights, request)
                if self._twice and math.prod(shape[:-1]) == 1:
                    return lambda request: linear(
                        floats(request.hidden_states).view(1, -1).expand(2, -1), matrix, bias
                    )[0].view(shape)
                return lambda request: linear(floats(request.hidden_states), matrix, bias)
            case RingLinearRequest() | RingLMHeadRequest():
                product, in_features = self._ring_product(request), request.elements.shape[-1]

                def ring(request: RingLinearRequest | RingLMHeadRequest) -> torch.Tensor:
                    elements = to_device(to_torch(request.elements), torch.int32)
                    return product(elements.view(-1, in_features)).view(shape)

                return ring
            case MatmulRequest():
                return lambda request: torch.matmul(floats(request.a), floats(request.b))
            case EmbeddingRequest():
                return lambda request: self._embedded(
                    to_device(to_torch(request.input_ids), torch.int64)
                )

    def _ring_product(
        self, request: RingLinearRequest | RingLMHeadRequest
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what multiplies int32 rows [T, K] on the device by the weight, mod 2^32."""
        weight, _ = weight_of(self._weights, request)
        return partial(exact_product, weight=weight)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids; zeros for an id that another part holds."""
        table, part = _there(self._weights.embedding), self._weights.part
        if len(table) == part.vocabulary:
            return embedding(ids, table)
        own = ids - part.first_id
        elsewhere = (own < 0) | (own >= len(table))
        rows = embedding(own.masked_fill(elsewhere, 0), table)
        return rows.masked_fill(elsewhere[..., None], 0.0)

    def _floats(self, tensor: WireTensor) -> torch.Tensor:
        return self._transfer.to_device(to_torch(tensor), self._weights.dtype)


def weight_of(
    weights: ServiceWeights, request: WeightRequest
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight that a request names, [out_features, in_features], and its bias."""
    match request:
        case LinearRequest(layer_idx=layer, module_names=names):
            fused = _there(weights.linears)[layer][OPERATOR_OF[names[0]]]
            part = _part(names, fused.rows)
            bias = None if fused.bias is None or not request.bias else fused.bias[part]
            return fused.weight[part], bias
        case RingLinearRequest(layer_idx=layer, module_names=names):
            integers = _there(weights.integers)[layer][OPERATOR_OF[names[0]]]
            return integers.weight[_part(names, integers.rows)], None
        case LMHeadRequest():
            return _there(weights.lm_head), None
        case RingLMHeadRequest():
            return _there(weights.lm_head_int8).weight, None


def _part(names: tuple[ModuleName, ...], rows: dict[ModuleName, slice]) -> slice:
    """Return which rows of a fused matrix are asked for: all of them, or those of one module."""
    return slice(None) if names == tuple(rows) else rows[names[0]]


def _there(held: T | None) -> T:
    """Return what the check has made sure of."""
    if held is None:
        raise RuntimeError("a request for what is not held got through the checks")
    return held


@dataclass(frozen=True, slots=True)
class _Modelled:
    """Work that takes as long as was computed before."""

    end_ns: int

    def ends_ns(self) -> int:
        return self.end_ns


class NullKernels:
    """Answers with zeros of the right shape, at once or after as long as an accelerator takes.

    An accelerator works on one request after the other, and meanwhile on nothing of ours: the
    service reads and writes. `itemsize`: bytes of an element of the weights that it would hold.
    """

    def __init__(
        self,
        device: NullDevice,
        itemsize: int,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._profile = device.profile
        self._itemsize = itemsize
        self._clock = clock
        # When the accelerator will have done all that it was given.
        self._free_ns = 0
        self._zeros = memoryview(b"")

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `Kernels.prepare`."""
        reply, duration_us = self.zeros(task), self.request_us(task)
        return lambda _request, _incoming: (reply, self.works_for(duration_us))

    def zeros(self, task: Task) -> TensorReply:
        """Return zeros of the task's shape and dtype."""
        size = task.output_bytes
        if size > len(self._zeros):
            # Twice as much as before at least, so that what older replies keep alive stays bounded.
            zeros = bytearray(max(size, 2 * len(self._zeros), _SMALLEST_ZEROS))
            self._zeros = memoryview(zeros).toreadonly()
        return TensorReply(output=WireTensor(task.dtype, task.shape, self._zeros[:size]))

    def request_us(self, task: Task) -> float:
        """Return how long the accelerator takes for it, 0 without one."""
        return 0.0 if self._profile is None else request_us(self._profile, task, self._itemsize)

    def attention_us(self, heads: int, rows: int, head_dim: int, context: int) -> float:
        """Return how long the attention of one layer and sequence takes, 0 without a profile.

        Two products for each of `heads`, of so many rows by so many keys.
        """
        if (profile := self._profile) is None:
            return 0.0
        sizes = ((rows, head_dim, context), (rows, context, head_dim))
        return sum(profile.matmul_us(heads, *size, self._itemsize) for size in sizes)

    def works_for(self, duration_us: float) -> Working | None:
        """Let the accelerator work so long, behind what it has; None without one: it has ended."""
        if self._profile is None:
            return None
        self._free_ns = max(self._clock(), self._free_ns) + math.ceil(duration_us * 1000)
        return _Modelled(self._free_ns)


def request_us(profile: DeviceProfile, task: Task, itemsize: int) -> float:
    """Return how long a service on that accelerator takes for a request, in microseconds.

    Copy in, kernels, copy out, one after the other; of a Segment without attention, which depends
    on its sessions. `itemsize`: bytes of an element of the weights; tensors cross the bus in the
    request's own dtype.
    """
    match task.work:
        case LinearWork(rows, in_features, out_features, integer):
            kernels_us = profile.linear_us(rows, in_features, out_features, itemsize, integer)
        case MatmulWork(batch, m, k, n):
            kernels_us = profile.matmul_us(batch, m, k, n, itemsize)
        case EmbeddingWork(tokens, hidden_size):
            kernels_us = profile.embedding_us(tokens, hidden_size, itemsize)
        case SegmentWork(layers, linears, head):
            works = (*linears * layers, *([] if head is None else [head]))
            sizes = ((work.rows, work.in_features, work.out_features) for work in works)
            kernels_us = sum(profile.linear_us(*size, itemsize) for size in sizes)
    copies_us = profile.transfer_us(task.input_bytes) + profile.transfer_us(task.output_bytes)
    return kernels_us + copies_us


@dataclass(frozen=True)
class Served:
    """What is there in the place of weights that this process holds alone.

    `model`: what it says that it holds; `kernels`: what computes with it.
    """

    model: ServedModel
    kernels: Kernels


class NullWeights:
    """A null device in place of weights. `model`: what it says that it holds."""

    def __init__(self, model: ServedModel, device: NullDevice, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.kernels = NullKernels(device, ITEMSIZE[short_name(dtype)])
