"""What reads the wire: requests and replies, framed and inline, and streams of them.

What decodes is looked into as well: its tensors become torch tensors, and encoded again it is read
as the same message. The runner acts on an Init reply, the service on a request.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from gpu_side.encoding import MAX_REQUEST_FRAMES, encode_reply
from gpu_side.handler import RequestHandler
from gpu_side.sessions import SessionSettings
from gpu_side.weights import load_weights
from protocol.encoding import MAX_REPLY_FRAMES, decode_reply, encode_request, reply_template
from protocol.errors import ErrorCode, ModelMismatchError, ProtocolError, ReplyError, ServiceError
from protocol.messages import LinearRequest, TensorReply
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.prepared import PreparedRequest
from protocol.stream_wire import MemoryPool, MessageReader, frames_in
from protocol.tensors import Buffer, WireTensor, to_torch
from tee_side.remote.services.member import ServiceCheck
from tests.fuzz.engine import Target
from tests.fuzz.files import tiny_model
from tests.kit import mutate
from tests.kit.mutate import Case
from tests.kit.wire import (
    MAX_BYTES,
    Expecting,
    KnowingReader,
    as_received,
    outcome_of,
    read_in_full,
)


def _case(frames: Sequence[Buffer]) -> Case:
    return tuple(bytes(frame) for frame in frames)


# ---------------------------------------------------------------------------- messages


def _described(message: object) -> str:
    """Say what kind of message it is, and turn its tensors into tensors."""
    said = [type(message).__name__]
    for value in vars(message).values():
        if isinstance(value, WireTensor):
            made = to_torch(value)
            if tuple(made.shape) != value.shape or value.payload_bytes != made.nbytes:
                raise ValueError("a tensor of another size than was checked")
            said.append(f"{value.dtype}{made.dim()}")
    return " ".join(said)


@cache
def _headers() -> dict[bytes, Any]:
    """Return what is remembered of the headers among the seeds."""
    reader = KnowingReader()
    for case in FRAMED.seeds():
        reader.read_known(case)
    return reader.known


def request(case: Case) -> str:
    """Read a request in full, by what is remembered of its header, and as it is encoded again."""
    reader = KnowingReader()
    reader.known |= _headers()  # and nothing of the cases before this one, which others may be
    known = len(case) > 1 and reader.open(as_received(case)).known is not None
    in_full = outcome_of(read_in_full, case)
    # Twice: the first may be what is remembered.
    if any(outcome_of(reader.read_known, case) != in_full for _ in range(2)):
        raise ValueError("not the same when its header is remembered")
    form, request_id, timeout_ms, method, message = read_in_full(case)
    if form == "framed":
        again = read_in_full(encode_request(message, request_id, timeout_ms or 0))
        if again != (form, request_id, timeout_ms, method, message):
            raise ValueError("another request when it is encoded again")
    return f"{form} {_described(message)}" + " known" * known


@cache
def _expecting() -> list[Expecting]:
    """Return what waits for the replies among the seeds."""
    expecting = []
    nothing = LinearRequest(
        layer_idx=0, module_names=("o_proj",), hidden_states=WireTensor("float32", (1,), b"")
    )
    for case in REPLY.seeds():
        result = decode_reply(as_received(case))
        if isinstance(result.response, TensorReply):
            output = result.response.output
            prepared = PreparedRequest(nothing, output.shape, output.dtype)
            prepared.method = result.method
            prepared.reply_template = reply_template(result.method, result.response, [b""])
            expecting.append(Expecting(prepared, (result.request_id,)))
    return expecting


def reply(case: Case) -> str:
    """Read a reply in full, as one that is expected, and as it is encoded again."""
    taken = False
    for expecting in _expecting():
        frames = as_received(case)
        expected = expecting.expected(frames)
        taken |= expected is not None
        if expected is not None and repr(expected) != repr(decode_reply(frames)):
            raise ValueError("not the same when it is expected")
    found = decode_reply(as_received(case))
    result = found.error if found.response is None else found.response
    if result is None or (found.response is not None and found.error is not None):
        raise ValueError("a reply that is not exactly one of result and error")
    again = encode_reply("framed", found.request_id, found.method, result, found.timing)
    if decode_reply(again) != found:
        raise ValueError("another reply when it is encoded again")
    kind = str(result) if isinstance(result, ErrorCode) else _described(result)
    return kind + " expected" * taken


# ---------------------------------------------------------------------------- streams


def _messages_in(data: bytes, max_frames: int) -> tuple[list[list[bytes]], int, bool]:
    """Read a stream in the plainest way: whole messages, their bytes, whether a refusal follows."""
    messages: list[list[bytes]] = []
    at = 0
    while len(data) - at >= 4:
        (count,) = struct.unpack_from("<I", data, at)
        if not 1 <= count <= max_frames:
            return messages, at, True
        if len(data) - at < 4 + 8 * count:
            break
        sizes = struct.unpack_from(f"<{count}Q", data, at + 4)
        if sum(sizes) > MAX_BYTES:
            return messages, at, True
        position, frames = 4 + 8 * count, []
        for size in sizes:
            position += -position % 64
            frames.append(data[at + position : at + position + size])
            position += size
        if len(data) - at < position:
            break
        messages.append(frames)
        at += position
    return messages, at, False


def _drain(reader: MessageReader) -> None:
    with suppress(BlockingIOError):
        while reader.read(socket.MSG_DONTWAIT):
            pass


def _stream(max_frames: int, read: Callable[[Case], str]) -> Callable[[Case], str]:
    """Return a reader of a stream that comes in pieces, and of the messages in it."""
    pool = MemoryPool()
    limits = {"max_frames": max_frames, "max_message_bytes": MAX_BYTES}

    def execute(case: Case) -> str:
        refused: ProtocolError | None = None
        writer, reading = socket.socketpair()
        with writer, reading:
            reader = MessageReader(reading, pool, where="peer", **limits)
            try:
                for piece in case:
                    for at in range(0, len(piece), 60_000):  # which a socket takes at once
                        writer.sendall(piece[at : at + 60_000])
                        _drain(reader)
            except ProtocolError as error:
                refused = error
            found = [[bytes(frame) for frame in frames] for frames, _ in reader.messages]
        expected, _, refusal = _messages_in(b"".join(case), max_frames)
        if found != expected or (refused is not None) != refusal:
            raise ValueError("other messages than are in the stream")
        if refused is not None:
            raise refused
        said = []
        for message in found[:2]:
            try:
                said.append(read(tuple(message)))
            except ProtocolError as error:
                said.append(error.code.value)
        return f"{min(len(found), 3)} messages: {' '.join(said)}"

    return execute


def http_body(case: Case) -> str:
    """Read a body: one message, whole, with nothing behind it."""
    data = b"".join(case)
    messages, size, refused = _messages_in(data, MAX_REQUEST_FRAMES)
    whole = not refused and len(messages) == 1 and size == len(data)
    limits = {"max_frames": MAX_REQUEST_FRAMES, "max_message_bytes": MAX_BYTES}
    try:
        found = frames_in(memoryview(bytearray(data)), "peer", **limits)
    except ProtocolError:
        if whole:
            raise ValueError("a whole message that is refused") from None
        raise
    if not whole or [bytes(frame) for frame in found] != messages[0]:
        raise ValueError("a message that is none")
    return request(_case(found))


# ---------------------------------------------------------------------------- both sides


@cache
def _service() -> RequestHandler:
    cpu, both = torch.device("cpu"), ("float", "int8")
    weights = load_weights(tiny_model(), device=cpu, dtype=torch.float32, arithmetic=both)
    sessions = SessionSettings(bytes=2**18, client_bytes=2**18)
    return RequestHandler(weights, MAX_BYTES, sessions=sessions)


@cache
def _check() -> ServiceCheck:
    config, checkpoint = read_config(tiny_model()), Checkpoint(tiny_model())
    return ServiceCheck(config, checkpoint)


def handshake(case: Case) -> str:
    """Compare what a service says of itself with the model, as a runner does."""
    found = decode_reply(as_received(case))
    if found.response is None:
        raise ServiceError("Init", code=found.error or ErrorCode.INTERNAL)
    _check().verify("ipc://service", found.response)
    return "the same model"


def operators(case: Case) -> str:
    """Compute what a request asks for, as a service does."""
    message: Any = read_in_full(case)[-1]
    if message.method == "Health":
        return "Health"  # the loop's own
    with torch.inference_mode():
        response = _service().apply(message)[0]
    if isinstance(response, TensorReply):
        return f"{message.method} {response.output.dtype} {len(response.output.shape)}"
    return type(response).__name__


_target = partial(Target, change=mutate.parts, errors=(ProtocolError,))
_stream_target = partial(Target, change=mutate.parts, errors=(ProtocolError,), weight=1)
_REFUSES = (ProtocolError, ReplyError, ServiceError, ModelMismatchError)
FRAMED = _target("request-framed", request, weight=6)
REPLY = _target("reply", reply, weight=6)

WIRE = (
    FRAMED,
    _target("request-inline", request, weight=3),
    REPLY,
    _stream_target("stream-of-requests", _stream(MAX_REQUEST_FRAMES, request)),
    _stream_target("stream-of-replies", _stream(MAX_REPLY_FRAMES, reply)),
    _stream_target("http-body", http_body),
    _target("handshake", handshake, errors=_REFUSES, weight=0.5),
    _target("operators", operators, weight=1),
)
