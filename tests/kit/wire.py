"""Raw sockets and hand-made messages for the fault tests: nothing of ours encodes them."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
import zmq

from gpu_side.encoding import Form, encode_reply, open_request
from gpu_side.handler import RequestHandler
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_listener import StreamListener
from protocol.encoding import encode_request
from protocol.errors import ErrorCode
from protocol.liveness import PROBE
from protocol.messages import InitRequest, SegmentRequest, TensorReply
from protocol.shared_memory import frames_in
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


def linear_body(**changes: Any) -> dict[str, Any]:
    """Return a good inline Linear body, changed; `...` removes a field."""
    body = {
        "layer_idx": 0,
        "module_name": "q_proj",
        "hidden_states": bytes(HIDDEN_BYTES),
        "shape": [1, HIDDEN],
        "dtype": "torch.float32",
    } | changes
    return {key: value for key, value in body.items() if value is not ...}


def embedding_body(ids: list[int], **changes: Any) -> dict[str, Any]:
    """Return an inline Embedding body."""
    data = b"".join(n.to_bytes(8, "little", signed=True) for n in ids)
    return {"input_ids": data, "input_shape": [1, len(ids)], "dtype": "torch.float32"} | changes


def matmul_body(a: list[int], b: list[int]) -> dict[str, Any]:
    """Return an inline Matmul body of zeros."""
    sizes = {"a_buffer": a, "b_buffer": b}
    buffers = {}
    for name, shape in sizes.items():
        elements = 1
        for n in shape:
            elements *= n
        buffers[name] = bytes(4 * elements)
    return {**buffers, "a_shape": a, "b_shape": b, "dtype": "torch.float32"}


def header(**changes: Any) -> bytes:
    """Return a good framed Linear header, changed; `...` removes a field."""
    fields = {
        "version": 1,
        "request_id": 7,
        "timeout_ms": TIMEOUT_MS,
        "method": "Linear",
        "request": {
            "layer_idx": 0,
            "module_names": ["q_proj"],
            "hidden_states": {"dtype": "float32", "shape": [1, HIDDEN], "frame": 1},
        },
    } | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))


def framed_linear(**changes: Any) -> bytes:
    """Return a framed Linear header with changed fields of the message itself."""
    fields = msgpack.unpackb(header())["request"] | changes
    return header(request={k: v for k, v in fields.items() if v is not ...})


def is_healthy(endpoint: str) -> bool:
    """Whether a client of each form gets a good answer."""
    (reply,) = exchange(zmq.REQ, endpoint, [inline("Linear", linear_body())])
    framed = exchange(zmq.DEALER, endpoint, [header(), bytes(HIDDEN_BYTES)])
    statuses = {msgpack.unpackb(reply)["status"], msgpack.unpackb(framed[0])["status"]}
    return statuses == {"success"} and len(framed) == 2


LARGE = 2**20
REFUSED = encode_reply(Form.FRAMED, 1, "Init", ErrorCode.INTERNAL)


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
    return encode_reply(Form.FRAMED, request_id, "LMHead", reply)


def slow_reader(raw: socket.socket) -> tuple[threading.Thread, bytearray]:
    """Make a thread that reads a little every millisecond, as long as anything comes."""
    received, pace = bytearray(), threading.Event()

    def read() -> None:
        with suppress(OSError):
            while data := raw.recv(36_000):
                received.extend(data)
                pace.wait(0.001)

    return threading.Thread(target=read), received


def request_of(listener: StreamListener, raw: socket.socket) -> tuple[bytes, ...]:
    """Send a request, and return the route of its reply."""
    raw.sendall(request_bytes())
    assert listener.wait(timeout_ms=10_000)
    incoming = listener.receive()
    assert incoming is not None
    return incoming.route


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


# Takes the body of a request, and returns an answer; nothing ends the connection.
Answer = Callable[[bytes], bytes]


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def message(frames: list[Buffer]) -> bytes:
    return b"".join(bytes(piece) for piece in to_pieces(frames)[0])


def reply_to(body: bytes, elements: int = 4) -> bytes:
    """Return the body that answers a request with ones."""
    frames = frames_in(memoryview(bytearray(body)), "test", max_frames=64, max_message_bytes=2**30)
    opened = open_request(frames, 2**30)
    reply = TensorReply(output=from_torch(torch.ones(elements)))
    return message(encode_reply(Form.FRAMED, opened.request_id, opened.method, reply))


def good(body: bytes, instance: str = "aa") -> bytes:
    return answer(200, reply_to(body), f"TSQP-Instance: {instance}")


@dataclass
class HttpPeer:
    """`answers`: one request each; the last is for all that follow."""

    answers: list[Answer]
    url: str = ""
    # The head and the body of each request.
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    # Set when a client has closed its connection.
    closed: threading.Event = field(default_factory=threading.Event)

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while True:
                head = b""
                try:
                    while not head.endswith(b"\r\n\r\n"):
                        if not (line := lines.readline()):
                            self.closed.set()
                            return
                        head += line
                    headers = head.decode("latin-1").lower()
                    size = int(headers.partition("content-length: ")[2].split("\r\n")[0])
                    body = lines.read(size)
                    self.requests.append((head.decode("latin-1"), body))
                    now = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                    if not (said := now(body)):
                        return
                    connection.sendall(said)
                    if b"Connection: close" in said:
                        return
                except OSError:
                    self.closed.set()
                    return


@contextmanager
def http_peer(*answers: Answer, tls: ssl.SSLContext | None = None) -> Iterator[HttpPeer]:
    """Serve on a port of loopback until the block ends."""
    peer = HttpPeer(list(answers))
    threads: list[threading.Thread] = []
    made: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer.url = f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}"

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                    if tls is not None:
                        connection = tls.wrap_socket(connection, server_side=True)
                except ssl.SSLError:
                    continue
                except OSError:
                    return
                made.append(connection)
                threads.append(threading.Thread(target=peer.serve, args=(connection,)))
                threads[-1].start()

        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield peer
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for connection in made:
                with suppress(OSError):  # it may have been closed, by either end
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


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
        """Return what the service computes."""
        incoming = Incoming((self.name,), [], 0)
        reply, work = self.handler.prepare(request)(request, incoming)
        assert work is None
        assert isinstance(reply, TensorReply)
        return to_torch(reply.output)
