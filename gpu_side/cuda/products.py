"""Products with the model's weights, each given to the device as one graph.

A graph copies the rows in from host memory, multiplies, and copies the result out. It is made for
one place in the model, one number of rows and the two addresses in host memory, when they come for
the second time: what comes once is not worth it, and by then kernels are compiled and libraries set
up. Numbers of rows are rounded up to `GRAPH_ROWS`; the rows in between are computed for nothing.
More rows than that are given to the device piece by piece: that takes less than the work itself,
and most of those numbers never come again.

Where the device reaches the memory of a request and of its reply (`register`), graphs use it in
place. Otherwise rows and result go through memory of our own, which the device reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from gpu_side.cuda.device import CudaDevice, Event, Graph
from gpu_side.replies import Working
from gpu_side.transfer import Queued

GRAPH_ROWS = (1, 2, 4, 8, 16, 32)
# 126 layers of four operators, in two numbers of rows, for two requests at a time. All of them are
# given up when there are more.
MAX_GRAPHS = 2048

# From rows on the device to the result on the device.
Product = Callable[[torch.Tensor], torch.Tensor]


class _Lane:
    """What one request under way needs: an event, and host memory that the device reaches."""

    def __init__(self, device: CudaDevice, row_bytes: tuple[int, int]) -> None:
        self.event: Event = device.event()
        # Never replaced: graphs refer to their addresses.
        self._inward, self._outward = (
            device.pinned((GRAPH_ROWS[-1] * size,), torch.uint8) for size in row_bytes
        )
        self._views: dict[tuple[bool, int, int, torch.dtype], torch.Tensor] = {}

    def view(self, inward: bool, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory as [rows, width]. Made once: looking it up is faster."""
        key = inward, rows, width, dtype
        if (view := self._views.get(key)) is None:
            memory = self._inward if inward else self._outward
            size = rows * width * dtype.itemsize
            view = self._views[key] = memory[:size].view(dtype).view(rows, width)
        return view


class Products:
    """Gives products to a device.

    `row_bytes`: of the longest row that comes, and of the longest of a result. `spin_us`: see
    `gpu_side.transfer.Queued`.
    """

    def __init__(
        self, device: CudaDevice, row_bytes: tuple[int, int], spin_us: float = 0.0
    ) -> None:
        self._device = device
        self._row_bytes = row_bytes
        self._spin_us = spin_us
        self._lanes: list[_Lane] = []
        # By what they were made for, `_key`. None: not made, to be done piece by piece.
        self._graphs: dict[tuple[Hashable, ...], Graph | None] = {}
        self._came_once: set[tuple[Hashable, ...]] = set()

    def register(self, address: int, size: int) -> bool:
        """Let the device use host memory in place from now on; False where it cannot.

        `unregister` it before it goes: graphs refer to it.
        """
        return self._device.register(address, size)

    def unregister(self, address: int, size: int) -> None:
        """Forget host memory that was registered, and the graphs over it."""
        self._device.synchronize()
        memory = range(address, address + size)
        self._graphs = {
            key: graph
            for key, graph in self._graphs.items()
            if key[-1] not in memory and key[-2] not in memory
        }
        self._device.unregister(address)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for a result of many rows, which is then written in place."""
        return self._device.pinned(shape, dtype)

    def submit(
        self, place: Hashable, product: Product, rows: torch.Tensor, result: torch.Tensor
    ) -> Working:
        """Have `result` filled with the product of `rows`.

        `rows`: [T, K], `result`: [T, N], contiguous and in host memory. Both must stay until the
        work has ended, unless they are not registered, when `rows` may go at once. `place`: names
        the product among those of the model. Raises RuntimeError where the device fails.
        """
        lane = self._lanes.pop() if self._lanes else _Lane(self._device, self._row_bytes)
        try:
            target = self._give(lane, place, product, rows, result)
            lane.event.record()
        except BaseException:
            self._lanes.append(lane)
            raise

        def ended() -> None:
            if target is not result:
                result.copy_(target[: len(result)])
            self._lanes.append(lane)

        return Queued(lane.event, self._spin_us, ended)

    def _give(
        self,
        lane: _Lane,
        place: Hashable,
        product: Product,
        rows: torch.Tensor,
        result: torch.Tensor,
    ) -> torch.Tensor:
        """Give a product to the device, and return the host memory in which the result will be."""
        device, count = self._device, len(rows)
        many = count > GRAPH_ROWS[-1]
        rounded = count if many else next(n for n in GRAPH_ROWS if n >= count)
        source, target = rows, result
        # Memory of the caller has no room for more rows.
        if rounded > count or not device.reaches(rows):
            shape = rounded, rows.shape[1]
            source = (
                device.pinned(shape, rows.dtype) if many else lane.view(True, *shape, rows.dtype)
            )
            # What an earlier request has left in the rows behind them is multiplied, and dropped.
            source[:count].copy_(rows)
        if rounded > count or not device.reaches(result):
            shape = rounded, result.shape[1]
            target = (
                device.pinned(shape, result.dtype)
                if many
                else lane.view(False, *shape, result.dtype)
            )

        def work() -> None:
            target.copy_(product(device.to_device(source)), non_blocking=True)

        if many:
            work()
        else:
            self._run((place, rounded, rows.dtype, source.data_ptr(), target.data_ptr()), work)
        return target

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
