"""The service's end of memory that a virtual machine has as a device (`protocol.ivshmem`).

The file is the operator's, as QEMU has it (memory-backend-file, share=on), and no client names one.
Whatever the virtual machine writes into it, the file keeps its size: nothing is missing when the
service touches it, as long as the operator does not truncate it.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat

from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.shared_memory import ATTACH, LARGEST, SESSION_BYTES, SMALLEST, TAKEN, Lane, areas_in


class DeviceMemory:
    """The memory in a file, mapped as long as we listen. Raises EndpointError for another file."""

    def __init__(self, path: str) -> None:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                size = min(_size_of(path, file), LARGEST)
                # Room is taken now: where the file system is full, the kernel ends a process that
                # touches a page that is not there yet.
                os.posix_fallocate(file, 0, size)
                self._mapped = mmap.mmap(file, size)
            finally:
                os.close(file)
        except OSError as error:
            got = os.strerror(error.errno or 0)
            raise EndpointError(path, got=got, expected="the file of a device's memory") from None

    def attach(self, connection: socket.socket, *, in_use: bool) -> Lane:
        """Take the segment that a new client has laid out. `in_use`: another client has one.

        Raises ProtocolError, and OSError for a connection that is lost.
        """
        said = connection.recv(len(ATTACH) + SESSION_BYTES, socket.MSG_DONTWAIT)
        session = said[len(ATTACH) :]
        if not said.startswith(ATTACH) or len(session) != SESSION_BYTES:
            expected = f"0x{ATTACH.hex()}, and {SESSION_BYTES} that its head names"
            raise _refused(f"{len(said)} other bytes first", expected)
        if in_use:
            raise _refused("a second client", "one at a time", ErrorCode.LIMIT_EXCEEDED)
        lane = Lane(self._mapped, areas_in(self._mapped, session), is_client=False)
        # A reply to an earlier client is none to this one. What follows is seen after that.
        lane.clear()
        lane.sleeps(True)
        self._mapped[TAKEN] = session
        return lane


def _size_of(path: str, file: int) -> int:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise EndpointError(path, got="no regular file", expected="one")
    if found.st_mode & stat.S_IWOTH:
        raise EndpointError(path, got="a file that all users may write", expected="mode 0660")
    if found.st_size < SMALLEST:
        raise EndpointError(path, got=f"{found.st_size} bytes", expected=f"{SMALLEST} or more")
    return found.st_size


def _refused(
    got: str, expected: str, code: ErrorCode = ErrorCode.MALFORMED_MESSAGE
) -> ProtocolError:
    return ProtocolError("shared memory", got=got, expected=expected, code=code)
