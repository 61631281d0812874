"""Where the numbers of a framed header stand: first, and always in the same width.

    request  {request_id, timeout_ms,                  version, method, request}
    reply    {request_id, timing {queue_us, compute_us}, version, method, status, response | error}

Each number is a msgpack uint64, so that a header is a head of known length with the numbers in it,
and a *template*, the bytes behind it, which two messages that differ in nothing else share
(`protocol.prepared`). That is how we write; msgpack of any other spelling and order is read too.
"""

from __future__ import annotations

import struct
from typing import Any

from protocol.codec import pack
from protocol.messages import Timing
from protocol.tensors import Buffer

# Longer templates are not worth remembering: those of all repeated messages are far below it.
MAX_TEMPLATE_BYTES = 512

_UINT64 = b"\xcf"
_REQUEST_KEYS = (b"\x85\xaarequest_id" + _UINT64, b"\xaatimeout_ms" + _UINT64)
_REPLY_KEYS = (
    b"\x86\xaarequest_id" + _UINT64,
    b"\xa6timing\x82\xa8queue_us" + _UINT64,
    b"\xaacompute_us" + _UINT64,
)


def _layout(keys: tuple[bytes, ...]) -> struct.Struct:
    return struct.Struct(">" + "".join(f"{len(key)}sQ" for key in keys))


# An error reply that says nothing of its time has one field less.
_UNTIMED_ID = b"\x85\xaarequest_id" + _UINT64
_UNTIMED_REPLY = _layout((_UNTIMED_ID,))
_REQUEST, _REPLY = _layout(_REQUEST_KEYS), _layout(_REPLY_KEYS)
REQUEST_HEAD_BYTES, REPLY_HEAD_BYTES = _REQUEST.size, _REPLY.size
_REQUEST_ID, _TIMEOUT_MS = _REQUEST_KEYS
_REPLY_ID, _QUEUE_US, _COMPUTE_US = _REPLY_KEYS
_MAX_REQUEST, _MAX_REPLY = (
    REQUEST_HEAD_BYTES + MAX_TEMPLATE_BYTES,
    REPLY_HEAD_BYTES + MAX_TEMPLATE_BYTES,
)


def pack_template(fields: dict[str, Any]) -> bytes:
    """Encode the fields behind the numbers, without the head of their map."""
    return pack(fields)[1:]


def request_header(request_id: int, timeout_ms: int, template: bytes) -> bytes:
    """Put the numbers before a template of three fields."""
    return _REQUEST.pack(_REQUEST_ID, request_id, _TIMEOUT_MS, timeout_ms) + template


def reply_header(request_id: int, timing: Timing | None, template: bytes) -> bytes:
    """Put the numbers before a template of four fields; without `timing` the id alone."""
    if timing is None:
        return _UNTIMED_REPLY.pack(_UNTIMED_ID, request_id) + template
    queue_us, compute_us = timing.queue_us, timing.compute_us
    head = _REPLY.pack(_REPLY_ID, request_id, _QUEUE_US, queue_us, _COMPUTE_US, compute_us)
    return head + template


def split_request(header: Buffer) -> tuple[int, int, bytes] | None:
    """Return (request_id, timeout_ms, template), or None where a header is not laid out so."""
    if not REQUEST_HEAD_BYTES < len(header) <= _MAX_REQUEST:
        return None
    id_key, request_id, timeout_key, timeout_ms = _REQUEST.unpack_from(header)
    if id_key != _REQUEST_ID or timeout_key != _TIMEOUT_MS:
        return None
    return request_id, timeout_ms, bytes(header[REQUEST_HEAD_BYTES:])


def split_reply(header: Buffer) -> tuple[int, int, int, bytes] | None:
    """Return (request_id, queue_us, compute_us, template), or None likewise."""
    if not REPLY_HEAD_BYTES < len(header) <= _MAX_REPLY:
        return None
    id_key, request_id, queue_key, queue_us, compute_key, compute_us = _REPLY.unpack_from(header)
    if id_key != _REPLY_ID or queue_key != _QUEUE_US or compute_key != _COMPUTE_US:
        return None
    return request_id, queue_us, compute_us, bytes(header[REPLY_HEAD_BYTES:])
