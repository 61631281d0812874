"""The segment that both ends map: what a service takes for one, and how messages lie in it."""

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_side.encoding import encode_reply, open_request
from gpu_side.transport import stream_client
from gpu_side.transport.stream_client import adopt
from gpu_side.transport.stream_listener import StreamListener
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import InitRequest, LMHeadRequest, TensorReply, Timing
from protocol.prepared import PreparedRequest
from protocol.shared_memory import ATTACH, SLOTS, Areas, Lane, create
from protocol.shm import ShmChannel
from protocol.stream_wire import frames_in
from protocol.tensors import Buffer, from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.shm import PAGE, RawClient, RawService, attach, memfd, message, write_line
from tests.kit.wire import REFUSED, is_dropped, take, tensor_reply

AREAS = Areas(2, PAGE, 2 * PAGE)
SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL
FRAMES = [b"header", bytes(range(200))]
US = os.getuid()


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Lane]]:
    """The client's and the service's end of one segment."""
    client, file = create(1000, 3000)
    yield client, adopt(file, US)
    os.close(file)


def _read(lane: Lane, slot: int) -> list[bytes]:
    frames = frames_in(lane.view(slot), "peer", max_frames=4, max_message_bytes=10_000)
    return list(map(bytes, frames))


def _head(areas: tuple[int, ...], magic: bytes = b"TSQPshm1") -> bytes:
    return struct.pack("<8sIxxxxQQ", magic, *areas)


@each_row(
    ("how", "said"),
    [
        ({"seals": 0}, "a file that may change its size"),
        ({"seals": GROW | SEAL}, "a file that may change its size"),
        ({"seals": SHRINK | SEAL}, "a file that may change its size"),
        ({"seals": SHRINK | GROW}, "a file that may change its size"),
        ({"seals": SHRINK | GROW | SEAL | fcntl.F_SEAL_WRITE}, "cannot be mapped"),
        ({"size": 0, "head": b""}, "got 0 bytes, expected 32 to"),
        ({"size": 31, "head": b""}, "got 31 bytes, expected 32 to"),
        ({"size": 2**40}, f"got {2**40} bytes, expected 32 to"),
        ({"size": AREAS.total - PAGE}, "got another head"),
        ({"size": AREAS.total + PAGE}, "got another head"),
        ({"head": _head(AREAS, b"TSQPshm2")}, "got another head"),
        ({"areas": Areas(0, PAGE, PAGE)}, "got another head"),
        ({"areas": Areas(SLOTS + 1, PAGE, PAGE)}, "got another head"),
        ({"areas": Areas(2, 0, 3 * PAGE)}, "got another head"),
        ({"areas": Areas(2, 3 * PAGE, 0)}, "got another head"),
        ({"areas": Areas(2, PAGE + 8, 2 * PAGE - 8)}, "got another head"),
        # Sizes that add up only modulo a word.
        ({"head": _head((2, 2**64 - PAGE, AREAS.request_bytes))}, "got another head"),
    ],
)
def test_a_file_that_is_no_segment_is_refused(how: dict[str, object], said: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = memfd(**{"areas": AREAS, **how})  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=f"shared memory: .*{said}") as info:
        adopt(file, US)
    limit, code = "expected 32 to" in said, info.value.code
    assert code is (ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE)
    del info  # its frames have the memory
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_memfd_or_another_users_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(AREAS.total))
    for path in (str(tmp_path / "plain"), "/dev/zero", str(tmp_path)):
        file = os.open(path, os.O_RDONLY)
        with pytest.raises(ProtocolError, match="expected a memfd"):
            adopt(file, US)
        os.close(file)
    file = memfd(AREAS)
    with pytest.raises(ProtocolError, match="got a file of another user"):
        adopt(file, US + 1)
    os.close(file)


def test_huge_pages_are_refused_but_transparent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none left when one is touched."""
    file = memfd(AREAS)
    fields = (*tuple(os.fstat(file))[:10], *(None,) * 9)
    transparent = os.stat_result(fields, {"st_blksize": 2**21})
    huge = os.statvfs_result((2**21, *tuple(os.fstatvfs(file))[1:]))
    with monkeypatch.context() as patch:
        patch.setattr(stream_client.os, "fstat", lambda _: transparent)
        adopt(file, US)
    monkeypatch.setattr(stream_client.os, "fstatvfs", lambda _: huge)
    with pytest.raises(ProtocolError, match="got pages of 2097152 bytes"):
        adopt(file, US)
    os.close(file)


def test_what_is_put_is_seen_once_by_an_end_that_is_woken_up(ends: tuple[Lane, Lane]) -> None:
    for us, peer in (ends, ends[::-1]):
        assert peer.look() == -1
        assert us.put(3, FRAMES) is False
        assert peer.look() == 3
        assert _read(peer, 3) == FRAMES
        assert peer.look() == peer.look(100) == -1
        peer.sleeps(True)
        assert us.put(0, FRAMES) is True
        peer.sleeps(False)
        assert us.put(1, FRAMES) is False
        assert (peer.look(), peer.look()) == (0, 1)
        us.put(5, ())  # no message gives the slot back
        assert peer.look() == 5
        assert not peer.view(5)
    client, service = ends
    assert client.put(2, [bytes(2 * PAGE - 64)]) is False
    assert client.put(6, [bytes(2 * PAGE - 63)]) is None
    assert (service.look(), service.look()) == (2, -1)
    client._put = 2**32 - 2  # the numbers begin anew, without a zero
    for slot in (4, 1, 6):
        client.put(slot, FRAMES)
    assert [service.look() for _ in range(3)] == [1, 4, 6]
    assert [service.number(slot) for slot in (4, 1, 6)] == [2**32 - 1, 1, 2]


def test_a_size_is_read_once_and_held_against_the_area(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client.put(0, FRAMES)
    assert service.look() == 0
    write_line(client, 0, 1, 2**64 - 1, of_client=True)
    assert _read(service, 0) == FRAMES
    for number, size in enumerate((2 * PAGE + 1, 2**63, 2**64 - 1), start=1):
        write_line(client, 7, number, size, of_client=True)
        assert service.look() == 7
        with pytest.raises(ProtocolError, match=f"got {size} bytes") as info:
            service.view(7)
        assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@each_row(
    ("content", "said"),
    [
        (b"", "got 0 frames in"),
        (message([b"x"])[:64].replace(b"\1", b"\0", 1), "got 0 frames in"),
        (struct.pack("<I5Q", 5, *(0,) * 5) + bytes(20), "got 5 frames in"),
        (message(FRAMES)[:-1], "got 2 frames in"),
        (message(FRAMES) + b"\0", "got 2 frames in"),
        (struct.pack("<IQ", 1, 900) + bytes(100), "got 1 frames in"),
        # Each is small enough; the second sum is no number of 64 bits.
        (struct.pack("<I2Q", 2, 600, 600) + bytes(2000), "expected at most 1000"),
        (struct.pack("<I2Q", 2, 2**64 - 1, 2) + bytes(2000), "expected at most 1000"),
    ],
)
def test_what_is_no_message_is_refused(content: bytes, said: str) -> None:
    view = memoryview(bytearray(content))
    with pytest.raises(ProtocolError, match=f"message from peer: .*{said}") as info:
        frames_in(view, "peer", max_frames=4, max_message_bytes=1000)
    limit = "at most" in said
    assert info.value.code is (ErrorCode.LIMIT_EXCEEDED if limit else ErrorCode.MALFORMED_MESSAGE)


def test_what_lies_in_the_slot_is_put_where_it_belongs(ends: tuple[Lane, Lane]) -> None:
    client, service = ends
    client.put(0, [b"request", b"tensor"])
    assert service.look() == 0
    reply = service.memory(0).reply
    # Where the second frame goes, as a device leaves it, and elsewhere.
    for start in (64 + 64, 1024):
        reply[start : start + 5] = b"right"
        frames: list[Buffer] = [b"header", reply[start : start + 5]]
        assert service.put(0, frames) is not None
        assert client.look() == 0
        assert _read(client, 0) == [b"header", b"right"]
        reply[128 : 128 + 5] = b"wrong"


ROUNDS = 500
TINY_S = 0.05
REQUEST = LMHeadRequest(hidden_states=from_torch(torch.ones(8)))
TIMING = Timing(queue_us=1, compute_us=1)


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
    request_id = channel.submit(REQUEST)
    service.accept()
    slot, seen = service.request()
    assert seen == request_id
    return request_id, slot


def _good(request_id: int, value: float = 1.0) -> list[bytes]:
    return [bytes(frame) for frame in tensor_reply(request_id, torch.full((8,), value))]


def test_no_wake_up_is_lost(endpoint: str) -> None:
    """Both ends fall asleep all the time; one that nobody wakes up ends in a deadline."""
    listener = StreamListener(endpoint)

    def serve() -> None:
        for _ in range(ROUNDS):
            incoming = take(listener)
            opened = open_request(incoming.frames, 2**20)
            listener.send(incoming.route, tensor_reply(opened.request_id, torch.ones(1)))

    thread = threading.Thread(target=serve)
    thread.start()
    with ShmChannel(endpoint, timeout_s=20) as channel:
        for _ in range(ROUNDS):
            channel.call(REQUEST)
    thread.join()
    listener.close()


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


def test_a_line_without_its_message_is_refused(service: RawService, channel: ShmChannel) -> None:
    for size, said in ((2**64 - 1, "got 1"), (1, "got 0 frames")):
        request_id, slot = _submit(channel, service)
        write_line(service.lane, slot, 1, size, of_client=False)
        with pytest.raises(ProtocolError, match=said):
            channel.wait(request_id)
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
    response = channel.wait(request_id).response
    assert isinstance(response, TensorReply)
    assert to_torch(response.output)[0].item() == 5.0
    again = channel.submit(REQUEST)
    assert service.request()[0] == slot
    service.lane.put(slot, _good(request_id, 9.0))  # of before
    assert not channel.arrived(again)
    service.lane.put(slot, _good(again, 2.0))
    # The slot was taken for free again: what comes there now is not looked at.
    assert not channel.arrived(again, time.monotonic() + TINY_S)


@pytest.mark.parametrize("read_once", [True, False])
def test_a_large_reply_that_is_read_once_has_its_slot_as_long_as_it_lives(
    service: RawService, endpoint: str, read_once: bool
) -> None:
    many = torch.ones(2**18)
    good = TensorReply(output=from_torch(many))
    prepared = PreparedRequest(REQUEST, tuple(many.shape), "float32")
    prepared.read_once = read_once
    with ShmChannel(endpoint, timeout_s=20, max_message_bytes=2**21) as channel:
        request_id = channel.start(prepared, torch.ones(8))
        service.accept()
        slot, _ = service.request()
        service.lane.put(slot, encode_reply("framed", request_id, "LMHead", good, TIMING))
        output = channel.wait(request_id).output
        assert output is not None
        assert torch.equal(output, many)
        end = service.lane._out[slot] + prepared.answered_as.total_bytes
        service.lane._memory[end - many.nbytes : end] = bytes(many.nbytes)
        assert torch.equal(output, torch.zeros_like(many) if read_once else many)
        channel.start(prepared, torch.ones(8))
        assert (service.request()[0] == slot) == (not read_once)
        del output
        channel.start(prepared, torch.ones(8))
        assert (service.request()[0] == slot) == read_once


def test_a_reply_as_expected_that_is_larger_than_its_area_is_refused(
    service: RawService, channel: ShmChannel
) -> None:
    """A limit of replies may be larger than an area; behind that others lie."""
    good = TensorReply(output=from_torch(torch.ones(2**15)))
    prepared = PreparedRequest(REQUEST, good.output.shape, "float32")
    prepared.read_once = True
    request_id = channel.start(prepared, torch.ones(8))
    channel._max_reply_bytes = 2**20
    service.accept()
    slot, _ = service.request()
    frames = encode_reply("framed", request_id, "LMHead", good, TIMING)
    start, size = service.lane._out[slot], prepared.answered_as.total_bytes
    service.lane._memory[start : start + PAGE] = message(frames)[:PAGE]
    write_line(service.lane, slot, 1, size, of_client=False)
    with pytest.raises(ProtocolError, match=f"got {size} bytes"):
        channel.wait(request_id)


INIT = [bytes(frame) for frame in encode_request(InitRequest(), 7, 1000)]
TWO = [bytes(range(100)), b"tensor"]


@pytest.fixture
def client(listener: StreamListener, endpoint: str) -> Iterator[RawClient]:
    with RawClient(endpoint) as made:
        yield made


def _others_go_on(listener: StreamListener, endpoint: str) -> None:
    with RawClient(endpoint) as other:
        other.put(0, INIT)
        assert open_request(take(listener).frames, 1000).request_id == 7


SEGMENT = Areas(1, PAGE, PAGE)


@pytest.mark.parametrize(
    ("made", "count", "said"),
    [
        (lambda: memfd(SEGMENT), 0, ATTACH),
        (lambda: memfd(SEGMENT), 2, ATTACH),
        (lambda: memfd(SEGMENT), 1, b"\xff"),
        (lambda: memfd(SEGMENT), 1, message(INIT)),
        (lambda: memfd(SEGMENT, seals=0), 1, ATTACH),
        (lambda: memfd(SEGMENT, head=bytes(32)), 1, ATTACH),
        (lambda: os.open("/dev/null", os.O_RDWR), 1, ATTACH),
    ],
)
def test_what_hands_over_no_segment_is_refused(
    listener: StreamListener, endpoint: str, made: Callable[[], int], count: int, said: bytes
) -> None:
    file = made()
    before = len(os.listdir("/proc/self/fd"))
    with attach(endpoint, [file] * count, said) as raw:
        assert is_dropped(listener, raw)
    # Files that were handed over are closed.
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(file)
    _others_go_on(listener, endpoint)


def test_a_header_that_changes_after_it_was_taken_changes_nothing(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(0, TWO)
    incoming = take(listener)
    start = client.lane._out[0]
    client.lane._memory[start : start + 300] = b"\xff" * 300
    assert bytes(incoming.frames[0]) == TWO[0]
    assert len(incoming.frames[1]) == len(TWO[1])  # its bytes are the client's own business


def test_a_reply_that_does_not_fit_gives_the_slot_back_and_goes_over_the_socket(
    listener: StreamListener, client: RawClient
) -> None:
    client.put(2, INIT)
    incoming = take(listener)
    large = [bytes(10 * PAGE)]
    assert listener.send(incoming.route, large)
    assert client.lane.look() == 2
    assert len(client.lane.view(2)) == 0
    assert client.socket.recv(2**20) == message(large)
    client.put(2, INIT)
    assert take(listener).route == incoming.route


def test_a_client_that_has_gone_gets_no_reply_and_its_requests_are_dropped(
    listener: StreamListener, endpoint: str
) -> None:
    """Its successor has the same slots, and its own name."""
    with RawClient(endpoint) as gone:
        gone.put(0, TWO)
        gone.put(1, INIT)
        incoming = take(listener)
    assert not listener.wait(timeout_ms=100)
    assert listener.receive() is None
    assert not listener._sharing
    with RawClient(endpoint) as successor:
        successor.put(0, INIT)
        assert take(listener).route != incoming.route
        assert not listener.send(incoming.route, REFUSED)
        assert successor.lane.look() == -1
    assert bytes(incoming.frames[1]) == TWO[1]  # as long as it is viewed


def test_a_request_before_the_last_reply_drops_the_client(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    client.put(3, INIT)
    take(listener)
    client.put(3, INIT)
    assert is_dropped(listener, client.socket)
    # It would wake the service up now, and so finds its connection closed.
    assert client.lane.put(0, INIT)
    _others_go_on(listener, endpoint)


def test_a_client_that_writes_over_flags_and_numbers_hurts_itself_alone(
    listener: StreamListener, client: RawClient, endpoint: str
) -> None:
    for value in (b"\1", b"\0", b"\xff"):
        client.lane._memory[64:192] = value * 128
        listener.wait(timeout_ms=10)
        with ShmChannel(endpoint) as other:
            request_id = other.submit(InitRequest())
            assert open_request(take(listener).frames, 1000).request_id == request_id
    for number in range(1, 20):
        for slot in range(client.lane.slots):
            write_line(client.lane, slot, number, 100, of_client=True)
        client.wake_up()
        listener.wait(timeout_ms=1)
    assert listener.clients_refused == 1
    _others_go_on(listener, endpoint)


# The memory of a device, where it differs.
