"""A service that is stopped is noticed; one that computes is not taken for it.

Real processes, over a plain stream and over shared memory. What is noticed "long before the
deadline" has one of an hour.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from protocol.connect import open_channel
from protocol.errors import EndpointError, ServiceError
from protocol.messages import InitReply, InitRequest
from protocol.pending import PendingChannel
from tests.kit.model import make_model
from tests.kit.service import ENVIRONMENT, Forked, Service, running_service

HOUR_S = 3600.0
CLIENTS = 8
# More than it takes to give up a service that gives no signs of life.
BUSY_S = 2

# Its only other thread is the one that it answers with: this one sleeps over each request.
BUSY_SERVICE = f"""
import sys, time
from gpu_side.transport.bind import open_listener
from gpu_side.encoding import Form, encode_reply, open_request
from protocol.errors import ErrorCode

listener = open_listener(sys.argv[1])
print("ready", flush=True)
while listener.wait():
    while (incoming := listener.receive()) is not None:
        print("busy", flush=True)
        time.sleep({BUSY_S})
        opened = open_request(incoming.frames, 1000)
        reply = encode_reply(Form.FRAMED, opened.request_id, opened.method, ErrorCode.INTERNAL)
        listener.send(incoming.route, reply)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module", params=["unix", "shm"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(
    model: Path, scheme: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("running")
    with running_service(model, f"{scheme}://{folder}/s", "--threads", "1") as made:
        yield made


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    yield running
    # Stopping a stopped process would wait for ever.
    running.thaw()


def _is_served(channel: PendingChannel) -> bool:
    return isinstance(channel.call(InitRequest()).response, InitReply)


def _loses_its_connection(channel: PendingChannel) -> bool:
    """Ask, and wait in vain."""
    request_id = channel.submit(InitRequest())
    with pytest.raises(EndpointError, match="a lost connection while Init") as info:
        channel.wait(request_id)
    return info.value.retryable


@pytest.mark.parametrize("known", [True, False])
def test_a_stopped_service_is_noticed_and_used_again(service: Service, known: bool) -> None:
    """Also again and again, on connections that it never knew of."""
    with open_channel(service.endpoint, timeout_s=HOUR_S) as channel:
        if known:
            assert _is_served(channel)
        service.freeze()
        for _ in range(2):
            assert _loses_its_connection(channel)
        service.thaw()
        assert _is_served(channel)


def test_a_service_that_is_stopped_while_it_is_asked_is_noticed(service: Service) -> None:
    with open_channel(service.endpoint, timeout_s=HOUR_S) as channel:
        assert _is_served(channel)
        service.freeze()
        ids = [channel.submit(InitRequest()) for _ in range(3)]
        for request_id in ids:
            with pytest.raises(EndpointError, match="a lost connection while Init"):
                channel.wait(request_id)
        service.thaw()
        assert _is_served(channel)


def test_many_clients_notice_and_come_back(service: Service) -> None:
    with ExitStack() as stack:
        channels = [
            stack.enter_context(open_channel(service.endpoint, timeout_s=HOUR_S))
            for _ in range(CLIENTS)
        ]
        with ThreadPoolExecutor(CLIENTS) as pool:
            assert all(pool.map(_is_served, channels))
            service.freeze()
            assert all(pool.map(_loses_its_connection, channels))
            service.thaw()
            assert all(pool.map(_is_served, channels))


def test_a_stopped_service_does_not_end_a_client_of_another(
    service: Service, model: Path, tmp_path: Path, scheme: str
) -> None:
    with (
        running_service(model, f"{scheme}://{tmp_path}/other", "--threads", "1") as other,
        open_channel(service.endpoint, timeout_s=HOUR_S) as stopped,
        open_channel(other.endpoint, timeout_s=HOUR_S) as healthy,
    ):
        assert _is_served(stopped)
        service.freeze()
        waiting = stopped.submit(InitRequest())
        assert _is_served(healthy)
        with pytest.raises(EndpointError):
            stopped.wait(waiting)
        assert _is_served(healthy)


@contextmanager
def _busy_service(endpoint: str) -> Iterator[TextIO]:
    """Yield what it says."""
    read, write = os.pipe()
    process = Forked("gpu-service", [endpoint], ENVIRONMENT, stdout=write, before=BUSY_SERVICE)
    os.close(write)
    with os.fdopen(read) as said:
        try:
            assert said.readline() == "ready\n"
            yield said
        finally:
            process.kill()


def test_a_busy_service_is_waited_for(tmp_path: Path, scheme: str) -> None:
    """Also by who comes while it is busy, and whose turn comes last."""
    endpoint = f"{scheme}://{tmp_path}/busy"

    def is_answered(channel: object) -> bool:
        assert isinstance(channel, PendingChannel)
        with pytest.raises(ServiceError, match="INTERNAL"):
            channel.call(InitRequest())
        return True

    with _busy_service(endpoint) as said, ExitStack() as stack:
        channels = [open_channel(endpoint, timeout_s=HOUR_S) for _ in range(2)]
        for channel in channels:
            stack.callback(channel.close)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(is_answered, channels[0])
            assert said.readline() == "busy\n"
            other = pool.submit(is_answered, channels[1])
            assert first.result()
            assert other.result()
