"""What of a CUDA device the products need: memory that it reaches, events and graphs.

A module of its own so that tests put a stand-in here; this one has not run on a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from gpu_side.event_log import log

_CACHE_BYTES = 2**28


class Event(Protocol):
    """A place in the queue of the device."""

    def record(self) -> None:
        """Place it behind all that the device was given."""
        ...

    def query(self) -> bool:
        """Say whether the device has got there. Raises RuntimeError where it has failed."""
        ...


class Graph(Protocol):
    """Copies and kernels that the device is given in one call."""

    def replay(self) -> None:
        """Carry them out, with what the memory holds that they were captured with."""
        ...


class CudaDevice:
    """A CUDA device with one stream, which becomes the current one of this thread.

    So all that is done here, by torch or by Triton, is done in the order in which it was given, and
    graphs may share their memory.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        # Weights were read on the default stream, which cannot be captured.
        torch.cuda.synchronize()
        self._device = device
        torch.cuda.set_stream(torch.cuda.Stream(device))
        self._pool = torch.cuda.graph_pool_handle()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy from host memory that the device reaches, without waiting for it."""
        return tensor.to(self._device, non_blocking=True)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return unset host memory that the device reaches."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device's own."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def reaches(self, tensor: torch.Tensor) -> bool:
        """Say whether the device reads and writes this host memory by itself."""
        return tensor.is_pinned()

    def is_idle(self) -> bool:
        """Say whether it has done all that it was given. Raises RuntimeError where it failed."""
        return torch.cuda.current_stream(self._device).query()

    def event(self) -> Event:
        """Return a new event."""
        return torch.cuda.Event()

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """Make a graph of what `work` gives the device, which is not done now; None: it cannot be.

        `work` has been done before, so that nothing is compiled or set up meanwhile.
        """
        # Not `torch.cuda.graph`, which waits for the device and empties torch's caches each time.
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        except RuntimeError:
            log.warning("no_graph", exc_info=True)
            return None
        return graph

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.cuda.synchronize(self._device)

    def time_us(self, work: Callable[[], object]) -> float:
        """Return how long the device takes for it, with its caches cold: the median of a few."""
        work()
        # Writing so much empties the caches, and takes longer than starting `work`.
        other = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=self._device)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(9)]
        for begin, end in pairs:
            other.zero_()
            begin.record()
            work()
            end.record()
        self.synchronize()
        took_ms: list[float] = [begin.elapsed_time(end) for begin, end in pairs]
        return statistics.median(took_ms) * 1000

    def register(self, address: int, size: int) -> bool:
        """Let the device reach `size` bytes of our memory; False where the driver refuses.

        At the addresses that we know them by, as a discrete GPU does on 64-bit Linux (CUDA's
        `cudaDevAttrCanUseHostPointerForRegisteredMem`).
        """
        if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:
            return True
        # The refusal stays behind as the last error, which torch would find at its next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return False

    def unregister(self, address: int) -> None:
        """Take back what `register` has allowed."""
        torch.cuda.cudart().cudaHostUnregister(address)
