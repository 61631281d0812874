"""A service that replies before it has read a request gets that request's bytes, and no others.

What the kernel has not taken waits in the TEE's memory while the forward pass goes on. Were that
memory written to, or given to another tensor, the service would read what was never masked.
"""

import fcntl
import queue
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from gpu_side.encoding import encode_reply
from protocol import stream_wire
from protocol.errors import ErrorCode, ServiceError
from protocol.messages import SEED_BYTES, InitRequest, Request, Response
from protocol.prepared import Payload, PreparedRequest
from protocol.stream import StreamChannel
from protocol.stream_wire import layout, to_pieces
from protocol.tensors import WireTensor
from tee_side.policy.placement import builtin_policies, load_policy
from tests.kit.model import LoopbackChannel, Models, token_ids

# Segments ask once a step, of rows that nothing is computed from in their place.
MASKED = [
    name
    for name in builtin_policies()
    if load_policy(name).masks and "segment" not in load_policy(name).operators
]
# The least that the kernel takes: most of a request waits in the TEE.
KERNEL_BYTES = 4096
LARGE_BYTES = 32 * 1024
ROWS = 200
TIMEOUT_S = 60.0

# A request's id, its method, and what to reply.
Asked = tuple[int, str, Response | ErrorCode]


class Accomplice(StreamChannel):
    """A client that tells the service each reply in advance, and notes what its requests held.

    It says so when the next request is made, too: then the forward pass has gone on, and has had
    its use for memory that nobody holds any more.
    """

    def __init__(self, endpoint: str, true: LoopbackChannel) -> None:
        super().__init__(endpoint, timeout_s=TIMEOUT_S)
        self._true = true
        self.asked: queue.Queue[Asked | None] = queue.Queue()
        self.sent: list[list[bytes]] = []

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        fields = (getattr(request, name) for name in type(request).model_fields)
        self.sent.append([bytes(field.data) for field in fields if isinstance(field, WireTensor)])
        last = isinstance(request, InitRequest)
        reply = ErrorCode.INTERNAL if last else self._true.answer(request)
        self.asked.put((self._last_id + 1, request.method, reply))
        return super().submit(request, timeout_s)

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        return self.submit(prepared.request(payload), timeout_s)


class EarlyService:
    """Reads the head of a request, replies, and reads the rest when the next one is made."""

    def __init__(self, listener: socket.socket, channel: Accomplice) -> None:
        self._listener = listener
        self._channel = channel
        self.received: list[list[bytes]] = []
        # Requests of which at least half was still in the TEE when their reply was sent.
        self.early = 0

    def serve(self) -> None:
        asking, _ = self._listener.accept()  # for signs of life
        connection, _ = self._listener.accept()
        connection.settimeout(TIMEOUT_S)
        with asking, connection:
            rest: list[int] = []
            while True:
                asked = self._channel.asked.get(timeout=TIMEOUT_S)
                # Each frame with the zeros before it.
                pieces = [_exactly(connection, count) for count in rest]
                if self.received:
                    self.received[-1] += pieces
                if asked is None:
                    return
                rest = self._head(connection)
                self.received.append([])
                (queued,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
                self.early += sum(rest) > LARGE_BYTES and queued < sum(rest) / 2
                request_id, method, reply = asked
                frames = encode_reply("framed", request_id, method, reply)
                connection.sendall(b"".join(to_pieces(frames)[0]))

    @staticmethod
    def _head(connection: socket.socket) -> list[int]:
        """Read up to the end of the first frame; return the sizes of what follows."""
        (count,) = struct.unpack("<I", _exactly(connection, 4))
        sizes = struct.unpack(f"<{count}Q", _exactly(connection, 8 * count))
        places = layout(sizes).places
        _exactly(connection, places[0].stop - 4 - 8 * count)
        ends = [place.stop for place in places]
        return [end - before for before, end in pairwise(ends)]


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(count - len(found))
        assert piece, "the client has closed the connection"
        found += piece
    return bytes(found)


@contextmanager
def _serving(folder: Path, true: LoopbackChannel) -> Iterator[tuple[Accomplice, EarlyService]]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder))
        listener.listen(1)
        listener.settimeout(TIMEOUT_S)
        channel = Accomplice(f"unix://{folder}", true)
        service = EarlyService(listener, channel)
        thread = threading.Thread(target=service.serve)
        thread.start()
        try:
            yield channel, service
            # What still waits goes out with another request.
            with pytest.raises(ServiceError):
                channel.call(InitRequest())
        finally:
            channel.asked.put(None)
            thread.join(TIMEOUT_S)
            channel.close()
        assert not thread.is_alive()


@pytest.mark.parametrize(("name", "micro_batches"), [*zip(MASKED, cycle((1, 2)))])
def test_what_is_read_after_the_reply_is_the_request(
    saved_model: Models,
    name: str,
    micro_batches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_wire, "SOCKET_BUFFER_BYTES", KERNEL_BYTES)
    model, policy = saved_model("llama", num_hidden_layers=2), load_policy(name)
    with ExitStack() as stack:
        serving = [
            stack.enter_context(_serving(tmp_path / str(number), true))
            for number, true in enumerate(model.services(policy))
        ]
        channels = cast("Any", [channel for channel, _ in serving])
        tee = model.tee(policy, channels=channels, micro_batches=micro_batches)
        # In the phase that leaves the TEE, whichever it is.
        tee.logits(token_ids(ROWS), phase="decode")
    for channel, service in serving:
        # A seed is too short to wait in the TEE.
        sizes = [sum(map(len, sent)) for sent in channel.sent]
        assert service.early >= 4 or (channel in channels[1:] and SEED_BYTES in sizes)
        assert len(service.received) == len(channel.sent)
        for received, sent in zip(service.received, channel.sent, strict=True):
            assert len(received) == len(sent)
            for piece, tensor in zip(received, sent, strict=True):
                assert piece.endswith(tensor), "other bytes than those of the request"
                assert not any(piece[: len(piece) - len(tensor)])
