"""Products with the model's weights, each given to the device as one graph, and the proof of them.

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

`check_integers` and `InPlaceProof` find out at the start whether int8 products are exact.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Hashable
from itertools import count
from typing import Protocol

import torch

from gpu_side.cuda.device import GRAPH_ROWS, CudaDevice, Event, InPlaceJob
from gpu_side.event_log import log
from gpu_side.kernels import Queued, Working, wait_until
from gpu_side.served_model import OPERATOR_OF
from protocol import native
from protocol.errors import KernelError
from protocol.integer import MAX_IN_FEATURES, check_kernels
from protocol.model.config import ModelConfig
from protocol.shared_memory import Lane, SlotMemory, adopt, create

# 126 layers of four operators, in two numbers of rows, for two requests at a time. All of them are
# given up when there are more.
MAX_GRAPHS = 2048

# Of all slots that the device reaches, and of those of one client: their pages, 128 MiB each at
# most, are held as long as it is there, and making them takes time.
MAX_REACHED_BYTES = 4 * 1024**3

MAX_REACHED_SLOTS = 2

# When a device that has not set a flag is asked, too, whether it has failed: that takes longer.
_ASK_AFTER_NS = 1_000_000


class Product(Protocol):
    """A product with one weight."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the result [T, N] for rows [T, K], both on the device."""

    @property
    def in_place(self) -> Callable[[InPlaceJob, int], None] | None:
        """What does a job of at most so many rows without copies; None where nothing does."""


class _Flag:
    """That of a job, in the place of an event."""

    def __init__(self, device: CudaDevice, job: InPlaceJob) -> None:
        self._device = device
        self._job = job
        self._ask_from_ns = 0

    def record(self) -> None:
        """Begin to wait; the kernels set it."""
        self._ask_from_ns = time.perf_counter_ns() + _ASK_AFTER_NS

    def query(self) -> bool:
        """Say whether it is set. Raises RuntimeError where it never will be."""
        if self._job.is_done:
            return True
        late = time.perf_counter_ns() >= self._ask_from_ns
        if late and self._device.is_idle() and not self._job.is_done:
            raise RuntimeError("the device has ended its work, and left no result")
        return False


class _Workspace:
    """What one request under way needs. `number`: names it among the others.

    `ended`: says when the device is done with what has come without copies; `event`: with others.
    """

    def __init__(self, device: CudaDevice, row_bytes: tuple[int, int], number: int) -> None:
        self.number = number
        self.event: Event = device.event()
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
        self.ended: Event = _Flag(device, self.job)
        self._views: dict[tuple[bool, int, int, torch.dtype], torch.Tensor] = {}

    def view(self, inward: bool, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as [rows, width]. Made once: looking it up is faster."""
        key = inward, rows, width, dtype
        if (view := self._views.get(key)) is None:
            memory = self._inward if inward else self._outward
            size = rows * width * dtype.itemsize
            view = self._views[key] = memory[:size].view(dtype).view(rows, width)
        return view


class DeviceProducts:
    """Gives products to a device.

    `row_bytes`: of the longest row that comes, and of the longest of a result. `spin_us`: see
    `gpu_side.kernels.Queued`.
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
            many = len(rows) > GRAPH_ROWS[-1]
            give = self._give_many if many else self._give_few
            target, event = give(workspace, place, product, rows, result, slot)
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

        return Queued(event, self._spin_us, ended)

    def _give_few(
        self,
        workspace: _Workspace,
        place: Hashable,
        product: Product,
        rows: torch.Tensor,
        result: torch.Tensor,
        slot: SlotMemory | None,
    ) -> tuple[torch.Tensor, Event]:
        """Give it to the device as a graph; return where the result will be, and what says when."""
        device, count, in_place = self._device, len(rows), product.in_place
        rounded = next(n for n in GRAPH_ROWS if n >= count)
        source, target = rows, result
        if in_place is None or not _lies_in(slot, rows):
            source = workspace.view(True, rounded, rows.shape[1], rows.dtype)
            # What an earlier request has left in the rows behind them is multiplied, and dropped.
            source[:count].copy_(rows)
        if in_place is None or not _lies_in(slot, result):
            target = workspace.view(False, rounded, result.shape[1], result.dtype)
        event = workspace.event if in_place is None else workspace.ended

        def work() -> None:
            if in_place is None:
                target.copy_(product(device.to_device(source)), non_blocking=True)
            else:
                in_place(workspace.job, rounded)

        if in_place is not None:
            workspace.job.tell(source[:count], target)
        self._run((workspace.number, place, rounded, rows.dtype), work)
        return target, event

    def _give_many(
        self,
        workspace: _Workspace,
        _place: Hashable,
        product: Product,
        rows: torch.Tensor,
        result: torch.Tensor,
        slot: SlotMemory | None,
    ) -> tuple[torch.Tensor, Event]:
        """Give it to the device piece by piece."""
        device, source, target = self._device, rows, result
        if not _lies_in(slot, rows):
            source = device.pinned((len(rows), rows.shape[1]), rows.dtype).copy_(rows)
        if not (_lies_in(slot, result) or device.reaches(result)):
            target = device.pinned((len(rows), result.shape[1]), result.dtype)
        target.copy_(product(device.to_device(source)), non_blocking=True)
        return target, workspace.event

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
    if slot is None:
        return False
    start = tensor.data_ptr() - slot.address
    return 0 <= start <= slot.size - tensor.nbytes


class InPlaceProof:
    """Compares products in place with others, in memory as a client shares it.

    A slot of our own segment: a device that does not reach it at our addresses fails here, and not
    at a client's request. `row_bytes`: see `DeviceProducts`. Without compiled kernels no client
    shares memory; then kernels are compared alone, as where the driver lets none be reached.
    """

    def __init__(self, products: DeviceProducts, row_bytes: tuple[int, int]) -> None:
        self._products = products
        # No two products may have one place.
        self._numbers = count()
        self._slot: SlotMemory | None = None
        if native.library is not None:
            # The client's end goes with its file; ours stays as long as the slot.
            _, file = create(*(GRAPH_ROWS[-1] * size for size in row_bytes))
            try:
                self._slot = adopt(file, os.geteuid()).memory(0)
            finally:
                os.close(file)

    def check(self, product: Product, given: torch.Tensor, expected: torch.Tensor) -> None:
        """Compute `expected` int32 [T, N] in place, of `given` int32 [T, K]. Raises KernelError."""
        rows, result, slot = given, torch.zeros_like(expected), self._slot
        if slot is not None and expected.nbytes <= len(slot.reply):
            area = (ctypes.c_char * given.nbytes).from_address(slot.address)
            rows = torch.frombuffer(area, dtype=torch.int32).view(given.shape).copy_(given)
            reply = slot.reply[: expected.nbytes]
            result = torch.frombuffer(reply, dtype=torch.int32).view(expected.shape).zero_()
        work = self._products.submit(("start", next(self._numbers)), product, rows, result, slot)
        while (ends_ns := work.ends_ns()) > time.perf_counter_ns():
            wait_until(ends_ns)
        KernelError.unless(
            torch.equal(result, expected),
            "int8 products in place",
            f"other numbers for {list(given.shape)} by {expected.shape[1]}",
            "those of products that are copied",
        )


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
