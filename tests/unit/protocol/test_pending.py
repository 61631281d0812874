"""What every channel keeps of its requests: ids, one connection, the size of replies.

And prepared requests: the bytes that they send, and replies that are not the expected one. Compiled
code takes a reply only where decoding it would say the same (`tests/fuzz/wire.py` says so of the
Python that does it).
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_side.encoding import encode_reply, open_request, read_request
from gpu_side.service import open_listener
from protocol import native
from protocol.channel import OversizedRequestError
from protocol.encoding import MAX_TEMPLATE_BYTES, REPLY, REQUEST, HeaderLayout
from protocol.errors import (
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
)
from protocol.messages import (
    MAX_TIMING_US,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.prepared import Payloads, PreparedRequest
from protocol.stream_wire import to_pieces
from protocol.tensors import Buffer, WireTensor, from_torch
from protocol.transport import open_channel
from tests.kit.rows import each_row
from tests.kit.wire import ScriptedChannel, take, tensor_reply

LOST = "a lost connection while LMHead"
ASK = LMHeadRequest(hidden_states=from_torch(torch.ones(4)))


def _zeros(request_id: int, elements: int = 4) -> list[Buffer]:
    return tensor_reply(request_id, torch.zeros(elements))


def test_ids_begin_anywhere_and_go_on_from_there() -> None:
    firsts = set()
    for _ in range(64):
        channel = ScriptedChannel()
        ids = [channel.submit(ASK) for _ in range(3)]
        assert ids == [open_request(list(frames), 2**20).request_id for frames in channel.sent]
        assert ids == [ids[0], ids[0] + 1, ids[0] + 2]
        firsts.add(ids[0])
    assert len(firsts) == 64
    assert 2**60 < max(firsts) <= 2**62


@each_row("id_of", [lambda n: n - 1, lambda n: n + 1, lambda _: ScriptedChannel().submit(ASK)])
def test_a_reply_to_what_was_never_sent_fits_nothing(id_of: Callable[[int], int]) -> None:
    """Such as one that was recorded in another session."""
    channel = ScriptedChannel()
    request_id = channel.submit(ASK)
    channel.script.append((_zeros(id_of(request_id)), 1))
    with pytest.raises(ProtocolError, match=r"request id .* the id of a request that was sent"):
        channel.wait(request_id)


def test_the_first_of_two_replies_to_a_request_counts() -> None:
    channel = ScriptedChannel()
    first, second = channel.submit(ASK), channel.submit(ASK)
    error = encode_reply("framed", first, "LMHead", ErrorCode.INTERNAL)
    channel.script.extend([(_zeros(first), 1), (error, 1), (_zeros(second), 1)])
    channel.wait(second)
    assert isinstance(channel.wait(first).response, TensorReply)


def test_a_reply_larger_than_any_that_can_be_asked_for_is_refused() -> None:
    channel = ScriptedChannel()
    channel.limit_replies(500)
    first, second = channel.submit(ASK), channel.submit(ASK)
    channel.script.extend([(_zeros(first, 80), 1), (_zeros(second, 120), 1)])
    channel.wait(first)
    with pytest.raises(ProtocolError, match=r"got 5\d\d bytes, expected at most 500") as caught:
        channel.wait(second)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED
    channel.limit_replies(10_000)  # it can only be lowered
    channel.script.append((_zeros(channel.submit(ASK), 120), 1))
    with pytest.raises(ProtocolError, match="at most 500"):
        channel.wait(channel._last_id)


@each_row(
    ("noted", "after_ms", "taken"),
    # A connection cannot be replaced in less than 50 ms; over the same one any time will do.
    [(["unseen"], 49, True), (["unseen"], 51, False), ([], 10_000, True)],
)
def test_a_late_reply_that_may_have_come_over_another_connection_is_not_taken(
    noted: list[str], after_ms: int, taken: bool
) -> None:
    """ZeroMQ connects again by itself, and hands what is queued to whoever is there then."""
    channel = ScriptedChannel()
    channel.use_one_connection()
    request_id = channel.submit(ASK)
    channel.script.extend([*noted, (_zeros(request_id), after_ms)])
    if taken:
        channel.wait(request_id)
        return
    with pytest.raises(EndpointError, match=LOST):
        channel.wait(request_id)


ROWS, IN, OUT = 2, 4, 6
ID = 2**61 + 12345
TIMING = Timing(queue_us=3, compute_us=MAX_TIMING_US)
OUTPUT = torch.arange(1, ROWS * OUT + 1, dtype=torch.int32).view(ROWS, OUT)


NOTHING = WireTensor("int32", (ROWS, IN), b"")
RING = RingLinearRequest(layer_idx=3, module_names=("q_proj", "k_proj"), elements=NOTHING)


def _ring() -> PreparedRequest:
    return PreparedRequest(RING, (ROWS, OUT), "int32")


def _payload(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(ROWS * IN).view(ROWS, IN).to(dtype)


def _reply(
    request_id: int, output: torch.Tensor = OUTPUT, method: str = "RingLinear"
) -> list[Buffer]:
    result = TensorReply(output=from_torch(output))
    return encode_reply("framed", request_id, method, result, TIMING)


@each_row("layout", [REQUEST, REPLY])
def test_a_header_that_is_laid_out_otherwise_is_not_split(layout: HeaderLayout) -> None:
    numbers = [2**64 - 1] * len(layout.places)
    header, longest = layout.header(b"", *numbers), b"x" * MAX_TEMPLATE_BYTES
    # A byte of a key, or of a mark of a number; not one of a number.
    for place in range(len(header)):
        changed = bytearray(header + b"x")
        changed[place] ^= 1
        assert (layout.split(changed) is None) == (header[place] != 0xFF), place
        assert layout.split(header[:place]) is None
    assert layout.split(header) is None
    assert layout.split(header + longest) == (tuple(numbers), longest)
    assert layout.split(header + longest + b"x") is None


@each_row(
    "payload",
    [_payload()[:1], _payload(torch.float32), _payload().flatten(), _payload().view(4, 2)],
)
def test_a_payload_that_was_not_prepared_is_not_sent(payload: torch.Tensor) -> None:
    channel = ScriptedChannel()
    with pytest.raises(ProtocolError, match=r"payload of RingLinear: .* expected int32 \[2, 4\]"):
        channel.start(_ring(), payload)
    small = ScriptedChannel(max_message_bytes=_ring().request_bytes - 1)
    with pytest.raises(OversizedRequestError, match=f"at most {_ring().request_bytes - 1} "):
        small.start(_ring(), _payload())
    assert channel.sent == small.sent == []


def test_a_message_of_several_tensors_goes_out_whole_and_in_order() -> None:
    pair = Payloads((torch.rand(1, 2, 3), torch.rand(1, 3, 4)))
    empty = [WireTensor("float32", tuple(one.shape), b"") for one in pair]
    prepared = PreparedRequest(MatmulRequest(a=empty[0], b=empty[1]), (1, 2, 4), "float32")
    channel = ScriptedChannel()
    channel.start(prepared, pair)
    (frames,) = channel.sent
    assert sum(memoryview(frame).nbytes for frame in frames) == prepared.request_bytes
    sent = read_request(open_request(list(frames), 2**20))
    assert sent == MatmulRequest(a=from_torch(pair[0]), b=from_torch(pair[1]))
    assert prepared.shape != pair[0].shape  # compiled code sends one tensor
    for other in (Payloads(pair[::-1]), Payloads(pair[:1]), pair[0]):
        with pytest.raises(ProtocolError, match="payload of Matmul: got "):
            channel.start(prepared, other)


def _timed(queue_us: int, compute_us: int) -> Callable[[int], list[Buffer]]:
    claim = Timing.model_construct(queue_us=queue_us, compute_us=compute_us)
    result = TensorReply(output=from_torch(OUTPUT))
    return lambda request_id: encode_reply("framed", request_id, "RingLinear", result, claim)


def _with(change: Callable[[bytes, Buffer], list[Buffer]]) -> Callable[[int], list[Buffer]]:
    return lambda request_id: change(*_reply(request_id))  # type: ignore[arg-type]


# What answers a prepared request wrongly: by id, the frames, and what is raised.
WRONG: list[tuple[Callable[[int], list[Buffer]], type[TsqpError]]] = [
    (lambda n: _reply(n, OUTPUT[:1]), ReplyError),
    (lambda n: _reply(n, OUTPUT.float()), ReplyError),
    (lambda n: _reply(n, OUTPUT.flatten()), ReplyError),
    (lambda n: _reply(n, OUTPUT.view(OUT, ROWS)), ReplyError),
    (lambda n: _reply(n, OUTPUT.view(1, ROWS, OUT)), ReplyError),
    (lambda n: _reply(n, method="Linear"), ReplyError),
    (lambda n: encode_reply("framed", n, "RingLinear", ErrorCode.INTERNAL), ServiceError),
    (lambda n: [b"\xc1"], ProtocolError),
    (_with(lambda header, frame: [header]), ProtocolError),
    (_with(lambda header, frame: [header, frame, frame]), ProtocolError),
    (_with(lambda header, frame: [header, frame[:-1]]), ProtocolError),
    (_with(lambda header, frame: [header, bytes(frame) + b"\0"]), ProtocolError),
    (_with(lambda header, frame: [header[:-1], frame]), ProtocolError),
    (_with(lambda header, frame: [header + b"\0", frame]), ProtocolError),
    (_with(lambda header, frame: [header[:-1] + b"\2", frame]), ProtocolError),
    (_timed(2**53 + 1, 0), ProtocolError),
    (_timed(0, 2**53 + 1), ProtocolError),
]


@each_row(("answer", "error"), WRONG, ids=map(str, range(len(WRONG))))
def test_another_reply_is_refused(
    answer: Callable[[int], list[Buffer]], error: type[TsqpError]
) -> None:
    prepared, channel = _ring(), ScriptedChannel()
    request_id = channel.start(prepared, _payload())
    channel.script.append((answer(request_id), 1))
    with pytest.raises(error):
        prepared.output(channel.wait(request_id))


@pytest.mark.parametrize("read_once", [True, False])
def test_a_seed_has_its_reply_read_as_the_elements_have(read_once: bool) -> None:
    prepared = _ring()
    prepared.read_once = read_once
    assert prepared.seeded.read_once == read_once


compiled_only = pytest.mark.skipif(native.library is None, reason="no compiled kernels")


@compiled_only
def test_compiled_code_takes_the_expected_reply_and_no_other() -> None:
    shape, message = _ring().answered_as, b"".join(to_pieces(_reply(ID))[0])
    payload, times_us = torch.empty(ROWS, OUT, dtype=torch.int32), np.zeros(2, np.int64)

    def take_from(message: bytes | bytearray, size: int) -> int:
        area = np.frombuffer(bytes(message), np.uint8)
        seen = np.array([1, size], np.uint64)
        payload.zero_()
        taken: int = native.library.lane_take(
            *(shape.address, ID, area.ctypes.data, 0, seen.ctypes.data, -1),
            *(payload.data_ptr(), times_us.ctypes.data),
        )
        assert payload.any() == (taken == 1)
        return taken

    size = len(message)
    assert size == shape.total_bytes
    assert take_from(message, size) == 1
    assert torch.equal(payload, OUTPUT)
    assert times_us.tolist() == [3, MAX_TIMING_US]
    places = [64 + place for place in REPLY.places]
    times = {at + i for at in places[1:] for i in range(8)}
    for at in range(len(message) - OUTPUT.nbytes):
        changed = bytearray(message)
        # A time that is less than the largest is as good; its first byte makes it larger.
        changed[at] ^= 1 if at not in times else 0x80
        if at not in times or at in places[1:]:
            assert take_from(changed, size) == -1, at
    for place in places[1:]:
        for time_us in (MAX_TIMING_US + 1, 2**63, 2**64 - 1):
            late = time_us.to_bytes(8, "big")
            assert take_from(message[:place] + late + message[place + 8 :], size) == -1
    for other in (0, size - 1, size + 1, 2**63):
        assert take_from(message, other) == -1
    assert take_from(b"".join(to_pieces(_reply(ID + 1))[0]), size) == -1


@compiled_only
@pytest.mark.parametrize("link", ["unix", "shm"])
def test_a_reply_over_a_link_is_taken_or_refused(link: str, tmp_path: Path) -> None:
    endpoint, prepared = f"{link}://{tmp_path}/s", _ring()
    for answer, error in ((_reply, None), *WRONG[:8], WRONG[10]):
        with (
            open_channel(endpoint, timeout_s=20, spin_us=100_000) as channel,
            closing(open_listener(endpoint)) as listener,
        ):
            request_id = channel.start(prepared, _payload())
            incoming = take(listener)
            sent = read_request(open_request(incoming.frames, 2**20))
            assert sent == prepared.request(_payload())
            listener.send(incoming.route, answer(request_id))
            if error is not None:
                with pytest.raises(error):
                    prepared.output(channel.wait(request_id))
                continue
            exchange = channel.wait(request_id)
            assert exchange.output is not None
            assert torch.equal(exchange.output, OUTPUT)
            assert exchange.timing == TIMING
