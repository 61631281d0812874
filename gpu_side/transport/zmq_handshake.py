"""The beginning of what a client says in ZMTP 3 without keys, where it may name itself.

A greeting of 64 bytes, then a command READY with the client's properties (RFC 23). In versions 1
and 2 a client names itself elsewhere: they are refused.
"""

from __future__ import annotations

from gpu_side.transport.zmq_names import as_property, is_property
from protocol.errors import ErrorCode, ProtocolError

_GREETING_BYTES = 64
_READY = b"\x05READY"
# Of READY, whose properties an application may add to.
_READY_BYTES = 8192
# A command, with its size in one byte, or in eight.
_SHORT, _LONG = 4, 6


class Handshake:
    """Passes on what a client says first, with a routing id of ours in place of its own."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._said = b""
        # How much of the greeting was passed on: the service's own depends on what it has read.
        self._passed = 0
        # Set once the client is named: what follows is passed on as it is.
        self.done = False

    def take(self, data: memoryview) -> bytes:
        """Take what has come, return what may be passed on. Raises ProtocolError."""
        self._said = said = self._said + data
        # Where ZeroMQ looks for the version: other bytes than these are one before 3.
        first, signed, version = said[:1], said[9:10], said[10:11]
        if first != b"\xff" or signed not in (b"", b"\x7f") or version not in (b"", b"\3"):
            raise _malformed("no greeting of ZMTP 3")
        passed = said[self._passed : _GREETING_BYTES]
        self._passed += len(passed)
        kind, size = said[_GREETING_BYTES : _GREETING_BYTES + 1], 1
        if kind == bytes([_LONG]):
            size = 8
        elif kind not in (b"", bytes([_SHORT])):
            raise _malformed("a message before READY")
        begin = _GREETING_BYTES + 1 + size
        if len(said) < begin:
            return passed
        end = begin + int.from_bytes(said[begin - size : begin])
        if end - begin > _READY_BYTES:
            raise _malformed(f"a command of {end - begin} bytes")
        if len(said) < end:
            return passed
        ready = _named(said[begin:end], self._name)
        self.done = True
        return passed + bytes([_LONG]) + len(ready).to_bytes(8) + ready + said[end:]


def _named(ready: bytes, name: bytes) -> bytes:
    """Return READY with another routing id. Raises ProtocolError for what is no READY."""
    if not ready.startswith(_READY):
        raise _malformed("a command before READY")
    kept, at = _READY, len(_READY)
    while at < len(ready):
        value = at + 1 + ready[at] + 4
        end = value + int.from_bytes(ready[value - 4 : value])
        if max(value, end) > len(ready):
            raise _malformed("a property that does not end")
        if not is_property(ready[at + 1 : value - 4]):
            kept += ready[at:end]
        at = end
    return kept + as_property(name)


def _malformed(got: str) -> ProtocolError:
    return ProtocolError(
        "ZeroMQ's handshake", got=got, expected="that of ZMTP 3", code=ErrorCode.MALFORMED_MESSAGE
    )
