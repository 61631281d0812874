"""Tests of the inline form: the published schema is accepted unchanged, anything else refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    EmbeddingRequest,
    InitConfig,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    NormWeight,
    Request,
    RingLinearRequest,
    RotaryParams,
    SeededRingLinearRequest,
    TensorReply,
    Timing,
)
from protocol.tensors import WireTensor, from_torch
from tests.kit.rows import each_row

IDS = b"".join(n.to_bytes(8, "little") for n in (1, 2))
F4 = b"\0" * 16
MALFORMED, INVALID = ErrorCode.MALFORMED_MESSAGE, ErrorCode.INVALID_FIELD

LINEAR = {
    "layer_idx": 3,
    "module_name": "q_proj",
    "hidden_states": F4,
    "shape": [1, 1, 4],
    "dtype": "torch.float32",
}
RING = {"layer_idx": 3, "module_name": "down_proj", "elements": F4, "shape": [1, 1, 4]}
SEEDED = {
    "layer_idx": 3,
    "module_name": "down_proj",
    "rows": 2,
    "columns": 4,
    "seed": bytes(32),
    "seed_shape": [8],
}
EMBEDDING = {"input_ids": IDS, "input_shape": [1, 2], "dtype": "torch.float32"}
MATMUL = {
    "a_buffer": F4,
    "a_shape": [2, 2],
    "b_buffer": F4,
    "b_shape": [2, 2],
    "dtype": "torch.float32",
}
LM_HEAD = {"hidden_states": F4, "shape": [4], "dtype": "torch.float32"}
F4_TENSOR = WireTensor("float32", (2, 2), F4)
IDS_TENSOR = WireTensor("int64", (1, 2), IDS)


def _read(message: Any) -> Request:
    return read_request(open_request([msgpack.packb(message)], 2**20))


def _without(body: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != key}


@each_row(
    ("method", "body", "expected"),
    [
        ("Init", {}, InitRequest()),
        ("Embedding", EMBEDDING, EmbeddingRequest(input_ids=IDS_TENSOR, dtype="float32")),
        (
            "Embedding",
            EMBEDDING | {"dtype": "torch.int64"},
            EmbeddingRequest(input_ids=IDS_TENSOR, dtype="float32"),
        ),
        (
            "Embedding",
            EMBEDDING | {"dtype": "bfloat16"},
            EmbeddingRequest(input_ids=IDS_TENSOR, dtype="bfloat16"),
        ),
        (
            "Linear",
            LINEAR,
            LinearRequest(
                layer_idx=3,
                module_names=("q_proj",),
                hidden_states=WireTensor("float32", (1, 1, 4), F4),
            ),
        ),
        (
            "Linear",
            _without(LINEAR, "module_name") | {"module_names": ["gate_proj", "up_proj"]},
            LinearRequest(
                layer_idx=3,
                module_names=("gate_proj", "up_proj"),
                hidden_states=WireTensor("float32", (1, 1, 4), F4),
            ),
        ),
        (
            "Linear",
            LINEAR | {"bias": False},
            LinearRequest(
                layer_idx=3,
                module_names=("q_proj",),
                hidden_states=WireTensor("float32", (1, 1, 4), F4),
                bias=False,
            ),
        ),
        ("Matmul", MATMUL, MatmulRequest(a=F4_TENSOR, b=F4_TENSOR)),
        (
            "LMHead",
            LM_HEAD | {"dtype": "float32"},
            LMHeadRequest(hidden_states=WireTensor("float32", (4,), F4)),
        ),
    ],
)
def test_published_schema_is_accepted(method: str, body: dict[str, Any], expected: Request) -> None:
    opened = open_request([msgpack.packb({"method": method, "request": body})], 2**20)
    assert (opened.form, opened.request_id, opened.timeout_ms) == (Form.INLINE, 0, None)
    assert read_request(opened) == expected


@pytest.mark.parametrize(
    ("body", "modules"),
    [
        (RING, ("down_proj",)),
        (
            _without(RING, "module_name") | {"module_names": ["gate_proj", "up_proj"]},
            ("gate_proj", "up_proj"),
        ),
    ],
)
def test_ring_linear_is_always_int32(body: dict[str, Any], modules: tuple[ModuleName, ...]) -> None:
    assert _read({"method": "RingLinear", "request": body}) == RingLinearRequest(
        layer_idx=3, module_names=modules, elements=WireTensor("int32", (1, 1, 4), F4)
    )


def test_a_seed_is_always_int32() -> None:
    assert _read({"method": "SeededRingLinear", "request": SEEDED}) == SeededRingLinearRequest(
        layer_idx=3,
        module_names=("down_proj",),
        rows=2,
        columns=4,
        seed=WireTensor("int32", (8,), bytes(32)),
    )


@each_row(
    ("method", "body", "code"),
    [
        ("Unknown", {}, ErrorCode.UNKNOWN_METHOD),
        ("init", {}, ErrorCode.UNKNOWN_METHOD),
        ("__class__", {}, ErrorCode.UNKNOWN_METHOD),
        ("Init", {"verbose": True}, INVALID),
        ("Embedding", {}, INVALID),
        ("Embedding", _without(EMBEDDING, "dtype"), INVALID),
        ("Embedding", EMBEDDING | {"dtype": "float64"}, INVALID),
        ("Embedding", EMBEDDING | {"dtype": 1}, INVALID),
        ("Embedding", EMBEDDING | {"input_ids": [1, 2]}, INVALID),
        ("Embedding", EMBEDDING | {"input_ids": "1" * 16}, INVALID),
        ("Embedding", EMBEDDING | {"input_shape": [1, 3]}, INVALID),
        ("Embedding", EMBEDDING | {"input_shape": [1, -2]}, INVALID),
        ("Embedding", EMBEDDING | {"shape": [1, 2]}, INVALID),
        ("Linear", _without(LINEAR, "module_name"), INVALID),
        ("Linear", _without(LINEAR, "hidden_states"), INVALID),
        ("Linear", _without(LINEAR, "shape"), INVALID),
        ("Linear", _without(LINEAR, "dtype"), INVALID),
        ("Linear", _without(LINEAR, "layer_idx"), INVALID),
        ("Linear", LINEAR | {"module_names": ["q_proj"]}, INVALID),
        ("Linear", LINEAR | {"module_name": ["q_proj"]}, INVALID),
        ("Linear", LINEAR | {"module_name": {"frame": 1}}, INVALID),
        ("Linear", LINEAR | {"module_name": "lm_head"}, INVALID),
        ("Linear", LINEAR | {"layer_idx": -1}, INVALID),
        ("Linear", LINEAR | {"dtype": "uint32"}, INVALID),
        ("Linear", LINEAR | {"shape": [2**31 - 1] * 3}, ErrorCode.LIMIT_EXCEEDED),
        ("Linear", LINEAR | {"hidden_states": {"dtype": "float32"}}, INVALID),
        ("Linear", LINEAR | {"bias": 0}, INVALID),
        ("Linear", LINEAR | {"bias": None}, INVALID),
        ("RingLinear", RING | {"dtype": "torch.int32"}, INVALID),
        ("RingLinear", RING | {"bias": False}, INVALID),
        ("RingLinear", RING | {"module_names": ["q_proj"]}, INVALID),
        ("RingLinear", RING | {"shape": [1, 1, 5]}, INVALID),
        ("RingLinear", RING | {"elements": [0, 0, 0, 0]}, INVALID),
        ("RingLinear", _without(RING, "module_name"), INVALID),
        ("RingLinear", _without(RING, "elements"), INVALID),
        ("RingLinear", _without(RING, "shape"), INVALID),
        ("RingLinear", LINEAR, INVALID),
        ("SeededRingLinear", RING, INVALID),
        ("SeededRingLinear", _without(SEEDED, "seed"), INVALID),
        ("SeededRingLinear", _without(SEEDED, "seed_shape"), INVALID),
        ("SeededRingLinear", _without(SEEDED, "rows"), INVALID),
        ("SeededRingLinear", _without(SEEDED, "columns"), INVALID),
        ("SeededRingLinear", SEEDED | {"seed": bytes(31)}, INVALID),
        ("SeededRingLinear", SEEDED | {"seed_shape": [7]}, INVALID),
        ("SeededRingLinear", SEEDED | {"rows": 0}, INVALID),
        ("SeededRingLinear", SEEDED | {"rows": -1}, INVALID),
        ("SeededRingLinear", SEEDED | {"rows": 2**31}, INVALID),
        ("SeededRingLinear", SEEDED | {"rows": 3.0}, INVALID),
        ("SeededRingLinear", SEEDED | {"rows": True}, INVALID),
        ("SeededRingLinear", SEEDED | {"columns": 0}, INVALID),
        ("SeededRingLinear", SEEDED | {"elements": bytes(32)}, INVALID),
        ("RingLMHead", RING, INVALID),
        ("RingLMHead", {"elements": bytes(16)}, INVALID),
        ("RingLMHead", {"elements": bytes(16), "shape": [1, 5]}, INVALID),
        ("RingLMHead", LM_HEAD, INVALID),
        ("Matmul", _without(MATMUL, "b_buffer"), INVALID),
        ("Matmul", _without(MATMUL, "dtype"), INVALID),
        ("Matmul", MATMUL | {"a_shape": [2, 3]}, INVALID),
        ("Matmul", MATMUL | {"transpose": True}, INVALID),
        ("LMHead", _without(LM_HEAD, "shape"), INVALID),
        ("LMHead", LM_HEAD | {"layer_idx": 0}, INVALID),
    ],
)
def test_body_that_deviates_is_refused(method: str, body: dict[str, Any], code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as info:
        _read({"method": method, "request": body})
    assert info.value.code is code, str(info.value)


@pytest.mark.parametrize("name", ["a", "b"])
def test_matmul_refuses_our_own_field_names(name: str) -> None:
    with pytest.raises(ProtocolError) as info:
        _read({"method": "Matmul", "request": MATMUL | {name: "junk"}})
    assert info.value.code is INVALID


@each_row(
    "envelope",
    [
        {},
        {"method": "Init"},
        {"request": {}},
        {"method": "Init", "request": None},
        {"method": "Init", "request": []},
        {"method": 1, "request": {}},
        {"method": b"Init", "request": {}},
        {"method": "Init", "request": {}, "request_id": 1},
    ],
)
def test_envelope_that_deviates_is_refused(envelope: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as info:
        _read(envelope)
    assert info.value.code is MALFORMED


def test_inline_request_has_one_frame() -> None:
    with pytest.raises(ProtocolError, match="got 2 frames") as info:
        open_request([msgpack.packb({"method": "Init", "request": {}}), b""], 2**20)
    assert info.value.code is MALFORMED


def test_tensor_reply_has_the_published_layout() -> None:
    output = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    frames = encode_reply(
        Form.INLINE,
        0,
        "Linear",
        TensorReply(output=from_torch(output)),
        Timing(queue_us=1, compute_us=1),
    )
    assert len(frames) == 1
    assert msgpack.unpackb(frames[0]) == {
        "status": "success",
        "response": {
            "output": output.view(torch.uint8).numpy().tobytes(),
            "shape": [1, 2],
            "dtype": "torch.bfloat16",
        },
    }


def test_init_reply_has_the_published_layout() -> None:
    weight = WireTensor("float32", (4,), F4)
    sizes = {"num_layers": 1, "hidden_size": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 2}
    reply = InitReply(
        config=InitConfig(**sizes),
        rotary_emb_params=RotaryParams(
            inv_freq=WireTensor("float32", (1,), b"\0\0\0\0"), attention_scaling=2.0
        ),
        norm_weights={
            "layer_0_input_layernorm": NormWeight(weight=weight, eps=1e-5),
            "final_norm": NormWeight(weight=weight, eps=1e-6),
        },
        model_digest="a" * 64,
        linear_digest="b" * 64,
        max_message_bytes=1,
        arithmetic=("int8",),
        provision_id="c" * 64,
        instance_id="d" * 32,
        layers=(0, 3),
        max_queued_requests=64,
        max_queued_bytes=1,
    )
    frames = encode_reply(Form.INLINE, 0, "Init", reply)
    assert msgpack.unpackb(frames[0])["response"] == {
        "config": sizes,
        "rotary_emb_params": {
            "inv_freq": b"\0\0\0\0",
            "inv_freq_shape": [1],
            "attention_scaling": 2.0,
        },
        "norm_weights": {
            "layer_0_input_layernorm": {"weight": F4, "shape": [4], "eps": 1e-5},
            "final_norm": {"weight": F4, "shape": [4], "eps": 1e-6},
        },
    }
