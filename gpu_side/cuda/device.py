"""What of a CUDA device the products need: memory that it reaches, events, graphs, jobs, tiles.

`CudaDevice` has not run on a GPU; tests put a stand-in in its place.

A tile is how the exact product is cut into blocks: there is a short list for each number of rows.
Which of a list is fastest depends on the matrix and the GPU, so each shape tries them once. The
lists are those of a prototype on an H100.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from gpu_side.event_log import log

# Numbers of rows of which graphs are made; see `gpu_side.cuda.products`.
GRAPH_ROWS = (1, 2, 4, 8, 16, 32)


class InPlaceJob:
    """What kernels of one request are told, and where they leave what they have fetched.

    `table`: int64 [3] of host memory, set before they start: the address of the rows, that of the
    result, and the number of rows. `flag`: int32 [1] of host memory, not 0 once the result is
    there. Of the device: `told`, zeros int64 [3], for the kernels alone; `fetched`: int32, room for
    the rows. All stay where they are: graphs refer to their addresses.
    """

    def __init__(
        self, table: torch.Tensor, flag: torch.Tensor, told: torch.Tensor, fetched: torch.Tensor
    ) -> None:
        self.table, self.flag, self.told, self.fetched = table, flag, told, fetched
        # Faster to read and write than tensors.
        self._numbers, self._word = table.numpy(), flag.numpy()

    @property
    def is_done(self) -> bool:
        """Whether the result is there."""
        return bool(self._word[0])

    def tell(self, rows: torch.Tensor, result: torch.Tensor) -> None:
        """Give it these rows and this result, in host memory that the device reaches."""
        self._word[0] = 0
        self._numbers[:] = rows.data_ptr(), result.data_ptr(), len(rows)


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

    # Says whether the device reads and writes this host memory by itself.
    reaches = staticmethod(torch.Tensor.is_pinned)

    def is_idle(self) -> bool:
        """Say whether it has done all that it was given. Raises RuntimeError where it failed."""
        return torch.cuda.current_stream(self._device).query()

    def event(self) -> torch.cuda.Event:
        """Return a new event."""
        return torch.cuda.Event()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
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
        other = torch.empty(2**28, dtype=torch.uint8, device=self._device)
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


# Up to so many rows, reading the weights takes longer than multiplying without tensor cores.
DIRECT_ROWS = 4


class Tile(NamedTuple):
    """What one block of threads computes: `rows` x `outputs`, `inner` input features at a time.

    One row: int32 multiplications and additions. More: digits, on tensor cores. `warps`, `stages`:
    of threads, and of loads under way.
    """

    rows: int
    outputs: int
    inner: int
    warps: int
    stages: int = 2


_DIRECT = (Tile(1, 16, 256, 4), Tile(1, 8, 512, 4), Tile(1, 4, 1024, 4), Tile(1, 8, 1024, 8))

_FEW = (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 3))

# Four accumulators of 32 registers a thread: larger tiles spill.
_MANY = (Tile(64, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3), Tile(128, 64, 64, 8, 3))


def tiles_for(rows: int) -> Sequence[Tile]:
    """Return the tiles that a product of so many rows chooses from."""
    return _DIRECT if rows <= DIRECT_ROWS else _FEW if rows <= 32 else _MANY
