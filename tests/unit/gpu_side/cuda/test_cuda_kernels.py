"""Requests as a CUDA device answers them, on a stand-in: the CPU's numbers."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_side.cuda.check import check_ring
from gpu_side.cuda.kernels import CudaKernels
from gpu_side.cuda.products import Job
from gpu_side.cuda.tiles import Tile
from gpu_side.encoding import Form, encode_reply, payload_place
from gpu_side.handler import RequestHandler
from gpu_side.request_loop import RequestLoop
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import KernelError
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    RingLinearRequest,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.shared_memory import Lane
from protocol.shm import ShmChannel
from protocol.stream_wire import layout
from protocol.tensors import WireTensor, from_torch, to_torch
from tests.kit.model import SavedModel
from tests.unit.gpu_side.cuda.device import Device

CPU = torch.device("cpu")
pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def weights(saved_model: Callable[..., SavedModel]) -> ServiceWeights:
    return load_weights(saved_model().directory, device=CPU, dtype=torch.float32)


def _on_cuda(
    weights: ServiceWeights,
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tries_tiles: bool = False,
) -> Any:
    """Return a handler on the stand-in. `tries_tiles`: all for each product; else one is chosen."""
    stand_in: Any = device
    if not tries_tiles:
        monkeypatch.setattr(device, "time_us", lambda _: 1.0)
    # In the interpreter each product of many rows takes half a second.
    monkeypatch.setattr("gpu_side.cuda.kernels._CHOSEN_ROWS", (1, 8))
    handler = RequestHandler(weights, 2**24)
    handler._kernels = CudaKernels(weights, device=stand_in)
    gc.collect()
    # Of what it has tried at the start.
    device.copies_in = device.waits = device.registrations = 0
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


@pytest.mark.parametrize(
    "rows", [1, *(pytest.param(n, marks=pytest.mark.more) for n in (3, 8)), 33]
)
def test_products_are_those_of_the_cpu(
    rows: int, weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    here = RequestHandler(weights, 2**24)
    there = _on_cuda(weights, device, monkeypatch, tries_tiles=rows == 1)
    for request in _requests(weights, rows):
        expected = _output(here, request)
        # Piece by piece, captured, replayed; many rows are not.
        for _ in range(3 if rows <= 32 else 2):
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


@pytest.mark.usefixtures("patient_streams")
@pytest.mark.parametrize("reached", [True, False])
def test_over_shared_memory_the_device_reads_and_writes_slots(
    reached: bool, weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = Device(registers=reached)
    handler = _on_cuda(weights, device, monkeypatch)
    replies_in_place: list[bool] = []
    put = Lane.put

    def noted(lane: Lane, slot: int, frames: Sequence[Any]) -> bool | None:
        # The client's puts are compiled, or not of memory that both share.
        if lane._sleeps < lane._peer_sleeps:
            return put(lane, slot, frames)
        replies_in_place.extend(frame.obj is lane._memory.obj for frame in frames[1:])
        return put(lane, slot, frames)

    monkeypatch.setattr(Lane, "put", noted)
    here, endpoint = RequestHandler(weights, 2**24), f"shm://{tmp_path}/s"
    with _served(handler, endpoint), ShmChannel(endpoint) as channel:
        for rows in (1, 33) * (2 if reached else 1):
            for request in _requests(weights, rows):
                expected = _output(here, request)
                response = channel.call(request).response
                assert isinstance(response, TensorReply)
                output = to_torch(response.output)
                if expected.dtype is torch.int32:
                    assert torch.equal(output, expected)
                else:
                    torch.testing.assert_close(output, expected)
    # Of eight slots only the one that was used; with the client it went.
    assert device.registrations == 1
    assert device.waits == reached
    # Elements in any number of rows, floats in many.
    assert len(replies_in_place) == (24 if reached else 12)
    assert replies_in_place.count(True) == (18 if reached else 0)


@contextmanager
def _served(handler: RequestHandler, endpoint: str) -> Iterator[None]:
    listener, stop = StreamListener(endpoint), StopSignal()
    thread = threading.Thread(target=RequestLoop(handler, 2**24).run, args=(listener, stop))
    thread.start()
    try:
        yield
    finally:
        stop.request(signal.SIGTERM, None)
        thread.join()
        listener.close()
        stop.reader.close()
        stop.writer.close()


def test_a_device_that_does_not_reach_shared_memory_is_found_at_the_start(
    weights: ServiceWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_side.cuda import ring

    do_job = ring.do_job

    def elsewhere(job: Job, rows: int, weight: torch.Tensor, tile: Tile) -> None:
        result = torch.empty(rows, len(weight), dtype=torch.int32)
        job.table[1] = result.data_ptr()
        do_job(job, rows, weight, tile)

    monkeypatch.setattr(ring, "do_job", elsewhere)
    with pytest.raises(KernelError, match="got other numbers for"):
        _on_cuda(weights, Device(), monkeypatch)


def test_where_a_tensor_lies_in_a_reply_is_where_it_is_put() -> None:
    for shape in ((1, 7), (1, 3, 2048), (2, 128_256)):
        output = WireTensor("int32", shape, bytes(4 * math.prod(shape)))
        reply = TensorReply(output=output)
        timing = Timing(queue_us=1, compute_us=2)
        frames = encode_reply(Form.FRAMED, 1, "RingLinear", reply, timing)
        (_, place), _, total = layout(tuple(map(len, frames)))
        assert payload_place("RingLinear", "int32", shape) == place
        assert place.stop <= total


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
