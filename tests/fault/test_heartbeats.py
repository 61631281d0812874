"""A peer that is stopped is noticed long before any deadline; one that is only busy is not cut."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpu_side.access import ServiceKeys
from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.transport.zmq_listener import ZmqListener
from protocol.curve import ClientKeys, read_public_key, read_secret_key
from protocol.errors import AbsentError, EndpointError, ErrorCode, ServiceError
from protocol.messages import InitRequest
from protocol.zmq_channel import ZmqChannel
from protocol.zmq_sockets import DEFAULT_HEARTBEAT_TIMEOUT_S
from tests.kit.model import make_model
from tests.kit.service import ENVIRONMENT, Service, run, running_service
from tsqp.key_files import new_key_pair

# Nothing here takes as long: what is noticed in time was noticed by heartbeats.
LONG_S = 3600.0
pytestmark = pytest.mark.timeout(60)
USUAL = ("--heartbeat-timeout-s", str(DEFAULT_HEARTBEAT_TIMEOUT_S))
# Twice as long as a heartbeat may stay away.
BUSY_S = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module", params=["tcp", "ipc"])
def running(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("running")
    endpoint = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{folder}/s"
    with running_service(model, endpoint, "--threads", "1", *USUAL) as made:
        yield made


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    # However the test ended: a stopped process does not end by itself.
    running.thaw()


# What ZeroMQ does the same over either: `make test` sees one of them.
over_tcp = pytest.mark.parametrize(
    "running", ["tcp", pytest.param("ipc", marks=pytest.mark.slow)], indirect=True
)


def test_a_stopped_service_is_noticed_by_all_who_wait_and_used_again(service: Service) -> None:
    with ZmqChannel(service.endpoint, timeout_s=LONG_S) as channel:
        channel.call(InitRequest())
        service.freeze()
        waiting = [channel.submit(InitRequest()) for _ in range(3)]
        for request_id in waiting:
            with pytest.raises(EndpointError, match="a lost connection while Init was waiting"):
                channel.wait(request_id)
        # It does not answer a new connection either, and this is no deadline either.
        with pytest.raises(EndpointError, match="before Init could be sent"):
            channel.call(InitRequest())
        service.thaw()
        channel.call(InitRequest())


@over_tcp
def test_a_service_that_is_stopped_from_the_start_is_noticed(service: Service) -> None:
    service.freeze()
    with (
        ZmqChannel(service.endpoint, timeout_s=LONG_S) as channel,
        pytest.raises(AbsentError, match="got no handshake while Init was waiting"),
    ):
        channel.call(InitRequest())


ASKER = """
import sys
from protocol.messages import InitRequest
from protocol.zmq_channel import ZmqChannel
with ZmqChannel(sys.argv[1], timeout_s=3600) as channel:
    channel.call(InitRequest())
"""


@pytest.mark.slow
def test_a_client_that_is_stopped_itself_says_the_same() -> None:
    # Its machine pauses: the call that waited for the service is interrupted then.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-c", ASKER, f"tcp://127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as asker:
            assert asker.stderr is not None
            connection, _ = silent.accept()
            while asker.poll() is None:
                asker.send_signal(signal.SIGSTOP)
                time.sleep(0.05)
                asker.send_signal(signal.SIGCONT)
                time.sleep(0.2)
            connection.close()
            assert "got no handshake while Init was waiting" in asker.stderr.read()


def test_with_keys_it_is_the_same(model: Path, tmp_path: Path) -> None:
    for name in ("service", "runner"):
        new_key_pair(tmp_path / name)
    options = ("--identity", str(tmp_path / "service.key"), "--allow", str(tmp_path / "runner.pub"))
    secret = read_secret_key(tmp_path / "runner.key")
    keys = ClientKeys(secret, read_public_key(tmp_path / "service.pub"))
    with (
        running_service(model, "tcp://127.0.0.1:*", *options, *USUAL) as service,
        ZmqChannel(service.endpoint, timeout_s=LONG_S, keys=keys) as channel,
    ):
        channel.call(InitRequest())
        service.freeze()
        try:
            with pytest.raises(EndpointError, match="a lost connection"):
                channel.call(InitRequest())
        finally:
            service.thaw()
        channel.call(InitRequest())


@over_tcp
def test_without_heartbeats_only_the_deadline_helps(service: Service) -> None:
    # What the others would see if heartbeats were off: so they are what makes the difference.
    with ZmqChannel(service.endpoint, timeout_s=LONG_S, heartbeat_timeout_s=0) as channel:
        channel.call(InitRequest())
        service.freeze()
        request_id = channel.submit(InitRequest())
        assert not channel.arrived(request_id, time.monotonic() + BUSY_S)
        service.thaw()
        channel.wait(request_id)


CLIENT = """
import sys, time, zmq
client = zmq.Context().socket(zmq.DEALER)
client.connect(sys.argv[1])
client.send(b"hello")
print("sent", flush=True)
time.sleep(3600)
"""


def test_a_stopped_client_is_noticed_by_the_service() -> None:
    listener = ZmqListener("tcp://127.0.0.1:*")
    command = [sys.executable, "-c", CLIENT, listener.endpoint]
    with subprocess.Popen(command, env=ENVIRONMENT) as client:
        try:
            assert listener.wait(timeout_ms=30_000)
            incoming = listener.receive()
            assert incoming is not None
            client.send_signal(signal.SIGSTOP)
            # Its kernel would take replies for a long time.
            while listener.send(incoming.route, [b"x"]):
                listener.wait(timeout_ms=50)
        finally:
            client.kill()
            listener.close()


def _compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pow(3, 200_003)  # holds Python's lock while it lasts


@pytest.mark.parametrize("with_keys", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_is_busy_is_not_cut_off_on_either_side(with_keys: bool) -> None:
    # Both sides at once: the threads that answer heartbeats are ZeroMQ's, and not Python's.
    public, secret = zmq.curve_keypair()
    keys = ServiceKeys(secret, frozenset({public})) if with_keys else None
    listener = ZmqListener("tcp://127.0.0.1:*", keys=keys)
    mine = ClientKeys(secret, public) if with_keys else None
    with ZmqChannel(listener.endpoint, timeout_s=LONG_S, keys=mine) as channel:
        # As many as a runner has under way at most, none of which the service reads while busy.
        waiting = [channel.submit(InitRequest()) for _ in range(64)]
        _compute(BUSY_S)
        for _ in waiting:
            assert listener.wait(timeout_ms=10_000)
            incoming = listener.receive()
            assert incoming is not None
            opened = open_request(incoming.frames, 2**20)
            error = encode_reply(Form.FRAMED, opened.request_id, opened.method, ErrorCode.INTERNAL)
            assert listener.send(incoming.route, error)
        _compute(BUSY_S)
        for request_id in waiting:
            with pytest.raises(ServiceError, match="INTERNAL"):
                channel.wait(request_id)
        channel._note_events()
        assert channel._connection == 0
    listener.close()


@over_tcp
def test_a_runner_says_what_happened(service: Service, model: Path) -> None:
    service.freeze()
    result = run(
        "tee-runner",
        "generate",
        str(model),
        "--policy",
        "attention-in-tee",
        "--prompt-token-ids",
        "5,6,7",
        "--gpu",
        service.endpoint,
        "--connect-timeout-s",
        "4",
    )
    assert result.returncode == 2
    assert service.endpoint in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("timeout_s", "every_ms", "within_ms"),
    [(1.0, 250, 1000), (0.2, 50, 200), (30, 7500, 30_000), (0.0001, 1, 2), (0, 0, -1)],
)
def test_the_setting_reaches_both_sockets(timeout_s: float, every_ms: int, within_ms: int) -> None:
    listener = ZmqListener("tcp://127.0.0.1:*", heartbeat_timeout_s=timeout_s)
    with ZmqChannel(listener.endpoint, heartbeat_timeout_s=timeout_s) as channel:
        for end in (listener._socket, channel._socket):
            assert end.getsockopt(zmq.HEARTBEAT_IVL) == every_ms
            assert end.getsockopt(zmq.HEARTBEAT_TIMEOUT) == within_ms
            assert end.getsockopt(zmq.HEARTBEAT_TTL) == 0
            assert end.getsockopt(zmq.HANDSHAKE_IVL) <= 2000
    listener.close()
