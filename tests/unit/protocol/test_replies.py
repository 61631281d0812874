"""What a client reads of a reply's bytes, what it refuses, and how a service writes one.

That every reply is read as it was sent is in `tests/property/test_encoding_property.py`.
"""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gpu_side.encoding import Form, encode_reply
from protocol.encoding import MAX_REPLY_FRAMES, MAX_REPLY_HEADER_BYTES, Reply, decode_reply
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    MAX_STATEMENT_BYTES,
    MAX_TIMING_US,
    REQUEST_TYPES,
    HealthReply,
    InitConfig,
    InitReply,
    NormWeight,
    RotaryParams,
    TensorReply,
    Timing,
    response_type,
)
from protocol.tensors import Buffer, WireTensor
from tests.kit.rows import each_row
from tests.kit.wire import Rows, not_refused

F4 = bytes(16)
MALFORMED, INVALID = ErrorCode.MALFORMED_MESSAGE, ErrorCode.INVALID_FIELD
VERSION = ErrorCode.UNSUPPORTED_VERSION
OUTPUT = TensorReply(output=WireTensor("float32", (4,), F4))
TIMING = Timing(queue_us=3, compute_us=4)
SIZES = {"num_layers": 1, "hidden_size": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
INIT = InitReply(
    config=InitConfig(**SIZES),
    rotary_emb_params=RotaryParams(
        inv_freq=WireTensor("float32", (1,), bytes(4)), attention_scaling=2.0
    ),
    norm_weights={"final_norm": NormWeight(weight=WireTensor("float32", (4,), F4), eps=1e-6)},
    model_digest="a" * 64,
    linear_digest="b" * 64,
    max_message_bytes=1,
    arithmetic=("float", "int8"),
    provision_id=None,
    instance_id="d" * 32,
    layers=(0, 3),
    max_queued_requests=64,
    max_queued_bytes=1,
)
HEALTH = {"status": "ready", "uptime_s": 1.5, "queued_requests": 3, "queued_bytes": 2**40}

# A field, the values in it that are refused alike, and how; perhaps the frames behind the header.
LINEAR: dict[str, Any] = {
    "version": 1,
    "request_id": 7,
    "timing": {"queue_us": 3, "compute_us": 4},
    "method": "Linear",
    "status": "success",
    "response": {"output": {"dtype": "float32", "shape": [4], "frame": 1}},
}
LINEAR_REFUSED: Rows = [
    ("version", (2, 0), VERSION),
    ("version", (...,), INVALID),
    ("request_id", (-1, 2**63, ...), INVALID),
    ("method", (..., "Init"), INVALID),
    ("status", ("ok", "canary", ...), INVALID),
    ("status", ("error",), MALFORMED),
    ("error", ("INTERNAL",), MALFORMED),
    ("response", (...,), MALFORMED, []),
    ("response", ({}, {"output": F4}, {"output": [1, 2]}), INVALID, []),
    ("traceback", ("canary",), INVALID),
    ("timing", (1, {"queue_us": 0}), INVALID),
    ("timing/queue_us", (-1, MAX_TIMING_US + 1), INVALID),
    ("timing/compute_us", (-1, MAX_TIMING_US + 1), INVALID),
    ("version", (1,), INVALID, []),
    ("version", (1,), MALFORMED, [F4, F4]),
    ("version", (1,), INVALID, [bytes(8)]),
]
FAILED = {"version": 1, "request_id": 7, "method": "Linear", "status": "error"}
FAILED_REFUSED: Rows = [
    ("version", (1,), MALFORMED),
    ("error", ("traceback: canary", 1), INVALID),
]
INIT_REFUSED: Rows = [
    ("model_digest", ("A" * 64, "a" * 63)),
    ("norm_weights/other_norm", (1, None, {}, {"eps": 1.0})),
    ("norm_weights/final_norm/eps", (..., "1", float("nan"), float("inf"))),
    ("arithmetic", (..., [], "int8", ["int8", "int8"], ["int4"], ["float", "int8", "float"], None)),
    ("provision_id", (..., "", "a" * 63, 1)),
    ("instance_id", (..., None, "d" * 31, "D" * 32)),
    ("layers", (..., None, [], [0], [0, 0, 0], [1, 0], [-1, 0], [0, 4096])),
    ("layers", ([0, True], [0, 0.0], ["0", "0"])),
    ("max_message_bytes", (..., 0, 2**40 + 1)),
    ("max_queued_requests", (..., 0, None, 2**31)),
    ("max_queued_bytes", (..., 0, True, 2**40 + 1)),
    ("statement", (None, "text", bytes(MAX_STATEMENT_BYTES + 1))),
    ("columns", ([0], [1, 1], [2, 1], [-1, 1], [0, 65], [0, 0], None)),
    ("ranks", (0, 65, True)),
]
HEALTH_REFUSED: Rows = [
    ("status", ("loading", None)),
    ("uptime_s", (-0.1, float("nan"), float("inf"), "1")),
    ("queued_requests", (-1, True, 2**31)),
    ("queued_bytes", (-1, 1.0, 2**53 + 1, ...)),
    ("peers", ([],)),
]


def _in_response(rows: Rows) -> Rows:
    return [(f"response/{field}", values, INVALID) for field, values in rows]


def test_replies_that_deviate_are_refused() -> None:
    init, *tensors = encode_reply(Form.FRAMED, 1, "Init", INIT)
    assert decode_reply([init, *tensors]).response == INIT
    (health,) = encode_reply(Form.FRAMED, 7, "Health", HealthReply(**HEALTH), TIMING)
    assert decode_reply([health]).response == HealthReply(**HEALTH)
    wrong = [
        *not_refused(decode_reply, LINEAR, LINEAR_REFUSED, [F4]),
        *not_refused(decode_reply, FAILED, FAILED_REFUSED),
        *not_refused(decode_reply, msgpack.unpackb(init), _in_response(INIT_REFUSED), tensors),
        *not_refused(decode_reply, msgpack.unpackb(health), _in_response(HEALTH_REFUSED)),
    ]
    assert wrong == []


def test_a_reply_names_its_request_and_operator() -> None:
    frames = encode_reply(Form.FRAMED, 7, "Linear", OUTPUT, TIMING)
    assert msgpack.unpackb(frames[0]) == LINEAR
    assert frames[1] is F4
    assert decode_reply(frames) == Reply(7, "Linear", OUTPUT, None, TIMING)


@each_row("code", list(ErrorCode))
def test_an_error_reply_carries_the_code_and_nothing_else(code: ErrorCode) -> None:
    expected = {"status": "error", "error": code.value}
    for form, more in ((Form.INLINE, {}), (Form.FRAMED, FAILED)):
        frames = encode_reply(form, 7, "Linear", code)
        assert [msgpack.unpackb(frame) for frame in frames] == [more | expected]
    assert decode_reply(frames) == Reply(7, "Linear", None, code, None)


@each_row(
    ("frames", "code", "said"),
    [
        ([], MALFORMED, "got 0 frames"),
        ([b""] * (MAX_REPLY_FRAMES + 1), MALFORMED, f"got {MAX_REPLY_FRAMES + 1} frames"),
        (
            [bytes(MAX_REPLY_HEADER_BYTES + 1)],
            ErrorCode.LIMIT_EXCEEDED,
            f"at most {MAX_REPLY_HEADER_BYTES}",
        ),
    ],
)
def test_a_reply_of_another_size_is_refused(
    frames: list[Buffer], code: ErrorCode, said: str
) -> None:
    with pytest.raises(ProtocolError, match=said) as info:
        decode_reply(frames)
    assert info.value.code is code


def test_inline_replies_have_the_published_layout() -> None:
    (init,) = encode_reply(Form.INLINE, 0, "Init", INIT)
    assert msgpack.unpackb(init)["response"] == {
        "config": SIZES,
        "rotary_emb_params": {
            "inv_freq": bytes(4),
            "inv_freq_shape": [1],
            "attention_scaling": 2.0,
        },
        "norm_weights": {"final_norm": {"weight": F4, "shape": [4], "eps": 1e-6}},
    }
    (health,) = encode_reply(Form.INLINE, 0, "Health", HealthReply(**HEALTH))
    assert msgpack.unpackb(health) == {"status": "success", "response": HEALTH}


def test_each_method_has_its_reply() -> None:
    others = {"Init": InitReply, "Health": HealthReply}
    for method in REQUEST_TYPES:
        assert response_type(method) is others.get(method, TensorReply)
