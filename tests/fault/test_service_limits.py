"""A real gpu-service with more to do than it can, told to stop with work left, and looked at."""

from __future__ import annotations

import signal
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import torch
import zmq
from prometheus_client.parser import text_string_to_metric_families

from protocol.channel import Channel
from protocol.connect import open_channel
from protocol.errors import ErrorCode, ServiceError
from protocol.messages import (
    HealthReply,
    HealthRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    TensorReply,
)
from protocol.tensors import from_torch
from tests.fault.test_service_lifecycle import CANARIES, CANARY_BYTES, CANARY_FLOAT, LINE
from tests.kit.model import make_model
from tests.kit.service import CALM_S, Service, run, running_service
from tests.kit.wire import HIDDEN, HIDDEN_BYTES, exchange, framed_linear, header, inline

TRANSPORTS = ["tcp", "unix", "shm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(params=TRANSPORTS)
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"{request.param}://{tmp_path}/s"


def slow_device(folder: Path, seconds: float) -> str:
    """Describe an accelerator that takes so long for each product: two copies and a kernel."""
    path = folder / "slow.toml"
    path.write_text(
        f'name = "slow"\ntflops = 1e6\nint8_tops = 1e6\ngb_per_s = 1e6\npcie_gb_per_s = 1e6\n'
        f"launch_us = {seconds / 3 * 1e6}\n"
    )
    return f"model:{path}"


@contextmanager
def _connected(service: Service) -> Iterator[Channel]:
    channel = open_channel(service.endpoint, timeout_s=60, heartbeat_timeout_s=CALM_S)
    try:
        yield channel
    finally:
        channel.close()


def _linear(rows: int = 1, layer: int = 0) -> LinearRequest:
    hidden = from_torch(torch.full((rows, HIDDEN), CANARY_FLOAT))
    return LinearRequest(layer_idx=layer, module_names=("q_proj",), hidden_states=hidden)


def _health(channel: Channel) -> HealthReply:
    reply = channel.call(HealthRequest()).response
    assert isinstance(reply, HealthReply)
    return reply


def _outcome(channel: Channel, request_id: int) -> ErrorCode | None:
    try:
        assert isinstance(channel.wait(request_id).response, TensorReply)
    except ServiceError as error:
        return error.code
    return None


def _fields(service: Service, event: str) -> list[dict[str, str]]:
    lines = [line for line in service.log if line.split()[2] == event]
    return [dict(field.split("=", 1) for field in line.split()[3:]) for line in lines]


def submit_until_some_wait(client: Channel) -> list[int]:
    """Submit four requests, and more until two of them wait at once, however slow we are.

    All have been picked up then: they came on the connection on which the service was asked.
    """
    ids = [client.submit(_linear()) for _ in range(4)]
    while _health(client).queued_requests < 2:
        assert len(ids) < 60, "a service that takes requests and has none waiting"
        time.sleep(0.05)
        ids.append(client.submit(_linear()))
    return ids


def _wait_until_it_drains(other: Channel) -> HealthReply:
    until = time.monotonic() + 60
    while (health := _health(other)).status == "ready":
        assert time.monotonic() < until, "a service that was told to stop goes on"
        time.sleep(0.01)
    return health


def test_a_client_with_too_many_requests_is_told_so_and_others_are_served(
    model: Path, tmp_path: Path, endpoint: str
) -> None:
    arguments = ("--device", slow_device(tmp_path, 0.3), "--max-queued-requests", "2")
    with (
        running_service(model, endpoint, *arguments) as service,
        _connected(service) as greedy,
        _connected(service) as modest,
    ):
        init = modest.call(InitRequest()).response
        assert isinstance(init, InitReply)
        assert (init.max_queued_requests, init.max_queued_bytes) == (2, 512 * 2**20)
        ids = [greedy.submit(_linear()) for _ in range(20)]
        health = _health(modest)
        assert health.status == "ready"
        assert health.queued_requests <= 2
        assert isinstance(modest.call(_linear()).response, TensorReply)
        # Some are refused while the first is worked on, however slowly they are sent. Those in
        # slots of shared memory and in the stream beside them come in no order.
        outcomes = [_outcome(greedy, request_id) for request_id in ids]
        assert outcomes[0] is None or endpoint.startswith("shm")
        assert set(outcomes) == {None, ErrorCode.QUEUE_FULL}
        # What was refused may be sent again.
        assert isinstance(greedy.call(_linear()).response, TensorReply)
        assert service.stop() == 0
    full = _fields(service, "queue_full")
    assert 1 <= len(full) <= 19
    assert {
        (line["code"], line["limit"], line["allowed"], line["requested"], line["available"])
        for line in full
    } == {("QUEUE_FULL", "max_queued_requests", "2", "1", "0")}
    assert all(LINE.match(line) for line in service.log)


def test_a_client_with_too_many_bytes_is_told_so(
    model: Path, tmp_path: Path, endpoint: str
) -> None:
    arguments = ["--device", slow_device(tmp_path, 0.3), "--max-message-mib", "1"]
    half_mib = _linear(rows=2**19 // HIDDEN_BYTES)
    with (
        running_service(model, endpoint, *arguments) as service,
        _connected(service) as greedy,
    ):
        ids = [greedy.submit(half_mib) for _ in range(8)]
        outcomes = [_outcome(greedy, request_id) for request_id in reversed(ids)]
        assert outcomes[-1] is None or endpoint.startswith("shm")
        assert set(outcomes) == {None, ErrorCode.QUEUE_FULL}
        assert service.stop() == 0
    lines = _fields(service, "queue_full")
    assert lines
    for line in lines:
        assert (line["limit"], line["allowed"]) == ("max_queued_bytes", str(2**20))
        assert int(line["available"]) < int(line["requested"])
        assert int(line["requested"]) > 2**19 - HIDDEN_BYTES


def test_what_was_taken_is_finished_after_sigterm(
    model: Path, tmp_path: Path, endpoint: str
) -> None:
    with (
        running_service(model, endpoint, "--device", slow_device(tmp_path, 1.0)) as service,
        _connected(service) as client,
        _connected(service) as other,
    ):
        _health(other)  # a new connection would have to be made while the service drains
        ids = submit_until_some_wait(client)
        service.process.send_signal(signal.SIGTERM)
        assert _wait_until_it_drains(other).status == "draining"
        late = other.submit(_linear())
        assert _outcome(other, late) is ErrorCode.SHUTTING_DOWN
        assert [_outcome(client, request_id) for request_id in ids] == [None] * len(ids)
        assert service.stop() == 0
    (draining,) = _fields(service, "draining")
    assert int(draining["queued_requests"]) + int(draining["underway_requests"]) in range(
        2, len(ids) + 1
    )
    assert _fields(service, "drain_ended") == []


@pytest.mark.parametrize(
    ("endpoint", "how"), [("tcp", "timeout"), ("unix", "second signal")], indirect=["endpoint"]
)
def test_a_drain_does_not_take_for_ever(
    model: Path, tmp_path: Path, endpoint: str, how: str
) -> None:
    patience = "0.2" if how == "timeout" else "3600"
    arguments = ("--device", slow_device(tmp_path, 600), "--drain-timeout-s", patience)
    with (
        running_service(model, endpoint, *arguments) as service,
        _connected(service) as client,
        _connected(service) as other,
    ):
        ids = submit_until_some_wait(client)
        service.process.send_signal(signal.SIGTERM)
        if how != "timeout":
            _wait_until_it_drains(other)
            service.process.send_signal(signal.SIGTERM)
        codes = [_outcome(client, request_id) for request_id in ids]
        assert codes == [ErrorCode.SHUTTING_DOWN] * len(ids)
        assert service.process.wait(30) == 0
        service.stop()
    assert _fields(service, "drain_ended") == [{"refused_requests": str(len(ids))}]


def test_health_in_the_inline_form(model: Path) -> None:
    with running_service(model, "tcp://127.0.0.1:*", "--device", "null") as service:
        (reply,) = exchange(zmq.REQ, service.endpoint, [inline("Health", {})])
    answer = msgpack.unpackb(reply)
    assert answer["status"] == "success"
    assert answer["response"].pop("uptime_s") > 0
    assert answer["response"] == {"status": "ready", "queued_requests": 0, "queued_bytes": 0}


# --------------------------------------------------------------------------------- metrics


def _metrics(service: Service) -> tuple[str, dict[tuple[str, ...], float]]:
    (line,) = [line for line in service.log if line.split()[2] == "metrics"]
    with urllib.request.urlopen(line.split("url=", 1)[1], timeout=30) as answer:
        text = answer.read().decode()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return text, values


def test_metrics_after_known_requests(model: Path, tmp_path: Path) -> None:
    arguments = (f"unix://{tmp_path}/s", "--threads", "1", "--metrics", "*")
    with running_service(model, *arguments) as service, _connected(service) as client:
        sent = received = 0
        for request in (InitRequest(), HealthRequest(), *[_linear()] * 3):
            done = client.call(request)
            sent, received = sent + done.bytes_sent, received + done.bytes_received
        before = client.traffic.bytes_sent
        assert _outcome(client, client.submit(_linear(layer=99))) is ErrorCode.INVALID_FIELD
        assert client.traffic.bytes_sent == before
        text, values = _metrics(service)
        until = time.monotonic() + 60
        # A reply is counted once it has gone: we may have it before.
        while values["tsqp_sent_bytes_total",] == received:
            assert time.monotonic() < until, "a reply that is never counted"
            time.sleep(0.01)
            text, values = _metrics(service)
        assert service.stop() == 0
    requests = {
        key[1:]: value for key, value in values.items() if key[0] == "tsqp_requests_total" and value
    }
    assert requests == {
        ("OK", "Init"): 1,
        ("OK", "Health"): 1,
        ("OK", "Linear"): 3,
        ("INVALID_FIELD", "Linear"): 1,
    }
    for name in ("compute", "queue"):
        assert values[f"tsqp_{name}_seconds_count", "Linear"] == 3
        assert 0 <= values[f"tsqp_{name}_seconds_sum", "Linear"] < 60
    refused = values["tsqp_received_bytes_total",] - sent
    assert HIDDEN_BYTES < refused < HIDDEN_BYTES + 300
    assert 0 < values["tsqp_sent_bytes_total",] - received < 200
    assert values["tsqp_ready",] == 1
    assert values["tsqp_queued_requests",] == values["tsqp_queued_bytes",] == 0
    assert values["tsqp_device_info", "cpu"] == 1
    assert values["tsqp_uptime_seconds",] > 0
    assert not [canary for canary in CANARIES if canary in text]


def test_metrics_hold_nothing_of_what_is_sent(model: Path) -> None:
    floats = struct.pack("<f", CANARY_FLOAT) * HIDDEN
    with running_service(model, "tcp://127.0.0.1:*", "--metrics", "127.0.0.1:*") as service:
        for frames in (
            [header(), floats],
            [header(method="canary"), floats],
            [framed_linear(hidden_states=CANARY_BYTES), floats],
            [inline(CANARY_BYTES, {})],
            [inline("canary", {})],
            [CANARY_BYTES],
        ):
            exchange(zmq.DEALER, service.endpoint, frames)
        # A request is counted after its reply was sent, and before the next one is taken.
        exchange(zmq.DEALER, service.endpoint, [inline("Health", {})])
        text, values = _metrics(service)
    assert values["tsqp_requests_total", "UNKNOWN_METHOD", "unknown"] == 2
    assert values["tsqp_requests_total", "MALFORMED_MESSAGE", "unknown"] == 2
    assert not [canary for canary in CANARIES if canary in text]


def test_a_metrics_port_that_is_taken_is_refused_at_start(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run(
            "gpu-service", str(model), "--bind", f"ipc://{tmp_path}/s", "--metrics", address
        )
    assert ended.returncode == 2
    assert f"metrics at {address}: got Address already in use" in ended.stderr
    assert "loaded" not in ended.stderr


# --------------------------------------------------------------------------------- settings


def test_a_service_with_some_layers(model: Path, tmp_path: Path) -> None:
    arguments = (f"unix://{tmp_path}/s", "--layers", "1-2", "--threads", "1")
    with running_service(model, *arguments) as service, _connected(service) as client:
        init = client.call(InitRequest()).response
        assert isinstance(init, InitReply)
        assert init.layers == (1, 2)
        head = LMHeadRequest(hidden_states=from_torch(torch.ones(1, HIDDEN)))
        matmul = MatmulRequest(a=head.hidden_states, b=from_torch(torch.ones(HIDDEN, 1)))
        for request in (_linear(layer=1), _linear(layer=2), head, matmul):
            assert isinstance(client.call(request).response, TensorReply)
        assert _outcome(client, client.submit(_linear(layer=0))) is ErrorCode.UNAVAILABLE
    (loading, *_) = _fields(service, "loading")
    assert loading["layers"] == "1-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0-3"], "got 0-3, expected a range within 0-2"),
        (["--max-queued-mib", "511"], "--max-queued-mib: got 511, expected at least 512"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_start(
    model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    ended = run("gpu-service", str(model), "--bind", f"ipc://{tmp_path}/s", *arguments)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
