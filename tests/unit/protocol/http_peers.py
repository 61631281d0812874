"""An HTTP server that answers what a test tells it to, byte for byte."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from gpu_side.encoding import Form, encode_reply, open_request
from protocol.messages import TensorReply
from protocol.shared_memory import frames_in
from protocol.stream_wire import to_pieces
from protocol.tensors import Buffer, from_torch

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
