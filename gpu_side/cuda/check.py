"""Whether a GPU's int8 products are to be relied on."""

from __future__ import annotations

import torch

from protocol.errors import KernelError
from protocol.integer import check_kernels


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
