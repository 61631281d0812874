"""Requests as a CUDA device answers them, on a stand-in: the CPU's numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_side.cuda.check import check_ring
from gpu_side.cuda.kernels import CudaKernels
from gpu_side.handler import RequestHandler
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import KernelError
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    RingLinearRequest,
    SeededRingLinearRequest,
    TensorReply,
)
from protocol.tensors import from_torch, to_torch
from tests.support import SavedModel
from tests.unit.gpu_side.cuda.device import Device

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def weights(saved_model: Callable[..., SavedModel]) -> ServiceWeights:
    return load_weights(saved_model().directory, device=CPU, dtype=torch.float32)


def _on_cuda(weights: ServiceWeights, device: Device, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_in: Any = device
    # In the interpreter each product of many rows takes half a second.
    monkeypatch.setattr("gpu_side.cuda.kernels._CHOSEN_ROWS", (1, 8))
    handler = RequestHandler(weights, 2**24)
    handler._kernels = CudaKernels(weights, device=stand_in)
    return handler


def _output(handler: RequestHandler, request: Any) -> torch.Tensor:
    reply, work = handler.apply(request)
    assert isinstance(reply, TensorReply)
    if work is not None:
        work.ends_ns()
    return to_torch(reply.output).clone()


def _requests(weights: ServiceWeights, rows: int) -> list[Any]:
    width = weights.config.hidden_size
    shape = (1, rows, width)
    elements = from_torch(torch.randint(-(2**31), 2**31, shape).to(torch.int32))
    hidden = torch.randn(shape)
    qkv: Any = ("q_proj", "k_proj", "v_proj")
    return [
        RingLinearRequest(layer_idx=1, module_names=qkv, elements=elements),
        RingLinearRequest(layer_idx=0, module_names=("k_proj",), elements=elements),
        SeededRingLinearRequest(
            layer_idx=0,
            module_names=("v_proj",),
            rows=rows,
            columns=width,
            seed=from_torch(torch.arange(8, dtype=torch.int32)),
        ),
        LinearRequest(layer_idx=1, module_names=qkv, hidden_states=from_torch(hidden)),
        LinearRequest(
            layer_idx=0, module_names=("up_proj",), hidden_states=from_torch(hidden.bfloat16())
        ),
        LMHeadRequest(hidden_states=from_torch(hidden)),
    ]


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_products_are_those_of_the_cpu(
    rows: int, weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    here, there = RequestHandler(weights, 2**24), _on_cuda(weights, device, monkeypatch)
    for request in _requests(weights, rows):
        expected = _output(here, request)
        # Piece by piece, captured, replayed.
        for _ in range(3):
            output = _output(there, request)
            assert (output.dtype, output.shape) == (expected.dtype, expected.shape)
            if expected.dtype is torch.int32:
                assert torch.equal(output, expected)
            else:
                torch.testing.assert_close(output, expected)
    assert device.attempts == (0 if rows > 32 else len(_requests(weights, rows)))


def test_other_requests_are_torch_s(
    weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    request = EmbeddingRequest(input_ids=from_torch(torch.tensor([[1, 2]])), dtype="float32")
    expected = _output(RequestHandler(weights, 2**24), request)
    assert torch.equal(_output(_on_cuda(weights, device, monkeypatch), request), expected)
    assert device.copies_in == 0


def test_a_link_gives_rows_and_result_in_its_own_memory(
    weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    handler = _on_cuda(weights, device, monkeypatch)
    (request, *_) = _requests(weights, 4)
    rows = to_torch(request.elements).view(4, -1)
    expected = _output(RequestHandler(weights, 2**24), request)
    result = torch.empty(4, expected.shape[-1], dtype=torch.int32)
    for memory in (rows, result):
        assert handler._kernels.register(memory.data_ptr(), memory.nbytes)
    device.done = False
    handler._kernels.plan(request, handler._checker.check(request))(rows, result)
    assert torch.equal(result.view(expected.shape), expected)


def test_without_triton_int8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpu_side.cuda.ring", None)
    with pytest.raises(KernelError, match="int8 products on cpu: got no Triton, expected it inst"):
        check_ring(CPU)


def test_what_triton_raises_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(elements: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise OSError("canary")

    monkeypatch.setattr("gpu_side.cuda.ring.every_tile", no_compiler)
    with pytest.raises(KernelError, match="got OSError from Triton"):
        check_ring(CPU)


def test_a_kernel_that_errs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpu_side.cuda.ring.every_tile",
        lambda elements, weight: torch.zeros(len(elements), len(weight), dtype=torch.int32),
    )
    with pytest.raises(KernelError, match="got wrong numbers for"):
        check_ring(CPU)
