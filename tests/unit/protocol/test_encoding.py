"""Tests of the framed and the inline form: layout, and the error code of every deviation."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

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
    Arithmetic,
    EmbeddingRequest,
    InitConfig,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    NormWeight,
    Request,
    RingLinearRequest,
    RotaryParams,
    TensorReply,
    Timing,
)
from protocol.tensors import Buffer, WireTensor, from_torch
from tests.kit.rows import each_row

F4 = b"\0" * 16  # four float32
MALFORMED, INVALID = ErrorCode.MALFORMED_MESSAGE, ErrorCode.INVALID_FIELD


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> WireTensor:
    return from_torch(torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype))


def _init_reply() -> InitReply:
    return InitReply(
        config=InitConfig(num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2),
        rotary_emb_params=RotaryParams(inv_freq=_tensor(1), attention_scaling=1.0),
        norm_weights={"final_norm": NormWeight(weight=_tensor(4), eps=1e-5)},
        model_digest="a" * 64,
        linear_digest="b" * 64,
        max_message_bytes=1,
        arithmetic=("float", "int8"),
        provision_id=None,
        instance_id="d" * 32,
        layers=(0, 0),
        max_queued_requests=1,
        max_queued_bytes=1,
    )


def _read(frames: list[Buffer]) -> Request:
    return read_request(open_request(frames, 2**20))


def _header(**changes: Any) -> dict[str, Any]:
    header = {
        "version": 1,
        "request_id": 7,
        "timeout_ms": 1000,
        "method": "Linear",
        "request": {
            "layer_idx": 0,
            "module_names": ["q_proj"],
            "hidden_states": {"dtype": "float32", "shape": [4], "frame": 1},
        },
    } | changes
    return {key: value for key, value in header.items() if value is not ...}


def _linear(**changes: Any) -> dict[str, Any]:
    fields = _header()["request"] | changes
    return _header(request={key: value for key, value in fields.items() if value is not ...})


def _description(**changes: Any) -> dict[str, Any]:
    fields = {"dtype": "float32", "shape": [4], "frame": 1} | changes
    return _linear(hidden_states={key: value for key, value in fields.items() if value is not ...})


def test_framed_request_is_a_header_and_one_frame_a_tensor() -> None:
    a, b = _tensor(2, 3), _tensor(3, 2)
    frames = encode_request(MatmulRequest(a=a, b=b), 5, 1500)
    assert len(frames) == 3
    assert frames[1] is a.data
    assert frames[2] is b.data
    assert msgpack.unpackb(frames[0]) == {
        "version": 1,
        "request_id": 5,
        "timeout_ms": 1500,
        "method": "Matmul",
        "request": {
            "a": {"dtype": "float32", "shape": [2, 3], "frame": 1},
            "b": {"dtype": "float32", "shape": [3, 2], "frame": 2},
        },
    }


def test_framed_reply_names_its_request_and_operator() -> None:
    frames = encode_reply(
        Form.FRAMED,
        9,
        "Linear",
        TensorReply(output=_tensor(2)),
        Timing(queue_us=3, compute_us=4),
    )
    assert msgpack.unpackb(frames[0]) == {
        "status": "success",
        "response": {"output": {"dtype": "float32", "shape": [2], "frame": 1}},
        "version": 1,
        "request_id": 9,
        "method": "Linear",
        "timing": {"queue_us": 3, "compute_us": 4},
    }
    reply = decode_reply(frames)
    assert reply == Reply(
        9, "Linear", TensorReply(output=_tensor(2)), None, Timing(queue_us=3, compute_us=4)
    )


@each_row("form", list(Form))
@pytest.mark.parametrize("code", list(ErrorCode))
def test_error_reply_carries_the_code_and_nothing_else(form: Form, code: ErrorCode) -> None:
    frames = encode_reply(form, 9, "Linear", code)
    expected: dict[str, Any] = {"status": "error", "error": code.value}
    if form is Form.FRAMED:
        expected |= {"version": 1, "request_id": 9, "method": "Linear"}
        assert decode_reply(frames) == Reply(9, "Linear", None, code, None)
    assert len(frames) == 1
    assert msgpack.unpackb(frames[0]) == expected


@pytest.mark.parametrize(
    ("request_id", "message"),
    [
        (1, InitRequest()),
        (2**63 - 1, EmbeddingRequest(input_ids=_tensor(3, dtype=torch.int64), dtype="float16")),
        (2, LMHeadRequest(hidden_states=_tensor(1, 2, 3))),
    ],
)
def test_opened_request_has_id_and_deadline(request_id: int, message: Request) -> None:
    opened = open_request(encode_request(message, request_id, 1234), 2**20)
    assert opened.form is Form.FRAMED
    assert (opened.request_id, opened.timeout_ms) == (request_id, 1234)
    assert opened.method == message.method
    assert read_request(opened) == message


@each_row(
    ("header", "frames", "code"),
    [
        (_header(version=2), [F4], ErrorCode.UNSUPPORTED_VERSION),
        (_header(version=0), [F4], ErrorCode.UNSUPPORTED_VERSION),
        (_header(version="1"), [F4], ErrorCode.UNSUPPORTED_VERSION),
        (_header(version=None), [F4], ErrorCode.UNSUPPORTED_VERSION),
        (_header(version=True), [F4], INVALID),
        (_header(version=1.0), [F4], INVALID),
        (_header(version=...), [F4], MALFORMED),
        (_header(request_id=0), [F4], INVALID),
        (_header(request_id=-1), [F4], INVALID),
        (_header(request_id=2**63), [F4], INVALID),
        (_header(request_id=1.0), [F4], INVALID),
        (_header(request_id="1"), [F4], INVALID),
        (_header(request_id=...), [F4], INVALID),
        (_header(timeout_ms=0), [F4], INVALID),
        (_header(timeout_ms=3_600_001), [F4], INVALID),
        (_header(timeout_ms=...), [F4], INVALID),
        (_header(method=1), [F4], INVALID),
        (_header(method=...), [F4], INVALID),
        (_header(method="linear"), [F4], ErrorCode.UNKNOWN_METHOD),
        (_header(method="Init"), [F4], INVALID),
        (_header(method=""), [F4], ErrorCode.UNKNOWN_METHOD),
        (_header(request=...), [F4], INVALID),
        (_header(request=[]), [F4], INVALID),
        (_header(request=None), [F4], INVALID),
        (_header(priority=1), [F4], INVALID),
        (_header(), [], INVALID),
        (_header(), [F4, F4], MALFORMED),
        (_header(), [F4] * 4, MALFORMED),
        (_header(), [b"\0" * 15], INVALID),
        (_header(), [b""], INVALID),
        (_linear(layer_idx=-1), [F4], INVALID),
        (_linear(layer_idx=4096), [F4], INVALID),
        (_linear(layer_idx="0"), [F4], INVALID),
        (_linear(layer_idx=True), [F4], INVALID),
        (_linear(layer_idx=...), [F4], INVALID),
        (_linear(layer_idx={"dtype": "float32", "shape": [4], "frame": 1}), [F4], INVALID),
        (_linear(module_names=[]), [F4], INVALID),
        (_linear(module_names=["q_proj"] * 4), [F4], INVALID),
        (_linear(module_names=["lm_head"]), [F4], INVALID),
        (_linear(module_names="q_proj"), [F4], INVALID),
        (_linear(module_names=[1]), [F4], INVALID),
        (_linear(module_names={"a": 1}), [F4], INVALID),
        (_linear(module_name="q_proj"), [F4], INVALID),
        (_linear(hidden_states=F4), [], INVALID),
        (_linear(hidden_states=[0.0] * 4), [], INVALID),
        (_linear(hidden_states={}), [], INVALID),
        (_linear(hidden_states=...), [], INVALID),
        (_linear(extra={"dtype": "float32", "shape": [4], "frame": 2}), [F4, F4], INVALID),
        (_linear(extra={"dtype": "float32", "shape": [4], "frame": 1}), [F4], INVALID),
        (_description(frame=0), [F4], INVALID),
        (_description(frame=-1), [F4], INVALID),
        (_description(frame=2), [F4], INVALID),
        (_description(frame=True), [F4], INVALID),
        (_description(frame=1.0), [F4], INVALID),
        (_description(frame=None), [F4], INVALID),
        (_description(frame="1"), [F4], INVALID),
        (_description(dtype="float64"), [F4], INVALID),
        (_description(dtype=...), [F4], INVALID),
        (_description(shape=...), [F4], INVALID),
        (_description(shape=[5]), [F4], INVALID),
        (_description(shape=[-1]), [F4], INVALID),
        (_description(shape=[2**31 - 1] * 4), [F4], ErrorCode.LIMIT_EXCEEDED),
        (_description(strides=[1]), [F4], INVALID),
    ],
)
def test_framed_request_that_deviates_is_refused(
    header: dict[str, Any], frames: list[Buffer], code: ErrorCode
) -> None:
    with pytest.raises(ProtocolError) as info:
        _read([msgpack.packb(header), *frames])
    assert info.value.code is code, str(info.value)


def test_the_tables_own_header_is_good() -> None:
    request = _read([msgpack.packb(_header()), F4])
    assert request == LinearRequest(
        layer_idx=0,
        module_names=("q_proj",),
        hidden_states=WireTensor("float32", (4,), F4),
    )


@pytest.mark.parametrize("count", [0, 5, 100])
def test_request_of_too_few_or_too_many_frames_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"got {count} frames, expected 1 to 4") as info:
        open_request([b"\x80"] * count, 2**20)
    assert info.value.code is MALFORMED


def test_a_request_holds_few_maps_and_arrays() -> None:
    """Sixty-four, its own two among them, in either form."""
    for form in (0, 1):
        for maps, is_refused in ((62, False), (63, True)):
            request = {f"f{n}": {} for n in range(maps)}
            body: dict[str, Any] = {"method": "Init", "request": request}
            if form:
                body |= {"version": 1, "request_id": 1, "timeout_ms": 1}
            if not is_refused:
                assert open_request([msgpack.packb(body)], 2**20).method == "Init"
                continue
            with pytest.raises(ProtocolError, match="more than 64 maps and arrays") as info:
                open_request([msgpack.packb(body)], 2**20)
            assert info.value.code is MALFORMED


@pytest.mark.parametrize(("frames", "limit"), [([b"\0" * 101], 100), ([b"\0" * 65537, F4], 65536)])
def test_request_over_a_byte_limit_is_refused(frames: list[Buffer], limit: int) -> None:
    with pytest.raises(ProtocolError, match=f"expected at most {limit}") as info:
        open_request(frames, 100)
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    ("message", "frames"),
    [
        ({b"method": None, "request": {}}, []),
        (_linear(hidden_states={"dtype": "float32", "shape": [4], "frame": 1, b"x": 1}), [F4]),
    ],
)
def test_keys_of_two_types_are_a_protocol_error(
    message: dict[str, Any], frames: list[Buffer]
) -> None:
    with pytest.raises(ProtocolError):
        _read([msgpack.packb(message), *frames])


def _reply(**changes: Any) -> dict[str, Any]:
    reply = {
        "version": 1,
        "request_id": 7,
        "method": "Linear",
        "status": "success",
        "response": {"output": {"dtype": "float32", "shape": [4], "frame": 1}},
    } | changes
    return {key: value for key, value in reply.items() if value is not ...}


@each_row(
    ("reply", "frames", "code"),
    [
        (_reply(version=2), [F4], ErrorCode.UNSUPPORTED_VERSION),
        (_reply(version=...), [F4], INVALID),
        (_reply(request_id=-1), [F4], INVALID),
        (_reply(request_id=...), [F4], INVALID),
        (_reply(method=...), [F4], INVALID),
        (_reply(method="Init"), [F4], INVALID),
        (_reply(status="ok"), [F4], INVALID),
        (_reply(status=...), [F4], INVALID),
        (_reply(status="error"), [F4], MALFORMED),
        (_reply(error="INTERNAL"), [F4], MALFORMED),
        (_reply(response=...), [], MALFORMED),
        (_reply(status="error", response=...), [], MALFORMED),
        (_reply(status="error", response=..., error="traceback: ..."), [], INVALID),
        (_reply(status="error", response=..., error=1), [], INVALID),
        (_reply(response={}), [], INVALID),
        (_reply(response={"output": F4}), [], INVALID),
        (_reply(response={"output": [1, 2]}), [], INVALID),
        (_reply(traceback="x"), [F4], INVALID),
        (_reply(timing={"queue_us": -1, "compute_us": 0}), [F4], INVALID),
        (_reply(timing={"queue_us": 0}), [F4], INVALID),
        (_reply(timing=1), [F4], INVALID),
        (_reply(), [], INVALID),
        (_reply(), [F4, F4], MALFORMED),
        (_reply(), [b"\0" * 8], INVALID),
    ],
)
def test_framed_reply_that_deviates_is_refused(
    reply: dict[str, Any], frames: list[Buffer], code: ErrorCode
) -> None:
    with pytest.raises(ProtocolError) as info:
        decode_reply([msgpack.packb(reply), *frames])
    assert info.value.code is code, str(info.value)


def test_reply_of_no_frames_or_with_a_huge_header_is_refused() -> None:
    with pytest.raises(ProtocolError, match="got 0 frames"):
        decode_reply([])
    with pytest.raises(ProtocolError, match=f"at most {MAX_REPLY_HEADER_BYTES}") as info:
        decode_reply([b"\0" * (MAX_REPLY_HEADER_BYTES + 1)])
    assert info.value.code is ErrorCode.LIMIT_EXCEEDED


@each_row(
    "changes",
    [
        {"model_digest": "A" * 64},
        {"model_digest": "a" * 63},
        {"norm_weights": {"final_norm": 1}},
        {"arithmetic": ...},
        {"arithmetic": []},
        {"arithmetic": "int8"},
        {"arithmetic": ["int8", "int8"]},
        {"arithmetic": ["int4"]},
        {"arithmetic": ["float", "int8", "float"]},
        {"arithmetic": None},
        {"provision_id": ...},
        {"provision_id": ""},
        {"provision_id": "a" * 63},
        {"provision_id": 1},
        {"instance_id": ...},
        {"instance_id": None},
        {"instance_id": "d" * 31},
        {"instance_id": "D" * 32},
        {"layers": ...},
        {"layers": None},
        {"layers": []},
        {"layers": [0]},
        {"layers": [0, 0, 0]},
        {"layers": [1, 0]},
        {"layers": [-1, 0]},
        {"layers": [0, 4096]},
        {"layers": [0, True]},
        {"layers": [0, 0.0]},
        {"layers": ["0", "0"]},
        {"max_queued_requests": ...},
        {"max_queued_requests": 0},
        {"max_queued_requests": None},
        {"max_queued_requests": 2**31},
        {"max_queued_bytes": ...},
        {"max_queued_bytes": 0},
        {"max_queued_bytes": True},
        {"max_queued_bytes": 2**40 + 1},
    ],
)
def test_init_reply_is_checked(changes: dict[str, Any]) -> None:
    frames = encode_reply(Form.FRAMED, 1, "Init", _init_reply())
    assert decode_reply(frames).response == _init_reply()
    header = msgpack.unpackb(frames[0])
    header["response"] |= changes
    header["response"] = {k: v for k, v in header["response"].items() if v is not ...}
    with pytest.raises(ProtocolError):
        decode_reply([msgpack.packb(header), *frames[1:]])


@pytest.mark.parametrize("arithmetic", [("float",), ("int8",), ("float", "int8")])
@pytest.mark.parametrize("provision_id", [None, "c" * 64])
def test_init_reply_says_what_is_held(
    arithmetic: tuple[Arithmetic, ...], provision_id: str | None
) -> None:
    reply = _init_reply().model_copy(
        update={"arithmetic": arithmetic, "provision_id": provision_id}
    )
    frames = encode_reply(Form.FRAMED, 1, "Init", reply)
    header = msgpack.unpackb(frames[0])["response"]
    assert header["arithmetic"] == list(arithmetic)
    assert header["provision_id"] == provision_id
    assert decode_reply(frames).response == reply


@pytest.mark.parametrize("given", [..., True, False])
def test_linear_adds_biases_unless_told_not_to(given: object) -> None:
    request = _read([msgpack.packb(_linear(bias=given)), F4])
    assert isinstance(request, LinearRequest)
    assert request.bias is (given is not False)
    assert msgpack.unpackb(encode_request(request, 1, 1)[0])["request"]["bias"] is request.bias


@pytest.mark.parametrize("given", [None, 0, 1, "false", [], {}])
def test_a_bias_that_is_not_a_boolean_is_refused(given: object) -> None:
    with pytest.raises(ProtocolError, match=r"Linear\.bias") as info:
        _read([msgpack.packb(_linear(bias=given)), F4])
    assert info.value.code is INVALID


def _ring(**changes: Any) -> dict[str, Any]:
    fields = {
        "layer_idx": 0,
        "module_names": ["q_proj"],
        "elements": {"dtype": "int32", "shape": [4], "frame": 1},
    } | changes
    request = {key: value for key, value in fields.items() if value is not ...}
    return _header(method="RingLinear", request=request)


def test_framed_ring_linear_is_read() -> None:
    request = _read([msgpack.packb(_ring()), F4])
    assert request == RingLinearRequest(
        layer_idx=0, module_names=("q_proj",), elements=WireTensor("int32", (4,), F4)
    )
    header, frame = encode_request(request, 7, 1000)
    assert msgpack.unpackb(header) == _ring()
    assert frame is F4


@each_row(
    "changes",
    [
        {"layer_idx": -1},
        {"layer_idx": 4096},
        {"layer_idx": ...},
        {"module_names": []},
        {"module_names": ["q_proj"] * 4},
        {"module_names": ["lm_head"]},
        {"module_names": ...},
        {"elements": {"dtype": "uint32", "shape": [4], "frame": 1}},
        {"elements": {"dtype": "int32", "shape": [5], "frame": 1}},
        {"hidden_states": {"dtype": "float32", "shape": [4], "frame": 1}},
        {"bias": True},
        {"bias": False},
        {"scale": 1.0},
    ],
)
def test_framed_ring_linear_that_deviates_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as info:
        _read([msgpack.packb(_ring(**changes)), F4])
    assert info.value.code is INVALID, str(info.value)


@pytest.mark.parametrize("elements", [..., F4, None, [0] * 4])
def test_framed_ring_linear_without_a_tensor_is_refused(elements: object) -> None:
    with pytest.raises(ProtocolError) as info:
        _read([msgpack.packb(_ring(elements=elements))])
    assert info.value.code is INVALID, str(info.value)


def test_a_reply_of_too_many_frames_is_refused_by_their_number() -> None:
    with pytest.raises(ProtocolError, match=f"{MAX_REPLY_FRAMES + 1} frames"):
        decode_reply([b""] * (MAX_REPLY_FRAMES + 1))
