"""Requests and replies: which bytes are read, and with which code others are refused.

That all of them are read as they were sent is in `tests/property/test_encoding_property.py`.
"""

import itertools
from typing import Any, get_args

import msgpack
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from gpu_side import encoding
from gpu_side.encoding import RequestReader, encode_reply, open_request, read_request
from protocol.encoding import (
    MAX_ARRAY_LENGTH,
    MAX_DEPTH,
    MAX_REPLY_FRAMES,
    MAX_REPLY_HEADER_BYTES,
    MAX_STRING_BYTES,
    decode_reply,
    encode_request,
    unpack,
)
from protocol.errors import ErrorCode, ProtocolError, TsqpError
from protocol.keystream import seeded
from protocol.messages import (
    MAX_STATEMENT_BYTES,
    MAX_TIMING_US,
    EmbeddingRequest,
    HealthReply,
    InitConfig,
    InitReply,
    LinearRequest,
    MatmulRequest,
    ModuleName,
    NormWeight,
    Request,
    RingLinearRequest,
    RotaryParams,
    TensorReply,
    Timing,
)
from protocol.tensors import MAX_DIMENSION, Buffer, WireTensor, from_torch, to_torch
from tests.kit.rows import each_row
from tests.kit.wire import Rows, changed, not_refused

F4 = bytes(16)  # four float32, or int32
MALFORMED, INVALID = ErrorCode.MALFORMED_MESSAGE, ErrorCode.INVALID_FIELD
LIMIT, UNKNOWN = ErrorCode.LIMIT_EXCEEDED, ErrorCode.UNKNOWN_METHOD
VERSION = ErrorCode.UNSUPPORTED_VERSION


def _read(frames: list[Buffer]) -> Request:
    return read_request(open_request(frames, 2**20))


TENSOR = {"dtype": "float32", "shape": [4], "frame": 1}
ELEMENTS = TENSOR | {"dtype": "int32"}
NAMES = "request/module_names"
HIDDEN = "request/hidden_states"


def _framed(method: str, **request: Any) -> dict[str, Any]:
    head = {"version": 1, "request_id": 7, "timeout_ms": 1000, "method": method}
    return {**head, "request": request}


LINEAR = _framed("Linear", layer_idx=0, module_names=["q_proj"], hidden_states=TENSOR)
RING = _framed("RingLinear", layer_idx=0, module_names=["q_proj"], elements=ELEMENTS)
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
    ("version", (1,), INVALID, [bytes(15)]),
    ("request/layer_idx", (-1, 4096, "0", True, ..., TENSOR), INVALID),
    (NAMES, ([], ["q_proj"] * 4, ["lm_head"], ["canary"], "q_proj", [1], {"a": 1}), INVALID),
    ("request/bias", (None, 0, 1, "false", [], {}), INVALID),
    (HIDDEN, (F4, [0.0] * 4, {}, ..., "canary"), INVALID, []),
    ("request/extra", (TENSOR, 1), INVALID),
    (f"{HIDDEN}/frame", (0, -1, 2, True, 1.0, None, "1", "canary"), INVALID),
    (f"{HIDDEN}/dtype", ("float64", "canary", ...), INVALID),
    (f"{HIDDEN}/shape", (..., [5], [-1]), INVALID),
    (f"{HIDDEN}/shape", ([2**31 - 1] * 4,), LIMIT),
    (f"{HIDDEN}/canary", ("canary",), INVALID),
]
RING_REFUSED: Rows = [
    ("request/elements/dtype", ("uint32",), INVALID),
    ("request/elements", (F4, None, [0] * 4, ...), INVALID, []),
    ("request/hidden_states", (TENSOR,), INVALID),
    ("request/bias", (True, False), INVALID),
]
SEGMENT_REFUSED: Rows = [
    ("request/first_layer", (-1, 4096, True, ...), INVALID),
    ("request/last_layer", (-1, 4096, "1", ...), INVALID),
    ("request/sinks", (-1, 2**31, 1.0, None), INVALID),
    ("request/recent", (-1, 2**31, True), INVALID),
    ("request/parts", (..., []), INVALID, [F4]),
]
INIT_REFUSED: Rows = [("request/nonce", (bytes(33), "n" * 32, None, 1), INVALID)]


def test_framed_requests_that_deviate_are_refused() -> None:
    read = _read([msgpack.packb(LINEAR), F4])
    tensor = WireTensor("float32", (4,), F4)
    assert read == LinearRequest(layer_idx=0, module_names=("q_proj",), hidden_states=tensor)
    ring = _read([msgpack.packb(RING), F4])
    assert isinstance(ring, RingLinearRequest)
    assert encode_request(ring, 7, 1000)[1] is F4
    assert _read([msgpack.packb(SEGMENT), *SEGMENT_FRAMES]).method == "Segment"
    a, b = WireTensor("float32", (2, 3), bytes(24)), WireTensor("float32", (3, 2), bytes(24))
    header, *frames = encode_request(MatmulRequest(a=a, b=b), 7, 1000)
    described = {
        "a": {"dtype": "float32", "shape": [2, 3], "frame": 1},
        "b": {"dtype": "float32", "shape": [3, 2], "frame": 2},
    }
    assert msgpack.unpackb(header) == _framed("Matmul", **described)
    assert (frames[0] is a.data, frames[1] is b.data) == (True, True)
    wrong = [
        *not_refused(_read, LINEAR, LINEAR_REFUSED, [F4]),
        *not_refused(_read, RING, RING_REFUSED, [F4]),
        *not_refused(_read, SEGMENT, SEGMENT_REFUSED, SEGMENT_FRAMES),
        *not_refused(_read, _framed("Init"), INIT_REFUSED),
    ]
    assert wrong == []


@each_row(
    ("frames", "code", "said"),
    [
        *(([b"\x80"] * n, MALFORMED, f"got {n} frames, expected 1 to 4") for n in (0, 5, 100)),
        ([bytes(101)], LIMIT, "expected at most 100"),
        ([bytes(65537), F4], LIMIT, "expected at most 65536"),
        ([msgpack.packb({b"method": None, "request": {}})], MALFORMED, "request: got"),
        ([msgpack.packb(changed(LINEAR, HIDDEN, {b"x": 1})), F4], MALFORMED, "request: got"),
        ([msgpack.packb({"method": "Init", "request": {}}), b""], MALFORMED, "got 2 frames"),
        # Two of its own, and 63 more.
        (
            [msgpack.packb({"method": "Init", "request": {f"f{n}": {} for n in range(63)}})],
            MALFORMED,
            "more than 64 maps and arrays",
        ),
    ],
)
def test_what_is_no_envelope_is_refused(frames: list[Buffer], code: ErrorCode, said: str) -> None:
    with pytest.raises(ProtocolError, match=said) as info:
        read_request(open_request(frames, 100 if code is LIMIT else 2**20))
    assert info.value.code is code


IDS = b"".join(n.to_bytes(8, "little") for n in (1, 2))
F32 = "torch.float32"
WHERE = {"layer_idx": 3, "module_name": "q_proj"}
SQUARES = {"a_buffer": F4, "a_shape": [2, 2], "b_buffer": F4, "b_shape": [2, 2]}
BODIES: dict[str, dict[str, Any]] = {
    "Init": {},
    "Embedding": {"input_ids": IDS, "input_shape": [1, 2], "dtype": F32},
    "Linear": WHERE | {"hidden_states": F4, "shape": [1, 1, 4], "dtype": F32},
    "RingLinear": WHERE | {"elements": F4, "shape": [1, 1, 4]},
    "SeededRingLinear": WHERE | {"rows": 2, "columns": 4, "seed": bytes(32), "seed_shape": [8]},
    "Matmul": SQUARES | {"dtype": F32},
    "LMHead": {"hidden_states": F4, "shape": [4], "dtype": F32},
    "RingLMHead": {"elements": F4, "shape": [1, 4]},
}


def _inline(method: str, **changes: Any) -> dict[str, Any]:
    return {"method": method, "request": BODIES[method] | changes}


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
    ],
    "Linear": [
        ("request/module_name", (..., ["q_proj"], {"frame": 1}, "lm_head", "canary"), INVALID),
        ("request/module_names", (["q_proj"],), INVALID),
        ("request/hidden_states", (..., {"dtype": "float32"}), INVALID),
        ("request/shape", (...,), INVALID),
        ("request/shape", ([2**31 - 1] * 3,), LIMIT),
        ("request/dtype", (..., "uint32", "canary"), INVALID),
        ("request/bias", (0, None), INVALID),
    ],
    "RingLinear": [
        ("request/dtype", ("torch.int32",), INVALID),
        ("request/shape", ([1, 1, 5], ...), INVALID),
        ("request", (BODIES["Linear"],), INVALID),
    ],
    "SeededRingLinear": [
        ("request/seed", (..., bytes(31)), INVALID),
        ("request/seed_shape", (..., [7]), INVALID),
        ("request/rows", (..., 0, -1, 2**31, 3.0, True), INVALID),
        ("request/columns", (..., 0), INVALID),
        ("request/elements", (bytes(32),), INVALID),
    ],
    "RingLMHead": [("request", (BODIES["RingLinear"], BODIES["LMHead"]), INVALID)],
    # Our own names for what the schema calls a_buffer and b_buffer.
    "Matmul": [(f"request/{name}", ("junk",), INVALID) for name in ("a", "b", "transpose")],
}


def test_inline_requests_that_deviate_are_refused() -> None:
    for method in BODIES:
        opened = open_request([msgpack.packb(_inline(method))], 2**20)
        assert (opened.form, opened.request_id, opened.timeout_ms) == ("inline", 0, None)
        assert read_request(opened).method == method
    # The published schema does not say whose dtype it is; ids have no other than int64.
    for dtype, reply_dtype in ((F32, "float32"), ("torch.int64", "float32")):
        request = _read([msgpack.packb(_inline("Embedding", dtype=dtype))])
        ids = WireTensor("int64", (1, 2), IDS)
        assert request == EmbeddingRequest(input_ids=ids, dtype=reply_dtype)
    wrong = [
        f"{method}: {found}"
        for method, rows in INLINE_REFUSED.items()
        for found in not_refused(_read, _inline(method), rows)
    ]
    assert wrong == []
    with pytest.raises(ProtocolError) as info:
        _read([msgpack.packb({})])
    assert info.value.code is MALFORMED


OUTPUT = TensorReply(output=WireTensor("float32", (4,), F4))
TIMING = Timing(queue_us=3, compute_us=4)
INIT_REPLY = InitReply(
    config=InitConfig(num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2),
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
FAILURE_REFUSED: Rows = [("version", (1,), MALFORMED), ("error", ("traceback: canary", 1), INVALID)]
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
    ("ranks", (0, 65, True)),
]
HEALTH_REPLY_REFUSED: Rows = [
    ("status", ("loading", None)),
    ("uptime_s", (-0.1, float("nan"), float("inf"), "1")),
    ("queued_requests", (-1, True, 2**31)),
    ("queued_bytes", (-1, 1.0, 2**53 + 1, ...)),
]


def _in_response(rows: Rows) -> Rows:
    return [(f"response/{field}", values, INVALID) for field, values in rows]


def test_replies_that_deviate_are_refused() -> None:
    init, *tensors = encode_reply("framed", 1, "Init", INIT_REPLY)
    assert decode_reply([init, *tensors]).response == INIT_REPLY
    assert msgpack.unpackb(encode_reply("framed", 7, "Linear", OUTPUT, TIMING)[0]) == ANSWER
    (failed,) = encode_reply("framed", 7, "Linear", ErrorCode.INTERNAL)
    assert msgpack.unpackb(failed) == FAILURE | {"error": "INTERNAL"}
    (health,) = encode_reply("framed", 7, "Health", HealthReply(**HEALTH_REPLY), TIMING)
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
    for frames in ([], [b""] * (MAX_REPLY_FRAMES + 1)):
        with pytest.raises(ProtocolError, match=f"got {len(frames)} frames, expected 1 to"):
            decode_reply(frames)
    with pytest.raises(ProtocolError, match=f"at most {MAX_REPLY_HEADER_BYTES}$"):
        decode_reply([bytes(MAX_REPLY_HEADER_BYTES + 1)])


# AES-256 of blocks 2 and 3 under the zero key.
KNOWN = "cea7403d4d606b6e074ec5d3baf39d18726003ca37a62a74d1a2f58e7506358e"


def test_a_seed_stands_for_aes_256_in_counter_mode_row_after_row() -> None:
    assert seeded([bytes(32)], 1, 8).elements().numpy().tobytes().hex() == KNOWN
    for rows, features in ((1, 1), (3, 1), (2, 4), (7, 1001)):
        cipher = Cipher(algorithms.AES(bytes(range(32))), modes.CTR((2).to_bytes(16, "big")))
        expected = cipher.encryptor().update(bytes(4 * rows * features))
        assert seeded([bytes(range(32))], rows, features).elements().numpy().tobytes() == expected


HUGE = b"\xff" * 4


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth > 1 else {}


@each_row(
    ("data", "text"),
    [
        (b"", "incomplete input"),
        (b"\xc1", "FormatError"),
        (b"\xa6canary", "got str, expected a map"),
        (b"\x81\xa1a\xc4\x06canary\xff", "ExtraData"),
        (b"\x82\xc4\x06canary\xc0\xa1a\xc0", "a key that is not a string"),
        (b"\x81\xa1a\xa1\xff", "UnicodeDecodeError"),
        (b"\x81\x01\xc0", "int is not allowed for map key"),
        (b"\x81\xa1a\xc7\x00\x05", "an extension type"),
        (b"\x82\xa1a\xc0\xa1a\xc0", "a duplicate key"),
        (b"\x81\xa1a\x91\x90", "an array of containers"),
        (msgpack.packb(_nested(MAX_DEPTH + 1)), f"nested more than {MAX_DEPTH} deep"),
        (msgpack.packb({"a": [0] * (MAX_ARRAY_LENGTH + 1)}), "max_array_len"),
        (msgpack.packb({"x" * (MAX_STRING_BYTES + 1): 1}), "max_str_len"),
        (b"\x81\xa1a\xc6" + HUGE, "incomplete input"),
        (b"\x91" * 60_000, "StackError"),
    ],
)
def test_what_is_no_map_within_the_limits_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^request: got ") as info:
        unpack(data, where="request", max_bytes=2**20, max_containers=64)
    assert info.value.code is ErrorCode.MALFORMED_MESSAGE
    assert text in str(info.value)
    assert "canary" not in str(info.value)


def test_requests_of_one_header_have_one_kernel_and_few_headers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def linear(layer: int = 3, names: tuple[ModuleName, ...] = ("q_proj",)) -> LinearRequest:
        hidden = WireTensor("float32", (4,), F4)
        return LinearRequest(layer_idx=layer, module_names=names, hidden_states=hidden)

    most = encoding.MAX_KNOWN_HEADERS // 16
    monkeypatch.setattr(encoding, "MAX_KNOWN_HEADERS", most)
    reader = RequestReader(2**20, lambda request: lambda *_: request)
    first = reader.open(encode_request(linear(), 1, 1000))
    assert (first.known, reader.known) == (None, {})  # its body has not been checked yet
    _, kernel = reader.read(first)
    opened = reader.open(encode_request(linear(), 2**63 - 1, 3_600_000))
    assert opened.known is not None
    assert (opened.request_id, opened.timeout_ms) == (2**63 - 1, 3_600_000)
    assert reader.read(opened) == (linear(), kernel)
    _, other = reader.read(reader.open(encode_request(linear(4), 1, 1000)))
    assert other is not kernel
    reader.read(reader.open([msgpack.packb(_inline("Linear"))]))
    assert len(reader.known) == 2
    triples = itertools.product(get_args(ModuleName), repeat=3)
    for names, layer in itertools.islice(itertools.product(triples, range(4)), 3 * most):
        reader.read(reader.open(encode_request(linear(layer, names), 1, 1000)))
        assert len(reader.known) <= most


SINGLE, F1, F6 = "float32", bytes(4), bytes(24)  # one float32, and six
WRONG_SHAPES = [
    *([-1, 3], [0], [], [1] * 5, [1.0], [True], ["1"], [[1]], "1", 1, None, {1: 1}),
    *([MAX_DIMENSION + 1], [2**63]),
]
UNKNOWN_DTYPES = [
    *("float64", "int8", "uint32", "complex64", "", "torch.", "torch.torch.float32", "Float32"),
    *(" float32", b"float32", None, 4, ["float32"], {}),
]


@each_row(
    ("dtype", "shape", "data", "code", "text"),
    [
        *((name, [1], F1, INVALID, "x.dtype: got") for name in UNKNOWN_DTYPES),
        *((SINGLE, shape, F6, INVALID, "x.shape") for shape in WRONG_SHAPES),
        (SINGLE, [2, 3], bytes(23), INVALID, "got 23 bytes, expected 24 for"),
        (SINGLE, [2, 3], bytes(25), INVALID, "got 25 bytes, expected 24 for"),
        ("float16", [2, 3], F6, INVALID, "expected 12 for float16 [2, 3]"),
        (SINGLE, [1], b"", INVALID, "got 0 bytes"),
        (SINGLE, [MAX_DIMENSION] * 4, b"", LIMIT, "at most 2147483648"),
        ("int64", [2**28 + 1], b"", LIMIT, "at most 2147483648"),
        (SINGLE, [1], "abcd", INVALID, "x: got str, expected raw bytes"),
        (SINGLE, [1], None, INVALID, "x: got NoneType"),
        (SINGLE, [1], [1.0], INVALID, "x: got list"),
    ],
)
def test_a_wrong_claim_about_bytes_is_refused(
    dtype: object, shape: object, data: object, code: ErrorCode, text: str
) -> None:
    with pytest.raises(ProtocolError) as info:
        WireTensor.checked(dtype, shape, data, "x")
    assert info.value.code is code
    assert text in str(info.value)


def test_bytes_are_little_endian_and_in_c_order() -> None:
    tensor = torch.tensor([[1, 2], [3, 4]], dtype=torch.int64)
    for sent, order in ((tensor, (1, 2, 3, 4)), (tensor.T, (1, 3, 2, 4))):
        assert bytes(from_torch(sent).data) == b"".join(n.to_bytes(8, "little") for n in order)
    assert "7777" not in repr(WireTensor("float32", (1,), b"7777"))
    for wrap in (bytes, memoryview):  # what cannot change is not aliased
        data = bytes(8)
        copied = to_torch(WireTensor.checked("float32", [2], wrap(data), "x"))
        copied += 1.0
        assert data == bytes(8)


def test_a_message_is_one_short_printable_line() -> None:
    error = ProtocolError("reply", got="[3]", expected="[4]", code=ErrorCode.INVALID_FIELD)
    assert str(error) == "reply: got [3], expected [4]"
    said = str(TsqpError("a\nb\x1b[2J", got="x" * 10_000, expected="\u202e"))
    assert said.isprintable()
    assert len(said) < 1100
