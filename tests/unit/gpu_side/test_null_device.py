"""Described accelerators, and the null device: the answers of a service, and its time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_side.devices import NullDevice
from gpu_side.handler import RequestHandler
from gpu_side.kernels import NullKernels, NullWeights, request_us
from gpu_side.profiles import PROFILES, DeviceProfile
from gpu_side.served_model import read_served_model
from gpu_side.tasks import Computed, RequestChecker
from gpu_side.weights import load_weights
from protocol.messages import SegmentRequest, TensorReply
from protocol.tensors import to_torch
from tests.kit import ask
from tests.kit.model import SIZES, SavedModel
from tests.kit.rows import each_row
from tests.kit.wire import part, segment

LIMIT = 2**26
HIDDEN, VOCAB, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"]
# 10^12 operations, 2 * 10^12 int8 ones, 10^11 and 10^10 bytes a second, in microseconds.
ROUND = DeviceProfile(
    name="round", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)
MOVED = 1000 * 4000 + 1000 + 4000


@each_row(
    ("found_us", "expected_us"),
    [
        # Few rows take as long as reading the weight, many as the arithmetic.
        (ROUND.linear_us(1, 1000, 4000, 2), 3 + 2 * MOVED / 1e5),
        (ROUND.linear_us(512, 1000, 4000, 2), 3 + 2 * 512 * 1000 * 4000 / 1e6),
        # float32 has half the rate, and twice the bytes.
        (ROUND.linear_us(512, 1000, 4000, 4), 3 + 4 * 512 * 1000 * 4000 / 1e6),
        (ROUND.linear_us(1, 1000, 4000, 4), 3 + 4 * MOVED / 1e5),
        # A product in the ring takes four of int8; of one row, a byte for each weight.
        (ROUND.linear_us(4096, 1000, 4000, 2, integer=True), 39 + 4 * 4096 * 1000 * 4000 / 1e6),
        (ROUND.linear_us(1, 1000, 4000, 2, integer=True), 39 + (1000 * 4012 + 4000 * 36) / 1e5),
        # Every operand of a batch is moved.
        (ROUND.matmul_us(8, 1, 64, 100, 2), 3 + 2 * 8 * (1 * 64 + 64 * 100 + 1 * 100) / 1e5),
        (ROUND.matmul_us(8, 512, 64, 512, 2), 3 + 2 * 8 * 512 * 64 * 512 / 1e6),
        (ROUND.embedding_us(512, 1000, 2), 3 + 2 * 512 * 1000 * 2 / 1e5),
        (ROUND.transfer_us(10**6), 3 + 100),
        # 67 MB at 3.35 TB/s: a unit that slipped would show.
        (PROFILES["h100"].linear_us(1, 4096, 8192, 2), 25.04),
    ],
)
def test_how_long_it_takes(found_us: float, expected_us: float) -> None:
    assert found_us == pytest.approx(expected_us, rel=1e-3)


RING, IDS = torch.ones(3, HIDDEN, dtype=torch.int32), torch.tensor([[1, 2, VOCAB - 1]])
# What each has in and out, in bytes, and its kernels take with weights of 16 bits.
REQUESTS: list[tuple[Any, tuple[int, int], float]] = [
    (
        ask.linear(torch.randn(2, 5, HIDDEN), *ask.QKV),
        *((1920, 6400), ROUND.linear_us(10, 48, 160, 2)),
    ),
    (ask.ring(RING, *ask.GATE_UP), (576, 2304), ROUND.linear_us(3, 48, 192, 2, integer=True)),
    (ask.head(torch.randn(4, 48)), (768, 5120), ROUND.linear_us(4, 48, 320, 2)),
    (
        ask.matmul(torch.randn(6, 2, 16), torch.randn(1, 16, 7)),
        *((1216, 336), ROUND.matmul_us(6, 2, 16, 7, 2)),
    ),
    (ask.embedding(IDS, torch.bfloat16), (24, 288), ROUND.embedding_us(3, 48, 2)),
]


def _segment(rows: int, start: int = 0, **fields: Any) -> SegmentRequest:
    hidden = torch.randn(rows, HIDDEN)
    return segment(hidden, [part(1, start, rows)], (0, LAYERS - 1), **fields)


LAST_ROW = {"lm_head": True, "outputs": torch.tensor([1])}


@pytest.fixture
def light(saved_model: Any, tmp_path: Path) -> Path:
    full = saved_model().directory
    shutil.copy(full / "config.json", tmp_path)
    tensors = load_file(full / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    return tmp_path


def _null(directory: Path, profile: DeviceProfile | None = None) -> NullWeights:
    held, _ = read_served_model(directory, weights=False)
    weights = NullWeights(held, NullDevice(profile), torch.bfloat16)
    weights.kernels = NullKernels(NullDevice(profile), 2, clock=lambda: 0)
    return weights


def test_zeros_of_the_shape_and_dtype_that_a_real_service_answers(
    saved_model: Any, light: Path
) -> None:
    model: SavedModel = saved_model()
    weights = load_weights(model.directory, device=torch.device("cpu"), dtype=torch.float32)
    real, null = RequestHandler(weights, LIMIT), RequestHandler(_null(light), LIMIT)
    segments, zeros = (_segment(5), _segment(2, 5, **LAST_ROW)), []
    for request in (*(request for request, *_ in REQUESTS), *segments):
        (expected, _), (reply, work) = real.apply(request), null.apply(request)
        assert isinstance(reply, TensorReply)
        assert isinstance(expected, TensorReply)
        found, wanted = reply.output, expected.output
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), request.method
        assert work is None
        assert memoryview(found.data).readonly
        zeros.append(to_torch(found))
    # It keeps sessions, and the zeros of earlier replies stay valid when larger ones are needed.
    assert null.session_totals().sessions == 1
    assert not any(one.any() for one in zeros)


@each_row(("request_", "sizes", "kernels_us"), REQUESTS)
def test_a_model_of_an_accelerator_works_on_one_request_after_the_other(
    light: Path, request_: Computed, sizes: tuple[int, int], kernels_us: float
) -> None:
    now, held = 5000, read_served_model(light, weights=False)[0]
    task = RequestChecker(held, LIMIT).check(request_)
    took_us = kernels_us + sum(map(ROUND.transfer_us, sizes))
    assert request_us(ROUND, task, 2) == pytest.approx(took_us)
    kernel = NullKernels(NullDevice(ROUND), 2, clock=lambda: now).prepare(request_, task)
    for free_ns in (5000, 5000 + took_us * 1000, 10**9):
        now = max(now, 10**9 * (free_ns == 10**9))  # once it has nothing to do, it begins at once
        _, work = kernel(request_, None)
        assert work is not None
        assert work.ends_ns() == pytest.approx(free_ns + took_us * 1000, abs=2)


def test_whole_layers_take_the_time_of_their_attention_besides(light: Path) -> None:
    weights = _null(light, ROUND)
    handler, free_us = RequestHandler(weights, LIMIT), 0.0
    # 6 heads of 16, 2 of keys and values; with a window, no more keys than it lets be seen.
    for request, rows, context in ((_segment(5), 5, 5), (_segment(1, 5, sinks=1, recent=2), 1, 4)):
        _, work = handler.apply(request)
        assert work is not None
        free_us += request_us(ROUND, RequestChecker(weights.model, LIMIT).check(request), 2)
        for sizes in ((16, context), (context, 16)):
            free_us += LAYERS * ROUND.matmul_us(2, 3 * rows, *sizes, 2)
        assert work.ends_ns() / 1000 == pytest.approx(free_us, abs=0.01)
