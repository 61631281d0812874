"""A channel over shared memory where it differs from a stream: slots, and a service that lies.

What scribbles over replies while they are read is in `tests/faults/test_service.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport.stream_listener import StreamListener
from protocol import native
from protocol.errors import (
    EndpointError,
    ErrorCode,
    ProtocolError,
)
from protocol.messages import InitRequest, LMHeadRequest, TensorReply
from protocol.shared_memory import SLOTS, Lane
from protocol.shm import ShmChannel
from protocol.stream import StreamChannel
from protocol.tensors import from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import RawService, message
from tests.kit.wire import look_until_refused, tensor_reply

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


# ---------------------------------------------------------------------------------------- slots


def test_a_slot_is_used_again_once_its_reply_is_there(
    service: RawService, channel: ShmChannel
) -> None:
    request_id, first = _submit(channel, service)
    service.lane.put(first, _good(request_id))
    assert _value(channel, request_id) == 1.0
    again = channel.submit(REQUEST)
    assert service.request()[0] == first  # it is in the caches
    other = channel.submit(REQUEST)
    assert service.request()[0] != first
    # Given back without a reply, that comes over the socket.
    service.lane.put(first, ())
    service.socket.sendall(message(_good(again, 3.0)))
    assert _value(channel, again) == 3.0
    assert first in channel._free
    channel.abandon(other)


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


# --------------------------------------------------------------------------- losing connections


def test_a_service_that_was_replaced_meanwhile_is_found(endpoint: str) -> None:
    """It was awake when it closed: the next request must not be left in a slot of its."""
    with ShmChannel(endpoint, timeout_s=20) as channel:
        for _ in range(2):
            listener = StreamListener(endpoint)
            request_id = channel.submit(REQUEST)
            assert listener.wait(timeout_ms=10_000)
            incoming = listener.receive()
            assert incoming is not None
            listener.send(incoming.route, tensor_reply(request_id, torch.ones(1)))
            channel.wait(request_id)
            listener.close()


def test_replies_that_came_before_a_loss_count(service: RawService, channel: ShmChannel) -> None:
    request_id, slot = _submit(channel, service)
    lost = channel.submit(REQUEST)
    service.lane.put(slot, _good(request_id))
    service.socket.close()
    with pytest.raises(EndpointError, match="a lost connection while LMHead"):
        channel.wait(lost)
    assert _value(channel, request_id) == 1.0


def test_nothing_is_left_of_a_lost_connection(service: RawService, channel: ShmChannel) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        _submit(channel, service)
        channel._disconnect()
        service.__exit__()
        del service.lane
        os.unlink(channel.endpoint.removeprefix("shm://"))
        service.__init__(channel.endpoint)  # type: ignore[misc]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("served", "client"), [("unix://", ShmChannel), ("shm://", StreamChannel)])
def test_a_plain_end_and_one_with_memory_refuse_each_other_at_once(
    endpoint: str, served: str, client: type[StreamChannel]
) -> None:
    listener = StreamListener(endpoint.replace("shm://", served))
    ours = endpoint if client is ShmChannel else endpoint.replace("shm://", "unix://")
    with client(ours, timeout_s=3600) as channel:
        request_id = channel.submit(InitRequest())
        look_until_refused(listener)
        with pytest.raises(EndpointError, match="a lost connection while Init"):
            channel.wait(request_id)
    listener.close()


def test_without_compiled_kernels_it_is_said(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", None)
    with pytest.raises(EndpointError, match="shm://: got no compiled kernels, expected them"):
        StreamListener(endpoint)
    plain = StreamListener(endpoint.replace("shm://", "unix://"))
    with (
        ShmChannel(endpoint) as channel,
        pytest.raises(EndpointError, match="got no compiled kernels"),
    ):
        channel.submit(InitRequest())
    plain.close()


# ------------------------------------------------------------------------------- what it may do


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
