"""Runs Segment requests on a device (TorchSegments), or models their duration (NullSegments)."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch.nn.functional import linear, silu

from gpu_side.cuda.kernels import device_kernels
from gpu_side.kernels import Kernel, Kernels, NullKernels, Result, transfer_to
from gpu_side.served_model import ServedModel
from gpu_side.session_cache import CacheShape, PartAttention, SessionCache, Window
from gpu_side.sessions import NO_SESSION, SegmentPart, SessionStore
from gpu_side.tasks import Task
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import FUSED_MODULES, SegmentRequest
from protocol.model.config import ModelConfig
from protocol.model.forward import Layer, Ops, bound, forward, staying
from protocol.model.rope import Rope
from protocol.tensors import to_torch

_PART = struct.Struct("<16s3q16s")

# Which rows are wanted; None: all.
Outputs: TypeAlias = Sequence[int] | None
# Computes the rows of these parts, each on its cache.
Compute: TypeAlias = Callable[
    [SegmentRequest, Sequence[SegmentPart], Sequence[SessionCache], Outputs], Result
]


def read_parts(request: SegmentRequest, context_length: int) -> list[SegmentPart]:
    """Read and check `parts`, whose shape has been checked. Raises ProtocolError.

    The numbers are copied first: a client may change memory that it shares with us.
    """
    parts = [SegmentPart(*numbers) for numbers in _PART.iter_unpack(bytes(request.parts.data))]
    ends: dict[bytes, int] = {}
    for part in parts:
        session, start, rows, length, _ = part
        _require(
            session != NO_SESSION,
            "parts",
            "the session 0",
            "another one, which the client has drawn",
        )
        if rows == 0:
            _require(
                session not in ends, "parts", "rows of a session to forget", "one or the other"
            )
            ends[session] = -1
            continue
        _require(
            min(start, rows) >= 0 and start + rows <= length <= context_length,
            "parts",
            f"a part of rows {start} + {rows} of {length}",
            f"numbers that add up, within {context_length} tokens",
        )
        follows = ends.setdefault(session, start) == start
        _require(follows, "parts", f"a part from {start}", "one that follows its session's last")
        ends[session] = start + rows
    rows, total = request.hidden_states.shape[0], sum(part.rows for part in parts)
    _require(total == rows, "parts", f"{total} rows", f"{rows}, as hidden_states has")
    return parts


def read_outputs(request: SegmentRequest) -> Outputs:
    """Read and check `outputs`; None where all rows are wanted. Raises ProtocolError."""
    rows = request.hidden_states.shape[0]
    wanted = memoryview(bytes(request.outputs.data)).cast("q").tolist()
    rising = all(first < second for first, second in pairwise(wanted))
    fits = rising and wanted[0] >= 0 and wanted[-1] < rows
    _require(fits, "outputs", "other numbers", f"rising ones, from 0 to {rows - 1}")
    return None if len(wanted) == rows else wanted


def _require(holds: bool, field: str, got: str, expected: str) -> None:
    where = f"Segment.{field}"
    ProtocolError.unless(holds, where, got, expected, code=ErrorCode.INVALID_FIELD)


class SegmentKernels(ABC):
    """Keeps sessions, and runs requests on them."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: SessionStore,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> None:
        self._config, self._sessions = config, sessions
        self._dtype, self._device = dtype, device

    def prepare(self, first: SegmentRequest, task: Task) -> Kernel:
        """Return what computes all requests that have this one's header.

        It raises ProtocolError for the numbers in `parts` and `outputs`, and for sessions.
        """
        layers, window = (first.first_layer, first.last_layer), Window(first.sinks, first.recent)
        _, heads, head_dim = self._config.heads
        count = layers[1] - layers[0] + 1
        shape = CacheShape(count, heads, head_dim, self._dtype, self._device)
        compute = self._compute(first, task, window)

        def kernel(request: Any, incoming: Incoming | None) -> Result:
            parts = read_parts(request, self._config.context_length)
            outputs = read_outputs(request)
            client = b"" if incoming is None else incoming.client
            with self._sessions.running(client, layers, parts, shape, window) as caches:
                return compute(request, [part for part in parts if part.rows], caches, outputs)

        return kernel

    @abstractmethod
    def _compute(self, first: SegmentRequest, task: Task, window: Window) -> Compute:
        """Return what computes the rows of requests like the first."""


def finish(running: Coroutine[Any, Any, torch.Tensor]) -> torch.Tensor:
    """Drive a forward pass that waits for nothing to its end; RuntimeError if it does wait."""
    try:
        running.send(None)
    except StopIteration as ended:
        found: torch.Tensor = ended.value
        return found
    running.close()
    raise RuntimeError("a forward pass waited that has nothing to wait for")


class TorchMaths:
    """The local operators of a layer, as in `transformers`: norms in float32 inside.

    `order_Xc`: int64 [H + K, C / 2], which pair of RoPE (i, i + C / 2) stands at each place of each
    head; None: each at its own.
    """

    def __init__(self, order_Xc: torch.Tensor | None = None) -> None:
        self._order_Xc = order_Xc

    @staticmethod
    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, in float32 inside."""
        x32 = x.to(torch.float32)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return weight * (x32 * scale).to(x.dtype)

    def apply_rope(
        self, x_TXC: torch.Tensor, cos_T1C: torch.Tensor, sin_T1c: torch.Tensor
    ) -> torch.Tensor:
        """Rotate every pair (i, i + C / 2) by its angle."""
        first, second = x_TXC.chunk(2, dim=-1)
        cos, sin = cos_T1C[..., : sin_T1c.shape[-1]], sin_T1c
        if self._order_Xc is not None:
            cos, sin = cos[:, 0][:, self._order_Xc], sin[:, 0][:, self._order_Xc]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    @staticmethod
    def silu_mul(gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""
        return silu(gate_TF) * up_TF

    # Not in place: the first rows are the client's.
    residual = staticmethod(torch.add)


class TorchSegments(SegmentKernels):
    """On the weights' device, in their dtype; `weights.linears` and `weights.segment` are held.

    `protocol.model.forward` over sessions; shape suffixes are those of that module, c half of C.
    """

    def __init__(
        self, weights: ServiceWeights, sessions: SessionStore, spin_us: float = 0.0
    ) -> None:
        config = weights.config
        super().__init__(config, sessions, weights.dtype, weights.device)
        if weights.linears is None or weights.segment is None:
            raise TypeError("weights that hold no whole layers")
        self._weights, linears = weights.segment, weights.linears
        orders = self._weights.orders
        self._layers = {
            layer: Layer(index=layer, **bound(norms, config, TorchMaths(orders.get(layer))))
            for layer, norms in self._weights.norms.items()
        }
        self._calls: dict[str, Any] = {
            name: {layer: staying(held[name]) for layer, held in linears.items()}
            for name in FUSED_MODULES
        }
        self._rope = Rope(config, weights.dtype, weights.device)
        self._transfer = transfer_to(weights.device, spin_us)

    def _compute(self, first: SegmentRequest, task: Task, window: Window) -> Compute:
        layers = [self._layers[at] for at in range(first.first_layer, first.last_layer + 1)]
        to_device = self._transfer.to_device
        ops: Ops[Layer, Sequence[PartAttention]] = Ops(
            embedding=staying(lambda hidden_TD: hidden_TD),
            attention=partial(self._attend, first.first_layer),
            **self._calls,
        )

        def compute(
            request: SegmentRequest,
            parts: Sequence[SegmentPart],
            caches: Sequence[SessionCache],
            outputs: Outputs,
        ) -> Result:
            rows = None if outputs is None else to_device(torch.tensor(outputs), torch.int64)
            ends = accumulate(part.rows for part in parts)
            attention = [
                PartAttention(cache, slice(end - part.rows, end), part.start, window)
                for part, cache, end in zip(parts, caches, ends, strict=True)
            ]
            h_TD = to_device(to_torch(request.hidden_states), self._dtype)
            rope = self._rope.of((one.start, one.start + one.rows, one.length) for one in parts)
            found = finish(forward(h_TD, layers, rope, ops, attention, rows))
            if first.lm_head:
                found = self._logits(found)
            return self._transfer.reply(found, task)

        return compute

    async def _attend(
        self,
        first: int,
        layer: Layer,
        q_THC: torch.Tensor,
        k_TKC: torch.Tensor,
        v_TKC: torch.Tensor,
        parts: Sequence[PartAttention],
    ) -> torch.Tensor:
        """Attend with each part's rows to its session, whose cache begins with layer `first`."""
        (H, K, C), window = layer.heads, self._config.sliding_windows[layer.index]
        q_TKGC = q_THC.view(-1, K, H // K, C)
        outputs = [
            part(layer.index - first, q_TKGC[part.rows], k_TKC[part.rows], v_TKC[part.rows], window)
            for part in parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _logits(self, h_ND: torch.Tensor) -> torch.Tensor:
        norm, head = self._weights.norm, self._weights.lm_head
        if norm is None or head is None:
            raise RuntimeError("a request for an LM head that is not held got through the checks")
        return linear(TorchMaths.rms_norm(h_ND, norm, self._config.rms_norm_eps), head)


class NullSegments(SegmentKernels):
    """Zeros, once an accelerator would be done. Of sessions their lengths alone are kept.

    `kernels`: those of the same accelerator, which works on one request after the other.
    """

    def __init__(self, config: ModelConfig, kernels: NullKernels, sessions: SessionStore) -> None:
        super().__init__(config, sessions, kernels.dtype, None)
        self._kernels = kernels

    def _compute(self, first: SegmentRequest, task: Task, window: Window) -> Compute:
        kernels = self._kernels
        reply, base_us = kernels.zeros(task), kernels.request_us(task)
        heads, K, C = self._config.heads
        layers = first.last_layer - first.first_layer + 1

        def attention_us(part: SegmentPart) -> float:
            context = part.start + part.rows
            if window.recent:
                context = min(context, window.sinks + window.recent + part.rows)
            return layers * kernels.attention_us(K, heads // K * part.rows, C, context)

        def compute(
            _request: SegmentRequest,
            parts: Sequence[SegmentPart],
            _caches: Sequence[SessionCache],
            _outputs: Outputs,
        ) -> Result:
            return reply, kernels.works_for(base_us + sum(map(attention_us, parts)))

        return compute


@dataclass(frozen=True)
class Served:
    """What answers the requests of a service, with weights, or with what is there instead.

    `model`: what it says that it holds; `kernels`: what computes. `segments`: makes what runs
    Segments on sessions, where there are whole layers; None: there are none. `device`: where
    sessions take their memory; None: nowhere.
    """

    model: ServedModel
    kernels: Kernels
    segments: Callable[[SessionStore], SegmentKernels] | None = None
    device: torch.device | None = None


def served_weights(weights: ServiceWeights, spin_us: float) -> Served:
    """Return what computes with weights that this process holds alone."""
    segments = partial(TorchSegments, weights, spin_us=spin_us)
    return Served(weights, device_kernels(weights, spin_us), segments, weights.device)


def served_zeros(model: ServedModel, kernels: NullKernels) -> Served:
    """Return a null device in the place of weights. `model`: what it says that it holds."""
    return Served(model, kernels, partial(NullSegments, model.config, kernels))
