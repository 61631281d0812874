"""Tests of the null device: it answers as a real service would, but for the numbers."""

from __future__ import annotations

import json
import logging
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
from gpu_side.provision import Provision, write_provision
from gpu_side.served_model import BOTH, NO_LINEAR_DIGEST, read_served_model
from gpu_side.service import ServiceSettings, _load
from gpu_side.session_settings import SessionSettings
from gpu_side.state import ServiceState
from gpu_side.stop_signal import StopSignal
from gpu_side.tasks import Computed, RequestChecker, Task
from gpu_side.weights import load_weights
from protocol.connect import open_channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import ErrorCode, ModelError, ModelMismatchError, ProtocolError
from protocol.messages import (
    Arithmetic,
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
)
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.model.layers import load_tee_model
from tee_side.remote.handshake import ServiceCheck
from tests.kit.model import SIZES, LoopbackChannel, assemble, make_model
from tests.kit.service import run, running_service
from tests.kit.wire import part, segment
from tsqp.lab.leak.recording import RecordingChannel

CPU = torch.device("cpu")
LIMIT = 2**26
HIDDEN, VOCAB, LAYERS = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_hidden_layers"]
PROFILE = DeviceProfile(
    name="slow", tflops=1.0, int8_tops=2.0, gb_per_s=100.0, launch_us=3.0, pcie_gb_per_s=10.0
)


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


REQUESTS: dict[str, Computed | SeededRingLinearRequest] = {
    "qkv": LinearRequest(
        layer_idx=0,
        module_names=("q_proj", "k_proj", "v_proj"),
        hidden_states=from_torch(_floats(2, 5, HIDDEN)),
    ),
    "down": LinearRequest(
        layer_idx=2, module_names=("down_proj",), hidden_states=from_torch(_floats(96).half())
    ),
    "ring": RingLinearRequest(
        layer_idx=1,
        module_names=("gate_proj", "up_proj"),
        elements=from_torch(torch.ones(3, HIDDEN, dtype=torch.int32)),
    ),
    "seed": SeededRingLinearRequest(
        layer_idx=1,
        module_names=("down_proj",),
        rows=3,
        columns=96,
        seed=from_torch(torch.arange(8, dtype=torch.int32)),
    ),
    "matmul": MatmulRequest(a=from_torch(_floats(6, 2, 16)), b=from_torch(_floats(1, 16, 7))),
    "head": LMHeadRequest(hidden_states=from_torch(_floats(4, HIDDEN).bfloat16())),
    "ring head": RingLMHeadRequest(elements=from_torch(torch.ones(2, HIDDEN, dtype=torch.int32))),
    "embedding": EmbeddingRequest(
        input_ids=from_torch(torch.tensor([[1, 2, VOCAB - 1]])), dtype="bfloat16"
    ),
}
REFUSED: dict[str, Computed] = {
    "layer": LinearRequest(
        layer_idx=LAYERS, module_names=("q_proj",), hidden_states=from_torch(_floats(2, HIDDEN))
    ),
    "width": LinearRequest(
        layer_idx=0, module_names=("q_proj",), hidden_states=from_torch(_floats(2, HIDDEN + 1))
    ),
    "modules": LinearRequest(
        layer_idx=0, module_names=("k_proj", "q_proj"), hidden_states=from_torch(_floats(HIDDEN))
    ),
    "dtype": RingLinearRequest(
        layer_idx=0, module_names=("q_proj",), elements=from_torch(_floats(2, HIDDEN))
    ),
    "id": EmbeddingRequest(input_ids=from_torch(torch.tensor([VOCAB])), dtype="float32"),
    "limit": MatmulRequest(a=from_torch(_floats(5000, 1)), b=from_torch(_floats(1, 5000))),
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("full")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def light(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its linear weights."""
    directory = tmp_path_factory.mktemp("light")
    shutil.copy(full / "config.json", directory)
    tensors = load_file(full / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "_proj." not in n}, _weights(directory))
    return directory


def _weights(directory: Path) -> Path:
    return directory / "model.safetensors"


def _null(
    directory: Path,
    arithmetic: tuple[Arithmetic, ...] = BOTH,
    device: NullDevice | None = None,
    limit: int = LIMIT,
) -> RequestHandler:
    held, _ = read_served_model(directory, arithmetic, weights=False)
    return RequestHandler(NullWeights(held, device or NullDevice(), torch.float32), limit)


class NullChannel(LoopbackChannel):
    """A loopback to a null device."""

    def __init__(self, directory: Path, arithmetic: tuple[Arithmetic, ...] = BOTH) -> None:
        held, _ = read_served_model(directory, arithmetic, weights=False)
        RecordingChannel.__init__(self, NullWeights(held, NullDevice(), torch.float32), "null")
        self.requests = []
        self.one_connection = False
        self.max_reply_bytes = self.max_message_bytes = None


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("where", ["full", "light"])
def test_zeros_of_the_shape_and_dtype_that_a_real_service_answers(
    full: Path, light: Path, name: str, where: str
) -> None:
    real = RequestHandler(load_weights(full, device=CPU, dtype=torch.float32), LIMIT)
    expected = real.apply(REQUESTS[name])[0]
    reply = _null({"full": full, "light": light}[where]).apply(REQUESTS[name])[0]
    assert isinstance(reply, TensorReply)
    assert isinstance(expected, TensorReply)
    assert (reply.output.dtype, reply.output.shape) == (
        expected.output.dtype,
        expected.output.shape,
    )
    assert len(reply.output.data) == len(expected.output.data)
    assert not to_torch(reply.output).any()
    assert to_torch(expected.output).any()


def _segment(rows: int, start: int = 0, **fields: Any) -> SegmentRequest:
    return segment(_floats(rows, HIDDEN), [part(1, start, rows)], (0, LAYERS - 1), **fields)


def test_whole_layers_are_zeros_with_sessions_as_a_real_service_has(
    full: Path, light: Path
) -> None:
    settings = SessionSettings(bytes=2**20, client_bytes=2**20)
    weights = load_weights(full, device=CPU, dtype=torch.float32)
    held, _ = read_served_model(light, weights=False)
    null = NullWeights(held, NullDevice(), torch.float32)
    said = []
    for service in (weights, null):
        handler = RequestHandler(service, LIMIT, sessions=settings)
        outcomes: list[object] = []
        for request in (
            _segment(5),
            _segment(2, 5, lm_head=True, outputs=torch.tensor([1])),
            _segment(1, 8),
            _segment(1, 3),
            _segment(1, 5),
            _segment(200, outputs=torch.tensor([200])),
            _segment(200),
            segment(_floats(600, HIDDEN), [part(n, 0, 200) for n in (1, 2, 3)], (0, LAYERS - 1)),
            segment(_floats(1400, HIDDEN), [part(n, 0, 200) for n in range(1, 8)], (0, LAYERS - 1)),
        ):
            try:
                reply, work = handler.apply(request)
            except ProtocolError as error:
                outcomes.append((str(error), error.code, handler.session_totals()))
                continue
            assert work is None
            assert isinstance(reply, TensorReply)
            outcomes.append((reply.output.dtype, reply.output.shape, handler.session_totals()))
            assert to_torch(reply.output).any() == (service is weights)
        said.append(outcomes)
    assert said[0] == said[1]
    codes = [outcome[1] for outcome in said[0] if isinstance(outcome[1], ErrorCode)]
    assert codes == [
        ErrorCode.UNKNOWN_SESSION,
        ErrorCode.UNKNOWN_SESSION,
        ErrorCode.INVALID_FIELD,
        ErrorCode.SESSIONS_FULL,
    ]


def test_whole_layers_take_the_time_of_their_products_and_attention(light: Path) -> None:
    held, _ = read_served_model(light, weights=False)
    weights = NullWeights(held, NullDevice(PROFILE), torch.bfloat16)
    weights.kernels = NullKernels(NullDevice(PROFILE), 2, clock=lambda: 0)
    handler = RequestHandler(weights, LIMIT)
    # 5 rows, then 2 more of which one gets logits: 6 heads of 16, 2 of keys and values.
    ends = [0]
    for request in (_segment(5), _segment(2, 5, lm_head=True, outputs=torch.tensor([1]))):
        _, work = handler.apply(request)
        assert work is not None
        ends.append(work.ends_ns())
    for took_ns, rows, context, head_us, sizes in (
        (ends[1] - ends[0], 5, 5, 0.0, (5 * HIDDEN * 4 + 56 + 40, 5 * HIDDEN * 4)),
        (
            ends[2] - ends[1],
            2,
            7,
            PROFILE.linear_us(1, HIDDEN, VOCAB, 2),
            (2 * HIDDEN * 4 + 56 + 8, VOCAB * 4),
        ),
    ):
        layer_us = sum(
            PROFILE.linear_us(rows, inputs, outputs, 2)
            for inputs, outputs in ((48, 160), (96, 48), (48, 192), (96, 48))
        )
        layer_us += PROFILE.matmul_us(2, 3 * rows, 16, context, 2)
        layer_us += PROFILE.matmul_us(2, 3 * rows, context, 16, 2)
        copies_us = sum(PROFILE.transfer_us(size) for size in sizes)
        assert took_ns / 1000 == pytest.approx(LAYERS * layer_us + head_us + copies_us, abs=0.01)
    # With a window, no more keys than it lets be seen.
    _, work = handler.apply(_segment(1, 7, sinks=1, recent=2))
    assert work is not None
    few_us = 2 * LAYERS * PROFILE.matmul_us(2, 3, 16, 4, 2)
    linears_us = request_us(
        PROFILE, RequestChecker(held, LIMIT).check(_segment(1, 7, sinks=1, recent=2)), 2
    )
    assert (work.ends_ns() - ends[2]) / 1000 == pytest.approx(linears_us + few_us, abs=0.01)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_real_service_refuses_is_refused(full: Path, light: Path, name: str) -> None:
    limit = 2**20
    real = RequestHandler(load_weights(full, device=CPU, dtype=torch.float32), limit)
    null = _null(light, limit=limit)
    errors = []
    for operators in (real, null, null):  # a refusal is not remembered as an answer
        with pytest.raises(ProtocolError) as caught:
            operators.apply(REFUSED[name])
        errors.append((str(caught.value), caught.value.code))
    assert errors[0] == errors[1] == errors[2]


def test_init_is_that_of_a_real_service(full: Path) -> None:
    real = RequestHandler(load_weights(full, device=CPU, dtype=torch.float32), LIMIT)
    expected = real.apply(InitRequest())[0]
    reply = _null(full).apply(InitRequest())[0]
    assert isinstance(expected, InitReply)
    assert isinstance(reply, InitReply)
    assert reply.arithmetic == ("float", "int8")
    tensors_and_id = {"instance_id", "norm_weights", "rotary_emb_params"}
    assert reply.model_dump(exclude=tensors_and_id) == expected.model_dump(exclude=tensors_and_id)
    assert set(reply.norm_weights) == set(expected.norm_weights)


@pytest.mark.parametrize("arithmetic", ["float", "int8"])
def test_a_runner_accepts_it_for_a_directory_without_linear_weights(
    light: Path, arithmetic: Arithmetic
) -> None:
    config, checkpoint = read_config(light), Checkpoint(light)
    model = load_tee_model(config, checkpoint, torch.float32)
    check = ServiceCheck(config, checkpoint, model.norm_weights(), arithmetic=arithmetic)
    check.verify("null", NullChannel(light).call(InitRequest()).response)
    other: Arithmetic = "int8" if arithmetic == "float" else "float"
    without = NullChannel(light, (other,)).call(InitRequest()).response
    with pytest.raises(ModelMismatchError, match="arithmetic"):
        check.verify("null", without)


def test_a_forward_pass_runs_against_it(light: Path) -> None:
    tee = assemble(light, "tsqp", channel=NullChannel(light))
    logits = tee.logits([3, 1, 4, 1, 5])
    assert logits.shape == (5, VOCAB)
    assert not logits.any()


def test_its_linear_digest_is_what_the_directory_allows(
    full: Path, light: Path, tmp_path: Path
) -> None:
    own, _ = read_served_model(full)
    assert own.linear_digest not in (NO_LINEAR_DIGEST, "")
    assert read_served_model(light, weights=False)[0].linear_digest == NO_LINEAR_DIGEST
    copy = Path(shutil.copytree(light, tmp_path / "copy"))
    path = copy / "calibration.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"linear_digest": "ab" * 32})
    assert read_served_model(copy, weights=False)[0].linear_digest == "ab" * 32
    # The weights themselves go before what a calibration says of them.
    shutil.copy(_weights(full), _weights(copy))
    assert read_served_model(copy, weights=False)[0].linear_digest == own.linear_digest


@pytest.mark.parametrize("metadata", [None, {"linear_digest": "x"}, {"other": "ab" * 32}])
def test_a_calibration_that_does_not_say_is_refused(
    light: Path, tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    copy = Path(shutil.copytree(light, tmp_path / "copy"))
    save_file({"x": torch.zeros(1)}, copy / "calibration.safetensors", metadata=metadata)
    with pytest.raises(ModelError, match="linear_digest"):
        read_served_model(copy, weights=False)


def test_a_damaged_calibration_is_refused(light: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(light, tmp_path / "copy"))
    (copy / "calibration.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelError, match="expected a safetensors file"):
        read_served_model(copy, weights=False)


def test_a_real_service_still_needs_the_weights(light: Path) -> None:
    with pytest.raises(ModelError, match="q_proj"):
        read_served_model(light)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_the_light_tensors_are_needed(light: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(light, tmp_path / "copy"))
    tensors = load_file(_weights(light))
    del tensors[name]
    save_file(tensors, _weights(copy))
    with pytest.raises(ModelError, match=name):
        read_served_model(copy, weights=False)


def test_linear_weights_of_another_shape_are_refused(full: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(full, tmp_path / "copy"))
    tensors = load_file(_weights(full))
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, _weights(copy))
    with pytest.raises(ModelError, match="up_proj"):
        read_served_model(copy, weights=False)


def test_a_provisioned_directory(full: Path, tmp_path: Path) -> None:
    shutil.copy(full / "config.json", tmp_path)
    tensors = load_file(_weights(full))
    save_file({n: t for n, t in tensors.items() if "_proj." in n}, _weights(tmp_path))
    write_provision(tmp_path, Provision(mask="feature-rotation", provision_id="5a" * 32))
    null = _null(tmp_path)
    reply = null.apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert (reply.provision_id, reply.arithmetic) == ("5a" * 32, ("float",))
    assert reply.linear_digest == read_served_model(full)[0].linear_digest
    assert isinstance(null.apply(REQUESTS["qkv"])[0], TensorReply)
    for name in ("ring", "head", "embedding"):
        with pytest.raises(ProtocolError) as caught:
            null.apply(REQUESTS[name])
        assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(ModelError, match="transformed weights have no integers"):
        _null(tmp_path, ("int8",))


def test_equal_requests_share_one_answer_and_zeros_are_never_written_to(light: Path) -> None:
    null = _null(light)
    kernel = null.prepare(REQUESTS["qkv"])
    (first, _), (again, _) = kernel(REQUESTS["qkv"], None), kernel(REQUESTS["qkv"], None)
    assert again is first
    assert isinstance(first, TensorReply)
    assert isinstance(first.output.data, memoryview)
    assert first.output.data.readonly
    null.apply(REQUESTS["head"])  # larger: more zeros, and the old ones stay valid
    assert not to_torch(first.output).any()


def _task(directory: Path, name: str) -> Task:
    return RequestChecker(read_served_model(directory, weights=False)[0], LIMIT).check(
        REQUESTS[name]
    )


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_of_an_accelerator_works_on_one_request_after_the_other(
    light: Path, name: str
) -> None:
    now = 5000
    kernels = NullKernels(NullDevice(PROFILE), 2, clock=lambda: now)
    task = _task(light, name)
    kernel = kernels.prepare(REQUESTS[name], task)
    took_ns = pytest.approx(request_us(PROFILE, task, 2) * 1000, abs=1)
    (response, first), (again, second) = (kernel(REQUESTS[name], None) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.ends_ns() - 5000 == took_ns
    assert second.ends_ns() - first.ends_ns() == took_ns
    assert first.ends_ns() - 5000 > 9000  # three launches
    # Once it has nothing to do, it begins at once.
    now = second.ends_ns() + 7
    _, later = kernel(REQUESTS[name], None)
    assert later is not None
    assert later.ends_ns() - now == took_ns
    assert again is response
    assert isinstance(response, TensorReply)
    assert not to_torch(response.output).any()


def test_at_once_means_that_no_clock_is_read(light: Path) -> None:
    def clock() -> int:
        raise AssertionError

    kernels = NullKernels(NullDevice(), 2, clock=clock)
    _, work = kernels.prepare(REQUESTS["qkv"], _task(light, "qkv"))(REQUESTS["qkv"], None)
    assert work is None


def test_the_time_of_a_request_is_its_kernels_and_both_copies(light: Path) -> None:
    def took(name: str) -> float:
        return request_us(PROFILE, _task(light, name), 2)

    def copies(*sizes: int) -> float:
        return sum(PROFILE.transfer_us(size) for size in sizes)

    # 10 rows in float32 on the bus, bfloat16 weights; q, k and v together have 160 outputs.
    assert took("qkv") == pytest.approx(
        PROFILE.linear_us(10, 48, 160, 2) + copies(10 * 48 * 4, 10 * 160 * 4)
    )
    assert took("ring") == pytest.approx(
        PROFILE.linear_us(3, 48, 192, 2, integer=True) + copies(3 * 48 * 4, 3 * 192 * 4)
    )
    assert took("head") == pytest.approx(
        PROFILE.linear_us(4, 48, 320, 2) + copies(4 * 48 * 2, 4 * 320 * 2)
    )
    assert took("matmul") == pytest.approx(
        PROFILE.matmul_us(6, 2, 16, 7, 2) + copies((6 * 2 + 7) * 16 * 4, 6 * 2 * 7 * 4)
    )
    assert took("embedding") == pytest.approx(
        PROFILE.embedding_us(3, 48, 2) + copies(3 * 8, 3 * 48 * 2)
    )


@pytest.mark.parametrize("device", [NullDevice(), NullDevice(PROFILE)])
def test_the_log_says_that_nothing_is_computed(
    light: Path, caplog: pytest.LogCaptureFixture, device: NullDevice
) -> None:
    stop = StopSignal()
    settings = ServiceSettings(light, "", dtype="bfloat16")
    with caplog.at_level(logging.INFO, "gpu_service"):
        assert _load(settings, device, ServiceState(), stop) is not None
    stop.reader.close()
    stop.writer.close()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == "null_device"
    fields = vars(warning)["fields"]
    assert (fields["device"], fields["computes"]) == (str(device), "nothing")
    (loaded,) = [record for record in caplog.records if record.getMessage() == "loaded"]
    assert vars(loaded)["fields"]["weight_bytes"] == 0


def test_a_model_too_wide_for_int8_products_is_served_in_floats(
    light: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Path(shutil.copytree(light, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text()) | {"intermediate_size": 2**17}
    (copy / "config.json").write_text(json.dumps(config))
    stop = StopSignal()
    service = _load(ServiceSettings(copy, ""), NullDevice(), ServiceState(), stop)
    stop.reader.close()
    stop.writer.close()
    assert service is not None
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "no_int8",
        "null_device",
    ]


def test_the_limit_of_a_message_is_told(light: Path) -> None:
    reply = _null(light, limit=DEFAULT_MAX_MESSAGE_BYTES).apply(InitRequest())[0]
    assert isinstance(reply, InitReply)
    assert reply.max_message_bytes == DEFAULT_MAX_MESSAGE_BYTES


@pytest.mark.usefixtures("patient_streams")
@pytest.mark.parametrize(
    ("scheme", "device"),
    [("ipc://{0}/s", "null"), ("unix://{0}/s", "null"), ("tcp://127.0.0.1:*", "model:l4")],
)
def test_a_process_with_it_answers_over_every_transport(
    light: Path, tmp_path: Path, scheme: str, device: str
) -> None:
    endpoint = scheme.format(tmp_path)
    with running_service(light, endpoint, "--device", device, "--spin-us", "50") as service:
        channel = open_channel(service.endpoint, timeout_s=20, heartbeat_timeout_s=0)
        for _ in range(3):
            response = channel.call(REQUESTS["qkv"]).response
            assert isinstance(response, TensorReply)
            assert response.output.shape == (2, 5, 160)
        channel.close()
        assert any("null_device" in line and "computes=nothing" in line for line in service.log)
    assert service.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "model:h1000"), "expected a100, h100, h200, l4, rtx-4090"),
        (("--device", "nul"), "--device: got 'nul', expected cpu, cuda, cuda:N, null or model:"),
        (("--spin-us", "-1"), "--spin-us"),
        (("--spin-us", "nan"), "--spin-us"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    light: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    ended = run("gpu-service", str(light), "--bind", f"ipc://{tmp_path}/s", *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
