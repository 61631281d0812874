"""What answers a checked request on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn.functional import linear

from gpu_side.cuda.device import CudaDevice
from gpu_side.cuda.products import GRAPH_ROWS, Product, Products
from gpu_side.cuda.tiles import TileChoices
from gpu_side.kernels import TorchKernels, WeightRequest, weight_of
from gpu_side.replies import Kernel, Result, Working
from gpu_side.tasks import Computed, LinearWork, Task
from gpu_side.weights import ServiceWeights
from protocol.messages import FUSED_MODULES, RingLinearRequest, RingLMHeadRequest, tensor_reply
from protocol.tensors import WireTensor, raw_bytes, to_torch, torch_dtype

# For how many rows tiles are chosen at the start; for other shapes at their first request.
_CHOSEN_ROWS = (*GRAPH_ROWS, 64, 128, 256, 512)


class CudaKernels:
    """Products with weights as graphs; the other requests as torch computes them.

    `spin_us`: see `gpu_side.transfer.Queued`. `device`: where the weights are.
    """

    def __init__(
        self, weights: ServiceWeights, spin_us: float = 0.0, device: CudaDevice | None = None
    ) -> None:
        self._weights = weights
        device = device or CudaDevice(weights.device)
        self._others = TorchKernels(weights, spin_us)
        self._products = Products(device, _row_bytes(weights), spin_us)
        self.register, self.unregister = self._products.register, self._products.unregister
        self._tiles = TileChoices(device.time_us)
        if weights.integers is not None:
            # Needs Triton, and was found to work when the weights were about to be read.
            from gpu_side.cuda.ring import ring_product

            self._ring_product = ring_product
            self._choose_tiles()

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `gpu_side.kernels.Kernels.prepare`."""
        if not isinstance(request, WeightRequest):
            return self._others.prepare(request, task)
        work = task.work
        if not isinstance(work, LinearWork):
            raise TypeError("a product with a weight that is none")
        submit = self.plan(request, task)
        rows, in_features, dtype = work.rows, work.in_features, torch_dtype(task.dtype)
        # A result of many rows is written into the reply's memory; of few, copied there.
        empty = self._products.pinned if rows > GRAPH_ROWS[-1] else torch.empty
        integer = work.integer

        def kernel(request: Any) -> Result:
            tensor = request.elements if integer else request.hidden_states
            result = empty((rows, work.out_features), dtype=dtype)
            under_way = submit(to_torch(tensor).view(rows, in_features), result)
            output = WireTensor(task.dtype, task.shape, raw_bytes(result))
            return tensor_reply({"output": output}), under_way

        return kernel

    def plan(
        self, request: WeightRequest, task: Task
    ) -> Callable[[torch.Tensor, torch.Tensor], Working]:
        """Return what fills a result, for a link that has rows and reply in memory of its own.

        It takes rows [T, in_features] and result [T, out_features] in the request's dtype: see
        `Products.submit`.
        """
        weight, bias = weight_of(self._weights, request)
        dtype, wire_dtype = self._weights.dtype, torch_dtype(task.dtype)

        def integers(rows: torch.Tensor) -> torch.Tensor:
            return self._ring(rows, weight)

        def floats(rows: torch.Tensor) -> torch.Tensor:
            return linear(rows.to(dtype), weight, bias).to(wire_dtype)

        is_ring = isinstance(request, RingLinearRequest | RingLMHeadRequest)
        product: Product = integers if is_ring else floats
        place: Hashable = (
            request.method,
            *(getattr(request, name, None) for name in ("layer_idx", "module_names", "bias")),
        )
        return lambda rows, result: self._products.submit(place, product, rows, result)

    def _ring(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out_features, in_features = weight.shape
        tile = self._tiles.choose(
            len(rows), in_features, out_features, lambda t: self._ring_product(rows, weight, t)
        )
        return self._ring_product(rows, weight, tile)

    def _choose_tiles(self) -> None:
        """Choose for all operators of a layer and the LM head, so that no request waits for it."""
        weights = self._weights
        operators = list((weights.integers or {})[weights.held_layers[0]].values())
        if weights.lm_head_int8 is not None:
            operators.append(weights.lm_head_int8)
        for operator in operators:
            for rows in _CHOSEN_ROWS:
                shape = rows, operator.weight.shape[1]
                self._ring(
                    torch.zeros(shape, dtype=torch.int32, device=operator.weight.device),
                    operator.weight,
                )


def _row_bytes(weights: ServiceWeights) -> tuple[int, int]:
    """Return the bytes of the longest row of a request, and of a result, in the widest dtype."""
    config = weights.config
    shapes = [[config.module_shape(name) for name in names] for names in FUSED_MODULES.values()]
    widest_in = max(sizes[0][1] for sizes in shapes)
    widest_out = max(sum(size[0] for size in sizes) for sizes in shapes)
    if weights.has_lm_head:
        widest_in = max(widest_in, config.hidden_size)
        widest_out = max(widest_out, config.vocab_size)
    return widest_in * torch.float32.itemsize, widest_out * torch.float32.itemsize
