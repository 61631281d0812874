"""What answers a checked request on a CUDA device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn.functional import linear

from gpu_side.cuda.device import GRAPH_ROWS, CudaDevice, InPlaceJob, Tile, TileChoices
from gpu_side.cuda.products import DeviceProducts, InPlaceProof, Product
from gpu_side.encoding import payload_place
from gpu_side.kernels import Kernel, Result, TorchKernels, WeightRequest, weight_of
from gpu_side.tasks import Computed, LinearWork, Task
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.messages import FUSED_MODULES, RingLinearRequest, RingLMHeadRequest, tensor_reply
from protocol.tensors import Buffer, WireTensor, raw_bytes, to_torch, torch_dtype

# For how many rows tiles are chosen at the start; for other shapes at their first request.
_CHOSEN_ROWS = (*GRAPH_ROWS, 64, 128, 256, 512)


class CudaKernels(TorchKernels):
    """Products with weights as graphs; the other requests as torch computes them.

    `spin_us`: see `gpu_side.kernels.Queued`. `device`: where the weights are.
    """

    def __init__(
        self, weights: ServiceWeights, spin_us: float = 0.0, device: CudaDevice | None = None
    ) -> None:
        super().__init__(weights, spin_us)
        self._device = device or CudaDevice(weights.device)
        self._products = DeviceProducts(self._device, _row_bytes(weights), spin_us)
        self._tiles = TileChoices(self._device.time_us)
        if weights.integers is not None:
            self._choose_tiles()

    def prepare(self, request: Computed, task: Task) -> Kernel:
        """See `gpu_side.kernels.Kernels.prepare`."""
        if not isinstance(request, WeightRequest):
            return super().prepare(request, task)
        work = task.work
        if not isinstance(work, LinearWork):
            raise TypeError("a product with a weight that is none")
        products, dtype, integer = self._products, torch_dtype(task.dtype), work.integer
        product: Product = (
            self._ring_product(request)
            if isinstance(request, RingLinearRequest | RingLMHeadRequest)
            else _Floats(*weight_of(self._weights, request), dtype)
        )
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

    def _ring_product(self, request: RingLinearRequest | RingLMHeadRequest) -> _Ring:
        """See `TorchKernels._ring_product`; without graphs."""
        weight, _ = weight_of(self._weights, request)
        return _Ring(weight, self._tiles)

    def _choose_tiles(self) -> None:
        """Choose for all operators of a layer and the LM head, so that no request waits for it.

        And have the device do each in a slot, as a client's are. Raises KernelError.
        """
        weights, proof = self._weights, InPlaceProof(self._products, _row_bytes(self._weights))
        operators = list((weights.integers or {})[weights.held_layers[0]].values())
        if weights.lm_head_int8 is not None:
            operators.append(weights.lm_head_int8)
        for operator in operators:
            for rows in _CHOSEN_ROWS:
                weight = operator.weight
                product = _Ring(weight, self._tiles)
                given = torch.randint(-(2**31), 2**31, (rows, weight.shape[1])).to(torch.int32)
                result = product(given.to(weight.device)).cpu()
                if rows <= GRAPH_ROWS[-1]:
                    proof.check(product, given, result)


def device_kernels(weights: ServiceWeights, spin_us: float) -> TorchKernels:
    """Return what computes with weights, on the device where they are."""
    return (CudaKernels if weights.device.type == "cuda" else TorchKernels)(weights, spin_us)


class _Ring:
    """A product in the ring: `weight` int8 [N, K]; rows and result int32."""

    def __init__(self, weight: torch.Tensor, tiles: TileChoices) -> None:
        # Needs Triton, and was found to work when the weights were about to be read.
        from gpu_side.cuda import ring

        self._ring = ring
        self._weight = weight
        self._tiles = tiles

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        return self._ring.ring_product(rows, self._weight, self._tile(rows))

    def in_place(self, job: InPlaceJob, rows: int) -> None:
        """See `Product.in_place`."""
        tile = self._tile(self._ring.fetched_rows(job, rows, self._weight))
        self._ring.do_job(job, rows, self._weight, tile)

    def _tile(self, rows: torch.Tensor) -> Tile:
        """Return the tile for so many rows. Their numbers are used where it is chosen now."""
        weight, product = self._weight, self._ring.ring_product
        out_features, in_features = weight.shape
        return self._tiles.choose(
            len(rows), in_features, out_features, lambda tile: product(rows, weight, tile)
        )


class _Floats:
    """A product of floats, in the weight's dtype; rows and result in that of the request."""

    in_place = None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, wire_dtype: torch.dtype
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._wire_dtype = wire_dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Product`."""
        return linear(rows.to(self._weight.dtype), self._weight, self._bias).to(self._wire_dtype)


def _row_bytes(weights: ServiceWeights) -> tuple[int, int]:
    """Return the bytes of the longest row of a request, and of a result, in the widest dtype."""
    config = weights.part
    shapes = [[config.module_shape(name) for name in names] for names in FUSED_MODULES.values()]
    widest_in = max(sizes[0][1] for sizes in shapes)
    widest_out = max(sum(size[0] for size in sizes) for sizes in shapes)
    if weights.has_lm_head:
        widest_in = max(widest_in, config.hidden_size)
        widest_out = max(widest_out, config.vocab_size)
    return widest_in * torch.float32.itemsize, widest_out * torch.float32.itemsize
