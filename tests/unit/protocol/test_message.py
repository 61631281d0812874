"""Compiled code that sends prepared requests and takes their replies: only what is expected."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from gpu_side.transport.bind import open_listener
from protocol import native
from protocol.channel import Exchange
from protocol.connect import open_channel
from protocol.errors import ErrorCode, ProtocolError, ReplyError, ServiceError, TsqpError
from protocol.header_numbers import REPLY, REQUEST
from protocol.messages import MAX_TIMING_US, RingLinearRequest, TensorReply, Timing
from protocol.prepared import PreparedRequest
from protocol.stream_wire import layout
from protocol.tensors import Buffer, WireTensor, from_torch

pytestmark = pytest.mark.skipif(native.library is None, reason="no compiled kernels")

ROWS, IN, OUT, ID = 3, 8, 40, 2**61 + 12345
LINKS = ("unix", "shm")


def prepared() -> PreparedRequest:
    elements = WireTensor("int32", (ROWS, IN), b"")
    request = RingLinearRequest(layer_idx=1, module_names=("down_proj",), elements=elements)
    return PreparedRequest(request, (ROWS, OUT), "int32")


def output(value: int = 7) -> torch.Tensor:
    return torch.full((ROWS, OUT), value, dtype=torch.int32)


def reply(request_id: int, tensor: torch.Tensor, timing: Timing | None = None) -> list[Buffer]:
    result = TensorReply(output=from_torch(tensor))
    timing = timing or Timing(queue_us=3, compute_us=MAX_TIMING_US)
    return encode_reply(Form.FRAMED, request_id, "RingLinear", result, timing)


def joined(frames: list[Buffer]) -> bytearray:
    """As a message lies in a stream or a slot."""
    places, gaps, total = layout(tuple(map(len, frames)))
    message = bytearray(total)
    for place, gap, frame in zip(places, gaps, frames, strict=True):
        message[place.start - len(gap) : place.start] = gap
        message[place] = frame
    return message


class Taking:
    """`lane_take` over an area of our own."""

    def __init__(self) -> None:
        self.shape = prepared().answered_as
        self.payload = torch.empty(ROWS, OUT, dtype=torch.int32)
        self.times = np.zeros(2, np.int64)

    def take(self, message: bytes | bytearray, size: int | None = None) -> int:
        area = np.frombuffer(bytes(message), np.uint8)
        seen = np.array([1, len(message) if size is None else size], np.uint64)
        self.payload.zero_()
        taken: int = native.library.lane_take(
            *(self.shape.address, ID, area.ctypes.data, 0, seen.ctypes.data, -1),
            *(self.payload.data_ptr(), self.times.ctypes.data),
        )
        return taken


def test_the_expected_reply_is_taken_with_its_times() -> None:
    taking, message = Taking(), joined(reply(ID, output()))
    assert len(message) == taking.shape.total_bytes
    assert taking.take(message) == 1
    assert torch.equal(taking.payload, output())
    assert taking.times.tolist() == [3, MAX_TIMING_US]


def test_a_reply_that_differs_in_any_byte_of_its_head_is_not() -> None:
    taking, message = Taking(), joined(reply(ID, output()))
    head = len(message) - output().nbytes
    places = [64 + place for place in REPLY.places]
    times = {at + i for at in places[1:] for i in range(8)}
    for at in range(head):
        changed = bytearray(message)
        changed[at] ^= 1 if at not in times else 0x80
        # A time below the largest is as good; the first byte of either makes it larger.
        as_good = at in times and at not in places[1:]
        if as_good and int.from_bytes(changed[at - at % 8 : at]) <= MAX_TIMING_US:
            continue
        assert taking.take(changed) == -1, at
        assert not taking.payload.any(), at


@pytest.mark.parametrize("time_us", [MAX_TIMING_US + 1, 2**63, 2**64 - 1])
def test_a_time_that_no_service_can_claim_is_not(time_us: int) -> None:
    taking, message = Taking(), joined(reply(ID, output()))
    for place in REPLY.places[1:]:
        changed = bytearray(message)
        changed[64 + place : 72 + place] = time_us.to_bytes(8, "big")
        assert taking.take(changed) == -1


def test_a_reply_of_another_size_or_id_is_not() -> None:
    taking, message = Taking(), joined(reply(ID, output()))
    for size in (0, len(message) - 1, len(message) + 1, 2**63):
        assert taking.take(message, size) == -1
    assert taking.take(joined(reply(ID + 1, output()))) == -1


def test_a_request_is_written_as_it_is_encoded() -> None:
    """What `stream_put` sends is what the service reads, byte by byte."""
    request, payload = prepared(), torch.arange(ROWS * IN, dtype=torch.int32).view(ROWS, IN)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        written = native.library.stream_put(
            *(request.sent_as.address, ID, 5000, payload.data_ptr(), ours.fileno())
        )
        received = theirs.recv(2**16)
    header = REQUEST.header(request.template, ID, 5000)
    assert written == len(received) == request.sent_as.total_bytes
    assert received == joined([header, request.payload(payload)])


@contextmanager
def started(link: str, folder: Path) -> Iterator[tuple[object, int, int, object]]:
    """A request that was started over a link: listener, its id, and how to wait for its reply."""
    endpoint, payload = f"{link}://{folder}/s", torch.ones(ROWS, IN, dtype=torch.int32)
    listener = open_listener(endpoint)
    channel = open_channel(endpoint, timeout_s=20, spin_us=100_000)
    request = prepared()
    try:
        request_id = channel.start(request, payload)
        assert listener.wait(timeout_ms=10_000)
        incoming = listener.receive()
        assert incoming is not None
        opened = open_request(incoming.frames, 2**20)
        message = read_request(opened)
        assert isinstance(message, RingLinearRequest)
        assert bytes(message.elements.data) == payload.numpy().tobytes()

        def answer(frames: list[Buffer]) -> Exchange:
            listener.send(incoming.route, frames)
            return channel.wait(request_id)

        yield request, request_id, opened.request_id, answer
    finally:
        channel.close()
        listener.close()


@pytest.mark.parametrize("link", LINKS)
def test_a_reply_over_a_link_is_taken_or_refused(link: str, tmp_path: Path) -> None:
    with started(link, tmp_path) as (request, _, request_id, answer):
        exchange = answer(reply(request_id, output()))
        assert exchange.output is not None
        assert torch.equal(request.output(exchange), output())
        assert exchange.timing == Timing(queue_us=3, compute_us=MAX_TIMING_US)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    ("frames", "error"),
    [
        (lambda id_: reply(id_, output().float()), ReplyError),
        (lambda id_: reply(id_, output()[:2]), ReplyError),
        (lambda id_: reply(id_, output().view(1, ROWS, OUT)), ReplyError),
        (
            lambda id_: encode_reply(Form.FRAMED, id_, "RingLinear", ErrorCode.INTERNAL),
            ServiceError,
        ),
        (lambda id_: [b"\xc1"], ProtocolError),
        (lambda id_: [reply(id_, output())[0], bytes(8)], ProtocolError),
    ],
)
def test_another_reply_is_refused_as_any_message(
    link: str, tmp_path: Path, frames: object, error: type[TsqpError]
) -> None:
    with (
        started(link, tmp_path) as (request, _, request_id, answer),
        pytest.raises(error),
    ):
        request.output(answer(frames(request_id)))
