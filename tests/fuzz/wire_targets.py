"""Targets that read the wire: requests and replies, framed and inline, and streams of them.

What decodes is looked into as well: its tensors become torch tensors, and encoded again it is read
as the same message. Where headers are remembered, a case is read twice, in full and by what is
remembered, and both must say the same.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import msgpack

from gpu_side.encoding import (
    MAX_REQUEST_FRAMES,
    Form,
    RequestReader,
    encode_reply,
    open_request,
    read_request,
)
from gpu_side.inline import to_inline
from protocol.codec import MAX_HEADER_BYTES
from protocol.encoding import MAX_REPLY_FRAMES, decode_reply, encode_request, reply_template
from protocol.errors import ErrorCode, ProtocolError
from protocol.header_numbers import REQUEST
from protocol.memory_pool import MemoryPool
from protocol.messages import (
    EmbeddingRequest,
    HealthReply,
    HealthRequest,
    InitConfig,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    NormWeight,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    RotaryParams,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
    Timing,
)
from protocol.prepared import PreparedRequest
from protocol.shared_memory import frames_in
from protocol.stream_wire import MessageReader, layout, to_pieces
from protocol.tensors import ITEMSIZE, Buffer, WireTensor, to_torch
from tests.fuzz.engine import Case, Target
from tests.fuzz.mutate import INTERESTING, Mutator, msgpack_junk
from tests.kit.wire import Expecting

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
_BOMB_BYTES = 3 * 1024 * 1024


def tensor(dtype: str, *shape: int) -> WireTensor:
    """Return a tensor of ones and zeros."""
    size = ITEMSIZE[dtype]
    for length in shape:
        size *= length
    return WireTensor(dtype, shape, (b"\x00\x3c" * size)[:size])


def requests() -> list[Request]:
    """Return one request of each kind."""
    return [
        InitRequest(),
        HealthRequest(),
        EmbeddingRequest(input_ids=tensor("int64", 3), dtype="float32"),
        LinearRequest(
            layer_idx=1,
            module_names=("q_proj", "k_proj", "v_proj"),
            hidden_states=tensor("float32", 2, 4),
            bias=False,
        ),
        LinearRequest(
            layer_idx=0, module_names=("down_proj",), hidden_states=tensor("bfloat16", 1, 2, 4)
        ),
        RingLinearRequest(layer_idx=0, module_names=("o_proj",), elements=tensor("int32", 1, 4)),
        SeededRingLinearRequest(
            layer_idx=0,
            module_names=("o_proj",),
            rows=3,
            columns=4,
            seed=tensor("int32", 8),
        ),
        MatmulRequest(a=tensor("float16", 2, 1, 3), b=tensor("float16", 2, 3, 2)),
        LMHeadRequest(hidden_states=tensor("float32", 1, 4)),
        RingLMHeadRequest(elements=tensor("int32", 1, 4)),
        SegmentRequest(
            first_layer=0,
            last_layer=1,
            hidden_states=tensor("float32", 2, 4),
            parts=tensor("int64", 1, 7),
            outputs=tensor("int64", 1),
            sinks=4,
            recent=8,
        ),
    ]


def init_reply() -> InitReply:
    """Return an Init reply of two layers."""
    norm = NormWeight(weight=tensor("float32", 4), eps=1e-5)
    fields: dict[str, Any] = {
        "config": InitConfig(num_layers=2, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2),
        "rotary_emb_params": RotaryParams(inv_freq=tensor("float32", 1), attention_scaling=1.0),
        "norm_weights": {"final_norm": norm, "layer_0_input_layernorm": norm},
        "model_digest": "a" * 64,
        "linear_digest": "b" * 64,
        "max_message_bytes": 1024,
        "arithmetic": ("float", "int8"),
        "provision_id": None,
        "instance_id": "c" * 32,
        "layers": (0, 1),
        "max_queued_requests": 64,
        "max_queued_bytes": 2**20,
    }
    return InitReply(**fields)


def replies() -> list[tuple[str, Response | ErrorCode]]:
    """Return one reply of each kind, with the method that it answers."""
    return [
        ("Init", init_reply()),
        ("Health", HealthReply(status="ready", uptime_s=1.0, queued_requests=1, queued_bytes=2)),
        ("Linear", TensorReply(output=tensor("float32", 2, 4))),
        ("RingLinear", TensorReply(output=tensor("int32", 1, 4))),
        ("Matmul", TensorReply(output=tensor("float16", 2, 1, 2))),
        ("LMHead", ErrorCode.INTERNAL),
        ("", ErrorCode.MALFORMED_MESSAGE),
    ]


# ----------------------------------------------------------------------------------- known headers


# One for all executions, as one service has for all its clients.
_reader = RequestReader(MAX_MESSAGE_BYTES, lambda request: lambda _: (request, None))


# ------------------------------------------------------------------------------------- executing


def received(case: Sequence[bytes]) -> list[Buffer]:
    """Return frames as a transport hands them out: writable memory of their own."""
    return [memoryview(bytearray(frame)) for frame in case]


def _described(message: object) -> str:
    """Say what kind of message it is, and turn its tensors into tensors."""
    said = [type(message).__name__]
    for name in type(message).model_fields:  # type: ignore[attr-defined]
        value = getattr(message, name)
        if isinstance(value, WireTensor):
            made = to_torch(value)
            if tuple(made.shape) != value.shape or value.payload_bytes != made.nbytes:
                raise ValueError(f"{name}: a tensor of another size than was checked")
            said.append(f"{value.dtype}{made.dim()}")
    return " ".join(said)


def _request(frames: Sequence[Buffer]) -> tuple[Form, int, int | None, Request]:
    opened = open_request(frames, MAX_MESSAGE_BYTES)
    return opened.form, opened.request_id, opened.timeout_ms, read_request(opened)


def _run_request(case: Case) -> str:
    form, request_id, timeout_ms, message = _request(received(case))
    if form is Form.FRAMED:
        again = _request(encode_request(message, request_id, timeout_ms or 0))
        if again != (form, request_id, timeout_ms, message):
            raise ValueError("another request when it is encoded again")
    return f"{form.value} {_described(message)}"


def _run_reply(case: Case) -> str:
    reply = decode_reply(received(case))
    result = reply.response if reply.response is not None else reply.error
    if result is None or (reply.response is not None and reply.error is not None):
        raise ValueError("a reply that is not exactly one of result and error")
    timing = (
        reply.timing
        if isinstance(result, ErrorCode) or reply.timing
        else Timing(queue_us=0, compute_us=0)
    )
    again = decode_reply(encode_reply(Form.FRAMED, reply.request_id, reply.method, result, timing))
    if again != reply._replace(timing=timing):
        raise ValueError("another reply when it is encoded again")
    return f"{result if reply.response is None else _described(result)}"


def _known_request(frames: Sequence[Buffer]) -> tuple[Form, int, int | None, Request]:
    opened = _reader.open(frames)
    return opened.form, opened.request_id, opened.timeout_ms, _reader.read(opened)[0]


def _run_known_request(case: Case) -> str:
    """Read in full and by what is remembered; both must say the same."""

    def said(decode: Callable[[Sequence[Buffer]], object]) -> tuple[object, ...]:
        try:
            found = decode(received(case))
        except ProtocolError as error:
            return type(error), str(error), error.code
        return found, repr(found)

    if said(_known_request) != said(_request):
        raise ValueError("not the same when its header is remembered")
    return _run_request(case)


@cache
def _expecting() -> list[Expecting]:
    message = LinearRequest(
        layer_idx=0, module_names=("o_proj",), hidden_states=tensor("float32", 1, 4)
    )
    found = []
    for method, result in replies():
        if isinstance(result, TensorReply):
            output = result.output
            prepared = PreparedRequest(message, output.shape, output.dtype)
            prepared.method = method
            prepared.reply_template = reply_template(method, result, [b""])
            found.append(Expecting(prepared, (7,)))
    return found


def _run_expected_reply(case: Case) -> str:
    """What is taken for an expected reply is what decoding says, and so is never refused."""
    for expecting in _expecting():
        frames = [memoryview(bytearray(frame)) for frame in case]
        found = expecting.expected(frames)
        if found is not None and repr(found) != repr(decode_reply(frames)):
            raise ValueError("not the same when it is expected")
    return _run_reply(case)


# -------------------------------------------------------------------------------------- mutating


def mutate_frames(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change the header, the frames, or both, of a framed message."""
    header, *frames = case or (b"",)
    kind = mutator.choose.random()
    if kind < 0.5:
        header = _mutate_header(mutator, header)
    elif kind < 0.7:
        header = mutator.bytes(header)
    elif kind < 0.85:
        frames = _mutate_list(mutator, frames)
    elif kind < 0.93:
        frames = list(other[1:])
        if mutator.chance(0.2):
            header = _mutate_header(mutator, header)
    elif kind < 0.9995:
        header = _appended(mutator, header)
    else:
        header = _bomb(mutator)
    return (header, *frames)


def _mutate_header(mutator: Mutator, header: bytes) -> bytes:
    try:
        value = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, msgpack.UnpackException):
        return mutator.bytes(header)
    for _ in range(1 + (mutator.below(3) if mutator.chance(0.3) else 0)):
        value = mutator.tree(value, msgpack_junk)
    try:
        packed: bytes = msgpack.packb(value)
    except (ValueError, OverflowError, TypeError, UnicodeEncodeError):
        return mutator.bytes(header)
    return packed


def _mutate_list(mutator: Mutator, frames: list[bytes]) -> list[bytes]:
    kind, changed = mutator.below(6), list(frames)
    if kind == 0 or not changed:
        changed.insert(mutator.below(len(changed) + 1), bytes(mutator.below(33)))
        return changed
    at = mutator.below(len(changed))
    if kind == 1:
        del changed[at]
    elif kind == 2:
        changed[at] = mutator.bytes(changed[at])
    elif kind == 3:
        changed[at] = changed[at][: mutator.below(len(changed[at]) + 1)]
    elif kind == 4:
        changed[at] += bytes(1 + mutator.below(8))
    else:
        mutator.choose.shuffle(changed)
    return changed


def _appended(mutator: Mutator, header: bytes) -> bytes:
    """Put a pair more into the outermost map: one that it has already, perhaps."""
    if not header or not 0x80 <= header[0] < 0x8F:
        return mutator.bytes(header)
    with suppress(ValueError, msgpack.UnpackException, AttributeError, UnicodeEncodeError):
        fields = msgpack.unpackb(header, strict_map_key=False)
        if mutator.chance(0.5) and fields:
            name = mutator.pick(list(fields))
            more = msgpack.packb(name) + msgpack.packb(fields[name])
        else:
            more = msgpack.packb(msgpack_junk(mutator)) + msgpack.packb(msgpack_junk(mutator))
        return bytes([header[0] + 1]) + header[1:] + more
    return mutator.bytes(header)


_ARRAY_64 = b"\xdc\x00\x40"


def _many(count: int, item: bytes) -> bytes:
    """Return a map of so many keys, each with this."""
    return (
        b"\xde" + count.to_bytes(2, "big") + b"".join(b"\xa4%04x" % n + item for n in range(count))
    )


# Little that claims, or becomes, much; by how many bytes it may have.
_BOMBS: tuple[Callable[[int], bytes], ...] = (
    lambda size: b"\x81\xa1x\xdc\xff\xff" + b"\x90" * size,
    lambda size: b"\x81\xa1x" * (size // 3) + b"\xc0",
    lambda size: b"\x91" * size,
    # Sizes of an array, a map, a string, bytes and an extension that are not there.
    *(
        (lambda size, kind=kind: b"\x81\xa1x" + kind + b"\xff" * 4)  # type: ignore[misc]
        for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")
    ),
    lambda size: _many(4096, b"\xc0"),
    lambda size: _many(4096, b"\x80"),
    lambda size: _many(512, _ARRAY_64 + b"\x00" * 64),
    lambda size: b"\x81\xa1x" + _ARRAY_64 + (_ARRAY_64 + b"\x90" * 64) * (size // 70),
    lambda size: b"\x81\xa1x\xc6" + size.to_bytes(4, "big") + bytes(size),
)


def _bomb(mutator: Mutator) -> bytes:
    size = _BOMB_BYTES if mutator.chance(0.1) else MAX_HEADER_BYTES - 200
    made: bytes = mutator.pick(_BOMBS)(size)
    return made


def _mutate_numbers(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change what is not remembered: the numbers, the frames; at times anything."""
    header, *frames = case or (b"",)
    kind = mutator.choose.random()
    if kind < 0.5:
        for start in (12, 33) if REQUEST.split(header) else (12, 35, 55):
            if len(header) >= start + 8 and mutator.chance(0.6):
                number = mutator.pick(INTERESTING) & (2**64 - 1)
                header = header[:start] + struct.pack(">Q", number) + header[start + 8 :]
        return (header, *frames)
    if kind < 0.75:
        return (header, *_mutate_list(mutator, frames))
    if kind < 0.85:
        return (header, *other[1:])
    return mutate_frames(mutator, case, other)


def mutate_inline(mutator: Mutator, case: Case, other: Case) -> Case:
    """Change a message of one frame."""
    if mutator.chance(0.03):
        return (*case, *other)
    if mutator.chance(0.0005):
        return (_bomb(mutator),)
    (header, *rest) = case or (b"",)
    kind = mutator.below(10)
    if kind < 7:
        header = _mutate_header(mutator, header)
    elif kind < 8:
        header = _appended(mutator, header)
    else:
        header = mutator.bytes(header)
    return (header, *rest)


# ---------------------------------------------------------------------------------------- seeds


def copied(frames: Sequence[Buffer]) -> Case:
    """Return frames as a case."""
    return tuple(bytes(frame) for frame in frames)


def framed_requests() -> list[Case]:
    """Return every kind of request in the framed form."""
    return [copied(encode_request(request, 7, 30_000)) for request in requests()]


def inline_requests() -> list[Case]:
    """Return every kind of request in the inline form, and one module alone."""
    bodies = [(request.method, to_inline(request)) for request in requests()]
    for _, body in bodies:
        body.pop("bias", None)
    linear = dict(bodies[4][1])
    linear["module_name"] = linear.pop("module_names")[0]
    bodies.append(("Linear", linear))
    return [(msgpack.packb({"method": method, "request": body}),) for method, body in bodies]


def framed_replies() -> list[Case]:
    """Return every kind of reply in the framed form, with and without a time."""
    timing = Timing(queue_us=3, compute_us=4)
    return [
        copied(encode_reply(Form.FRAMED, 7, method, result, claim))
        for method, result in replies()
        for claim in (timing, None)
    ]


# --------------------------------------------------------------------------------------- streams


def _messages_in(data: bytes, max_frames: int) -> tuple[list[list[bytes]], bool]:
    """Read a stream in the plainest way: whole messages, and whether a refusal follows them."""
    messages: list[list[bytes]] = []
    at = 0
    while len(data) - at >= 4:
        (count,) = struct.unpack_from("<I", data, at)
        if not 1 <= count <= max_frames:
            return messages, True
        if len(data) - at < 4 + 8 * count:
            break
        sizes = struct.unpack_from(f"<{count}Q", data, at + 4)
        if sum(sizes) > MAX_MESSAGE_BYTES:
            return messages, True
        position, frames = 4 + 8 * count, []
        for size in sizes:
            position += -position % 64
            frames.append(data[at + position : at + position + size])
            position += size
        if len(data) - at < position:
            break
        messages.append(frames)
        at += position
    return messages, False


def _stream(max_frames: int, run: Callable[[Case], str]) -> Callable[[Case], str]:
    pool = MemoryPool()

    def execute(case: Case) -> str:
        writer, reading = socket.socketpair()
        refused: ProtocolError | None = None
        found: list[list[bytes]] = []
        with writer, reading:
            writer.setblocking(False)
            reader = MessageReader(
                reading,
                pool,
                where="peer",
                max_frames=max_frames,
                max_message_bytes=MAX_MESSAGE_BYTES,
            )
            try:
                for piece in case:
                    if piece:
                        writer.send(piece)
                        _drain(reader)
                writer.close()
                while reader.read(socket.MSG_DONTWAIT):
                    pass
            except ProtocolError as error:
                refused = error
            found = [[bytes(frame) for frame in frames] for frames, _ in reader.messages]
        expected, refusal = _messages_in(b"".join(case), max_frames)
        if found != expected or (refused is not None) != refusal:
            raise ValueError("other messages than are in the stream")
        if refused is not None:
            raise refused
        said = []
        for message in found[:2]:
            try:
                said.append(run(tuple(message)))
            except ProtocolError as error:
                said.append(error.code.value)
        return f"{min(len(found), 3)} messages: {' '.join(said)}"

    return execute


def _drain(reader: MessageReader) -> None:
    with suppress(BlockingIOError):
        while reader.read(socket.MSG_DONTWAIT):
            pass


def _run_http_body(case: Case) -> str:
    """Read a body: one message, whole, with nothing behind it."""
    data = b"".join(case)
    messages, refused = _messages_in(data, MAX_REQUEST_FRAMES)
    whole = not refused and len(messages) == 1 and len(b"".join(to_pieces(messages[0])[0]))
    try:
        frames = frames_in(
            memoryview(bytearray(data)),
            "peer",
            max_frames=MAX_REQUEST_FRAMES,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
    except ProtocolError:
        if whole == len(data) and data:
            raise ValueError("a whole message that is refused") from None
        raise
    if whole != len(data) or [bytes(frame) for frame in frames] != messages[0]:
        raise ValueError("a message that is none")
    return _run_request(tuple(bytes(frame) for frame in frames))


def _stream_seeds(messages: list[Case]) -> list[Case]:
    whole = [b"".join(to_pieces(message)[0]) for message in messages]
    large = (messages[1][0], bytes(200_000))
    return [
        *((stream,) for stream in whole),
        (whole[0] + whole[1], whole[2]),
        (whole[1][:3], whole[1][3:50], whole[1][50:] + whole[2][:70], whole[2][70:]),
        tuple(
            b"".join(to_pieces(large)[0])[start : start + 60_000]
            for start in range(0, 240_000, 60_000)
        ),
        (b"".join(to_pieces((b"", b"", b""))[0]),),
    ]


def _mutate_stream(mutator: Mutator, case: Case, other: Case) -> Case:
    data = b"".join(case)
    kind = mutator.below(10)
    if kind < 3 and len(data) >= 20:
        # The prefix: how many frames, how large.
        number = mutator.pick(INTERESTING) & (2**64 - 1)
        at, form = mutator.pick(((0, "<I"), (4, "<Q"), (12, "<Q")))
        changed = bytearray(data)
        struct.pack_into(form, changed, at, number & (256 ** struct.calcsize(form) - 1))
        data = bytes(changed)
    elif kind < 6:
        data = mutator.bytes(data)
    elif kind < 8:
        data += b"".join(other)
    elif kind < 9:
        sizes = [mutator.below(70) for _ in range(1 + mutator.below(4))]
        frames = [bytes(size) for size in sizes]
        message = b"".join(to_pieces(frames)[0])
        data = (message + data) if layout(tuple(sizes)).total == len(message) else data
    return _cut(mutator, data[:600_000])


def _cut(mutator: Mutator, data: bytes) -> Case:
    """Cut a stream into pieces, none larger than a socket takes at once."""
    pieces, at = [], 0
    while at < len(data):
        most = mutator.pick((1, 7, 64, 1000, 60_000)) if len(pieces) < 6 else 60_000
        size = 1 + mutator.below(most)
        pieces.append(data[at : at + size])
        at += size
    return tuple(pieces)


# --------------------------------------------------------------------------------------- targets


WIRE_TARGETS = (
    Target("request-framed", framed_requests, mutate_frames, _run_request, (ProtocolError,), 4),
    Target(
        "request-framed-known",
        framed_requests,
        _mutate_numbers,
        _run_known_request,
        (ProtocolError,),
        2,
    ),
    Target("request-inline", inline_requests, mutate_inline, _run_request, (ProtocolError,), 3),
    Target("reply", framed_replies, mutate_frames, _run_reply, (ProtocolError,), 4),
    Target(
        "reply-known",
        framed_replies,
        _mutate_numbers,
        _run_expected_reply,
        (ProtocolError,),
        2,
    ),
    Target(
        "stream-of-requests",
        lambda: _stream_seeds(framed_requests()),
        _mutate_stream,
        _stream(MAX_REQUEST_FRAMES, _run_request),
        (ProtocolError,),
        1,
    ),
    Target(
        "stream-of-replies",
        lambda: _stream_seeds(framed_replies()),
        _mutate_stream,
        _stream(MAX_REPLY_FRAMES, _run_reply),
        (ProtocolError,),
        1,
    ),
    Target(
        "http-body",
        lambda: _stream_seeds(framed_requests())[: len(framed_requests())],
        _mutate_stream,
        _run_http_body,
        (ProtocolError,),
        1,
    ),
)
