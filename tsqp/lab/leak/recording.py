"""A service in this process that writes down every byte that reaches it.

It stands at the protocol's boundary: requests and replies are encoded, copied frame by frame as a
socket would, opened and checked; only the socket is missing. So a trace holds what a service gets,
and nothing that only the TEE knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_side.encoding import encode_reply, open_request, read_request
from gpu_side.handler import RequestHandler, Served
from gpu_side.segment_kernels import read_parts
from gpu_side.session_cache import CacheShape, SessionName, SpilledSession, Window
from gpu_side.sessions import SegmentPart
from gpu_side.weights import ServiceWeights
from protocol.channel import Channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError, ServiceError
from protocol.messages import HealthRequest, Request, Response, SegmentRequest, Timing
from protocol.prepared import Exchange, Traffic
from protocol.tensors import raw_bytes
from tsqp.lab.leak.trace import Trace, read_frames

_TIMEOUT_MS = 60_000


class AtOnce(Channel):
    """A `Channel` whose replies are there before they are waited for. `endpoint`: its name."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.traffic = endpoint, Traffic()
        self._replies: dict[int, Exchange] = {}
        self._submitted = 0

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        exchange = self._replies.pop(request_id)
        self.traffic.round_trips += 1
        self.traffic.bytes_sent += exchange.bytes_sent
        self.traffic.bytes_received += exchange.bytes_received
        return exchange

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._replies.pop(request_id, None)

    def close(self) -> None:
        """See `Channel.close`."""


class RecordingChannel(AtOnce):
    """A `Channel` to a service's operators in this process; keeps all that reached it."""

    def __init__(self, weights: ServiceWeights | Served, endpoint: str = "recording") -> None:
        super().__init__(endpoint)
        self._handler = RequestHandler(weights, DEFAULT_MAX_MESSAGE_BYTES)
        self._recorded: list[tuple[bytes, ...]] = []

    @property
    def recorded(self) -> int:
        """How many requests have come since the last trace was taken."""
        return len(self._recorded)

    def take(self) -> Trace:
        """Return what has come since this was last called."""
        trace, self._recorded = Trace(tuple(self._recorded)), []
        return trace

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """Answer at once, and keep the reply until it is waited for. Raises ServiceError."""
        self._submitted += 1
        sent = _crossed(encode_request(request, self._submitted, _TIMEOUT_MS))
        self._recorded.append(tuple(bytes(frame) for frame in sent))
        opened = open_request(sent, DEFAULT_MAX_MESSAGE_BYTES)
        result: Response | ErrorCode
        try:
            result = self.answer(read_request(opened))
        except ProtocolError as error:
            result = error.code
        timing = Timing(queue_us=0, compute_us=0)
        frames = _crossed(
            encode_reply(opened.form, opened.request_id, opened.method, result, timing)
        )
        reply = decode_reply(frames)
        if reply.response is None:
            raise ServiceError(request.method, code=reply.error or ErrorCode.INTERNAL)
        self._replies[self._submitted] = Exchange(
            reply.response,
            bytes_sent=sum(map(len, sent)),
            bytes_received=sum(map(len, frames)),
            encode_ns=0,
            elapsed_ns=0,
            decode_ns=0,
            timing=reply.timing,
            sent_ns=0,
            endpoint=self.endpoint,
        )
        return self._submitted

    def answer(self, request: Request) -> Response:
        """Compute a reply. Raises ProtocolError; KeyError for Health, which a loop answers."""
        if isinstance(request, HealthRequest):
            raise KeyError(request.method)
        response, _ = self._handler.apply(request)
        return response

    def disk_of(self, trace: Trace, context: int, directory: Path) -> Disk | None:
        """Write a trace's session to disk, and return what stands there; None if there is none.

        `context`: of the model, in tokens; `directory`: for the file, which is gone at the end.
        Raises ProtocolError where the service has lost the session, and OSError.
        """
        requests = map(read_frames, trace.messages)
        segments = [request for request in requests if isinstance(request, SegmentRequest)]
        sessions = self._handler.sessions
        if sessions is None or not segments:
            return None
        last = min(reversed(segments), key=lambda request: request.first_layer)
        layers = last.first_layer, last.last_layer
        part = next(part for part in read_parts(last, context) if part.rows)
        end = part.start + part.rows
        # The session goes on by a token, as for a request that comes next; that one is not written.
        parts = [SegmentPart(part.session, end, 1, end + 1)]
        window = Window(last.sinks, last.recent)
        with sessions.running(b"", layers, parts, _NO_SHAPE, window) as (cache,):
            kept = (tensor[:, :, : cache.stored] for tensor in cache.tensors)
            clear = b"".join(bytes(raw_bytes(tensor)) for tensor in kept)
            name = SessionName(b"", part.session, *layers)
            found = _Found(directory, name, cache)
            try:
                return Disk(found.contents(), clear)
            finally:
                found.close()


def _crossed(frames: list[Any]) -> list[memoryview]:
    """Copy frames into memory of their own, writable like what a socket hands out."""
    return [memoryview(bytearray(frame)) for frame in frames]


# ---------------------------------------------------------------------------------------- the disk

# Of what is there already a service needs no shape.
_NO_SHAPE = CacheShape(0, 0, 0, torch.float32, None)


@dataclass(frozen=True)
class Disk:
    """A session's file: `encrypted`, as the service writes it, and as it would be in the `clear`.

    Of its segment that comes first in the model.
    """

    encrypted: bytes
    clear: bytes


class _Found(SpilledSession):
    """A file whose disk was found, without the key."""

    def contents(self) -> bytes:
        self._file.seek(0)
        return bytes(self._file.read())
