"""The listening end of shared memory, and clients that do with theirs what they like."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_side.encoding import open_request
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_listener import StreamListener
from protocol.encoding import encode_request
from protocol.messages import InitRequest
from protocol.shared_memory import ATTACH, Areas
from protocol.shm import ShmChannel
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, RawClient, attach, memfd, message
from tests.kit.wire import REFUSED, is_dropped

REQUEST = [bytes(frame) for frame in encode_request(InitRequest(), 7, 1000)]
TWO = [bytes(range(100)), b"tensor"]


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"shm://{tmp_path}/s"


@pytest.fixture
def client(listener: StreamListener, endpoint: str) -> Iterator[RawClient]:
    with RawClient(endpoint) as made:
        yield made


def _take(listener: StreamListener) -> Incoming:
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming


def _others_go_on(listener: StreamListener, endpoint: str) -> None:
    with RawClient(endpoint) as other:
        other.put(0, REQUEST)
        assert open_request(_take(listener).frames, 1000).request_id == 7


# ------------------------------------------------------------------------------------ letting in


def _file(kind: str) -> int:
    if kind == "no memfd":
        return os.open("/dev/null", os.O_RDWR)
    areas = Areas(1, PAGE, PAGE)
    if kind == "unsealed":
        return memfd(areas, seals=0)
    return memfd(areas, head=bytes(32) if kind == "no head" else None)


@pytest.mark.parametrize(
    ("kind", "count", "said"),
    [
        ("good", 0, ATTACH),
        ("good", 2, ATTACH),
        ("good", 64, ATTACH),
        ("good", 1, b"\xff"),
        ("good", 1, message(REQUEST)),
        ("unsealed", 1, ATTACH),
        ("no head", 1, ATTACH),
        ("no memfd", 1, ATTACH),
    ],
)
def test_what_hands_over_no_segment_is_refused(
    listener: StreamListener,
    endpoint: str,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    count: int,
    said: bytes,
) -> None:
    file = _file(kind)
    before = len(os.listdir("/proc/self/fd"))
    with attach(endpoint, [file] * count, said) as raw:
        assert is_dropped(listener, raw)
    # Files that were handed over are closed.
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)
    if kind == "good":
        (record,) = caplog.records
        detail = vars(record)["fields"]["detail"]
        assert re.match(r"shared memory: got \d files with the first bytes, expected one", detail)
    _others_go_on(listener, endpoint)


# --------------------------------------------------------------------------------------- slots


def test_a_header_that_changes_after_it_was_taken_changes_nothing(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(0, TWO)
    incoming = _take(listener)
    start = client.lane._out[0]
    client.lane._memory[start : start + 300] = b"\xff" * 300
    assert bytes(incoming.frames[0]) == TWO[0]
    assert len(incoming.frames[1]) == len(TWO[1])  # its bytes are the client's own business


def test_a_reply_that_does_not_fit_gives_the_slot_back_and_goes_over_the_socket(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(2, REQUEST)
    incoming = _take(listener)
    large = [bytes(10 * PAGE)]
    assert listener.send(incoming.route, large)
    assert client.lane.look() == 2
    assert len(client.lane.view(2)) == 0
    assert client.socket.recv(2**20) == message(large)
    client.put(2, REQUEST)
    assert _take(listener).route == incoming.route


def test_a_client_that_has_gone_gets_no_reply_and_its_requests_are_dropped(
    listener: StreamListener, endpoint: str
) -> None:
    """Its successor has the same slots, and its own name."""
    with RawClient(endpoint) as gone:
        gone.put(0, TWO)
        gone.put(1, REQUEST)
        incoming = _take(listener)
    assert not listener.wait(timeout_ms=100)
    assert listener.receive() is None
    assert not listener._sharing
    with RawClient(endpoint) as successor:
        successor.put(0, REQUEST)
        assert _take(listener).route != incoming.route
        assert not listener.send(incoming.route, REFUSED)
        assert successor.lane.look() == -1
    assert bytes(incoming.frames[1]) == TWO[1]  # as long as it is viewed


# ------------------------------------------------------------------------- clients that do wrong


@each_row(
    ("said", "claimed"),
    [
        (b"", 2**64 - 1),
        (b"", 3 * PAGE),
        (b"", 0),
        (bytes(100), 100),
        (message(TWO)[:-1], None),
        (b"\xff" * 4 + bytes(100), 104),
        (b"\2\0\0\0" + b"\xff" * 16, 1000),
        # Larger than the limit of a message.
        (message([b"header", bytes(2001)]), None),
    ],
)
def test_a_slot_with_no_message_drops_the_client(
    tmp_path: Path, said: bytes, claimed: int | None
) -> None:
    endpoint = f"shm://{tmp_path}/t"
    listener = StreamListener(endpoint, max_message_bytes=2000)
    with RawClient(endpoint, area_bytes=2 * PAGE) as client:
        # What was put before it is lost with the client.
        client.lane.put(1, REQUEST)
        client.put_bytes(0, said, claimed)
        assert is_dropped(listener, client.socket)
    _others_go_on(listener, endpoint)
    listener.close()


def test_a_request_before_the_last_reply_drops_the_client(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    client.put(3, REQUEST)
    _take(listener)
    client.put(3, REQUEST)
    assert is_dropped(listener, client.socket)
    # It would wake the service up now, and so finds its connection closed.
    assert client.lane.put(0, REQUEST)
    _others_go_on(listener, endpoint)


def test_a_client_that_writes_over_flags_and_numbers_hurts_itself_alone(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    for value in (b"\1", b"\0", b"\xff"):
        client.lane._memory[64:192] = value * 128
        listener.wait(timeout_ms=10)
        with ShmChannel(endpoint) as other:
            request_id = other.submit(InitRequest())
            assert open_request(_take(listener).frames, 1000).request_id == request_id
    for number in range(1, 20):
        for slot in range(client.lane.slots):
            client.write_line(slot, number, 100)
        client.wake_up()
        listener.wait(timeout_ms=1)
    assert listener.clients_refused == 1
    _others_go_on(listener, endpoint)
