"""Raw sockets and hand-made messages, which nothing of ours encodes, and a scripted channel."""

import errno
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeAlias
from unittest.mock import DEFAULT, Mock

import msgpack
import torch
import zmq

from gpu_side.encoding import (
    Form,
    OpenedRequest,
    RequestReader,
    encode_reply,
    open_request,
    read_request,
)
from gpu_side.handler import RequestHandler
from gpu_side.transport.listener import Incoming, Listener
from gpu_side.transport.stream_listener import StreamListener
from protocol.channel import Pending, PendingChannel, Received
from protocol.encoding import Reply, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.liveness import PROBE
from protocol.messages import InitRequest, Request, SegmentRequest, TensorReply
from protocol.prepared import PreparedRequest
from protocol.stream_wire import to_pieces
from protocol.tensors import Buffer, from_torch, to_torch

TIMEOUT_MS = 30_000
HIDDEN = 48
HIDDEN_BYTES = HIDDEN * 4


@contextmanager
def connected(kind: int, endpoint: str, linger_ms: int = 0) -> Iterator[zmq.Socket[bytes]]:
    """Yield a client socket with a context of its own."""
    context = zmq.Context()
    client = context.socket(kind)
    client.setsockopt(zmq.LINGER, linger_ms)
    client.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    client.connect(endpoint)
    try:
        yield client
    finally:
        client.close()
        context.term()


def exchange(kind: int, endpoint: str, frames: list[bytes]) -> list[bytes]:
    """Send one message and return the reply's frames."""
    with connected(kind, endpoint) as client:
        client.send_multipart(frames)
        return client.recv_multipart()


def inline(method: object, request: object, **more: object) -> bytes:
    """Return a message of the published schema."""
    return bytes(msgpack.packb({"method": method, "request": request, **more}))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not ...}


def linear_body(**changes: Any) -> dict[str, Any]:
    """Return a good inline Linear body, changed; `...` removes a field."""
    where = {"layer_idx": 0, "module_name": "q_proj", "hidden_states": bytes(HIDDEN_BYTES)}
    return _given({**where, "shape": [1, HIDDEN], "dtype": "torch.float32", **changes})


def embedding_body(ids: list[int], **changes: Any) -> dict[str, Any]:
    data = struct.pack(f"<{len(ids)}q", *ids)
    return {"input_ids": data, "input_shape": [1, len(ids)], "dtype": "torch.float32"} | changes


def matmul_body(a: list[int], b: list[int]) -> dict[str, Any]:
    """Return an inline Matmul body of zeros."""
    zeros = {"a_buffer": bytes(4 * math.prod(a)), "b_buffer": bytes(4 * math.prod(b))}
    return {**zeros, "a_shape": a, "b_shape": b, "dtype": "torch.float32"}


def header(**changes: Any) -> bytes:
    """Return a good framed Linear header, changed; `...` removes a field."""
    head = {"version": 1, "request_id": 7, "timeout_ms": TIMEOUT_MS, "method": "Linear"}
    hidden = {"dtype": "float32", "shape": [1, HIDDEN], "frame": 1}
    body = {"layer_idx": 0, "module_names": ["q_proj"], "hidden_states": hidden}
    return bytes(msgpack.packb(_given({**head, "request": body, **changes})))


def framed_linear(**changes: Any) -> bytes:
    """Return a framed Linear header with changed fields of the message itself."""
    return header(request=_given(msgpack.unpackb(header())["request"] | changes))


def is_healthy(endpoint: str) -> bool:
    """Whether a client of each form gets a good answer."""
    (reply,) = exchange(zmq.REQ, endpoint, [inline("Linear", linear_body())])
    framed = exchange(zmq.DEALER, endpoint, [header(), bytes(HIDDEN_BYTES)])
    statuses = {msgpack.unpackb(reply)["status"], msgpack.unpackb(framed[0])["status"]}
    return statuses == {"success"} and len(framed) == 2


def changed(message: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return nested maps with another value in one place (`a/b`); `...` leaves it out."""
    name, _, rest = path.partition("/")
    inner = changed(message[name], rest, value) if rest else value
    return _given({**message, name: inner})


# A field, the values in it that are refused alike, and how; perhaps the frames behind the header.
Rows: TypeAlias = Iterable[tuple[Any, ...]]


def not_refused(
    read: Callable[[list[Buffer]], object],
    message: dict[str, Any],
    rows: Rows,
    behind: Sequence[Buffer] = (),
) -> list[str]:
    """Return what of a table is read, or refused with another code, or in words of the message."""
    wrong = []
    for path, values, code, *frames in rows:
        for value in values:
            header, said = msgpack.packb(changed(message, path, value)), ""
            try:
                found: object = read([header, *(frames[0] if frames else behind)])
            except ProtocolError as error:
                found, said = error.code, str(error)
            if found is not code or "canary" in said:
                wrong.append(f"{path} {value!r}: got {found} ({said}), expected {code}")
    return wrong


MAX_BYTES = 8 * 2**20
Read: TypeAlias = tuple[Form, int, int | None, str, Request]


def as_received(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return frames as a transport hands them out: writable memory of their own."""
    return [memoryview(bytearray(frame)) for frame in frames]


def read_in_full(frames: Sequence[Buffer]) -> Read:
    """Read a request, and nothing of it by what is remembered of its header."""
    return _read(open_request(as_received(frames), MAX_BYTES), read_request)


class KnowingReader(RequestReader[None]):
    """Reads requests as a service does, which remembers the headers of all its clients."""

    def __init__(self) -> None:
        super().__init__(MAX_BYTES, lambda _: None)

    def read_known(self, frames: Sequence[Buffer]) -> Read:
        return _read(self.open(as_received(frames)), lambda opened: self.read(opened)[0])


def _read(opened: OpenedRequest, read: Callable[[OpenedRequest], Request]) -> Read:
    message = read(opened)
    return opened.form, opened.request_id, opened.timeout_ms, opened.method, message


def outcome_of(
    decode: Callable[[Sequence[Buffer]], tuple[Any, ...]], frames: Sequence[Buffer]
) -> tuple[object, ...]:
    """Return all that could be seen of how a message is decoded."""
    try:
        found = decode(frames)
    except ProtocolError as error:
        answered = getattr(error, "form", None), getattr(error, "request_id", None)
        return type(error), str(error), ErrorCode(error.code), *answered
    # repr, for equal values of unequal types; the fields that were set, which == leaves out.
    return found, repr(found), getattr(found[-1], "model_fields_set", None)


LARGE = 2**20
REFUSED = encode_reply("framed", 1, "Init", ErrorCode.INTERNAL)


def raw_socket(endpoint: str) -> socket.socket:
    """Connect to a Unix socket; no read takes longer than ten seconds."""
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(10)
    try:
        raw.connect(endpoint.removeprefix("unix://"))
    except OSError:
        raw.close()
        raise
    return raw


@contextmanager
def accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """Let a `StreamChannel` in: its connection for signs of life, which stays silent, and ours."""
    probing, _ = listening.accept()
    with probing:
        assert probing.recv(10) == PROBE
        served, _ = listening.accept()
        with served:
            yield served


def request_bytes(request_id: int = 1) -> bytes:
    """Return an Init request as it is written to a stream."""
    return b"".join(to_pieces(encode_request(InitRequest(), request_id, 1000))[0])


def tensor_reply(request_id: int, value: torch.Tensor) -> list[bytes | bytearray | memoryview]:
    """Return the frames of a reply to LMHead."""
    reply = TensorReply(output=from_torch(value))
    return encode_reply("framed", request_id, "LMHead", reply)


def without_descriptors(listening: socket.socket, times: int) -> Mock:
    """Return a listening socket that finds no file descriptor for its first clients."""
    full = OSError(errno.EMFILE, "Too many open files")
    accept = Mock(wraps=listening.accept, side_effect=chain([full] * times, repeat(DEFAULT)))
    return Mock(wraps=listening, accept=accept)


def slow_reader(raw: socket.socket) -> tuple[threading.Thread, bytearray]:
    """Make a thread that reads a little every millisecond, as long as anything comes."""
    received, pace = bytearray(), threading.Event()

    def read() -> None:
        with suppress(OSError):
            while data := raw.recv(36_000):
                received.extend(data)
                pace.wait(0.001)

    return threading.Thread(target=read), received


def take(listener: Listener) -> Incoming:
    """Return the message that comes."""
    assert listener.wait(timeout_ms=20_000), "no message came"
    incoming = listener.receive()
    assert incoming is not None
    return incoming


def request_of(listener: StreamListener, raw: socket.socket) -> tuple[bytes, ...]:
    """Send a request, and return the route of its reply."""
    raw.sendall(request_bytes())
    return take(listener).route


def wait_and_take(listener: StreamListener) -> Incoming | None:
    """Return a message if one comes within a moment."""
    listener.wait(timeout_ms=10)
    return listener.receive()


def look_until_refused(listener: StreamListener, count: int = 1) -> None:
    """Let the listener look until it has turned away so many, and hand out nothing."""
    until = time.monotonic() + 30
    while listener.clients_refused < count:
        assert not listener.wait(timeout_ms=20)
        assert time.monotonic() < until
    assert listener.clients_refused == count


def is_dropped(listener: StreamListener, raw: socket.socket) -> bool:
    """Say whether the listener closes a connection, having turned one away."""
    look_until_refused(listener)
    try:
        return raw.recv(10, socket.MSG_DONTWAIT) == b""
    except ConnectionResetError:  # closed with bytes that it has not read
        return True


def part(
    session: int, start: int, rows: int, *, length: int | None = None, parent: int = 0
) -> list[int]:
    """Return the numbers of one part; sessions are small numbers here."""
    length = start + rows if length is None else length
    return [7 * bool(session), session, start, rows, length, 7 * bool(parent), parent]


def segment(
    hidden: torch.Tensor, parts: Sequence[Sequence[int]], layers: tuple[int, int], **fields: Any
) -> SegmentRequest:
    """Return a request that wants all rows, unless `outputs` are among `fields`."""
    outputs = fields.pop("outputs", torch.arange(len(hidden)))
    return SegmentRequest(
        first_layer=layers[0],
        last_layer=layers[1],
        hidden_states=from_torch(hidden),
        parts=from_torch(torch.tensor(parts)),
        outputs=from_torch(outputs),
        **fields,
    )


@dataclass
class Client:
    """One client of a service in this process."""

    handler: RequestHandler
    name: bytes = b"client"

    def ask(self, request: SegmentRequest) -> torch.Tensor:
        incoming = Incoming((self.name,), [], 0)
        reply, work = self.handler.prepare(request)(request, incoming)
        assert work is None
        assert isinstance(reply, TensorReply)
        return to_torch(reply.output)


class ScriptedChannel(PendingChannel):
    """A transport that does what a test says. `script`: what `_receive` comes to, step by step.

    Frames are a message that arrives so many ms after the last request; "lost" is a connection that
    is lost, "unseen" one that is, and is noticed only by looking. `sent`: each message's frames.
    """

    def __init__(self, max_message_bytes: int = 10_000) -> None:
        super().__init__("scripted", timeout_s=5.0, max_message_bytes=max_message_bytes)
        self.sent: list[list[bytes]] = []
        self.script: deque[tuple[list[Buffer], int] | str] = deque()
        self.unseen = False
        self.sent_ns = 10**12

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        self._refuse_second_connection(method)
        self.sent.append([bytes(frame) for frame in frames])
        assert size == sum(map(len, self.sent[-1]))
        self.patience_s = timeout_s
        return self.sent_ns

    def _receive(self, deadline: float) -> Received | None:
        if not self.script:
            return None
        step = self.script.popleft()
        if isinstance(step, str):
            self._connection += step == "lost"
            self.unseen |= step == "unseen"
            return self._receive(deadline) if step == "unseen" else None
        frames, after_ms = step
        views = [memoryview(bytearray(frame)) for frame in frames]
        return views, self.sent_ns + after_ms * 1_000_000

    def _was_replaced(self, connection: int) -> bool:
        self._connection += self.unseen
        self.unseen = False
        return self._connection != connection

    def close(self) -> None:
        pass


class Expecting(ScriptedChannel):
    """Waits for the replies to requests of one kind with these ids."""

    def __init__(self, prepared: PreparedRequest, ids: Iterable[int]) -> None:
        super().__init__()
        for request_id in ids:
            self._pending[request_id] = Pending(
                method=prepared.method, prepared=prepared, deadline=0.0, timeout_s=0.0
            )

    def expected(self, frames: Sequence[memoryview]) -> Reply | None:
        """Return the reply if it is taken without being decoded."""
        return self._expected_reply(frames)
