"""What answers a checked request on a CUDA device: products with weights, each as one graph.

A graph is made for one place in the model, one number of rows and the workspace that it runs in,
when they come for the second time: what comes once is not worth it, and by then kernels are
compiled and libraries set up. Numbers of rows are rounded up to `GRAPH_ROWS`; the rows in between
are computed for nothing. More rows than that are given to the device piece by piece: that takes
less than the work itself, and most of those numbers never come again.

Up to `GRAPH_ROWS`, elements of the ring are not copied. Kernels find the addresses of the rows and
of the result in a table, fetch the rows once, and write the result and then a flag, at which the
host looks (`gpu_side.cuda.ring`). Floats are copied in and out, and an event says when they are
there. A slot of shared memory is used in place once the device reaches it (`reach`); what comes
from elsewhere goes through a workspace's host memory.

`check_integers` finds out at the start whether a device's int8 products are exact, and
`CudaKernels` whether those in place are those that are copied.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import linear

from gpu_side.cuda.device import GRAPH_ROWS, CudaDevice, InPlaceJob, Tile, tiles_for
from gpu_side.encoding import payload_place
from gpu_side.event_log import log
from gpu_side.kernels import (
    Kernel,
    Result,
    TorchKernels,
    WeightRequest,
    Working,
    queued,
    wait_until,
    weight_of,
)
from gpu_side.tasks import Computed, LinearWork, Task
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_client import adopt
from gpu_side.weights import OPERATOR_OF, ServiceWeights
from protocol import native
from protocol.errors import KernelError
from protocol.integer import MAX_IN_FEATURES, check_kernels
from protocol.messages import (
    FUSED_MODULES,
    Projection,
    tensor_reply,
)
from protocol.model.config import ModelConfig
from protocol.shared_memory import Lane, SlotMemory, create
from protocol.tensors import Buffer, WireTensor, raw_bytes, to_torch, torch_dtype

# For how many rows tiles are chosen at the start; for other shapes at their first request.
_CHOSEN_ROWS = (*GRAPH_ROWS, 64, 128, 256, 512)

# 126 layers of four operators, in two numbers of rows, for two requests at a time. All of them are
# given up when there are more.
MAX_GRAPHS = 2048

# Of all slots that the device reaches, and of those of one client: their pages, 128 MiB each at
# most, are held as long as it is there, and making them takes time.
MAX_REACHED_BYTES = 4 * 1024**3

MAX_REACHED_SLOTS = 2

# When a device that has not set a flag is asked, too, whether it has failed: that takes longer.
_ASK_AFTER_NS = 1_000_000


class Product(NamedTuple):
    """A product with one weight.

    `multiply`: returns the result [T, N] for rows [T, K], both on the device. `in_place`: does a
    job of at most so many rows without copies; None where nothing does.
    """

    multiply: Callable[[torch.Tensor], torch.Tensor]
    in_place: Callable[[InPlaceJob, int], None] | None = None


class _Workspace:
    """What one request under way needs. `number`: names it among the others.

    `event` says when the device is done with what was copied. For what has come without copies the
    workspace is in the place of an event: it looks at the flag of its job.
    """

    def __init__(self, device: CudaDevice, row_bytes: tuple[int, int], number: int) -> None:
        self.number = number
        self._device, self.event = device, device.event()
        inward, outward = (GRAPH_ROWS[-1] * size for size in row_bytes)
        # Never replaced: graphs refer to their addresses.
        self._inward = device.pinned((inward,), torch.uint8)
        self._outward = device.pinned((outward,), torch.uint8)
        self.job = InPlaceJob(
            table=device.pinned((3,), torch.int64),
            flag=device.pinned((1,), torch.int32),
            told=device.zeros((3,), torch.int64),
            fetched=device.zeros((inward // torch.int32.itemsize,), torch.int32),
        )
        self._ask_from_ns = 0
        self._views: dict[tuple[bool, int, int, torch.dtype], torch.Tensor] = {}

    def record(self) -> None:
        """Begin to wait for the flag; the kernels set it."""
        self._ask_from_ns = time.perf_counter_ns() + _ASK_AFTER_NS

    def query(self) -> bool:
        """Say whether the flag is set. Raises RuntimeError where it never will be."""
        if self.job.is_done:
            return True
        late = time.perf_counter_ns() >= self._ask_from_ns
        if late and self._device.is_idle() and not self.job.is_done:
            raise RuntimeError("the device has ended its work, and left no result")
        return False

    def view(self, inward: bool, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as [rows, width]. Made once: looking it up is faster."""
        key = inward, rows, width, dtype
        if (view := self._views.get(key)) is None:
            memory = self._inward if inward else self._outward
            size = rows * width * dtype.itemsize
            view = self._views[key] = memory[:size].view(dtype).view(rows, width)
        return view


# A place in the queue of the device, which may be asked whether the device has got there.
_Event: TypeAlias = torch.cuda.Event | _Workspace


class DeviceProducts:
    """Gives products to a device.

    `row_bytes`: of the longest row that comes, and of the longest of a result. `spin_us`: see
    `gpu_side.kernels.queued`.
    """

    def __init__(
        self, device: CudaDevice, row_bytes: tuple[int, int], spin_us: float = 0.0
    ) -> None:
        self._device = device
        self._row_bytes = row_bytes
        self._spin_us = spin_us
        self._workspaces: list[_Workspace] = []
        self._numbers = count()
        # By what they were made for, `_run`. None: not made, to be done piece by piece.
        self._graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}
        self._came_once: set[tuple[Hashable, ...]] = set()
        # Slots by their address: whether the device reaches them; how many of each client's.
        self._slots: dict[int, bool] = {}
        self._reached_of: weakref.WeakKeyDictionary[Lane, int] = weakref.WeakKeyDictionary()
        self._reached_bytes = 0

    def reach(self, slot: SlotMemory | None) -> bool:
        """Let the device use a slot in place, if it can, from its first request on.

        It is taken back when the client's memory goes.
        """
        if slot is None:
            return False
        if (reached := self._slots.get(slot.address)) is None:
            size, of_client = slot.size, self._reached_of.get(slot.lane, 0)
            fits = of_client < MAX_REACHED_SLOTS and self._reached_bytes + size <= MAX_REACHED_BYTES
            reached = fits and self._device.register(slot.address, size)
            if not reached:
                log.warning("not_registered", bytes=size, reached_bytes=self._reached_bytes)
            self._slots[slot.address] = reached
            self._reached_bytes += size * reached
            self._reached_of[slot.lane] = of_client + reached
            # Called before the client's memory is unmapped.
            weakref.finalize(slot.lane, self._forget, slot.address, size).atexit = False
        return reached

    def _forget(self, address: int, size: int) -> None:
        if not self._slots.pop(address, False):
            return
        self._reached_bytes -= size
        # There is room again for those that had none.
        self._slots = {other: True for other, reached in self._slots.items() if reached}
        try:
            # The device may still write the result of a client that has gone.
            self._device.synchronize()
            self._device.unregister(address)
        except RuntimeError:
            log.exception("not_unregistered")

    def submit(
        self,
        place: Hashable,
        product: Product,
        rows: torch.Tensor,
        result: torch.Tensor,
        slot: SlotMemory | None = None,
    ) -> Working:
        """Have `result` filled with the product of `rows`.

        `rows`: [T, K], `result`: [T, N], contiguous and in host memory. Both must stay until the
        work has ended. `place`: names the product among those of the model. `slot`: where both may
        lie; used in place if the device reaches it. Raises RuntimeError where the device fails.
        """
        slot = slot if self.reach(slot) else None
        workspace = (
            self._workspaces.pop()
            if self._workspaces
            else _Workspace(self._device, self._row_bytes, next(self._numbers))
        )
        try:
            target, event = self._give(workspace, place, product, rows, result, slot)
            event.record()
        except BaseException:
            # A kernel that was given may still use it.
            self._device.synchronize()
            self._workspaces.append(workspace)
            raise

        def ended() -> None:
            if target is not result:
                result.copy_(target[: len(result)])
            self._workspaces.append(workspace)

        return queued(event.query, self._spin_us, ended)

    def _give(
        self,
        workspace: _Workspace,
        place: Hashable,
        product: Product,
        rows: torch.Tensor,
        result: torch.Tensor,
        slot: SlotMemory | None,
    ) -> tuple[torch.Tensor, _Event]:
        """Give few rows to the device as a graph, and many piece by piece.

        Return where the result will be, and what says when.
        """
        device, count, many = self._device, len(rows), len(rows) > GRAPH_ROWS[-1]
        in_place = None if many else product.in_place
        rounded = count if many else next(n for n in GRAPH_ROWS if n >= count)
        source, target = rows, result
        used_where_they_lie = many or in_place is not None

        def room(inward: bool, width: int, dtype: torch.dtype) -> torch.Tensor:
            if many:
                return device.pinned((count, width), dtype)
            return workspace.view(inward, rounded, width, dtype)

        if not (used_where_they_lie and _lies_in(slot, rows)):
            source = room(True, rows.shape[1], rows.dtype)
            # What an earlier request has left in the rows behind them is multiplied, and dropped.
            source[:count].copy_(rows)
        reached = _lies_in(slot, result) or (many and device.reaches(result))
        if not (used_where_they_lie and reached):
            target = room(False, result.shape[1], result.dtype)

        def work() -> None:
            if in_place is None:
                target.copy_(product.multiply(device.to_device(source)), non_blocking=True)
            else:
                in_place(workspace.job, rounded)

        if in_place is not None:
            workspace.job.tell(source[:count], target)
        if many:
            work()
        else:
            self._run((workspace.number, place, rounded, rows.dtype), work)
        return target, workspace.event if in_place is None else workspace

    def _run(self, key: tuple[Hashable, ...], work: Callable[[], None]) -> None:
        """Do it, as a graph if there is one or it is worth one."""
        graph = self._graphs.get(key)
        if graph is None and key in self._came_once:
            self._came_once.remove(key)
            if len(self._graphs) >= MAX_GRAPHS:
                self._device.synchronize()
                self._graphs.clear()
            graph = self._graphs[key] = self._device.capture(work)
        elif key not in self._graphs:
            if len(self._came_once) >= MAX_GRAPHS:
                self._came_once.clear()
            self._came_once.add(key)
        work() if graph is None else graph.replay()


def _lies_in(slot: SlotMemory | None, tensor: torch.Tensor) -> bool:
    return slot is not None and (0 <= tensor.data_ptr() - slot.address <= slot.size - tensor.nbytes)


class CudaKernels(TorchKernels):
    """Products with weights as graphs; the other requests as torch computes them.

    `spin_us`: see `gpu_side.kernels.queued`. `device`: where the weights are.
    """

    def __init__(
        self, weights: ServiceWeights, spin_us: float = 0.0, device: CudaDevice | None = None
    ) -> None:
        super().__init__(weights, spin_us)
        self._device = device or CudaDevice(weights.device)
        head: list[Projection] = ["lm_head"] if weights.has_lm_head else []
        shapes = [weights.part.row_layout(name)[1] for name in (*FUSED_MODULES, *head)]
        # Of the longest row of a request, and of a result, in the widest dtype.
        widest_out, widest_in = (
            torch.float32.itemsize * max(sizes) for sizes in zip(*shapes, strict=True)
        )
        row_bytes = widest_in, widest_out
        self._products = DeviceProducts(self._device, row_bytes, spin_us)
        # For each shape, the fastest.
        self._tiles: dict[tuple[int, int, int], Tile] = {}
        if weights.integers is not None:
            self._choose_tiles(row_bytes)

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `gpu_side.kernels.Prepare`."""
        if not isinstance(request, WeightRequest):
            return super().prepare(request, task)
        work = task.work
        if not isinstance(work, LinearWork):
            raise TypeError("a product with a weight that is none")
        products, dtype, integer = self._products, torch_dtype(task.dtype), work.integer
        weight, bias = weight_of(self._weights, request)
        product = self._ring(weight) if integer else Product(partial(_floats, weight, bias, dtype))
        place: Hashable = (
            request.method,
            *(getattr(request, name, None) for name in ("layer_idx", "module_names", "bias")),
        )
        rows_shape, result_shape = (work.rows, work.in_features), (work.rows, work.out_features)
        # A result of many rows is written into the reply's memory; of few, copied there.
        empty = self._device.pinned if work.rows > GRAPH_ROWS[-1] else torch.empty
        in_reply = payload_place(request.method, task.dtype, task.shape)
        used_in_place = product.in_place is not None or work.rows > GRAPH_ROWS[-1]

        def kernel(request: Any, incoming: Incoming | None) -> Result:
            slot = None if incoming is None else incoming.slot
            tensor = request.elements if integer else request.hidden_states
            data: Buffer
            fits = slot is not None and used_in_place and in_reply.stop <= len(slot.reply)
            if slot is not None and fits and products.reach(slot):
                data = slot.reply[in_reply]
                result = torch.frombuffer(data, dtype=dtype).view(result_shape)
            else:
                slot, result = None, empty(result_shape, dtype=dtype)
                data = raw_bytes(result)
            rows = to_torch(tensor).view(rows_shape)
            under_way = products.submit(place, product, rows, result, slot)
            return tensor_reply({"output": WireTensor(task.dtype, task.shape, data)}), under_way

        return kernel

    def _ring_product(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `TorchKernels._ring_product`; without graphs."""
        return self._ring(weight).multiply

    def _ring(self, weight: torch.Tensor) -> Product:
        """Return the product by int8 [N, K] in the ring; rows and result are int32."""
        # Needs Triton, and was found to work when the weights were about to be read.
        from gpu_side.cuda import ring

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return ring.ring_product(rows, weight, self._tile(ring.ring_product, rows, weight))

        def in_place(job: InPlaceJob, rows: int) -> None:
            fetched = ring.fetched_rows(job, rows, weight)
            ring.do_job(job, rows, weight, self._tile(ring.ring_product, fetched, weight))

        return Product(multiply, in_place)

    def _tile(
        self, product: Callable[..., torch.Tensor], rows: torch.Tensor, weight: torch.Tensor
    ) -> Tile:
        """Return the fastest tile for so many rows. Their numbers are used where it is chosen."""
        out_features, in_features = weight.shape
        # Of the next power of two, which stands for these rows.
        key = (in_features, out_features, min(1 << (len(rows) - 1).bit_length(), 512))
        if (tile := self._tiles.get(key)) is None:
            took_us = {
                tile: self._device.time_us(partial(product, rows, weight, tile))
                for tile in tiles_for(len(rows))
            }
            tile = self._tiles[key] = min(took_us, key=took_us.__getitem__)
            log.info(
                "tile",
                in_features=in_features,
                out_features=out_features,
                rows=key[-1],
                tile="x".join(map(str, tile)),
                us=round(took_us[tile], 1),
            )
        return tile

    def _choose_tiles(self, row_bytes: tuple[int, int]) -> None:
        """Choose for all operators of a layer and the LM head, so that no request waits for it.

        And have the device do each in a slot of our own segment, as a client's are: a device that
        does not reach it at our addresses fails here, and not at a client's request. Without
        compiled kernels no client shares memory; then kernels are compared alone, as where the
        driver lets none be reached. Raises KernelError.
        """
        weights = self._weights
        slot: SlotMemory | None = None
        if native.library is not None:
            # The client's end goes with its file; ours stays as long as the slot.
            _, file = create(*(GRAPH_ROWS[-1] * size for size in row_bytes))
            try:
                slot = adopt(file, os.geteuid()).memory(0)
            finally:
                os.close(file)
        operators = list((weights.integers or {})[weights.held_layers[0]].values())
        if weights.lm_head_int8 is not None:
            operators.append(weights.lm_head_int8)
        # No two products may have one place.
        numbers = count()
        for operator in operators:
            for rows in _CHOSEN_ROWS:
                weight = operator.weight
                product = self._ring(weight)
                given = torch.randint(-(2**31), 2**31, (rows, weight.shape[1])).to(torch.int32)
                result = product.multiply(given.to(weight.device)).cpu()
                if rows <= GRAPH_ROWS[-1]:
                    self._prove(("start", next(numbers)), product, given, result, slot)

    def _prove(
        self,
        place: Hashable,
        product: Product,
        given: torch.Tensor,
        expected: torch.Tensor,
        slot: SlotMemory | None,
    ) -> None:
        """Compute `expected` int32 [T, N] in place, of `given` int32 [T, K]. Raises KernelError."""
        rows, result = given, torch.zeros_like(expected)
        if slot is not None and expected.nbytes <= len(slot.reply):
            area = (ctypes.c_char * given.nbytes).from_address(slot.address)
            rows = torch.frombuffer(area, dtype=torch.int32).view(given.shape).copy_(given)
            reply = slot.reply[: expected.nbytes]
            result = torch.frombuffer(reply, dtype=torch.int32).view(expected.shape).zero_()
        ends = self._products.submit(place, product, rows, result, slot)
        while (ends_ns := ends()) > time.perf_counter_ns():
            wait_until(ends_ns)
        KernelError.unless(
            torch.equal(result, expected),
            "int8 products in place",
            f"other numbers for {list(given.shape)} by {expected.shape[1]}",
            "those of products that are copied",
        )


def _floats(
    weight: torch.Tensor, bias: torch.Tensor | None, wire_dtype: torch.dtype, rows: torch.Tensor
) -> torch.Tensor:
    """Multiply floats, in the weight's dtype; rows and result are in that of the request."""
    return linear(rows.to(weight.dtype), weight, bias).to(wire_dtype)


def device_kernels(weights: ServiceWeights, spin_us: float) -> TorchKernels:
    """Return what computes with weights, on the device where they are."""
    return (CudaKernels if weights.device.type == "cuda" else TorchKernels)(weights, spin_us)


def check_integers(config: ModelConfig, device: torch.device | None) -> None:
    """Check that this device computes this model's int8 products exactly. Raises KernelError.

    `device`: None for a null one, which has no products: then only the widths must fit.
    """
    widest = max(config.module_shape(module)[1] for module in OPERATOR_OF)
    KernelError.unless(
        widest <= MAX_IN_FEATURES,
        "int8 weights of this model",
        f"{widest} in_features",
        f"at most {MAX_IN_FEATURES}",
    )
    if device is not None:
        (check_ring if device.type == "cuda" else check_kernels)(device)


def check_ring(device: torch.device) -> None:
    """Compare the kernels in all their tiles with exact arithmetic on this device.

    Compiles them, which takes seconds the first time and is kept by Triton. Raises KernelError:
    Triton is not there, cannot compile, or gives a wrong number.
    """
    where = f"int8 products on {device}"
    with KernelError.instead_of(
        ImportError, where, "no Triton", "it installed: torch for CUDA brings it"
    ):
        # Not imported, and need not be installed, where nothing is computed on a GPU.
        from gpu_side.cuda.ring import every_tile
    try:
        check_kernels(device, every_tile)
    except KernelError:
        raise
    except Exception as error:
        # Of its compiler, the C compiler that it calls, and the driver: no common class.
        raise KernelError(
            where, got=f"{type(error).__name__} from Triton", expected="kernels that it compiles"
        ) from error
