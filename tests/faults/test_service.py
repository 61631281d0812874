"""Real gpu-services from their start to their end: what they log, count, refuse and finish.

And their shared memory, when clients are killed that use it.
"""

import os
import re
import signal
import struct
import urllib.request
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
import torch
import zmq

from protocol.channel import Channel, PendingChannel
from protocol.errors import ErrorCode, ServiceError
from protocol.messages import (
    HealthReply,
    HealthRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    TensorReply,
)
from protocol.shared_memory import SLOTS
from protocol.tensors import to_torch
from protocol.transport import open_channel
from tests.kit import ask
from tests.kit.kernel_log import PLUGGED, RESUMED
from tests.kit.model import make_model
from tests.kit.service import (
    CALM_S,
    ENVIRONMENT,
    TEE_ONLY,
    WAIT_S,
    Forked,
    Service,
    run,
    running_server,
    running_service,
    until,
)
from tests.kit.wire import (
    HIDDEN,
    connected,
    embedding_body,
    exchange,
    framed_linear,
    header,
    inline,
    is_healthy,
    linear_body,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


def channel(service: Service) -> PendingChannel:
    return open_channel(service.endpoint, timeout_s=60, heartbeat_timeout_s=CALM_S)


def linear(value: float = 1.0, rows: int = 1) -> LinearRequest:
    return ask.linear(torch.full((rows, HIDDEN), value), "q_proj", layer=0)


def output(channel: Channel, request_id: int) -> torch.Tensor:
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    return to_torch(response.output)


def outcome(channel: Channel, request_id: int) -> ErrorCode | None:
    try:
        output(channel, request_id)
    except ServiceError as error:
        return error.code
    return None


LINE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:\d\d)? (debug|info|warning|error) [a-z_]+"
    r'( [a-z_]+=([^\s"=]+|"([^"\\]|\\.)*"))*$'
)
CANARY_FLOAT, CANARY_ID, CANARY_BYTES = 1234.5625, 7654321, b"canary\xfe"
CANARIES = ("1234.56", "765432", "canary", "63616e617279")


def canary_messages() -> tuple[list[list[bytes]], list[list[bytes]]]:
    """Good and bad messages, each with something in it that must never be written down."""
    floats = struct.pack("<f", CANARY_FLOAT) * HIDDEN
    ids, numbers = [CANARY_ID] * 4, [CANARY_FLOAT] * HIDDEN
    tensor = {"dtype": "float32", "shape": [1, HIDDEN], "frame": CANARY_BYTES}
    return [[inline("Linear", linear_body(hidden_states=floats))], [header(), floats]], [
        *([CANARY_BYTES], [msgpack.packb({CANARY_BYTES: 1})], [inline(CANARY_BYTES, {})]),
        *([inline("Linear", linear_body(extra=wrong))] for wrong in (CANARY_BYTES, numbers, ids)),
        [inline("Embedding", embedding_body(ids))],
        *([header(), floats[:-1]], [header(), floats, floats], [header(method="canary"), floats]),
        *([framed_linear(hidden_states=wrong), floats] for wrong in (numbers, tensor)),
        [header(request_id=CANARY_BYTES), floats],
    ]


def test_logs_and_metrics_are_structured_and_hold_no_contents(model: Path, tmp_path: Path) -> None:
    good, bad = canary_messages()
    options = ("--metrics", "127.0.0.1:*", "--max-message-mib", "1", "--threads", "1")
    with running_service(model, "tcp://127.0.0.1:*", *options) as service:
        for frames in good:
            answer = msgpack.unpackb(exchange(zmq.DEALER, service.endpoint, frames)[0])
            assert answer["status"] == "success"
        codes = [
            msgpack.unpackb(exchange(zmq.DEALER, service.endpoint, frames)[0])["error"]
            for frames in bad
        ]
        # One that is too large ends its connection only; a second service finds the port taken.
        with connected(zmq.DEALER, service.endpoint) as client:
            client.send(inline("Linear", linear_body(hidden_states=bytes(2**21))))
            assert is_healthy(service.endpoint)
            assert not client.poll(0)
        second = run("gpu-service", str(model), "--bind", service.endpoint)
        assert second.returncode == 2
        assert "Address already in use" in second.stderr
        service.process.send_signal(signal.SIGHUP)  # without keys there is nothing to read again
        assert is_healthy(service.endpoint)
        (url,) = (line.split("url=", 1)[1] for line in service.log if " metrics " in line)
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            metrics = reply.read().decode()
        assert service.stop(signal.SIGINT) == 0
    for code in ("MALFORMED_MESSAGE", "INVALID_FIELD", "UNKNOWN_METHOD"):
        counted = re.findall(rf'\ntsqp_requests_total{{code="{code}",.*}} (\S+)', metrics)
        assert sum(map(float, counted)) == codes.count(code) > 0
    assert {*codes} == {"MALFORMED_MESSAGE", "INVALID_FIELD", "UNKNOWN_METHOD"}
    refused = [line for line in service.log if " warning refused " in line]
    assert len(refused) == len(bad)
    assert all(" code=" in line and " request_id=" in line for line in refused)
    for line in [*service.log, metrics]:
        assert line is metrics or LINE.match(line), line
        assert not [canary for canary in CANARIES if canary in line], line
    events = [line.split()[2] for line in service.log]
    assert [e for e in events if e != "metrics"][:4] == ["bound", "loading", "loaded", "ready"]
    assert "sighup_ignored" in events
    assert events[-1] == "stopped"


# An accelerator on which each product, two copies and a kernel, takes a tenth of a second.
SLOW = """
name = "slow"
tflops = 1e6
int8_tops = 1e6
gb_per_s = 1e6
pcie_gb_per_s = 1e6
launch_us = 33333.0
"""


def health(channel: PendingChannel) -> HealthReply:
    reply = channel.call(HealthRequest()).response
    assert isinstance(reply, HealthReply)
    return reply


def test_a_greedy_client_is_told_so_and_what_was_taken_is_finished_after_sigterm(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "slow.toml").write_text(SLOW)
    options = ("--device", f"model:{tmp_path}/slow.toml", "--threads", "1")
    options += ("--max-queued-requests", "4", "--max-message-mib", "1")
    with (
        running_service(model, "tcp://127.0.0.1:*", *options) as service,
        closing(channel(service)) as greedy,
        closing(channel(service)) as modest,
    ):
        init = modest.call(InitRequest()).response
        assert isinstance(init, InitReply)
        assert (init.max_queued_requests, init.max_queued_bytes) == (4, 2**20)
        for rows, count in ((1, 20), (2**19 // HIDDEN // 4, 8)):  # too many, and too many bytes
            ids = [greedy.submit(linear(rows=rows)) for _ in range(count)]
            assert health(modest).status == "ready"
            assert outcome(modest, modest.submit(linear())) is None
            outcomes = [outcome(greedy, request_id) for request_id in ids]
            assert outcomes[0] is None
            assert set(outcomes) == {None, ErrorCode.QUEUE_FULL}
        ids = [greedy.submit(linear())]

        def waiting() -> bool:
            ids.append(greedy.submit(linear()))
            return health(greedy).queued_requests >= 2

        until(waiting)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: health(modest).status == "draining")
        assert outcome(modest, modest.submit(linear())) is ErrorCode.SHUTTING_DOWN
        allowed = {None, ErrorCode.QUEUE_FULL}
        assert {outcome(greedy, request_id) for request_id in ids} - allowed == set()
        assert service.stop() == 0
    full = [line for line in service.log if " queue_full " in line]
    for limit, allowed_ in (("max_queued_requests", "4"), ("max_queued_bytes", str(2**20))):
        assert any(f"limit={limit} allowed={allowed_}" in line for line in full)
    assert not [line for line in service.log if " drain_ended " in line]


# As if there were a device; a named pipe is not to be sought in.
_RESUMABLE = """
import os
from pathlib import Path
from types import SimpleNamespace
from tee_side.protect import resumption
resumption._DRIVERS, resumption._LOG = [Path({0!r})], Path({0!r}) / "log"
resumption.os = SimpleNamespace(**{{**vars(os), "lseek": lambda *_: 0}})
"""


def test_programs_of_a_vm_that_was_resumed_end_and_say_why(tmp_path: Path) -> None:
    said = "tee-runner: error: this VM: got resumed from a snapshot, expected to run on"
    (tmp_path / "VMGENCTR:00" / "driver").mkdir(parents=True)
    os.mkfifo(tmp_path / "log")
    before, log = _RESUMABLE.format(str(tmp_path)), os.open(tmp_path / "log", os.O_RDWR)
    try:
        with running_server(*TEE_ONLY, before=before) as server:
            os.write(log, PLUGGED.encode())
            assert server.get("/health")
            os.write(log, RESUMED.encode())
            assert server.process.wait(WAIT_S) == 2
            (line,) = server.process.stderr.read().splitlines()
            assert line.startswith(said)
        os.write(log, RESUMED.encode())
        with running_service("demo", f"unix://{tmp_path}/s", "--threads", "1") as service:
            given = ("generate", "demo", "--gpu", service.endpoint, "--prompt", "x")
            runner = Forked("tee-runner", given, ENVIRONMENT, before=before)
            assert runner.communicate(WAIT_S)[1].splitlines()[-1].startswith(said)
            assert runner.wait() == 2
    finally:
        os.close(log)


# Fills every slot of its segment, says so, and waits to be killed.
CLIENT = """
import sys, time, torch
from protocol.transport import open_channel
from protocol.messages import LinearRequest
from protocol.tensors import from_torch
channel = open_channel(sys.argv[1])
hidden = from_torch(torch.ones(64, int(sys.argv[2])))
request = LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=hidden)
channel.call(request)
for _ in range(20):
    channel.submit(request)
print("full", flush=True)
time.sleep(3600)
"""


def test_a_client_that_is_killed_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        process = Path(f"/proc/{sharing.pid}")
        opened = len(list((process / "fd").iterdir()))
        return opened, (process / "maps").read_text().count("memfd:tsqp")

    with (
        running_service(model, f"shm://{tmp_path}/s", "--threads", "1") as sharing,
        closing(channel(sharing)) as other,
    ):
        right = output(other, other.submit(linear()))
        before = held()
        for _ in range(3):
            read, write = os.pipe()
            arguments = [sharing.endpoint, str(HIDDEN)]
            client = Forked("tsqp", arguments, ENVIRONMENT, stdout=write, before=CLIENT)
            os.close(write)
            with os.fdopen(read) as said:
                assert said.readline() == "full\n"
            client.kill()
            # More than all slots hold is answered, too.
            ids = [other.submit(linear(2.0**n)) for n in range(3 * SLOTS)]
            for n, request_id in reversed(list(enumerate(ids))):
                assert torch.equal(output(other, request_id), right * 2.0**n)
        until(
            lambda: torch.equal(output(other, other.submit(linear())), right) and held() == before
        )
