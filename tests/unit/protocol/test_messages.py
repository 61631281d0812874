"""Requests and replies: which bytes are read, and with which code others are refused.

That all of them are read as they were sent is in `tests/property/test_encoding_property.py`.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from protocol.encoding import (
    MAX_REPLY_FRAMES,
    MAX_REPLY_HEADER_BYTES,
    Reply,
    decode_reply,
    encode_request,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    MAX_STATEMENT_BYTES,
    MAX_TIMING_US,
    EmbeddingRequest,
    HealthReply,
    HealthRequest,
    InitConfig,
    InitReply,
    LinearRequest,
    MatmulRequest,
    NormWeight,
    Request,
    RingLinearRequest,
    RotaryParams,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.seed import SEED_SHAPE, expand
from protocol.tensors import Buffer, WireTensor, from_torch, to_torch
from tee_side.protect.masks.mask import Seed
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


# ------------------------------------------------------------------------------------- replies

OUTPUT = TensorReply(output=WireTensor("float32", (4,), F4))
TIMING = Timing(queue_us=3, compute_us=4)
SIZES = {"num_layers": 1, "hidden_size": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
INIT_REPLY = InitReply(
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
HEALTH_REPLY = {"status": "ready", "uptime_s": 1.5, "queued_requests": 3, "queued_bytes": 2**40}

ANSWER: dict[str, Any] = {
    "version": 1,
    "request_id": 7,
    "timing": {"queue_us": 3, "compute_us": 4},
    "method": "Linear",
    "status": "success",
    "response": {"output": {"dtype": "float32", "shape": [4], "frame": 1}},
}
ANSWER_REFUSED: Rows = [
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
FAILURE = {"version": 1, "request_id": 7, "method": "Linear", "status": "error"}
FAILURE_REFUSED: Rows = [
    ("version", (1,), MALFORMED),
    ("error", ("traceback: canary", 1), INVALID),
]
INIT_REPLY_REFUSED: Rows = [
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
HEALTH_REPLY_REFUSED: Rows = [
    ("status", ("loading", None)),
    ("uptime_s", (-0.1, float("nan"), float("inf"), "1")),
    ("queued_requests", (-1, True, 2**31)),
    ("queued_bytes", (-1, 1.0, 2**53 + 1, ...)),
    ("peers", ([],)),
]


def _in_response(rows: Rows) -> Rows:
    return [(f"response/{field}", values, INVALID) for field, values in rows]


def test_replies_that_deviate_are_refused() -> None:
    init, *tensors = encode_reply(Form.FRAMED, 1, "Init", INIT_REPLY)
    assert decode_reply([init, *tensors]).response == INIT_REPLY
    (health,) = encode_reply(Form.FRAMED, 7, "Health", HealthReply(**HEALTH_REPLY), TIMING)
    assert decode_reply([health]).response == HealthReply(**HEALTH_REPLY)
    wrong = [
        *not_refused(decode_reply, ANSWER, ANSWER_REFUSED, [F4]),
        # What a service calls its reply is not repeated.
        *not_refused(
            decode_reply, ANSWER | {"method": "canary"}, [("response", ({},), INVALID, [])]
        ),
        *not_refused(decode_reply, FAILURE, FAILURE_REFUSED),
        *not_refused(
            decode_reply, msgpack.unpackb(init), _in_response(INIT_REPLY_REFUSED), tensors
        ),
        *not_refused(decode_reply, msgpack.unpackb(health), _in_response(HEALTH_REPLY_REFUSED)),
    ]
    assert wrong == []


def test_a_reply_names_its_request_and_operator() -> None:
    frames = encode_reply(Form.FRAMED, 7, "Linear", OUTPUT, TIMING)
    assert msgpack.unpackb(frames[0]) == ANSWER
    assert frames[1] is F4
    assert decode_reply(frames) == Reply(7, "Linear", OUTPUT, None, TIMING)


@each_row("code", list(ErrorCode))
def test_an_error_reply_carries_the_code_and_nothing_else(code: ErrorCode) -> None:
    expected = {"status": "error", "error": code.value}
    for form, more in ((Form.INLINE, {}), (Form.FRAMED, FAILURE)):
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
    (init,) = encode_reply(Form.INLINE, 0, "Init", INIT_REPLY)
    assert msgpack.unpackb(init)["response"] == {
        "config": SIZES,
        "rotary_emb_params": {
            "inv_freq": bytes(4),
            "inv_freq_shape": [1],
            "attention_scaling": 2.0,
        },
        "norm_weights": {"final_norm": {"weight": F4, "shape": [4], "eps": 1e-6}},
    }
    (health,) = encode_reply(Form.INLINE, 0, "Health", HealthReply(**HEALTH_REPLY))
    assert msgpack.unpackb(health) == {"status": "success", "response": HEALTH_REPLY}


# --------------------------------------------------------------------------------------- seeds

# AES-256 of blocks 2 and 3 under the zero key.
KNOWN = "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e"


def test_the_keystream_is_that_of_aes_256_in_counter_mode() -> None:
    assert expand(bytes(32), 8).hex() == KNOWN
    for count in (1, 3, 4, 8, 1000):
        for seed in (bytes(32), os.urandom(32)):
            cipher = Cipher(algorithms.AES(seed), modes.CTR((2).to_bytes(16, "big")))
            assert expand(seed, count) == cipher.encryptor().update(bytes(4 * count))
    plain = expand(bytes(32), 64)
    for place in range(32):
        other = bytearray(32)
        other[place] = 0x10
        same = sum(a == b for a, b in zip(expand(other, 64), plain, strict=True))
        assert same < 16, place


def test_both_sides_make_the_same_of_a_seed() -> None:
    seed = Seed(os.urandom(32), (5, 7))
    assert (seed.words().dtype, tuple(seed.words().shape)) == (torch.int32, SEED_SHAPE)
    request = SeededRingLinearRequest(
        layer_idx=1, module_names=("o_proj",), rows=5, columns=7, seed=from_torch(seed.words())
    )
    whole = request.expanded()
    assert (whole.layer_idx, whole.module_names) == (1, ("o_proj",))
    assert torch.equal(to_torch(whole.elements), seed.elements())
    assert seed.elements().shape == seed.shape
    assert repr(Seed(b"secret", (1, 2))) == "Seed(shape=(1, 2))"
