"""How a real gpu-service ends, and what it writes down while it runs."""

from __future__ import annotations

import re
import signal
import struct
import time
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
import zmq

from protocol.connect import open_channel
from protocol.messages import HealthReply, HealthRequest
from tests.kit.model import make_model
from tests.kit.service import ENVIRONMENT, Forked, run, running_service
from tests.kit.wire import (
    HIDDEN,
    HIDDEN_BYTES,
    connected,
    embedding_body,
    exchange,
    framed_linear,
    header,
    inline,
    is_healthy,
    linear_body,
    matmul_body,
)

LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d)? (debug|info|warning|error) [a-z_]+"
    r'( [a-z_]+=([^\s"=]+|"([^"\\]|\\.)*"))*$'
)
CANARY_FLOAT = 1234.5625  # exact in float32
CANARY_ID = 7654321
CANARY_BYTES = b"canary\xfe"
CANARIES = ("1234.56", "765432", "canary", "63616e617279")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.mark.parametrize(("number", "transport"), [(signal.SIGTERM, "tcp"), (signal.SIGINT, "ipc")])
def test_signal_ends_an_idle_service(
    model: Path, tmp_path: Path, number: int, transport: str
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s"
    with running_service(model, endpoint, "--threads", "1") as service:
        assert is_healthy(service.endpoint)
        assert service.stop(number) == 0
    log = "\n".join(service.log)
    assert " info stopped " in log
    assert "Traceback" not in log


def test_signal_ends_a_busy_service(model: Path) -> None:
    request = matmul_body([1, 512, 512], [1, 512, 512])
    with (
        running_service(model, "tcp://127.0.0.1:*", "--threads", "1") as service,
        connected(zmq.DEALER, service.endpoint) as client,
    ):
        for _ in range(30):
            client.send(inline("Matmul", request))
        replies = [msgpack.unpackb(client.recv())]
        assert service.stop() == 0
        while client.poll(0):
            replies.append(msgpack.unpackb(client.recv()))
    assert replies[0]["status"] == "success"
    assert {reply.get("error") for reply in replies} <= {None, "SHUTTING_DOWN"}
    assert "Traceback" not in "\n".join(service.log)


def test_signal_while_requests_wait_unread(model: Path) -> None:
    with (
        running_service(model, "tcp://127.0.0.1:*", "--threads", "1") as service,
        connected(zmq.DEALER, service.endpoint) as client,
    ):
        # Or it might be frozen before there is a connection that takes anything.
        client.send(inline("Init", {}))
        assert msgpack.unpackb(client.recv())["status"] == "success"
        service.freeze()
        sent_bytes = 0
        for request_id in range(1, 31):
            sent_bytes += len(header(request_id=request_id)) + HIDDEN_BYTES
            client.send_multipart([header(request_id=request_id), bytes(HIDDEN_BYTES)])
        _wait_until_received(service.endpoint, sent_bytes)
        service.process.send_signal(signal.SIGTERM)
        service.thaw()
        assert service.stop() == 0
        # What has come by then is not lost: each gets an answer, and one only.
        replies = []
        while len(replies) < 30 and client.poll(10_000):
            replies.append(msgpack.unpackb(client.recv_multipart()[0]))
        assert [reply["request_id"] for reply in replies] == list(range(1, 31))
        assert {reply.get("error") for reply in replies} <= {None, "SHUTTING_DOWN"}
        assert not client.poll(0)


def _wait_until_received(endpoint: str, size: int) -> None:
    """Wait until the kernel has so many bytes for a service that does not read."""
    port = f":{int(endpoint.rpartition(':')[2]):04X}"
    until = time.monotonic() + 30
    waiting = 0
    while waiting < size:
        assert time.monotonic() < until
        time.sleep(0.01)
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        fields = [line.split() for line in lines]
        waiting = sum(int(f[4].partition(":")[2], 16) for f in fields if f[1].endswith(port))


def test_a_runner_waits_for_a_service_that_is_not_there_yet(model: Path, tmp_path: Path) -> None:
    endpoint, output = f"ipc://{tmp_path}/s", tmp_path / "out"
    given = ("--policy", "attention-in-tee", "--prompt-token-ids", "5,6,7", "--max-new-tokens", "3")
    command = ("generate", str(model), "--gpu", endpoint, "--connect-timeout-s", "60", *given)
    with output.open("w") as file:
        runner = Forked("tee-runner", command, ENVIRONMENT, stdout=file.fileno())
    try:
        while " waiting_for_service " not in (line := runner.stderr.readline()):
            assert line, runner.wait(60)
        with running_service(model, endpoint, "--threads", "1"):
            assert runner.wait(60) == 0, runner.communicate()
    finally:
        runner.kill()
    assert output.read_text()


def test_two_services_do_not_share_an_endpoint(model: Path, tmp_path: Path) -> None:
    with running_service(model, f"ipc://{tmp_path}/s", "--threads", "1") as service:
        second = run("gpu-service", str(model), "--bind", service.endpoint)
        assert second.returncode == 2
        assert "Address already in use" in second.stderr
        assert is_healthy(service.endpoint)


def _canary_messages() -> list[list[bytes]]:
    """Good and bad messages, each with something in it that must never be written down."""
    floats = struct.pack("<f", CANARY_FLOAT) * HIDDEN
    numbers = [CANARY_FLOAT] * HIDDEN
    ids = [CANARY_ID] * 4
    tensor = {"dtype": "float32", "shape": [1, HIDDEN], "frame": 1}
    embedding = {"input_ids": ids, "dtype": "float32"}
    return [
        [CANARY_BYTES],
        [b"canary"],
        [CANARY_BYTES * 1000],
        [inline("Linear", linear_body(hidden_states=floats))],
        [inline("Linear", linear_body(hidden_states=floats[:-1]))],
        [inline("Linear", linear_body(hidden_states=floats, shape=[2, HIDDEN]))],
        [inline("Linear", linear_body(hidden_states=floats, dtype="torch.float16"))],
        [inline("Linear", linear_body(hidden_states=numbers))],
        [inline("Linear", linear_body(extra=CANARY_BYTES))],
        [inline("Linear", linear_body(extra=numbers))],
        [inline("Linear", linear_body(extra=ids))],
        [inline("Linear", linear_body(layer_idx=CANARY_BYTES))],
        [inline("Linear", linear_body())[:-20] + CANARY_BYTES],
        [inline("Embedding", embedding_body(ids))],
        [inline("Embedding", embedding_body(ids, input_ids=ids))],
        [inline("Embedding", embedding_body([1], extra=CANARY_ID))],
        [inline(CANARY_BYTES, {})],
        [msgpack.packb({CANARY_BYTES: 1})],
        [msgpack.packb({"method": "Init", "request": {}, CANARY_BYTES: 1})],
        [header(), floats],
        [header(), floats[:-1]],
        [header(), floats, floats],
        [framed_linear(hidden_states=floats)],
        [framed_linear(hidden_states=numbers)],
        [framed_linear(hidden_states=CANARY_FLOAT)],
        [framed_linear(hidden_states=tensor | {"extra": CANARY_BYTES}), floats],
        [framed_linear(hidden_states=tensor | {"frame": CANARY_BYTES}), floats],
        [header(method="Embedding", request=embedding)],
        [header(method="Embedding", request=embedding | {"input_ids": CANARY_ID})],
        [header(request=CANARY_BYTES), floats],
        [header(request_id=CANARY_BYTES), floats],
    ]


def test_log_is_structured_and_holds_no_contents(model: Path) -> None:
    messages = _canary_messages()
    with running_service(model, "tcp://127.0.0.1:*", "--threads", "1") as service:
        answered = [
            msgpack.unpackb(exchange(zmq.DEALER, service.endpoint, frames)[0])
            for frames in messages
        ]
        assert service.stop() == 0
        log = list(service.log)
    refused = [line for line in log if " warning refused " in line]
    errors = [answer for answer in answered if answer["status"] == "error"]
    assert {answer["error"] for answer in errors} <= {"MALFORMED_MESSAGE", "INVALID_FIELD"}
    assert len(refused) == len(errors) == len(messages) - 2
    for line in log:
        assert LINE.match(line), line
        assert not [canary for canary in CANARIES if canary in line], line
    events = [line.split()[2] for line in log]
    assert events[:4] == ["bound", "loading", "loaded", "ready"]
    assert events[-1] == "stopped"
    assert all(" code=" in line and " request_id=" in line for line in refused)


@pytest.mark.parametrize("scheme", ["ipc", "unix", "shm"])
def test_sighup_without_a_list_is_logged_and_changes_nothing(
    scheme: str, model: Path, tmp_path: Path
) -> None:
    with running_service(model, f"{scheme}://{tmp_path}/s", "--threads", "1") as service:
        assert service.process.stderr is not None
        service.process.send_signal(signal.SIGHUP)
        line = service.process.stderr.readline()
        assert line.split()[2] == "sighup_ignored"
        with closing(open_channel(service.endpoint)) as channel:
            assert isinstance(channel.call(HealthRequest()).response, HealthReply)
        assert service.stop() == 0


def test_oversized_message_ends_its_connection_only(model: Path) -> None:
    with (
        running_service(
            model, "tcp://127.0.0.1:*", "--threads", "1", "--max-message-mib", "1"
        ) as service,
        connected(zmq.DEALER, service.endpoint) as client,
    ):
        client.send(inline("Linear", linear_body(hidden_states=bytes(2**21))))
        assert is_healthy(service.endpoint)
        assert service.stop() == 0
        assert not client.poll(0)


def test_a_client_that_does_not_read_loses_replies_and_others_go_on(model: Path) -> None:
    request = inline("Embedding", embedding_body([7] * 4000))
    # None is refused, whose reply would be small.
    arguments = ("--threads", "1", "--max-queued-requests", "200")
    with (
        running_service(model, "tcp://127.0.0.1:*", *arguments) as service,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as deaf,
    ):
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.connect(service.endpoint)
        for _ in range(200):  # 150 MB of replies, of which the service keeps 128
            deaf.send(request)
        assert service.process.stderr is not None
        assert any(" client_gone " in line for line in service.process.stderr)
        assert is_healthy(service.endpoint)
