"""Tests of where a header's numbers stand, and that any msgpack reader finds them there."""

from __future__ import annotations

import msgpack
import pytest

from protocol.header_numbers import (
    MAX_TEMPLATE_BYTES,
    pack_template,
    reply_header,
    request_header,
    split_reply,
    split_request,
)
from protocol.messages import Timing

REQUEST = {"version": 1, "method": "Linear", "request": {"layer_idx": 3}}
REPLY = {"version": 1, "method": "Linear", "status": "success", "response": {}}
REQUEST_HEAD, REPLY_HEAD = 41, 67
LONGEST = Timing.model_construct(queue_us=2**64 - 1, compute_us=2**64 - 1)
SHORTEST = Timing(queue_us=1, compute_us=1)


@pytest.mark.parametrize("request_id", [1, 255, 2**63 - 1])
@pytest.mark.parametrize("timeout_ms", [1, 3_600_000])
def test_request_header_is_one_map_of_one_length(request_id: int, timeout_ms: int) -> None:
    template = pack_template(REQUEST)
    header = request_header(request_id, timeout_ms, template)
    assert msgpack.unpackb(header) == {
        "request_id": request_id,
        "timeout_ms": timeout_ms,
        **REQUEST,
    }
    assert len(header) == REQUEST_HEAD + len(template)
    assert split_request(memoryview(bytearray(header))) == (request_id, timeout_ms, template)
    assert split_reply(header) is None


@pytest.mark.parametrize("request_id", [0, 2**63 - 1])
@pytest.mark.parametrize(("queue_us", "compute_us"), [(0, 1), (2**53, 2**53)])
def test_reply_header_is_one_map_of_one_length(
    request_id: int, queue_us: int, compute_us: int
) -> None:
    template = pack_template(REPLY)
    timing = Timing(queue_us=queue_us, compute_us=compute_us)
    header = reply_header(request_id, timing, template)
    assert msgpack.unpackb(header) == {
        "request_id": request_id,
        "timing": {"queue_us": queue_us, "compute_us": compute_us},
        **REPLY,
    }
    assert len(header) == REPLY_HEAD + len(template)
    expected = (request_id, queue_us, compute_us, template)
    assert split_reply(memoryview(bytearray(header))) == expected
    assert split_request(header) is None


def test_a_byte_of_a_key_or_a_mark_that_is_another_is_another_layout() -> None:
    request = request_header(2**64 - 1, 2**64 - 1, pack_template(REQUEST))
    reply = reply_header(2**64 - 1, LONGEST, pack_template(REPLY))
    for place in range(REQUEST_HEAD):
        changed = bytearray(request)
        changed[place] ^= 1
        assert (split_request(changed) is None) == (request[place] != 0xFF), place
    for place in range(REPLY_HEAD):
        changed = bytearray(reply)
        changed[place] ^= 1
        assert (split_reply(changed) is None) == (reply[place] != 0xFF), place


def test_short_and_long_headers_are_not_split() -> None:
    request, reply = request_header(1, 1, b""), reply_header(1, SHORTEST, b"")
    for size in range(REQUEST_HEAD + 1):
        assert split_request(request[:size]) is None
    for size in range(REPLY_HEAD + 1):
        assert split_reply(reply[:size]) is None
    longest = b"x" * MAX_TEMPLATE_BYTES
    assert split_request(request + longest) == (1, 1, longest)
    assert split_reply(reply + longest) == (1, 1, 1, longest)
    assert split_request(request + longest + b"x") is None
    assert split_reply(reply + longest + b"x") is None


def test_a_reply_without_timing_has_one_field_less() -> None:
    header = reply_header(7, None, pack_template(REPLY))
    assert msgpack.unpackb(header) == {"request_id": 7, **REPLY}
    assert split_reply(header) is None
