"""What a service reads of a request's bytes, in both forms, and with which code it refuses others.

That every request is read as it was sent is in `tests/property/test_encoding_property.py`.
"""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from gpu_side.encoding import Form, open_request, read_request
from protocol.encoding import encode_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    EmbeddingRequest,
    HealthRequest,
    LinearRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
)
from protocol.tensors import Buffer, WireTensor
from tests.kit.rows import each_row
from tests.kit.wire import Rows, changed, not_refused

F4 = bytes(16)  # four float32, or int32
MALFORMED, INVALID = ErrorCode.MALFORMED_MESSAGE, ErrorCode.INVALID_FIELD
LIMIT, UNKNOWN = ErrorCode.LIMIT_EXCEEDED, ErrorCode.UNKNOWN_METHOD
VERSION = ErrorCode.UNSUPPORTED_VERSION


def _read(frames: list[Buffer]) -> Request:
    return read_request(open_request(frames, 2**20))


# -------------------------------------------------------------------------------------- framed

TENSOR = {"dtype": "float32", "shape": [4], "frame": 1}
ELEMENTS = TENSOR | {"dtype": "int32"}
NAMES = "request/module_names"
HIDDEN = "request/hidden_states"


def _framed(method: str, **request: Any) -> dict[str, Any]:
    head = {"version": 1, "request_id": 7, "timeout_ms": 1000, "method": method}
    return {**head, "request": request}


LINEAR = _framed("Linear", layer_idx=0, module_names=["q_proj"], hidden_states=TENSOR)
RING = _framed("RingLinear", layer_idx=0, module_names=["q_proj"], elements=ELEMENTS)
HEALTH = _framed("Health")
SEGMENT = _framed(
    "Segment",
    first_layer=0,
    last_layer=1,
    hidden_states=TENSOR,
    parts={"dtype": "int64", "shape": [1, 7], "frame": 2},
    outputs={"dtype": "int64", "shape": [1], "frame": 3},
)
SEGMENT_FRAMES: list[Buffer] = [F4, bytes(56), bytes(8)]

LINEAR_REFUSED: Rows = [
    ("version", (2, 0, "1", "canary", None), VERSION),
    ("version", (True, 1.0), INVALID),
    ("version", (...,), MALFORMED),
    ("request_id", (0, -1, 2**63, 1.0, "1", "canary", ...), INVALID),
    ("timeout_ms", (0, 3_600_001, ...), INVALID),
    ("method", (1, "Init", ...), INVALID),
    ("method", ("linear", "", "canary", "__class__"), UNKNOWN),
    ("request", (..., [], None), INVALID),
    ("priority", (1, "canary"), INVALID),
    ("canary", (1,), INVALID),
    ("version", (1,), INVALID, []),
    ("version", (1,), MALFORMED, [F4, F4]),
    ("version", (1,), MALFORMED, [F4] * 4),
    ("version", (1,), INVALID, [bytes(15)]),
    ("version", (1,), INVALID, [b""]),
    ("request/layer_idx", (-1, 4096, "0", True, ..., TENSOR), INVALID),
    (NAMES, ([], ["q_proj"] * 4, ["lm_head"], ["canary"], "q_proj", [1], {"a": 1}), INVALID),
    ("request/module_name", ("q_proj",), INVALID),
    ("request/bias", (None, 0, 1, "false", [], {}), INVALID),
    (HIDDEN, (F4, [0.0] * 4, {}, ..., "canary"), INVALID, []),
    ("request/extra", (TENSOR | {"frame": 2},), INVALID, [F4, F4]),
    ("request/extra", (TENSOR, 1), INVALID),
    ("request/a canary", (TENSOR, 1, "canary"), INVALID),
    (f"{HIDDEN}/frame", (0, -1, 2, True, 1.0, None, "1", "canary"), INVALID),
    (f"{HIDDEN}/dtype", ("float64", "canary", ...), INVALID),
    (f"{HIDDEN}/shape", (..., [5], [-1]), INVALID),
    (f"{HIDDEN}/shape", ([2**31 - 1] * 4,), LIMIT),
    (f"{HIDDEN}/strides", ([1],), INVALID),
    (f"{HIDDEN}/canary", ("canary",), INVALID),
]
RING_REFUSED: Rows = [
    ("request/layer_idx", (-1, 4096, ...), INVALID),
    (NAMES, ([], ["q_proj"] * 4, ["lm_head"], ...), INVALID),
    ("request/elements/dtype", ("uint32",), INVALID),
    ("request/elements/shape", ([5],), INVALID),
    ("request/elements", (F4, None, [0] * 4, ...), INVALID, []),
    ("request/hidden_states", (TENSOR,), INVALID),
    ("request/bias", (True, False), INVALID),
    ("request/scale", (1.0,), INVALID),
]
SEGMENT_REFUSED: Rows = [
    ("request/first_layer", (-1, 4096, True, ...), INVALID),
    ("request/last_layer", (-1, 4096, "1", ...), INVALID),
    ("request/sinks", (-1, 2**31, 1.0, None), INVALID),
    ("request/recent", (-1, 2**31, True), INVALID),
    ("request/lm_head", (1, None), INVALID),
    ("request/parts", (..., []), INVALID, [F4]),
]
INIT_REFUSED: Rows = [
    ("request/nonce", (bytes(33), "n" * 32, None, 1), INVALID),
    ("request/verbose", (True,), INVALID),
]


def test_framed_requests_that_deviate_are_refused() -> None:
    read = _read([msgpack.packb(LINEAR), F4])
    tensor = WireTensor("float32", (4,), F4)
    assert read == LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=tensor)
    ring = _read([msgpack.packb(RING), F4])
    assert isinstance(ring, RingLinearRequest)
    assert encode_request(ring, 7, 1000)[1] is F4
    assert _read([msgpack.packb(SEGMENT), *SEGMENT_FRAMES]).method == "Segment"
    assert _read([msgpack.packb(HEALTH)]) == HealthRequest()
    wrong = [
        *not_refused(_read, LINEAR, LINEAR_REFUSED, [F4]),
        *not_refused(_read, RING, RING_REFUSED, [F4]),
        *not_refused(_read, SEGMENT, SEGMENT_REFUSED, SEGMENT_FRAMES),
        *not_refused(_read, _framed("Init"), INIT_REFUSED),
    ]
    assert wrong == []


def test_a_framed_request_is_a_header_and_a_frame_for_each_tensor() -> None:
    a, b = WireTensor("float32", (2, 3), bytes(24)), WireTensor("float32", (3, 2), bytes(24))
    header, *frames = encode_request(MatmulRequest(a=a, b=b), 7, 1000)
    described = {
        "a": {"dtype": "float32", "shape": [2, 3], "frame": 1},
        "b": {"dtype": "float32", "shape": [3, 2], "frame": 2},
    }
    assert msgpack.unpackb(header) == _framed("Matmul", **described)
    assert frames[0] is a.data
    assert frames[1] is b.data
    opened = open_request([header, *frames], 2**20)
    assert (opened.form, opened.request_id, opened.timeout_ms) == (Form.FRAMED, 7, 1000)


@each_row("given", [..., True, False])
def test_a_linear_adds_biases_unless_told_not_to(given: object) -> None:
    request = _read([msgpack.packb(changed(LINEAR, "request/bias", given)), F4])
    assert isinstance(request, LinearRequest)
    assert request.bias is (given is not False)
    assert msgpack.unpackb(encode_request(request, 1, 1)[0])["request"]["bias"] is request.bias


@each_row(
    ("frames", "code", "said"),
    [
        *(([b"\x80"] * n, MALFORMED, f"got {n} frames, expected 1 to 4") for n in (0, 5, 100)),
        ([bytes(101)], LIMIT, "expected at most 100"),
        ([bytes(65537), F4], LIMIT, "expected at most 65536"),
        ([msgpack.packb({b"method": None, "request": {}})], MALFORMED, "request: got"),
        ([msgpack.packb(changed(LINEAR, HIDDEN, {b"x": 1})), F4], MALFORMED, "request: got"),
        ([msgpack.packb({"method": "Init", "request": {}}), b""], MALFORMED, "got 2 frames"),
    ],
)
def test_what_is_no_envelope_is_refused(frames: list[Buffer], code: ErrorCode, said: str) -> None:
    with pytest.raises(ProtocolError, match=said) as info:
        open_request(frames, 100 if code is LIMIT else 2**20)
    assert info.value.code is code


@each_row("head", [{}, {"version": 1, "request_id": 1, "timeout_ms": 1}])
def test_a_request_holds_sixty_four_maps_and_arrays(head: dict[str, int]) -> None:
    for maps, is_refused in ((62, False), (63, True)):  # and two of its own
        body = {**head, "method": "Init", "request": {f"f{n}": {} for n in range(maps)}}
        if not is_refused:
            assert open_request([msgpack.packb(body)], 2**20).method == "Init"
            continue
        with pytest.raises(ProtocolError, match="more than 64 maps and arrays"):
            open_request([msgpack.packb(body)], 2**20)


# -------------------------------------------------------------------------------------- inline

IDS = b"".join(n.to_bytes(8, "little") for n in (1, 2))
F32 = "torch.float32"
BODIES: dict[str, dict[str, Any]] = {
    "Init": {},
    "Embedding": {"input_ids": IDS, "input_shape": [1, 2], "dtype": F32},
    "Linear": {
        "layer_idx": 3,
        "module_name": "q_proj",
        "hidden_states": F4,
        "shape": [1, 1, 4],
        "dtype": F32,
    },
    "RingLinear": {
        "layer_idx": 3,
        "module_name": "down_proj",
        "elements": F4,
        "shape": [1, 1, 4],
    },
    "SeededRingLinear": {
        "layer_idx": 3,
        "module_name": "down_proj",
        "rows": 2,
        "columns": 4,
        "seed": bytes(32),
        "seed_shape": [8],
    },
    "Matmul": {
        "a_buffer": F4,
        "a_shape": [2, 2],
        "b_buffer": F4,
        "b_shape": [2, 2],
        "dtype": F32,
    },
    "LMHead": {"hidden_states": F4, "shape": [4], "dtype": F32},
    "RingLMHead": {"elements": F4, "shape": [1, 4]},
}


def _inline(method: str, **changes: Any) -> dict[str, Any]:
    return {"method": method, "request": BODIES[method] | changes}


@each_row(
    ("dtype", "reply_dtype"),
    # The published schema does not say whose dtype it is; ids have no other than int64.
    [(F32, "float32"), ("torch.int64", "float32"), ("bfloat16", "bfloat16")],
)
def test_an_inline_embedding_says_the_dtype_of_its_reply(dtype: str, reply_dtype: str) -> None:
    request = _read([msgpack.packb(_inline("Embedding", dtype=dtype))])
    ids = WireTensor("int64", (1, 2), IDS)
    assert request == EmbeddingRequest(input_ids=ids, dtype=reply_dtype)


INLINE_REFUSED: dict[str, Rows] = {
    "Init": [
        ("method", ("Unknown", "init", "__class__", "canary"), UNKNOWN),
        ("method", (..., 1, b"Init"), MALFORMED),
        ("request", (..., None, []), MALFORMED),
        ("request_id", (1,), MALFORMED),
        ("request/verbose", (True, "canary"), INVALID),
    ],
    "Embedding": [
        ("request", ({},), INVALID),
        ("request/dtype", (..., "float64", 1, "canary"), INVALID),
        ("request/input_ids", ([1, 2], "1" * 16), INVALID),
        ("request/input_shape", ([1, 3], [1, -2], ...), INVALID),
        ("request/shape", ([1, 2],), INVALID),
    ],
    "Linear": [
        ("request/module_name", (..., ["q_proj"], {"frame": 1}, "lm_head", "canary"), INVALID),
        ("request/module_names", (["q_proj"],), INVALID),
        ("request/hidden_states", (..., {"dtype": "float32"}), INVALID),
        ("request/shape", (...,), INVALID),
        ("request/shape", ([2**31 - 1] * 3,), LIMIT),
        ("request/dtype", (..., "uint32", "canary"), INVALID),
        ("request/layer_idx", (..., -1), INVALID),
        ("request/bias", (0, None), INVALID),
    ],
    "RingLinear": [
        ("request/dtype", ("torch.int32",), INVALID),
        ("request/bias", (False,), INVALID),
        ("request/module_names", (["q_proj"],), INVALID),
        ("request/shape", ([1, 1, 5], ...), INVALID),
        ("request/elements", ([0, 0, 0, 0], ...), INVALID),
        ("request/module_name", (...,), INVALID),
        ("request", (BODIES["Linear"],), INVALID),
    ],
    "SeededRingLinear": [
        ("request", (BODIES["RingLinear"],), INVALID),
        ("request/seed", (..., bytes(31)), INVALID),
        ("request/seed_shape", (..., [7]), INVALID),
        ("request/rows", (..., 0, -1, 2**31, 3.0, True), INVALID),
        ("request/columns", (..., 0), INVALID),
        ("request/elements", (bytes(32),), INVALID),
    ],
    "RingLMHead": [
        ("request", (BODIES["RingLinear"], BODIES["LMHead"]), INVALID),
        ("request/shape", (..., [1, 5]), INVALID),
    ],
    "Matmul": [
        ("request/b_buffer", (...,), INVALID),
        ("request/dtype", (...,), INVALID),
        ("request/a_shape", ([2, 3],), INVALID),
        ("request/transpose", (True,), INVALID),
        # Our own names for what the schema calls a_buffer and b_buffer.
        ("request/a", ("junk",), INVALID),
        ("request/b", ("junk",), INVALID),
    ],
    "LMHead": [("request/shape", (...,), INVALID), ("request/layer_idx", (0,), INVALID)],
}


def test_inline_requests_that_deviate_are_refused() -> None:
    for method in BODIES:
        opened = open_request([msgpack.packb(_inline(method))], 2**20)
        assert (opened.form, opened.request_id, opened.timeout_ms) == (Form.INLINE, 0, None)
        assert read_request(opened).method == method
    wrong = [
        f"{method}: {found}"
        for method, rows in INLINE_REFUSED.items()
        for found in not_refused(_read, _inline(method), rows)
    ]
    assert wrong == []
    with pytest.raises(ProtocolError) as info:
        _read([msgpack.packb({})])
    assert info.value.code is MALFORMED
