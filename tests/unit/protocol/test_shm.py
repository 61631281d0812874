"""A channel over shared memory where it differs from a stream: slots, and a service that lies.

What scribbles over replies while they are read is in `tests/faults/test_service.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport.stream_listener import StreamListener
from protocol.errors import (
    ErrorCode,
    ProtocolError,
)
from protocol.messages import LMHeadRequest, TensorReply
from protocol.shared_memory import SLOTS, Lane
from protocol.shm import ShmChannel
from protocol.tensors import from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import RawService
from tests.kit.wire import tensor_reply

ROUNDS = 500
TINY_S = 0.05
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(8)))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s"


@pytest.fixture
def service(endpoint: str) -> Iterator[RawService]:
    with RawService(endpoint) as made:
        yield made


@pytest.fixture
def channel(endpoint: str) -> Iterator[ShmChannel]:
    with ShmChannel(endpoint, timeout_s=20, max_message_bytes=2**16) as made:
        yield made


def _submit(channel: ShmChannel, service: RawService) -> tuple[int, int]:
    """Send the first request; return its id and slot."""
    request_id = channel.submit(REQUEST)
    service.accept()
    slot, seen = service.request()
    assert seen == request_id
    return request_id, slot


def _value(channel: ShmChannel, request_id: int) -> float:
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    return to_torch(response.output)[0].item()


def _good(request_id: int, value: float = 1.0) -> list[bytes]:
    return [bytes(frame) for frame in tensor_reply(request_id, torch.full((8,), value))]


def test_no_wake_up_is_lost(endpoint: str) -> None:
    """Both ends fall asleep all the time; one that nobody wakes up ends in a deadline."""
    listener = StreamListener(endpoint)

    def serve() -> None:
        for _ in range(ROUNDS):
            assert listener.wait(timeout_ms=20_000)
            incoming = listener.receive()
            assert incoming is not None
            opened = open_request(incoming.frames, 2**20)
            listener.send(incoming.route, tensor_reply(opened.request_id, torch.ones(1)))

    thread = threading.Thread(target=serve)
    thread.start()
    with ShmChannel(endpoint, timeout_s=20) as channel:
        for _ in range(ROUNDS):
            channel.call(REQUEST)
    thread.join()
    listener.close()


def test_numbers_of_slots_that_are_ours_say_nothing(
    service: RawService, channel: ShmChannel
) -> None:
    request_id, slot = _submit(channel, service)
    for number in (7, 9, 2**32 - 1):
        for idle in channel._free:
            service.write_line(idle, number, 2**64 - 1)
        assert not channel.arrived(request_id)
    service.lane.put(slot, _good(request_id))
    assert _value(channel, request_id) == 1.0
    assert sorted(channel._free) == list(range(SLOTS))


def test_a_service_that_raises_numbers_without_end_holds_no_caller(
    service: RawService, channel: ShmChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, slot = _submit(channel, service)
    looks: list[int] = []

    def look(_: Lane, spin_us: int = 0) -> int:
        looks.append(spin_us)
        assert len(looks) < 100, "it looks without end"
        return (slot + 1) % SLOTS

    monkeypatch.setattr(Lane, "look", look)
    assert not channel.arrived(request_id)
    assert 0 < len(looks) <= 2 * SLOTS


@each_row(
    ("size", "said"),
    [
        *((size, f"a message of {size} bytes") for size in (2**16 + 2 * 4096, 2**63, 2**64 - 1)),
        # A number that comes early: there are zeros.
        *((size, "got 0 frames") for size in (1, 4, 12, 500)),
    ],
)
def test_a_line_without_its_message_is_refused(size: int, said: str, tmp_path: Path) -> None:
    endpoint = f"shm://{tmp_path}/{size}"
    with RawService(endpoint) as service, ShmChannel(endpoint, max_message_bytes=2**16) as channel:
        request_id, slot = _submit(channel, service)
        service.write_line(slot, 1, size)
        with pytest.raises(ProtocolError, match=said) as info:
            channel.wait(request_id)
        limit = "a message of" in said
        assert info.value.code is (
            ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE
        )
        with pytest.raises(KeyError):
            channel.wait(request_id)


def test_a_reply_is_read_once_and_answers_its_own_request_alone(
    service: RawService, channel: ShmChannel
) -> None:
    request_id, slot = _submit(channel, service)
    service.lane.put(slot, _good(request_id, 5.0))
    assert channel.arrived(request_id)
    start = service.lane._out[slot]
    service.lane._memory[start : start + 2**16] = b"\xff" * 2**16
    assert _value(channel, request_id) == 5.0
    again = channel.submit(REQUEST)
    assert service.request()[0] == slot
    service.lane.put(slot, _good(request_id, 9.0))  # of before
    assert not channel.arrived(again)
    service.lane.put(slot, _good(again, 2.0))
    # The slot was taken for free again: what comes there now is not looked at.
    assert not channel.arrived(again, time.monotonic() + TINY_S)
