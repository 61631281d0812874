"""Bounds of the messages that are nobody else's: what a service says of itself."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from protocol.encoding import decode_reply, encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    REQUEST_TYPES,
    HealthReply,
    HealthRequest,
    InitReply,
    TensorReply,
    Timing,
    response_type,
)
from tests.kit.rows import each_row

HEALTH: dict[str, Any] = {
    "status": "ready",
    "uptime_s": 1.5,
    "queued_requests": 3,
    "queued_bytes": 2**40,
}


def test_each_method_has_its_reply() -> None:
    assert {method: response_type(method) for method in REQUEST_TYPES} == {
        "Init": InitReply,
        "Health": HealthReply,
        **dict.fromkeys(
            [
                *("Embedding", "Linear", "RingLinear", "SeededRingLinear"),
                *("Matmul", "LMHead", "RingLMHead", "Segment"),
            ],
            TensorReply,
        ),
    }


def test_a_request_for_health_is_one_small_frame() -> None:
    frames = encode_request(HealthRequest(), 2**63 - 1, 3_600_000)
    assert len(frames) == 1
    assert len(frames[0]) < 256
    assert read_request(open_request(frames, 2**20)) == HealthRequest()
    inline = msgpack.packb({"method": "Health", "request": {}})
    assert read_request(open_request([inline], 2**20)) == HealthRequest()


@pytest.mark.parametrize("status", ["ready", "draining"])
@pytest.mark.parametrize("timing", [None, Timing(queue_us=1, compute_us=2)])
def test_health_comes_back_as_it_was_said(status: str, timing: Timing | None) -> None:
    reply = HealthReply(**(HEALTH | {"status": status}))
    frames = encode_reply(Form.FRAMED, 7, "Health", reply, timing)
    decoded = decode_reply(frames)
    assert (decoded.response, decoded.timing, decoded.request_id) == (reply, timing, 7)
    (inline,) = encode_reply(Form.INLINE, 0, "Health", reply)
    assert msgpack.unpackb(inline) == {
        "status": "success",
        "response": HEALTH | {"status": status},
    }


@each_row(
    "changes",
    [
        {"status": "loading"},
        {"status": None},
        {"uptime_s": -0.1},
        {"uptime_s": float("nan")},
        {"uptime_s": float("inf")},
        {"uptime_s": "1"},
        {"queued_requests": -1},
        {"queued_requests": True},
        {"queued_requests": 2**31},
        {"queued_bytes": -1},
        {"queued_bytes": 1.0},
        {"queued_bytes": 2**53 + 1},
        {"queued_bytes": ...},
        {"peers": []},
    ],
)
def test_a_health_reply_is_checked(changes: dict[str, Any]) -> None:
    fields = {k: v for k, v in (HEALTH | changes).items() if v is not ...}
    with pytest.raises(ValidationError):
        HealthReply(**fields)
    header = msgpack.unpackb(encode_reply(Form.FRAMED, 1, "Health", HealthReply(**HEALTH))[0])
    with pytest.raises(ProtocolError) as caught:
        decode_reply([msgpack.packb(header | {"response": fields})])
    assert caught.value.code is ErrorCode.INVALID_FIELD
