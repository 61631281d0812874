"""Requests for operators, of tensors; what a service in this process answers."""

from typing import Any

import torch

from gpu_side.handler import RequestHandler
from protocol.messages import (
    EmbeddingRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
)
from protocol.tensors import ITEMSIZE, WireTensor, from_torch, short_name, to_torch

QKV: tuple[ModuleName, ...] = ("q_proj", "k_proj", "v_proj")
GATE_UP: tuple[ModuleName, ...] = ("gate_proj", "up_proj")


def linear(hidden: torch.Tensor, *names: ModuleName, layer: int = 1) -> LinearRequest:
    return LinearRequest(layer_idx=layer, module_names=names, hidden_states=from_torch(hidden))


def ring(elements: torch.Tensor, *names: ModuleName, layer: int = 1) -> RingLinearRequest:
    return RingLinearRequest(layer_idx=layer, module_names=names, elements=from_torch(elements))


def seeded(
    rows: int,
    columns: int,
    *names: ModuleName,
    seed: bytes = bytes(range(32)),
    dtype: str = "int32",
) -> SeededRingLinearRequest:
    tensor = WireTensor(dtype, (len(seed) // ITEMSIZE[dtype],), seed)
    return SeededRingLinearRequest(
        layer_idx=1, module_names=names, rows=rows, columns=columns, seed=tensor
    )


def head(hidden: torch.Tensor) -> LMHeadRequest:
    return LMHeadRequest(hidden_states=from_torch(hidden))


def ring_head(elements: torch.Tensor) -> RingLMHeadRequest:
    return RingLMHeadRequest(elements=from_torch(elements))


def embedding(ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> EmbeddingRequest:
    fields: dict[str, Any] = {"input_ids": from_torch(ids), "dtype": short_name(dtype)}
    return EmbeddingRequest.model_validate(fields)


def matmul(a: torch.Tensor, b: torch.Tensor) -> MatmulRequest:
    return MatmulRequest(a=from_torch(a), b=from_torch(b))


def uniform(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def one_of_each(rows: int, hidden_size: int) -> list[Request]:
    hidden, elements = torch.randn(rows, hidden_size), uniform(rows, hidden_size)
    return [
        linear(hidden, *QKV),
        linear(hidden, *QKV).model_copy(update={"bias": False}),
        linear(hidden.bfloat16(), "up_proj", layer=0),
        linear(hidden, "v_proj", layer=2),
        ring(elements, *QKV),
        ring(elements, "k_proj", layer=0),
        seeded(rows, hidden_size, *GATE_UP),
        head(hidden),
        ring_head(elements),
    ]


def answer(handler: RequestHandler, request: Request) -> torch.Tensor:
    """Return what the service computes, once that has ended."""
    reply, work = handler.apply(request)
    assert isinstance(reply, TensorReply)
    if work is not None:
        work()
    return to_torch(reply.output).clone()
