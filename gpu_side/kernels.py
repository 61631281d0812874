"""What answers a checked request: torch on a device, or nothing at all.

Checks are the same for both (`gpu_side.plans`) and are done before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch.nn.functional import embedding, linear

from gpu_side.answers import Answer
from gpu_side.devices import NullDevice
from gpu_side.holdings import OPERATOR_OF, Holdings
from gpu_side.plans import Computed, EmbeddingWork, LinearWork, MatmulWork, Plan
from gpu_side.profiles import DeviceProfile
from gpu_side.transfer import transfer_to
from gpu_side.weights import ServiceWeights
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    TensorReply,
)
from protocol.tensors import ITEMSIZE, WireTensor, from_torch, short_name, to_torch, torch_dtype

T = TypeVar("T")

_KEPT_ANSWERS = 1024
_SMALLEST_ZEROS = 2**16


class Kernels(Protocol):
    """Computes. Stateless between requests."""

    def compute(self, request: Computed, plan: Plan) -> Answer:
        """Return an output of the plan's shape and dtype, complete once its work has ended."""
        ...


class TorchKernels:
    """Applies requests to the weights, on their device.

    Floats are computed in the weights' dtype, and outputs converted back to the dtype of the
    request, so a client that sends float32 gets float32 whatever the service computes in. Elements
    of the ring are never rounded.
    """

    def __init__(self, weights: ServiceWeights) -> None:
        self._weights = weights
        self._transfer = transfer_to(weights.device)
        self._twice = _two_rows_are_faster(weights)

    def compute(self, request: Computed, plan: Plan) -> Answer:
        """See `Kernels.compute`."""
        output, work = self._transfer.to_host(self._output(request, plan), torch_dtype(plan.dtype))
        return Answer(TensorReply(output=from_torch(output)), work)

    def _output(self, request: Computed, plan: Plan) -> torch.Tensor:
        weights = self._weights
        match request:
            case LinearRequest():
                output = self._linear(request)
            case RingLinearRequest():
                layer = _there(weights.integers)[request.layer_idx]
                fused = layer[OPERATOR_OF[request.module_names[0]]]
                elements = self._transfer.to_device(to_torch(request.elements), torch.int32)
                output = fused.product(elements, request.module_names)
            case MatmulRequest():
                output = torch.matmul(self._floats(request.a), self._floats(request.b))
            case LMHeadRequest():
                hidden = self._rows(request.hidden_states)
                output = linear(hidden, _there(weights.lm_head))
            case EmbeddingRequest():
                ids = self._transfer.to_device(to_torch(request.input_ids), torch.int64)
                output = embedding(ids, _there(weights.embedding))
        # The plan has fewer rows where `_rows` has doubled one.
        return output if output.shape == plan.shape else output[0].view(plan.shape)

    def _linear(self, request: LinearRequest) -> torch.Tensor:
        layer = _there(self._weights.linears)[request.layer_idx]
        fused = layer[OPERATOR_OF[request.module_names[0]]]
        if fused.bias is not None and not request.bias:
            fused = replace(fused, bias=None)
        return fused(self._rows(request.hidden_states), request.module_names)

    def _rows(self, tensor: WireTensor) -> torch.Tensor:
        """Return what to multiply by a weight: the rows, or a single one twice."""
        hidden = self._floats(tensor)
        if self._twice and hidden.numel() == hidden.shape[-1]:
            return hidden.view(1, -1).expand(2, -1)
        return hidden

    def _floats(self, tensor: WireTensor) -> torch.Tensor:
        return self._transfer.to_device(to_torch(tensor), self._weights.dtype)


def _two_rows_are_faster(weights: ServiceWeights) -> bool:
    """Say whether one row is better multiplied as two of the same.

    On processors with AVX512-BF16, oneDNN reads a bfloat16 matrix a tenth faster for two rows than
    for one, with the same numbers. For float32 and float16 two rows take twice as long as one.
    """
    if weights.device.type != "cpu" or weights.dtype is not torch.bfloat16:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in every torch
    return capabilities is not None and bool(capabilities().get("avx512_bf16", False))


def _there(held: T | None) -> T:
    """Return what the plan has made sure of."""
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
        self._answer: Callable[[Plan], tuple[Answer, int]] = lru_cache(_KEPT_ANSWERS)(
            self._make_answer
        )

    def compute(self, request: Computed, plan: Plan) -> Answer:
        """See `Kernels.compute`."""
        answer, duration_ns = self._answer(plan)
        if self._profile is None:
            return answer
        self._free_ns = max(self._clock(), self._free_ns) + duration_ns
        return Answer(answer.response, _Modelled(self._free_ns))

    def _make_answer(self, plan: Plan) -> tuple[Answer, int]:
        size = plan.output_bytes
        if size > len(self._zeros):
            # Twice as much as before at least, so that what older answers keep alive stays
            # bounded.
            zeros = bytearray(max(size, 2 * len(self._zeros), _SMALLEST_ZEROS))
            self._zeros = memoryview(zeros).toreadonly()
        output = WireTensor(plan.dtype, plan.shape, self._zeros[:size])
        us = 0.0 if self._profile is None else request_us(self._profile, plan, self._itemsize)
        return Answer(TensorReply(output=output)), math.ceil(us * 1000)


def request_us(profile: DeviceProfile, plan: Plan, itemsize: int) -> float:
    """Return how long a service on that accelerator takes for a request, in microseconds.

    Copy in, kernels, copy out, one after the other. `itemsize`: bytes of an element of the weights;
    tensors cross the bus in the request's own dtype.
    """
    match plan.work:
        case LinearWork(rows, in_features, out_features, integer):
            kernels_us = profile.linear_us(rows, in_features, out_features, itemsize, integer)
        case MatmulWork(batch, m, k, n):
            kernels_us = profile.matmul_us(batch, m, k, n, itemsize)
        case EmbeddingWork(tokens, hidden_size):
            kernels_us = profile.embedding_us(tokens, hidden_size, itemsize)
    copies_us = profile.transfer_us(plan.input_bytes) + profile.transfer_us(plan.output_bytes)
    return kernels_us + copies_us


class NullWeights:
    """A null device in place of weights. `held`: what it says that it holds."""

    def __init__(self, held: Holdings, device: NullDevice, dtype: torch.dtype) -> None:
        self.held = held
        self.kernels = NullKernels(device, ITEMSIZE[short_name(dtype)])
