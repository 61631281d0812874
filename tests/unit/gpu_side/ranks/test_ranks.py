"""A service of two ranks as real processes: its replies, and what becomes of it when one dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.errors import DeadlineExceededError, EndpointError, ErrorCode, ServiceError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
)
from protocol.seed import SEED_SHAPE
from protocol.tensors import WireTensor, from_torch, to_torch
from tests.kit.model import SIZES, make_model
from tests.kit.rows import each_row
from tests.kit.service import ENVIRONMENT, Forked, Service, run, running_service

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("patient_streams")]

HIDDEN, VOCAB, BETWEEN = SIZES["hidden_size"], 331, SIZES["intermediate_size"]
TWO = ("--tensor-parallel", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "llama", vocab_size=VOCAB, attention_bias=True)
    return directory


@contextmanager
def _client(service: Service) -> Iterator[Channel]:
    channel = open_channel(service.endpoint, timeout_s=30.0)
    try:
        yield channel
    finally:
        channel.close()


def _output(channel: Channel, request: Request) -> torch.Tensor:
    reply = channel.wait(channel.submit(request)).response
    assert isinstance(reply, TensorReply)
    return to_torch(reply.output).clone()


def _reply(channel: Channel, request: Request) -> object:
    """Return the reply, or the code of an error reply."""
    try:
        return channel.wait(channel.submit(request)).response
    except ServiceError as error:
        return error.code


def _requests(rows: int) -> list[Request]:
    generator = torch.Generator().manual_seed(rows)
    floats = torch.randn(rows, HIDDEN, generator=generator)
    wide = torch.randint(-(2**31), 2**31, (rows, BETWEEN), generator=generator).to(torch.int32)
    hidden, elements = from_torch(floats), from_torch(wide[:, :HIDDEN].contiguous())
    ids = torch.randint(0, VOCAB, (rows,), generator=generator)
    seed = WireTensor("int32", SEED_SHAPE, bytes(range(32)))
    qkv, gate_up = FUSED_MODULES["qkv_proj"], FUSED_MODULES["gate_up_proj"]
    down = from_torch(wide)
    return [
        LinearRequest(layer_idx=1, module_names=qkv, hidden_states=hidden),
        LinearRequest(layer_idx=1, module_names=qkv, hidden_states=hidden, bias=False),
        LinearRequest(layer_idx=2, module_names=("v_proj",), hidden_states=hidden),
        RingLinearRequest(layer_idx=0, module_names=gate_up, elements=elements),
        RingLinearRequest(layer_idx=0, module_names=("down_proj",), elements=down),
        SeededRingLinearRequest(
            layer_idx=0, module_names=qkv, rows=rows, columns=HIDDEN, seed=seed
        ),
        LMHeadRequest(hidden_states=hidden),
        RingLMHeadRequest(elements=elements),
        EmbeddingRequest(input_ids=from_torch(ids), dtype="float32"),
        MatmulRequest(a=hidden, b=from_torch(floats.t().contiguous())),
    ]


def test_two_ranks_answer_as_one_process(model: Path, tmp_path: Path) -> None:
    with (
        running_service(model, f"unix://{tmp_path}/one") as one,
        running_service(model, f"unix://{tmp_path}/two", *TWO) as two,
        _client(one) as alone,
        _client(two) as together,
    ):
        # 97 rows are more than one message between ranks holds.
        for rows in (1, 3, 97, 1):
            for request in _requests(rows):
                expected, found = _output(alone, request), _output(together, request)
                assert found.shape == expected.shape, request.method
                if found.dtype == torch.int32 or isinstance(request, EmbeddingRequest):
                    assert torch.equal(found, expected), request.method
                else:
                    torch.testing.assert_close(found, expected)
        init = together.wait(together.submit(InitRequest())).response
        assert isinstance(init, InitReply)
        assert (init.columns, init.ranks) == ((0, 1), 2)
        outside = EmbeddingRequest(input_ids=from_torch(torch.tensor([VOCAB])), dtype="float32")
        with pytest.raises(ServiceError) as refused:
            _output(together, outside)
        assert refused.value.code is ErrorCode.INVALID_FIELD
        row = from_torch(torch.zeros(1, HIDDEN))
        segment = SegmentRequest(
            first_layer=0,
            last_layer=1,
            hidden_states=row,
            parts=from_torch(torch.tensor([[1, 1, 0, 1, 1, 0, 0]])),
            outputs=from_torch(torch.tensor([0])),
        )
        with pytest.raises(ServiceError) as refused:
            _output(together, segment)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        ranks = _ranks_of(two)
        assert len(ranks) == 1
        assert two.stop() == 0
        assert not _alive(ranks)
    bytes_of = [_loaded_bytes(service) for service in (one, two)]
    assert bytes_of[1] <= bytes_of[0] * 0.55


@each_row(
    "arguments",
    [
        ("--arithmetic", "int8", "--layers", "1-2"),
        ("--arithmetic", "float", "--layers", "0-1"),
    ],
)
def test_layers_and_arithmetic_hold_for_all_ranks(
    model: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name = arguments[1]
    with (
        running_service(model, f"unix://{tmp_path}/1{name}", *arguments) as one,
        running_service(model, f"unix://{tmp_path}/2{name}", *arguments, *TWO) as two,
        _client(one) as alone,
        _client(two) as together,
    ):
        for request in _requests(2):
            expected, found = (_reply(channel, request) for channel in (alone, together))
            if isinstance(expected, TensorReply) and isinstance(found, TensorReply):
                torch.testing.assert_close(to_torch(found.output), to_torch(expected.output))
            else:
                assert found is expected, request.method


def test_a_rank_that_dies_ends_the_service(model: Path, tmp_path: Path) -> None:
    with running_service(model, f"unix://{tmp_path}/s", *TWO) as service:
        (rank,) = _ranks_of(service)
        os.kill(rank, signal.SIGKILL)
        # By itself: nothing is asked of it.
        assert service.process.wait(30) not in (0, None)
        service.stop()
    log = "\n".join(service.log)
    assert "rank_failed rank=1" in log
    assert "rank 1: got a process killed by SIGKILL, expected one that goes on" in log
    assert not _alive([rank])


def test_a_stop_that_all_processes_are_told_of_is_in_order(model: Path, tmp_path: Path) -> None:
    """As systemd tells all of a unit, and a terminal all of a group."""
    with (
        running_service(model, f"unix://{tmp_path}/s", *TWO) as service,
        _client(service) as client,
    ):
        (rank,) = _ranks_of(service)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(rank, number)
        # It computes on: the head says when it is to end.
        assert _output(client, _requests(1)[0]).shape[0] == 1
        os.kill(service.process.pid, signal.SIGTERM)
        assert service.process.wait(30) == 0
    assert "rank_failed" not in "\n".join(service.log)
    assert not _alive([rank])


def test_a_rank_that_hangs_ends_the_service_with_an_error_reply(
    model: Path, tmp_path: Path
) -> None:
    impatient = "import gpu_side.ranks.head as head; head.COMPUTE_S = 1.0"
    with (
        running_service(model, f"unix://{tmp_path}/s", *TWO, before=impatient) as service,
        _client(service) as client,
    ):
        (rank,) = _ranks_of(service)
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises((ServiceError, EndpointError, DeadlineExceededError)) as failed:
            _output(client, _requests(1)[0])
        if isinstance(failed.value, ServiceError):
            assert failed.value.code is ErrorCode.SHUTTING_DOWN
        assert service.process.wait(60) not in (0, None)
        service.stop()
    assert "rank_failed" in "\n".join(service.log)
    assert not _alive([rank])


def test_ranks_end_with_a_head_that_is_killed(model: Path, tmp_path: Path) -> None:
    with running_service(model, f"unix://{tmp_path}/s", *TWO) as service:
        ranks = _ranks_of(service)
        assert len(ranks) == 1
        service.process.send_signal(signal.SIGKILL)
        service.process.wait(30)
        _wait_for_end(ranks)


def test_a_rank_that_cannot_start_ends_the_service(model: Path, tmp_path: Path) -> None:
    broken = "import sys; sys.executable = '/bin/false'"
    with (
        pytest.raises(RuntimeError, match="rank 1: got a process that ended with 1"),
        running_service(model, f"unix://{tmp_path}/s", *TWO, before=broken),
    ):
        pass


def test_a_head_that_is_told_to_stop_while_it_waits_stops(model: Path, tmp_path: Path) -> None:
    # In the place of Python: a rank that never comes.
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    waits = (
        f"import os, signal, sys, time; sys.executable = {str(sleeper)!r}; sleep = time.sleep\n"
        "import gpu_side.ranks.group as group\n"
        "def stop(seconds): os.kill(os.getpid(), signal.SIGTERM); sleep(seconds)\n"
        "group.time.sleep = stop\n"
    )
    log = tmp_path / "log"
    with log.open("w+b") as errors:
        options = (str(model), "--bind", f"unix://{tmp_path}/s", *TWO)
        head = Forked("gpu-service", options, ENVIRONMENT, stderr=errors.fileno(), before=waits)
        assert head.wait(60) == 0
        head.kill()
    assert "rank_failed" not in log.read_text()
    assert " stopped " in log.read_text()


def test_torchrun_starts_the_ranks(model: Path, tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("gpu-service"))
    endpoint = f"unix://{tmp_path}/s"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone"]  # it finds a free port
    command += [program, str(model), "--bind", endpoint, "--dtype", "float32", *TWO]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = []
            for line in process.stderr:
                log.append(line)
                if " ready " in line:
                    break
            else:
                pytest.fail("".join(log))
            channel = open_channel(endpoint, timeout_s=30.0)
            with running_service(model, f"unix://{tmp_path}/one") as one, _client(one) as alone:
                request = _requests(3)[3]
                assert torch.equal(_output(channel, request), _output(alone, request))
            channel.close()
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read() if process.stderr else ""
            process.wait(60)
    assert "stopped" in rest
    assert "rank_failed" not in rest


@each_row(
    ("arguments", "text"),
    [
        (("--tensor-parallel", "33"), "--tensor-parallel: got 33 parts, expected 1 to 32"),
        ((*TWO, "--columns", "0/2"), "--tensor-parallel: got --columns as well, expected one of"),
        ((*TWO, "--device", "null"), "--tensor-parallel: got --device null, expected cpu or cuda"),
        ((*TWO, "--device", "model:h100"), "--tensor-parallel: got --device model:h100, expected"),
        ((*TWO, "--device", "cuda:1"), "--tensor-parallel: got --device cuda:1, expected cpu or"),
        (("--columns", "2/2"), "--columns: got part 2 of 2, expected 0 to 1"),
        (("--columns", "0/33"), "--columns: got 33 parts, expected 1 to 32"),
        (("--columns", "0/0"), "--columns: got 0 parts, expected 1 to 32"),
        (("--columns", "half"), "--columns: got 'half', expected I/N, such as 0/2"),
        (("--columns", "-1/2"), "--columns: got '-1/2', expected I/N, such as 0/2"),
    ],
)
def test_options_that_make_no_sense(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    ended = run("gpu-service", str(model), "--bind", f"unix://{tmp_path}/s", *arguments)
    assert ended.returncode == 2
    assert text in ended.stderr


def test_torchrun_with_another_number_of_processes(model: Path, tmp_path: Path) -> None:
    theirs = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    options = (str(model), "--bind", f"unix://{tmp_path}/s", *TWO)
    ended = run("gpu-service", *options, MASTER_ADDR="127.0.0.1", **theirs)
    assert "--tensor-parallel: got torchrun with 3 processes, 3 of them here, exp" in ended.stderr
    assert ended.returncode == 2


def _ranks_of(service: Service) -> list[int]:
    """Return the processes that a service has started."""
    children = Path(f"/proc/{service.process.pid}/task/{service.process.pid}/children")
    return [int(pid) for pid in children.read_text(encoding="ascii").split()]


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while _alive(pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _loaded_bytes(service: Service) -> int:
    found = re.search(r"loaded weight_bytes=(\d+)", "\n".join(service.log))
    assert found
    return int(found[1])
