"""Whether another process listens on a Unix socket already: a service must not displace it."""

from __future__ import annotations

import errno
import os
import socket

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
