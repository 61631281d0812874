"""Whether a GPU's int8 products are to be relied on."""

from __future__ import annotations

import ctypes
import os
import time
from itertools import count

import torch

from gpu_side.cuda.products import GRAPH_ROWS, DeviceProducts, Product
from gpu_side.transfer import wait_until
from protocol import native
from protocol.errors import KernelError
from protocol.integer import check_kernels
from protocol.shared_memory import SlotMemory, adopt, create


class InPlaceProof:
    """Compares products in place with others, in memory as a client shares it.

    A slot of our own segment: a device that does not reach it at our addresses fails here, and not
    at a client's request. `row_bytes`: see `DeviceProducts`. Without compiled kernels nobody shares
    memory; then kernels are compared alone, as where the driver lets no memory be reached.
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


def check_ring(device: torch.device) -> None:
    """Compare the kernels in all their tiles with exact arithmetic on this device.

    Compiles them, which takes seconds the first time and is kept by Triton. Raises KernelError:
    Triton is not there, cannot compile, or gives a wrong number.
    """
    where = f"int8 products on {device}"
    try:
        # Not imported, and need not be installed, where nothing is computed on a GPU.
        from gpu_side.cuda.ring import every_tile
    except ImportError:
        raise KernelError(
            where, got="no Triton", expected="it installed: torch for CUDA brings it"
        ) from None
    try:
        check_kernels(device, every_tile)
    except KernelError:
        raise
    except Exception as error:
        # Of its compiler, the C compiler that it calls, and the driver: no common class.
        raise KernelError(
            where, got=f"{type(error).__name__} from Triton", expected="kernels that it compiles"
        ) from error
