"""Unix sockets with a file: a service replaces and removes its own, and no live one's."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

from protocol.endpoint import Endpoint
from protocol.errors import EndpointError

# What connecting says where no process listens, or there is no file at all.
_NOBODY = frozenset({errno.ECONNREFUSED, errno.ENOENT, errno.ENOTDIR})


def refuse_live_socket(endpoint: Endpoint) -> None:
    """Raise EndpointError where a live service owns the Unix socket, or may own it.

    A file whose service is dead can be replaced; a live one's must not be taken over silently. What
    cannot be connected to, because it is no stream or not ours, is not for that reason dead.
    """
    address = endpoint.socket_path
    if address is None:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # A live service whose backlog is full does not answer, and is no less alive.
        probe.setblocking(False)
        try:
            probe.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NOBODY:
                return
            got = f"a socket there that may be in use ({os.strerror(error.errno or 0)})"
            raise EndpointError(endpoint.text, got=got, expected="an address to bind") from None
    raise EndpointError(endpoint.text, got="Address already in use", expected="an address to bind")


def bind_at(path: str, backlog: int) -> socket.socket:
    """Listen at a path, in place of a dead service's socket. After `refuse_live_socket`.

    What is no socket stays, and cannot be bound. Raises OSError.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        listening.bind(path)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening


class SocketFile:
    """The file of a socket that was just bound at a path. Raises OSError where it is gone."""

    def __init__(self, path: str) -> None:
        self._path, self._id = path, _id_of(path)

    def remove(self) -> None:
        """Remove the file, unless it is another's by now."""
        with suppress(OSError):
            if _id_of(self._path) == self._id:
                os.unlink(self._path)


def _id_of(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
