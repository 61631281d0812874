"""Where the numbers of a framed header stand: first, and always in the same width.

    request  {request_id, timeout_ms,                  version, method, request}
    reply    {request_id, timing {queue_us, compute_us}, version, method, status, response | error}

Each number is a msgpack uint64, so that a header is a head of known length with the numbers in it,
and a *template*, the bytes behind it, which two messages that differ in nothing else share
(`protocol.prepared`). That is how we write; msgpack of any other spelling and order is read too.
"""

from __future__ import annotations

import struct
from itertools import accumulate, chain
from typing import Any

from protocol.codec import pack
from protocol.tensors import Buffer

# Longer templates are not worth remembering: those of all repeated messages are far below it.
MAX_TEMPLATE_BYTES = 512


class HeaderLayout:
    """A head of known length: numbers, each behind the msgpack of what precedes it.

    `places`: where the numbers stand, 8 bytes each, big-endian.
    """

    def __init__(self, *keys: bytes) -> None:
        self._keys = tuple(key + b"\xcf" for key in keys)  # the mark of a uint64
        self._head = struct.Struct(">" + "".join(f"{len(key)}sQ" for key in self._keys))
        self.head_bytes = self._head.size
        # Where the numbers stand.
        keyed = accumulate(len(key) + 8 for key in self._keys)
        self.places = tuple(end - 8 for end in keyed)
        self._max_bytes = self.head_bytes + MAX_TEMPLATE_BYTES

    def header(self, template: bytes, *numbers: int) -> bytes:
        """Put the numbers before a template."""
        keyed = chain.from_iterable(zip(self._keys, numbers, strict=True))
        return self._head.pack(*keyed) + template

    def split(self, header: Buffer) -> tuple[tuple[int, ...], bytes] | None:
        """Return the numbers and the template, or None where a header is not laid out so."""
        if not self.head_bytes < len(header) <= self._max_bytes:
            return None
        found = self._head.unpack_from(header)
        if found[::2] != self._keys:
            return None
        return found[1::2], bytes(header[self.head_bytes :])


REQUEST = HeaderLayout(b"\x85\xaarequest_id", b"\xaatimeout_ms")
REPLY = HeaderLayout(b"\x86\xaarequest_id", b"\xa6timing\x82\xa8queue_us", b"\xaacompute_us")
# An error reply that says nothing of its time has one field less.
UNTIMED_REPLY = HeaderLayout(b"\x85\xaarequest_id")


def pack_template(fields: dict[str, Any]) -> bytes:
    """Encode the fields behind the numbers, without the head of their map."""
    return pack(fields)[1:]
