"""Tests of where a header's numbers stand, and that any msgpack reader finds them there."""

from __future__ import annotations

import msgpack
import pytest

from protocol.header_numbers import (
    MAX_TEMPLATE_BYTES,
    REPLY,
    REQUEST,
    UNTIMED_REPLY,
    pack_template,
)

REQUEST_FIELDS = {"version": 1, "method": "Linear", "request": {"layer_idx": 3}}
REPLY_FIELDS = {"version": 1, "method": "Linear", "status": "success", "response": {}}
REQUEST_HEAD, REPLY_HEAD = 41, 67
LARGEST = 2**64 - 1


@pytest.mark.parametrize("request_id", [1, 255, 2**63 - 1])
@pytest.mark.parametrize("timeout_ms", [1, 3_600_000])
def test_request_header_is_one_map_of_one_length(request_id: int, timeout_ms: int) -> None:
    template = pack_template(REQUEST_FIELDS)
    header = REQUEST.header(template, request_id, timeout_ms)
    assert msgpack.unpackb(header) == {
        "request_id": request_id,
        "timeout_ms": timeout_ms,
        **REQUEST_FIELDS,
    }
    assert len(header) == REQUEST_HEAD + len(template)
    assert REQUEST.split(memoryview(bytearray(header))) == (
        (request_id, timeout_ms),
        template,
    )
    assert REPLY.split(header) is None


@pytest.mark.parametrize("request_id", [0, 2**63 - 1])
@pytest.mark.parametrize(("queue_us", "compute_us"), [(0, 1), (2**53, 2**53)])
def test_reply_header_is_one_map_of_one_length(
    request_id: int, queue_us: int, compute_us: int
) -> None:
    template = pack_template(REPLY_FIELDS)
    header = REPLY.header(template, request_id, queue_us, compute_us)
    assert msgpack.unpackb(header) == {
        "request_id": request_id,
        "timing": {"queue_us": queue_us, "compute_us": compute_us},
        **REPLY_FIELDS,
    }
    assert len(header) == REPLY_HEAD + len(template)
    expected = (request_id, queue_us, compute_us), template
    assert REPLY.split(memoryview(bytearray(header))) == expected
    assert REQUEST.split(header) is None


def test_a_byte_of_a_key_or_a_mark_that_is_another_is_another_layout() -> None:
    request = REQUEST.header(pack_template(REQUEST_FIELDS), LARGEST, LARGEST)
    reply = REPLY.header(pack_template(REPLY_FIELDS), LARGEST, LARGEST, LARGEST)
    for place in range(REQUEST_HEAD):
        changed = bytearray(request)
        changed[place] ^= 1
        assert (REQUEST.split(changed) is None) == (request[place] != 0xFF), place
    for place in range(REPLY_HEAD):
        changed = bytearray(reply)
        changed[place] ^= 1
        assert (REPLY.split(changed) is None) == (reply[place] != 0xFF), place


def test_short_and_long_headers_are_not_split() -> None:
    request, reply = REQUEST.header(b"", 1, 1), REPLY.header(b"", 1, 1, 1)
    for size in range(REQUEST_HEAD + 1):
        assert REQUEST.split(request[:size]) is None
    for size in range(REPLY_HEAD + 1):
        assert REPLY.split(reply[:size]) is None
    longest = b"x" * MAX_TEMPLATE_BYTES
    assert REQUEST.split(request + longest) == ((1, 1), longest)
    assert REPLY.split(reply + longest) == ((1, 1, 1), longest)
    assert REQUEST.split(request + longest + b"x") is None
    assert REPLY.split(reply + longest + b"x") is None


def test_a_reply_without_timing_has_one_field_less() -> None:
    header = UNTIMED_REPLY.header(pack_template(REPLY_FIELDS), 7)
    assert msgpack.unpackb(header) == {"request_id": 7, **REPLY_FIELDS}
    assert REPLY.split(header) is None
