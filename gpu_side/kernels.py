"""What answers a checked request: torch on a device, or nothing at all.

Checks are the same for both (`gpu_side.tasks`) and are done before.

An accelerator may still be working on a result when the kernel returns (`Working`). On CUDA, copies
go through pinned host memory, which the device reads and writes by itself; from pageable memory the
driver would stage every copy a second time and wait. torch keeps pinned blocks and hands them out
again once the device is done with them, so none is allocated per request. Products with weights
have a way of their own there (`gpu_side.cuda.products`).
"""

import ctypes
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.functional import embedding, linear

from gpu_side.devices import DeviceProfile, NullDevice, multiplies_bfloat16
from gpu_side.encoding import payload_place
from gpu_side.tasks import Computed, LinearWork, MatmulWork, Task
from gpu_side.transport.listener import Incoming
from gpu_side.weights import OPERATOR_OF, ServiceWeights
from protocol.integer import DIGITS, ring_product
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    TensorReply,
    part_of,
    tensor_reply,
)
from protocol.tensors import WireTensor, raw_bytes, to_torch, torch_dtype

T = TypeVar("T")

# What is multiplied by a weight.
WeightRequest: TypeAlias = LinearRequest | RingLinearRequest | LMHeadRequest | RingLMHeadRequest

# The least that are kept to reply with; more are written where a reply goes, if there is a place.
_SMALLEST_ZEROS = 2**16


# What an accelerator was given; the host has other things to do meanwhile. Returns when it ends or
# ended (perf_counter_ns), or when to ask again. Raises RuntimeError where the device has failed.
Working: TypeAlias = Callable[[], int]

# A reply, and what has to end before its tensors may be read; None: nothing.
Result: TypeAlias = tuple[Response, Working | None]

# Computes requests that differ in the numbers of their tensors only. It gets the message that the
# request came in, too: in a slot of shared memory the result may be left where the reply goes.
Kernel: TypeAlias = Callable[[Request, Incoming | None], Result]

# A sleeping thread wakes up as late as this; the rest of a wait is spent awake.
_WAKE_UP_NS = 120_000


def wait_until(
    deadline_ns: int,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return at that reading of the clock, a few microseconds late and never early.

    Sleeps for all but the last tenth of a millisecond or so: a sleep alone comes back too late, and
    staying awake takes a core from the program that is being measured.
    """
    spare_ns = deadline_ns - clock() - _WAKE_UP_NS
    if spare_ns > 0:
        sleep(spare_ns / 1e9)
    while clock() < deadline_ns:
        pass


# When to ask again whether the device is done: at once as long as we may spin, then after this, or
# a part of the time that it has taken so far, whichever is longer, so that long work costs no core.
_ASK_AGAIN_NS = 50_000

_ASK_AGAIN_PART = 8


def digits_needed(values: torch.Tensor) -> int:
    """Return how many digits (1 to 4) hold every value of an int32 tensor exactly."""
    if not values.numel():
        return 1
    lowest, highest = torch.aminmax(values)
    low, high = int(lowest), int(highest)
    for count in range(1, DIGITS):
        # 127 + 127 * 256 + ... at most, -128 - 128 * 256 - ... at least.
        places = (256**count - 1) // 255
        if -128 * places <= low and high <= 127 * places:
            return count
    return DIGITS


def exact_product(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `ring_product`, with as few digits as the values need.

    Half the work or less for values that are small: the product itself where it fits int32, and
    modulo 2^32 otherwise. How long it takes depends on the values: not for activations in the TEE.
    """
    return ring_product(values, weight, digits_needed(values))


class Transfer:
    """Carries tensors to the device and back. Of the CPU: only another dtype is a copy."""

    # Returns a CPU tensor as it is needed on the device; the original may be freed at once. Without
    # a Python call: it is asked for every request.
    to_device: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = staticmethod(torch.Tensor.to)

    def to_host(
        self, tensor: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Working | None]:
        """Return a device tensor on the CPU, complete once the work with it has ended."""
        return tensor.to(dtype), None

    def reply(self, output: torch.Tensor, task: Task) -> Result:
        """Return an output of the device as the reply that the task asks for."""
        found, work = self.to_host(output, torch_dtype(task.dtype))
        tensor = WireTensor(task.dtype, task.shape, raw_bytes(found))
        return tensor_reply({"output": tensor}), work


def queued(
    query: Callable[[], bool], spin_us: float = 0.0, ended: Callable[[], None] | None = None
) -> Working:
    """Return work that stands in a stream before an event: only the device knows when it ends.

    `query`: says whether the device has got to the event; raises RuntimeError where it has failed.
    `spin_us`: for how long to ask again without a pause; the loop looks for messages in between.
    `ended`: what is left to do then, on the host.
    """
    began_ns, spin_ns = time.perf_counter_ns(), int(spin_us * 1000)
    ended_ns = 0

    def ends_ns() -> int:
        nonlocal ended_ns
        if not ended_ns:
            now_ns = time.perf_counter_ns()
            if not query():
                taken_ns = now_ns - began_ns
                if taken_ns < spin_ns:
                    return now_ns + 1
                return now_ns + max(_ASK_AGAIN_NS, taken_ns // _ASK_AGAIN_PART)
            if ended is not None:
                ended()
            ended_ns = now_ns
        return ended_ns

    return ends_ns


class PinnedStaging(Transfer):
    """The device is a CUDA one: copies through pinned memory, all on the current stream.

    Copies and kernels of requests queue up behind each other, and the host waits for none of them.
    dtypes are converted on the device, where it is cheap, and cross the bus as sent.
    """

    def __init__(self, device: torch.device, spin_us: float = 0.0) -> None:
        self._device = device
        self._spin_us = spin_us

    def to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `Transfer.to_device`."""
        # Dropping the pinned tensor early is safe: torch reuses its block only after the copy.
        pinned = self._empty(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(self._device, non_blocking=True).to(dtype)

    def to_host(
        self, tensor: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Working | None]:
        """See `Transfer.to_host`."""
        pinned = self._empty(tensor.shape, dtype)
        pinned.copy_(tensor.to(dtype), non_blocking=True)
        return pinned, queued(self._record(), self._spin_us)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _record(self) -> Callable[[], bool]:
        # The device's own stream: the current device may be another.
        query: Callable[[], bool] = torch.cuda.current_stream(self._device).record_event().query
        return query


def transfer_to(device: torch.device, spin_us: float = 0.0) -> Transfer:
    """Return what carries tensors to a device. `spin_us`: see `queued`."""
    return PinnedStaging(device, spin_us) if device.type == "cuda" else Transfer()


# Returns what computes all requests that have this one's header. Its output has the task's shape
# and dtype, and is complete once its work has ended. Nothing else is kept between requests.
Prepare: TypeAlias = Callable[[Computed, Task], Kernel]


class TorchKernels:
    """Applies requests to the weights, on their device.

    Floats are computed in the weights' dtype, and outputs converted back to the dtype of the
    request, so a client that sends float32 gets float32 whatever the service computes in. Elements
    of the ring are never rounded. Ranks use `product` by itself.
    """

    def __init__(self, weights: ServiceWeights, spin_us: float = 0.0) -> None:
        self._weights = weights
        self.transfer = transfer_to(weights.device, spin_us)
        # Whether one row is better multiplied as two of the same. On processors with AVX512-BF16,
        # oneDNN reads a bfloat16 matrix a tenth faster for two rows than for one, with the same
        # numbers. For float32 and float16 two rows take twice as long as one.
        self._twice = (
            weights.device.type == "cpu"
            and weights.dtype is torch.bfloat16
            and multiplies_bfloat16()
        )

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `Prepare`."""
        to_host, dtype, shape = self.transfer.to_host, torch_dtype(task.dtype), task.shape
        product = self.product(request, task)

        def kernel(request: Request, _incoming: Incoming | None) -> Result:
            # As `Transfer.reply`, in two calls less.
            output, work = to_host(product(request), dtype)
            tensor = WireTensor(task.dtype, shape, raw_bytes(output))
            return tensor_reply({"output": tensor}), work

        return kernel

    def product(self, request: Computed, task: Task) -> Callable[[Any], torch.Tensor]:
        """Return what computes all requests that have this one's header, and leaves it there.

        The output has the task's shape, and the dtype of the weights; int32 in the ring.
        """
        floats, to_device, shape = self._floats, self.transfer.to_device, task.shape
        match request:
            case LinearRequest() | LMHeadRequest():
                matrix, bias = weight_of(self._weights, request)
                if self._twice and math.prod(shape[:-1]) == 1:
                    return lambda request: linear(
                        floats(request.hidden_states).view(1, -1).expand(2, -1), matrix, bias
                    )[0].view(shape)
                return lambda request: linear(floats(request.hidden_states), matrix, bias)
            case RingLinearRequest() | RingLMHeadRequest():
                product = self._ring_product(weight_of(self._weights, request)[0])
                in_features = request.elements.shape[-1]

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

    def _ring_product(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what multiplies int32 rows [T, K] on the device by int8 [N, K], mod 2^32."""
        return partial(exact_product, weight=weight)

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of these ids; zeros for an id that another part holds."""
        table, part = there(self._weights.embedding), self._weights.part
        if len(table) == part.vocabulary:
            return embedding(ids, table)
        own = ids - part_of(part.vocabulary, *part.columns).start
        elsewhere = (own < 0) | (own >= len(table))
        rows = embedding(own.masked_fill(elsewhere, 0), table)
        return rows.masked_fill(elsewhere[..., None], 0.0)

    def _floats(self, tensor: WireTensor) -> torch.Tensor:
        return self.transfer.to_device(to_torch(tensor), self._weights.dtype)


def weight_of(
    weights: ServiceWeights, request: WeightRequest
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight that a request names, [out_features, in_features], and its bias."""
    match request:
        case LinearRequest(layer_idx=layer, module_names=names):
            fused = there(weights.linears)[layer][OPERATOR_OF[names[0]]]
            part = _part(names, fused.rows)
            bias = None if fused.bias is None or not request.bias else fused.bias[part]
            return fused.weight[part], bias
        case RingLinearRequest(layer_idx=layer, module_names=names):
            integers = there(weights.integers)[layer][OPERATOR_OF[names[0]]]
            return integers.weight[_part(names, integers.rows)], None
        case LMHeadRequest():
            return there(weights.lm_head), None
        case RingLMHeadRequest():
            return there(weights.lm_head_int8).weight, None


def _part(names: tuple[ModuleName, ...], rows: dict[ModuleName, slice]) -> slice:
    """Return which rows of a fused matrix are asked for: all of them, or those of one module."""
    return slice(None) if names == tuple(rows) else rows[names[0]]


def there(held: T | None) -> T:
    """Return what a check before has made sure of."""
    if held is None:
        raise RuntimeError("what is not there got through the checks")
    return held


class NullKernels:
    """Answers with zeros of the right shape, at once or after as long as an accelerator takes.

    An accelerator works on one request after the other, and meanwhile on nothing of ours: the
    service reads and writes. `profile`: the accelerator's, None: there is none. `dtype`: of the
    weights that it would hold.
    """

    def __init__(
        self,
        device: NullDevice,
        dtype: torch.dtype,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.profile = device.profile
        self.dtype = dtype
        self._clock = clock
        # When the accelerator will have done all that it was given.
        self._free_ns = 0
        self._zeros = memoryview(b"")

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `Prepare`."""
        zeros, duration_us = self.zeros(task), self.request_us(task)
        place = payload_place(request.method, task.dtype, task.shape)
        large = task.output_bytes > _SMALLEST_ZEROS

        def kernel(_request: Request, incoming: Incoming | None) -> Result:
            reply, slot = zeros, None if incoming is None else incoming.slot
            if slot is not None and large and place.stop <= len(slot.reply):
                # Written where a device would leave it, without a copy.
                zeroed = slot.reply[place]
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(zeroed)), 0, len(zeroed))
                reply = TensorReply(output=WireTensor(task.dtype, task.shape, zeroed))
            return reply, self.works_for(duration_us)

        return kernel

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
        return 0.0 if self.profile is None else request_us(self.profile, task, self.dtype.itemsize)

    def works_for(self, duration_us: float) -> Working | None:
        """Let the accelerator work so long, behind what it has; None without one: it has ended."""
        if self.profile is None:
            return None
        self._free_ns = end_ns = max(self._clock(), self._free_ns) + math.ceil(duration_us * 1000)

        def ends_ns() -> int:
            return end_ns

        return ends_ns


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
        case None:
            *leading, hidden_size = task.shape
            kernels_us = profile.embedding_us(math.prod(leading), hidden_size, itemsize)
        case works:
            sizes = ((work.rows, work.in_features, work.out_features) for work in works)
            kernels_us = sum(profile.linear_us(*size, itemsize) for size in sizes)
    copies_us = profile.transfer_us(task.input_bytes) + profile.transfer_us(task.output_bytes)
    return kernels_us + copies_us
