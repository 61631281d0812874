"""A channel over a device's memory where it differs from one over shared memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import open_request
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_listener import StreamListener
from protocol import ivshmem
from protocol.errors import EndpointError, ProtocolError
from protocol.ivshmem import IvshmemChannel
from protocol.messages import LMHeadRequest, TensorReply
from protocol.shared_memory import LARGEST, MAX_AREA_BYTES, SLOTS, SMALLEST, Areas, areas_for
from protocol.tensors import from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import PAGE
from tests.kit.wire import tensor_reply

SIZE = 2**20
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(8)))


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture
def endpoint(memory: Path, tmp_path: Path) -> str:
    return f"ivshmem://{memory},{tmp_path}/s"


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[StreamListener]:
    """A service that would be there, were the memory right."""
    made = StreamListener(f"unix://{tmp_path}/s")
    yield made
    made.close()


def _take(listener: StreamListener) -> Incoming:
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming


def _call(channel: IvshmemChannel, listener: StreamListener, value: float = 1.0) -> bool:
    """Have a request answered; say whether it came in a slot."""
    request_id = channel.submit(REQUEST)
    incoming = _take(listener)
    assert open_request(incoming.frames, 2**20).request_id == request_id
    assert listener.send(incoming.route, tensor_reply(request_id, torch.full((1,), value)))
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    assert to_torch(response.output).item() == value
    return incoming.slot is not None


def _kept(memory: Path) -> tuple[int, int]:
    """Return how often this process has the memory mapped, and open."""
    files = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it by now
            files.append(os.readlink(f"/proc/self/fd/{file}"))
    return Path("/proc/self/maps").read_text().count(str(memory)), files.count(str(memory))


# ----------------------------------------------------------------------------- what is laid out


@each_row(
    "size",
    [SMALLEST, SMALLEST + PAGE, SIZE - 1, SIZE, SIZE + 17 * PAGE, LARGEST - 1, LARGEST, 2**33],
)
def test_areas_fill_what_there_is_and_no_more(size: int) -> None:
    areas = areas_for(2**40, 2**40, size)
    assert areas.slots == SLOTS
    assert areas.request_bytes == areas.reply_bytes <= MAX_AREA_BYTES
    assert areas.request_bytes % PAGE == 0 < areas.request_bytes
    assert areas.total <= size
    assert size - areas.total < 2 * SLOTS * PAGE or size > LARGEST
    assert areas_for(2**40, 1, size).reply_bytes == min(2 * PAGE, areas.reply_bytes)


def test_slots_are_used_once_the_service_has_them(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        ids = [channel.submit(REQUEST) for _ in range(2)]
        for request_id in ids:
            incoming = _take(listener)
            assert incoming.slot is None
            listener.send(incoming.route, tensor_reply(request_id, torch.ones(1)))
        for request_id in ids:
            channel.wait(request_id)
        assert all(_call(channel, listener) for _ in range(2 * SLOTS))
        head = memory.read_bytes()[:44]
    magic, slots, session, *sizes = struct.unpack_from("<8sI4sQQ", head)
    assert (magic, head[40:]) == (b"TSQPshm1", session)
    assert Areas(slots, *sizes) == areas_for(2**30, 2**30, SIZE)


def test_every_session_has_a_number_of_chance(
    listener: StreamListener, endpoint: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier client has left there says nothing."""
    drawn: list[int] = []
    monkeypatch.setattr(ivshmem.os, "urandom", lambda size: drawn.append(size) or b"1234")
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        _call(channel, listener)
    assert drawn == [4]
    assert memory.read_bytes()[12:16] == memory.read_bytes()[40:44] == b"1234"


# ----------------------------------------------------------------------------- what is refused


@each_row(
    ("content", "said"),
    [
        (b"", f"got 0 bytes, expected {SMALLEST} or more"),
        (bytes(SMALLEST - 1), f"got {SMALLEST - 1} bytes, expected {SMALLEST} or more"),
        (b"#!/bin/sh\n" + bytes(SIZE), "got something else in it, expected zeros"),
        (b"TSQPshm2" + bytes(SIZE), "got something else in it"),
        (None, "got No such file or directory, expected a file to map"),
        (..., "got Is a directory"),
    ],
)
def test_another_file_is_refused_and_left_alone(
    plain: StreamListener, tmp_path: Path, content: object, said: str
) -> None:
    memory = tmp_path / "other"
    memory.unlink(missing_ok=True)
    if isinstance(content, bytes):
        memory.write_bytes(content)
    elif content is ...:
        memory.mkdir()
    with (
        IvshmemChannel(f"ivshmem://{memory},{tmp_path}/s", timeout_s=3600) as channel,
        pytest.raises(EndpointError, match=f"^{memory}: {said}"),
    ):
        channel.submit(REQUEST)
    assert content in (None, ...) or memory.read_bytes() == content
    assert _kept(memory) == (0, 0)


def test_a_second_client_does_not_touch_the_memory_of_the_first(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    with IvshmemChannel(endpoint, timeout_s=20) as first:
        assert [_call(first, listener) for _ in range(2)] == [False, True]
        had = memory.read_bytes()[:40]
        with (
            IvshmemChannel(endpoint, timeout_s=3600) as second,
            pytest.raises(EndpointError, match=f"{memory}: got another client, expected one at a"),
        ):
            second.submit(REQUEST)
        assert memory.read_bytes()[:40] == had
        assert _call(first, listener)
        kept = first._lane  # as an error may keep the segment, by its frames
    with IvshmemChannel(endpoint, timeout_s=20) as successor:
        assert [_call(successor, listener) for _ in range(2)] == [False, True]
    assert kept is not None


# ------------------------------------------------------------------------- what is left over


def test_nothing_is_left_of_a_lost_connection(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    before = _kept(memory)
    with IvshmemChannel(endpoint, timeout_s=20) as channel:
        for _ in range(3):
            assert [_call(channel, listener) for _ in range(2)] == [False, True]
            channel._disconnect()
            assert not listener.wait(timeout_ms=1)  # it sees that we have gone
            assert _kept(memory) == before == (1, 1)


def test_a_reply_to_an_earlier_client_is_none_to_the_next(
    listener: StreamListener, endpoint: str
) -> None:
    """The service puts it there after the next one has laid out its segment."""
    with IvshmemChannel(endpoint, timeout_s=20) as first:
        _call(first, listener)
        gone_id = first.submit(REQUEST)
        late = _take(listener)
        assert late.slot is not None
    with IvshmemChannel(endpoint, timeout_s=20) as second:
        request_id = second.submit(REQUEST)
        assert listener.send(late.route, tensor_reply(gone_id, torch.full((1,), 9.0)))
        incoming = _take(listener)
        listener.send(incoming.route, tensor_reply(request_id, torch.ones(1)))
        second.wait(request_id)
        asked = second.submit(REQUEST)
        incoming = _take(listener)
        assert incoming.route[1] == late.route[1]  # it is in the same slot
        assert not second.arrived(asked)
        listener.send(incoming.route, tensor_reply(asked, torch.ones(1)))
        second.wait(asked)
        for value in range(2 * SLOTS):
            assert _call(second, listener, value)
        assert not listener.send(late.route, tensor_reply(gone_id, torch.ones(1)))


# --------------------------------------------------------------------------- what the host may do


def test_a_head_that_changes_while_connected_changes_nothing(
    listener: StreamListener, endpoint: str, memory: Path
) -> None:
    """Each end goes by the sizes that it knew from the start."""
    with IvshmemChannel(endpoint, timeout_s=20) as channel, memory.open("r+b") as file:
        _call(channel, listener)
        for head in (struct.pack("<8sI4sQQ", b"TSQPshm1", 8, b"", 2**40, 2**40), b"\xff" * 40):
            file.seek(0)
            file.write(head)
            file.flush()
            assert all(_call(channel, listener) for _ in range(SLOTS))
            assert channel._lane is not None
            assert channel._lane._incoming == areas_for(2**30, 2**30, SIZE).reply_bytes
        request_id = channel.submit(REQUEST)
        file.seek(192 + 64 * (SLOTS + _take(listener).route[1][0]))
        file.write(struct.pack("<IxxxxQ", 77, SIZE))
        file.flush()
        with pytest.raises(ProtocolError, match=f"got a message of {SIZE} bytes"):
            channel.wait(request_id)
