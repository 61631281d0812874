"""What answers a Segment: its sessions, and whole layers over them, or the time that those take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from gpu_side.kernels import NullWeights
from gpu_side.segment import SegmentModel
from gpu_side.segment_attention import PartAttention
from gpu_side.segment_parts import Part, read_outputs, read_parts
from gpu_side.segment_rope import SegmentRope
from gpu_side.session_cache import CacheShape, SessionCache, Window
from gpu_side.sessions import SessionStore
from gpu_side.tasks import Task
from gpu_side.transfer import Kernel, Result, transfer_to
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.messages import SegmentRequest, tensor_reply
from protocol.model.config import ModelConfig
from protocol.tensors import WireTensor, raw_bytes, to_torch, torch_dtype

# Which rows are wanted; None: all.
Outputs: TypeAlias = Sequence[int] | None
# Computes the rows of these parts, each on its cache.
Compute: TypeAlias = Callable[
    [SegmentRequest, Sequence[Part], Sequence[SessionCache], Outputs], Result
]


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


class TorchSegments(SegmentKernels):
    """On the weights' device, in their dtype."""

    def __init__(
        self, weights: ServiceWeights, sessions: SessionStore, spin_us: float = 0.0
    ) -> None:
        super().__init__(weights.config, sessions, weights.dtype, weights.device)
        self._model = SegmentModel(weights)
        self._rope = SegmentRope(weights.config, weights.device, weights.dtype)
        self._transfer = transfer_to(weights.device, spin_us)

    def _compute(self, first: SegmentRequest, task: Task, window: Window) -> Compute:
        layers, lm_head = range(first.first_layer, first.last_layer + 1), first.lm_head
        to_device, dtype = self._transfer.to_device, torch_dtype(task.dtype)

        def compute(
            request: SegmentRequest,
            parts: Sequence[Part],
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
            table = self._rope.of_parts(parts)
            found = self._model.forward(h_TD, layers, attention, table, rows, lm_head=lm_head)
            output, work = self._transfer.to_host(found, dtype)
            tensor = WireTensor(task.dtype, task.shape, raw_bytes(output))
            return tensor_reply({"output": tensor}), work

        return compute


class NullSegments(SegmentKernels):
    """Zeros, once an accelerator would be done. Of sessions their lengths alone are kept.

    `kernels`: those of the same accelerator, which works on one request after the other.
    """

    def __init__(self, weights: NullWeights, sessions: SessionStore) -> None:
        super().__init__(weights.model.config, sessions, weights.dtype, None)
        self._kernels = weights.kernels

    def _compute(self, first: SegmentRequest, task: Task, window: Window) -> Compute:
        kernels = self._kernels
        reply, base_us = kernels.zeros(task), kernels.request_us(task)
        heads, K, C = self._config.heads
        layers = first.last_layer - first.first_layer + 1

        def attention_us(part: Part) -> float:
            context = part.start + part.rows
            if window.recent:
                context = min(context, window.sinks + window.recent + part.rows)
            return layers * kernels.attention_us(K, heads // K * part.rows, C, context)

        def compute(
            _request: SegmentRequest,
            parts: Sequence[Part],
            _caches: Sequence[SessionCache],
            _outputs: Outputs,
        ) -> Result:
            return reply, kernels.works_for(base_us + sum(map(attention_us, parts)))

        return compute
