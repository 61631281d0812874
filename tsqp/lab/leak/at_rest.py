"""What a service's disk holds of a session that had to make room for another one.

It is written as the service writes it: the cache that the session's requests have filled, by the
service's own code. Nothing of it crosses, so it stands beside the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_side.encoding import open_request, read_request
from gpu_side.segment_parts import Part, read_parts
from gpu_side.session_cache import CacheShape, Window
from gpu_side.sessions import SessionStore
from gpu_side.spill import SessionName, SpilledSession, SpillKey
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.messages import SegmentRequest
from protocol.tensors import raw_bytes
from tsqp.lab.leak.trace import Trace

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


def disk_of(sessions: SessionStore, trace: Trace, context: int, directory: Path) -> Disk | None:
    """Write a trace's session to disk, and return what stands there; None if no segment crossed.

    `context`: of the model, in tokens; `directory`: for the file, which is gone at the end. Raises
    ProtocolError where the service has lost the session, and OSError.
    """
    requests = [
        read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
        for frames in trace.messages
    ]
    segments = [request for request in requests if isinstance(request, SegmentRequest)]
    if not segments:
        return None
    last = min(reversed(segments), key=lambda request: request.first_layer)
    layers = last.first_layer, last.last_layer
    part = next(part for part in read_parts(last, context) if part.rows)
    end = part.start + part.rows
    # The session goes on by a token, as for a request that comes next; that one is not written.
    parts = [Part(part.session, end, 1, end + 1)]
    window = Window(last.sinks, last.recent)
    with sessions.running(b"", layers, parts, _NO_SHAPE, window) as (cache,):
        clear = b"".join(bytes(raw_bytes(tensor[:, :, : cache.stored])) for tensor in cache.tensors)
        name = SessionName(b"", part.session, *layers)
        found = _Found(directory, name, cache, SpillKey())
        try:
            return Disk(found.contents(), clear)
        finally:
            found.close()
