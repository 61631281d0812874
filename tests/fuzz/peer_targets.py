"""Targets that act on what was decoded: the runner on an Init reply, the service on a request."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, cast

import msgpack
import torch

from gpu_side.encoding import Form, encode_reply, open_request, read_request
from gpu_side.handler import RequestHandler
from gpu_side.inline import to_inline
from gpu_side.session_settings import SessionSettings
from gpu_side.weights import load_weights
from protocol.encoding import decode_reply, encode_request
from protocol.errors import (
    ErrorCode,
    ModelMismatchError,
    ProtocolError,
    ReplyError,
    ServiceError,
)
from protocol.messages import (
    EmbeddingRequest,
    InitReply,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    Request,
    RingLinearRequest,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
    Timing,
)
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import read_config
from protocol.tensors import WireTensor
from tee_side.model.layers import load_tee_model
from tee_side.remote.handshake import ServiceCheck
from tests.fuzz.engine import Case, Target
from tests.fuzz.file_targets import tiny_model
from tests.fuzz.mutate import INTERESTING, Mutator
from tests.fuzz.wire_targets import (
    MAX_MESSAGE_BYTES,
    copied,
    mutate_frames,
    mutate_inline,
    received,
    replies,
    tensor,
)


@cache
def _service() -> RequestHandler:
    weights = load_weights(
        tiny_model(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        arithmetic=("float", "int8"),
    )
    sessions = SessionSettings(bytes=2**18, client_bytes=2**18)
    return RequestHandler(weights, MAX_MESSAGE_BYTES, sessions=sessions)


def served_init() -> Case:
    """Return what a service of the tiny model answers to Init."""
    reply = cast(InitReply, _service().apply(InitRequest())[0])
    return copied(encode_reply(Form.FRAMED, 7, "Init", reply, Timing(queue_us=1, compute_us=2)))


@cache
def _check() -> ServiceCheck:
    config, checkpoint = read_config(tiny_model()), Checkpoint(tiny_model())
    norms = load_tee_model(config, checkpoint, torch.float32).norm_weights()
    return ServiceCheck(config, checkpoint, norms)


def _handshake(case: Case) -> str:
    reply = decode_reply(received(case))
    if reply.response is None:
        raise ServiceError("Init", code=reply.error or ErrorCode.INTERNAL)
    _check().verify("ipc://service", reply.response)
    return "the same model"


def _init_replies() -> list[Case]:
    timing = Timing(queue_us=3, compute_us=4)
    others = [encode_reply(Form.FRAMED, 7, name, result, timing) for name, result in replies()]
    return [served_init(), _other_dtype(), *(copied(frames) for frames in others[:3])]


def _other_dtype() -> Case:
    """Return an Init reply with integers for frequencies: torch compares no two dtypes."""
    header, *rest = served_init()
    fields = msgpack.unpackb(header)
    fields["response"]["rotary_emb_params"]["inv_freq"]["dtype"] = "int32"
    return (msgpack.packb(fields), *rest)


def _fitting() -> list[Request]:
    return [
        InitRequest(),
        EmbeddingRequest(input_ids=tensor("int64", 2), dtype="bfloat16"),
        LinearRequest(
            layer_idx=1, module_names=("q_proj", "k_proj"), hidden_states=tensor("float32", 2, 8)
        ),
        LinearRequest(
            layer_idx=0, module_names=("down_proj",), hidden_states=tensor("float16", 1, 2, 8)
        ),
        RingLinearRequest(
            layer_idx=0, module_names=("gate_proj", "up_proj"), elements=tensor("int32", 1, 8)
        ),
        SeededRingLinearRequest(
            layer_idx=0,
            module_names=("o_proj",),
            rows=3,
            columns=8,
            seed=tensor("int32", 8),
        ),
        MatmulRequest(a=tensor("float32", 2, 1, 3), b=tensor("float32", 2, 3, 2)),
        LMHeadRequest(hidden_states=tensor("float32", 1, 8)),
        _segment([(1, 0, 2, 8, 0)], recent=2),
        _segment([(1, 2, 1, 8, 0), (2, 1, 1, 8, 1)], lm_head=True),
        _segment([(2, 0, 0, 0, 0), (1, 0, 1, 8, 0), (1, 1, 1, 8, 0)], sinks=1, recent=1),
    ]


def _segment(parts: list[tuple[int, ...]], **fields: Any) -> SegmentRequest:
    """Return a request of whole layers, of sessions with small numbers."""
    packed = b"".join(
        struct.pack("<7q", 0, session, start, rows, length, 0, parent)
        for session, start, rows, length, parent in parts
    )
    return SegmentRequest(
        first_layer=0,
        last_layer=1,
        hidden_states=tensor("float32", sum(part[2] for part in parts), 8),
        parts=WireTensor("int64", (len(parts), 7), packed),
        outputs=WireTensor("int64", (1,), bytes(8)),
        **fields,
    )


def _requests() -> list[Case]:
    framed = [copied(encode_request(request, 7, 1000)) for request in _fitting()]
    inline = [
        (msgpack.packb({"method": request.method, "request": to_inline(request)}),)
        for request in _fitting()[2:4]
    ]
    return [*framed, *inline]


def _mutate_request(mutator: Mutator, case: Case, other: Case) -> Case:
    mutate = mutate_inline if len(case) == 1 else mutate_frames
    if len(case) == 2 and mutator.chance(0.2):
        return (case[0], bytes(mutator.choose.randbytes(len(case[1]))))
    if len(case) == 4 and mutator.chance(0.5):
        return _other_numbers(mutator, case)
    return mutate(mutator, case, other)


def _other_numbers(mutator: Mutator, case: Case) -> Case:
    """Change a number in the parts of a Segment, or in its outputs, by little or for any."""
    header, hidden, *frames = case
    frame = mutator.below(2)
    numbers = [
        number
        for (number,) in struct.iter_unpack("<q", frames[frame][: len(frames[frame]) // 8 * 8])
    ]
    if numbers:
        at = mutator.below(len(numbers))
        near = numbers[at] + mutator.pick((-2, -1, 1, 2))
        other = near if mutator.chance(0.6) else mutator.pick(INTERESTING)
        numbers[at] = (other + 2**63) % 2**64 - 2**63
    frames[frame] = struct.pack(f"<{len(numbers)}q", *numbers)
    return (header, hidden, *frames)


def _apply(case: Case) -> str:
    request: Any = read_request(open_request(received(case), MAX_MESSAGE_BYTES))
    if request.method == "Health":
        return "Health"  # the loop's own
    with torch.inference_mode():
        response = _service().apply(request)[0]
    if isinstance(response, TensorReply):
        return f"{request.method} {response.output.dtype} {len(response.output.shape)}"
    return type(response).__name__


PEER_TARGETS = (
    Target(
        "handshake",
        _init_replies,
        mutate_frames,
        _handshake,
        (ProtocolError, ReplyError, ServiceError, ModelMismatchError),
        0.5,
    ),
    Target("operators", _requests, _mutate_request, _apply, (ProtocolError,), 1),
)
