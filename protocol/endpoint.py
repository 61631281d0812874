"""Endpoints: where a service listens and a client connects, and over which transport.

tcp://HOST:PORT     ZeroMQ over TCP; HOST may be * and PORT * or 0 to bind
ipc://PATH          ZeroMQ over a Unix socket
unix://PATH         a plain Unix stream socket
shm://PATH          shared memory, handed over on such a socket
vsock://CID:PORT    a stream between a virtual machine and its host; to bind, CID may be any
                    and PORT *
ivshmem://MEMORY,CID:PORT or ivshmem://MEMORY,PATH
                    memory that both have, by the path of its file at this end, beside a stream over
                    vsock or over a Unix socket
http://HOST:PORT    HTTP, for hosts that offer nothing else; https:// is HTTP over TLS. To connect,
                    the port may be left out, and a /PATH may follow

An abstract Unix socket (@NAME) is refused: it has no owner and no mode, so any process of the
network namespace could take its name.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, cast

from protocol.errors import EndpointError, SettingsError

Scheme: TypeAlias = Literal["tcp", "ipc", "unix", "shm", "vsock", "ivshmem", "http", "https"]
# What a socket of the standard library connects to: a path, or (CID, port).
StreamAddress: TypeAlias = str | tuple[int, int]
K = TypeVar("K")

SPELLINGS = (
    "tcp://HOST:PORT, ipc://PATH, unix://PATH, shm://PATH, vsock://CID:PORT,"
    " ivshmem://MEMORY,CID:PORT or http(s)://HOST:PORT"
)
# sockaddr_un has 108 bytes, one of which ends the path; ZeroMQ takes as many.
UNIX_PATH_MAX_BYTES = 107
VSOCK_ANY = 2**32 - 1

_NETWORK = re.compile(
    r"(tcp|https?)://(?P<host>[A-Za-z0-9._-]+|\*|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\])"
    r"(:(?P<port>\*|[0-9]{1,5}))?(?P<path>(/[A-Za-z0-9._~%+-]*)*)"
)
_VSOCK = re.compile(r"vsock://(?P<cid>any|[0-9]{1,10}):(?P<port>\*|[0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked endpoint: the text as it was given, its scheme, and a stream's address.

    `memory`: path of the file of memory that a VM and its host share; `host`: of a network, with
    the brackets of IPv6; both are empty for other schemes.
    """

    text: str
    scheme: Scheme
    address: StreamAddress | None = None
    memory: str = ""
    host: str = ""

    @property
    def is_zmq(self) -> bool:
        """Whether ZeroMQ carries it."""
        return self.scheme in ("tcp", "ipc")

    @property
    def is_http(self) -> bool:
        """Whether it is a URL."""
        return self.scheme in ("http", "https")

    @property
    def is_stream(self) -> bool:
        """Whether plain stream sockets carry it, not ZeroMQ."""
        return self.address is not None


def parse_endpoint(endpoint: str, *, for_bind: bool = False) -> Endpoint:
    """Read an endpoint to connect to, or to bind. Raises EndpointError."""
    scheme, _, rest = endpoint.partition("://")
    if host := _network_host(endpoint, for_bind):
        return Endpoint(endpoint, cast("Scheme", scheme), host=host)
    if scheme in ("ipc", "unix", "shm") and _is_path(endpoint, rest):
        return Endpoint(endpoint, cast("Scheme", scheme), None if scheme == "ipc" else rest)
    if scheme == "vsock" and (address := _vsock_address(endpoint, for_bind)) is not None:
        return Endpoint(endpoint, "vsock", address)
    memory, _, stream = rest.rpartition(",")
    if scheme == "ivshmem" and memory.startswith("/") and "\0" not in memory:
        if stream.startswith("/") and _is_path(endpoint, stream):
            return Endpoint(endpoint, "ivshmem", stream, memory)
        if (address := _vsock_address(f"vsock://{stream}", for_bind)) is not None:
            return Endpoint(endpoint, "ivshmem", address, memory)
    raise EndpointError("endpoint", repr(endpoint), SPELLINGS)


def _network_host(endpoint: str, for_bind: bool) -> str:
    """Return the host of tcp:// and of a URL; nothing where it is malformed or another's."""
    if (match := _NETWORK.fullmatch(endpoint)) is None:
        return ""
    host, port = match["host"], match["port"]
    is_tcp = endpoint.startswith("tcp:")
    if is_tcp and (port is None or match["path"]):
        return ""
    good_port = for_bind if port in ("*", "0") else port is None or 0 < int(port) < 2**16
    return host if good_port and (for_bind or host != "*") else ""


def _is_path(endpoint: str, path: str) -> bool:
    size, limit = len(os.fsencode(path)), UNIX_PATH_MAX_BYTES
    EndpointError.unless(size <= limit, endpoint, f"a path of {size} bytes", f"at most {limit}")
    named = not path.startswith(("@", "\0"))
    EndpointError.unless(
        named, endpoint, "an abstract socket, which any process can bind", "a path"
    )
    return path != "" and "\0" not in path


def _vsock_address(endpoint: str, for_bind: bool) -> tuple[int, int] | None:
    match = _VSOCK.fullmatch(endpoint)
    # The largest number means "any", which has a spelling of its own.
    if match is None or any(one.isdigit() and int(one) >= VSOCK_ANY for one in match.groups()):
        return None
    cid = VSOCK_ANY if match["cid"] == "any" else int(match["cid"])
    port = VSOCK_ANY if match["port"] == "*" else int(match["port"])
    return (cid, port) if for_bind or VSOCK_ANY not in (cid, port) else None


def is_beyond_loopback(endpoint: str) -> bool:
    """Say whether an endpoint is, or may be, on a network, where keys are all that keeps it.

    Not vsock:// and ivshmem://: they have no keys, and the peer that they reach runs on this
    machine.
    """
    host = parse_endpoint(endpoint, for_bind=True).host
    loopback = host in ("localhost", "lo", "[::1]") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host)
    return host != "" and not loopback


def is_exposed(endpoint: str) -> bool:
    """Say whether messages to an endpoint without keys may cross a network in the clear."""
    return is_beyond_loopback(endpoint) and not endpoint.startswith("https://")


def one_for_each(
    keys: Sequence[K], endpoints: Sequence[str], option: str = "--service-key"
) -> list[K | None]:
    """Say which keys go with which endpoint: none, one for all, or one for each in order.

    A URL has none, and is not counted. Raises SettingsError.
    """
    keyed = [not endpoint.startswith(("http://", "https://")) for endpoint in endpoints]
    needed = sum(keyed)
    SettingsError.unless(
        len(keys) == needed or not keys or (len(keys) == 1 and needed),
        option,
        f"{len(keys)} for {needed} endpoints",
        "one for all of them, or one for each in order",
    )
    in_order = iter(keys if len(keys) == needed else list(keys) * needed)
    return [next(in_order, None) if has_key else None for has_key in keyed]
