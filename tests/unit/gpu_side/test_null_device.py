"""The null device answers as a service with weights does, but for the numbers and the time."""

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
from gpu_side.profiles import DeviceProfile
from gpu_side.served_model import NO_LINEAR_DIGEST, read_served_model
from gpu_side.tasks import Computed, RequestChecker, Task
from gpu_side.weights import load_weights
from protocol.errors import ModelError
from protocol.messages import (
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    SegmentRequest,
    TensorReply,
)
from protocol.tensors import from_torch, to_torch
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row
from tests.kit.wire import part, segment

LIMIT = 2**26
HIDDEN, VOCAB, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"]
PROFILE = DeviceProfile(
    name="slow", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)
QKV: Any = ("q_proj", "k_proj", "v_proj")
GATE_UP: Any = ("gate_proj", "up_proj")


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _linear(rows: torch.Tensor, modules: Any = QKV) -> LinearRequest:
    return LinearRequest(layer_idx=0, module_names=modules, hidden_states=from_torch(rows))


RING = from_torch(torch.ones(3, HIDDEN, dtype=torch.int32))
# What each has in and out, in bytes, and its kernels take: bfloat16 weights, float32 on the bus.
REQUESTS: list[tuple[Computed, int, int, float]] = [
    (_linear(_floats(2, 5, HIDDEN)), 1920, 6400, PROFILE.linear_us(10, 48, 160, 2)),
    (
        RingLinearRequest(layer_idx=1, module_names=GATE_UP, elements=RING),
        *(576, 2304, PROFILE.linear_us(3, 48, 192, 2, integer=True)),
    ),
    (
        LMHeadRequest(hidden_states=from_torch(_floats(4, HIDDEN).bfloat16())),
        *(384, 2560, PROFILE.linear_us(4, 48, 320, 2)),
    ),
    (
        MatmulRequest(a=from_torch(_floats(6, 2, 16)), b=from_torch(_floats(1, 16, 7))),
        *(1216, 336, PROFILE.matmul_us(6, 2, 16, 7, 2)),
    ),
    (
        EmbeddingRequest(input_ids=from_torch(torch.tensor([[1, 2, VOCAB - 1]])), dtype="bfloat16"),
        *(24, 288, PROFILE.embedding_us(3, 48, 2)),
    ),
]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("full")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def real(full: Path) -> RequestHandler:
    weights = load_weights(full, device=torch.device("cpu"), dtype=torch.float32)
    return RequestHandler(weights, LIMIT)


@pytest.fixture
def light(full: Path, tmp_path: Path) -> Path:
    """The same model without its linear weights."""
    shutil.copy(full / "config.json", tmp_path)
    tensors = load_file(full / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "_proj." not in n}, _weights(tmp_path))
    return tmp_path


def _weights(directory: Path) -> Path:
    return directory / "model.safetensors"


def _null(directory: Path, profile: DeviceProfile | None = None) -> NullWeights:
    held, _ = read_served_model(directory, weights=False)
    return NullWeights(held, NullDevice(profile), torch.bfloat16)


def _task(directory: Path, request: Computed | SegmentRequest) -> Task:
    held, _ = read_served_model(directory, weights=False)
    return RequestChecker(held, LIMIT).check(request)


def _segment(rows: int, start: int = 0, **fields: Any) -> SegmentRequest:
    return segment(_floats(rows, HIDDEN), [part(1, start, rows)], (0, LAYERS - 1), **fields)


def test_zeros_of_the_shape_and_dtype_that_a_real_service_answers(
    real: RequestHandler, light: Path
) -> None:
    null = RequestHandler(_null(light), LIMIT)
    replies = []
    segments = (_segment(5), _segment(2, 5, lm_head=True, outputs=torch.tensor([1])))
    for request in (*(request for request, *_ in REQUESTS), *segments):
        (expected, _), (reply, work) = real.apply(request), null.apply(request)
        assert isinstance(reply, TensorReply)
        assert isinstance(expected, TensorReply)
        found, wanted = reply.output, expected.output
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), request.method
        assert len(found.data) == len(wanted.data), request.method
        assert work is None
        assert isinstance(found.data, memoryview)
        assert found.data.readonly, request.method
        replies.append(found)
    # It keeps sessions, and the zeros of earlier replies stay valid when larger ones are needed.
    assert null.session_totals().sessions == 1
    assert not any(to_torch(one).any() for one in replies)
    init, expected_init = null.apply(InitRequest())[0], real.apply(InitRequest())[0]
    assert isinstance(init, InitReply)
    assert isinstance(expected_init, InitReply)
    own = {"instance_id", "norm_weights", "rotary_emb_params", "linear_digest"}
    assert init.model_dump(exclude=own) == expected_init.model_dump(exclude=own)
    assert set(init.norm_weights) == set(expected_init.norm_weights)


def test_whole_layers_take_the_time_of_their_products_and_attention(light: Path) -> None:
    weights = _null(light, PROFILE)
    weights.kernels = NullKernels(NullDevice(PROFILE), 2, clock=lambda: 0)
    handler, free_us = RequestHandler(weights, LIMIT), 0.0
    # 6 heads of 16, 2 of keys and values; with a window, no more keys than it lets be seen.
    for request, rows, context in (
        (_segment(5), 5, 5),
        (_segment(2, 5, lm_head=True, outputs=torch.tensor([1])), 2, 7),
        (_segment(1, 7, sinks=1, recent=2), 1, 4),
    ):
        _, work = handler.apply(request)
        assert work is not None
        attention_us = PROFILE.matmul_us(2, 3 * rows, 16, context, 2)
        attention_us += PROFILE.matmul_us(2, 3 * rows, context, 16, 2)
        task = _task(light, request)
        free_us += request_us(PROFILE, task, 2) + LAYERS * attention_us
        assert work.ends_ns() / 1000 == pytest.approx(free_us, abs=0.01)
        layer = ((48, 160), (96, 48), (48, 192), (96, 48))
        kernels_us = LAYERS * sum(PROFILE.linear_us(rows, *sizes, 2) for sizes in layer)
        kernels_us += PROFILE.linear_us(1, HIDDEN, VOCAB, 2) * request.lm_head
        copies_us = sum(map(PROFILE.transfer_us, (task.input_bytes, task.output_bytes)))
        assert request_us(PROFILE, task, 2) == pytest.approx(kernels_us + copies_us)


@each_row(("request_", "bytes_in", "bytes_out", "kernels_us"), REQUESTS)
def test_a_model_of_an_accelerator_works_on_one_request_after_the_other(
    light: Path, request_: Computed, bytes_in: int, bytes_out: int, kernels_us: float
) -> None:
    now = 5000
    task = _task(light, request_)
    took_us = kernels_us + PROFILE.transfer_us(bytes_in) + PROFILE.transfer_us(bytes_out)
    assert request_us(PROFILE, task, 2) == pytest.approx(took_us)
    kernels = NullKernels(NullDevice(PROFILE), 2, clock=lambda: now)
    kernel = kernels.prepare(request_, task)
    for free_ns in (5000, 5000 + took_us * 1000, 10**9):
        now = max(now, 10**9 * (free_ns == 10**9))  # once it has nothing to do, it begins at once
        _, work = kernel(request_, None)
        assert work is not None
        assert work.ends_ns() == pytest.approx(free_ns + took_us * 1000, abs=2)


def test_its_linear_digest_is_what_the_directory_allows(full: Path, light: Path) -> None:
    own, _ = read_served_model(full)
    assert read_served_model(light, weights=False)[0].linear_digest == NO_LINEAR_DIGEST
    path = light / "calibration.safetensors"
    for metadata in (None, {"linear_digest": "x"}, {"other": "ab" * 32}):
        save_file({"x": torch.zeros(1)}, path, metadata=metadata)
        with pytest.raises(ModelError, match="linear_digest"):
            read_served_model(light, weights=False)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="expected a safetensors file"):
        read_served_model(light, weights=False)
    save_file({"x": torch.zeros(1)}, path, metadata={"linear_digest": "ab" * 32})
    assert read_served_model(light, weights=False)[0].linear_digest == "ab" * 32
    # The weights themselves go before what a calibration says of them.
    shutil.copy(_weights(full), _weights(light))
    assert read_served_model(light, weights=False)[0].linear_digest == own.linear_digest


@each_row(
    ("name", "replacement", "weights"),
    [
        ("model.norm.weight", None, False),
        ("lm_head.weight", None, False),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(3, 3), False),
        ("model.layers.0.self_attn.q_proj.weight", None, True),
    ],
)
def test_a_directory_without_what_is_needed_is_refused(
    full: Path, light: Path, name: str, replacement: torch.Tensor | None, weights: bool
) -> None:
    tensors = load_file(_weights(full if weights or replacement is not None else light))
    del tensors[name]
    save_file(tensors | ({} if replacement is None else {name: replacement}), _weights(light))
    with pytest.raises(ModelError, match=name):
        read_served_model(light, weights=weights)
