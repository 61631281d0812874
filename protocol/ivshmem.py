"""The client's end of memory that a virtual machine has as a device; otherwise as `protocol.shm`.

QEMU's device `ivshmem-plain` lets a guest map a file of its host: in the guest it is `resource2` of
the device in /sys. (Not `resource2_wc`: what is written there may arrive in another order.) A file
cannot be handed over vsock, so each end maps the one that its own operator has named.

The memory holds the segment of one client, and what earlier clients have left. So the client says a
random number over the stream, which is in the head as well. It uses slots once the service has
written the number back: then it has mapped this memory, and writes nothing more for others. Until
then messages go over the stream.

The host can make its file smaller, and the kernel then ends us (SIGBUS) when we touch the rest:
that denies service, as a host always can, and tells it nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence

from protocol.endpoint import parse_endpoint
from protocol.errors import EndpointError
from protocol.shared_memory import (
    ATTACH,
    MAGIC,
    SESSION_BYTES,
    SMALLEST,
    TAKEN,
    Lane,
    areas_for,
    lay_out,
)
from protocol.shm import ShmChannel
from protocol.tensors import Buffer


class IvshmemChannel(ShmChannel):
    """Our client over the memory of a device."""

    # Locked while we are connected: no other client of this machine lays out its own there.
    _file: int | None = None
    # A segment that the service has not taken yet, its memory, and its number.
    _offered: tuple[Lane, mmap.mmap, bytes] | None = None

    def _share(self, connection: socket.socket) -> None:
        path = parse_endpoint(self.endpoint).memory
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(self._file).st_size
            EndpointError.unless(size >= SMALLEST, path, f"{size} bytes", f"{SMALLEST} or more")
            areas = areas_for(self._max_message_bytes, self._max_reply_bytes, size)
            mapped = mmap.mmap(self._file, areas.total)
        except BlockingIOError:
            raise EndpointError(path, "another client", "one at a time") from None
        except OSError as error:
            raise EndpointError(
                path, os.strerror(error.errno or 0), "a file to map (resource2)"
            ) from None
        ours = mapped[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)))
        EndpointError.unless(ours, path, "something else in it", "zeros, or a segment")
        session = os.urandom(SESSION_BYTES)
        self._offered = lay_out(mapped, areas, session), mapped, session
        connection.sendall(ATTACH + session)

    def _write(self, frames: Sequence[Buffer], most_s: float) -> None:
        if self._offered is not None and self._offered[1][TAKEN] == self._offered[2]:
            self._use(self._offered[0])
            self._offered = None
        super()._write(frames, most_s)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._offered = None
        if self._file is not None:
            # By itself it would stay locked as long as it is mapped.
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None
