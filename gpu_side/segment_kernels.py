"""Runs Segment requests on a device (torch_segments), or models their duration (null_segments).

Attention is causal and grouped-query, of a part's rows over its session's cache. Few rows are two
plain products, which read the cache once: torch's fused kernel takes longer for them. Many go
through that kernel a block at a time, each with the keys up to its end. Shape suffixes: R rows, K
key/value heads, G query heads of each, C head dim, S keys.
"""

import struct
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from torch.nn.functional import (
    gelu,
    layer_norm,
    linear,
    relu,
    scaled_dot_product_attention,
    silu,
    softmax,
)

from gpu_side.devices import DeviceProfile, multiplies_bfloat16
from gpu_side.kernels import Kernel, NullKernels, Result, there, transfer_to
from gpu_side.session_cache import CacheShape, SessionCache, Window
from gpu_side.sessions import NO_SESSION, SegmentPart, SessionStore
from gpu_side.tasks import Task, require_field
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.messages import FUSED_MODULES, SegmentRequest
from protocol.model.architectures import ActivationName
from protocol.model.config import ModelConfig
from protocol.model.forward import Layer, Ops, Rope, bound, forward, staying
from protocol.model.weights import NormTensors
from protocol.tensors import to_torch

# Which rows are wanted; None: all.
Outputs: TypeAlias = Sequence[int] | None
# Computes the rows of these parts, each on its cache.
Compute: TypeAlias = Callable[
    [SegmentRequest, Sequence[SegmentPart], Sequence[SessionCache], Outputs], Result
]
# Returns what computes all requests that have this one's header, and raises ProtocolError for the
# numbers in `parts` and `outputs`, and for sessions.
PrepareSegment: TypeAlias = Callable[[SegmentRequest, Task], Kernel]


def read_parts(request: SegmentRequest, context_length: int) -> list[SegmentPart]:
    """Read and check `parts`, whose shape has been checked. Raises ProtocolError.

    The numbers are copied first: a client may change memory that it shares with us.
    """
    parts = [
        SegmentPart(*numbers)
        for numbers in struct.iter_unpack("<16s3q16s", bytes(request.parts.data))
    ]
    ends: dict[bytes, int] = {}
    for part in parts:
        session, start, rows, length, _ = part
        require_field(
            session != NO_SESSION,
            "Segment.parts",
            "the session 0",
            "another one, which the client has drawn",
        )
        if rows == 0:
            require_field(
                session not in ends,
                "Segment.parts",
                "rows of a session to forget",
                "one or the other",
            )
            ends[session] = -1
            continue
        require_field(
            min(start, rows) >= 0 and start + rows <= length <= context_length,
            "Segment.parts",
            f"a part of rows {start} + {rows} of {length}",
            f"numbers that add up, within {context_length} tokens",
        )
        require_field(
            ends.setdefault(session, start) == start,
            "Segment.parts",
            f"a part from {start}",
            "one that follows its session's last",
        )
        ends[session] = start + rows
    rows, total = request.hidden_states.shape[0], sum(part.rows for part in parts)
    require_field(total == rows, "Segment.parts", f"{total} rows", f"{rows}, as hidden_states has")
    return parts


def read_outputs(request: SegmentRequest) -> Outputs:
    """Read and check `outputs`; None where all rows are wanted. Raises ProtocolError."""
    rows = request.hidden_states.shape[0]
    wanted = memoryview(bytes(request.outputs.data)).cast("q").tolist()
    rising = all(first < second for first, second in pairwise(wanted))
    fits = rising and wanted[0] >= 0 and wanted[-1] < rows
    require_field(fits, "Segment.outputs", "other numbers", f"rising ones, from 0 to {rows - 1}")
    return None if len(wanted) == rows else wanted


# Rows that go through the fused kernel at once, and that are plain products at most.
_BLOCK_ROWS = 512
_FEW_ROWS = 8


# Some rows of a part, the keys that any of them attends to, and which each does: bool [R, S]. None:
# all of them for one row, and for several those up to itself.
Block: TypeAlias = tuple[slice, slice, torch.Tensor | None]


class PartAttention:
    """Attention of the rows of one part: rows `rows` of the request, from position `start` on."""

    def __init__(self, cache: SessionCache, rows: slice, start: int, window: Window) -> None:
        self.rows = rows
        self._cache, self._start, self._window = cache, start, window
        self._count = rows.stop - rows.start
        # Where they are stored. Layers share what a window says.
        stored = start - cache.dropped
        self._stored = slice(stored, stored + self._count)
        self._blocks: dict[int | None, list[Block]] = {}

    def __call__(
        self,
        index: int,
        q_RKGC: torch.Tensor,
        k_RKC: torch.Tensor,
        v_RKC: torch.Tensor,
        sliding: int | None,
    ) -> torch.Tensor:
        """Store keys and values, and return [R, K * G * C].

        `index`: of the layer, in the segment; `sliding`: how many tokens back a token may look.
        """
        both_2KSC = self._cache.tensors[index]
        k_KSC, v_KSC = both_2KSC.unbind()
        k_KSC[:, self._stored] = k_RKC.transpose(0, 1)
        v_KSC[:, self._stored] = v_RKC.transpose(0, 1)
        if sliding not in self._blocks:
            self._blocks[sliding] = self._cut_into_blocks(sliding, q_RKGC.device)
        attend = _few if self._count <= _FEW_ROWS else _many
        outputs = [
            attend(q_RKGC[rows], k_KSC[:, keys], v_KSC[:, keys], seen)
            for rows, keys, seen in self._blocks[sliding]
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _cut_into_blocks(self, sliding: int | None, device: torch.device) -> list[Block]:
        kept, blocks = self._cache, list[Block]()
        for first in range(0, self._count, _BLOCK_ROWS):
            rows = slice(first, min(first + _BLOCK_ROWS, self._count))
            position = self._start + first
            # Of what is stored; what was dropped stands in no row's way, so this is never too late.
            low = 0 if sliding is None else max(0, position - sliding + 1 - kept.dropped)
            keys = slice(low, self._stored.start + rows.stop)
            plain = sliding is None and not self._window.recent
            # The kernel for many rows knows without a mask what those of a beginning attend to.
            known = self._count == 1 or (position == 0 and self._count > _FEW_ROWS)
            seen = None if plain and known else self._seen(rows, keys, sliding)
            blocks.append((rows, keys, None if seen is None or seen.all() else seen.to(device)))
        return blocks

    def _seen(self, rows: slice, keys: slice, sliding: int | None) -> torch.Tensor:
        """Say which keys each row attends to, bool [R, S]."""
        key_S = torch.arange(keys.start, keys.stop)
        key_S[key_S >= self._cache.sinks] += self._cache.dropped
        at_R1 = torch.arange(self._start + rows.start, self._start + rows.stop).unsqueeze(1)
        back_RS = at_R1 - key_S
        seen = back_RS >= 0
        if sliding is not None:
            seen &= back_RS < sliding
        if self._window.recent:
            seen &= (back_RS < self._window.recent) | (key_S < self._window.sinks)
        return seen


def _few(
    q_RKGC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    # Where the processor does not, multiplying takes many times as long as to convert the keys.
    if q_RKGC.is_cpu and q_RKGC.dtype is not torch.float32 and not multiplies_bfloat16():
        found = _few(q_RKGC.float(), k_KSC.float(), v_KSC.float(), seen)
        return found.to(q_RKGC.dtype)
    R, K, G, C = q_RKGC.shape
    q_KNC = (q_RKGC * C**-0.5).permute(1, 2, 0, 3).reshape(K, G * R, C)
    scores_KGRS = (q_KNC @ k_KSC.transpose(1, 2)).view(K, G, R, -1)
    if seen is not None:
        scores_KGRS = scores_KGRS.masked_fill_(~seen, float("-inf"))
    weights_KGRS = softmax(scores_KGRS, dim=-1, dtype=torch.float32).to(q_RKGC.dtype)
    out_KNC = weights_KGRS.view(K, G * R, -1) @ v_KSC
    return out_KNC.view(K, G, R, C).permute(2, 0, 1, 3).reshape(R, K * G * C)


def _many(
    q_RKGC: torch.Tensor, k_KSC: torch.Tensor, v_KSC: torch.Tensor, seen: torch.Tensor | None
) -> torch.Tensor:
    R, K, G, C = q_RKGC.shape
    k_KGSC, v_KGSC = (x.unsqueeze(1).expand(-1, G, -1, -1) for x in (k_KSC, v_KSC))
    out_KGRC = scaled_dot_product_attention(
        q_RKGC.permute(1, 2, 0, 3), k_KGSC, v_KGSC, seen, is_causal=seen is None and R > 1
    )
    return out_KGRC.permute(2, 0, 1, 3).reshape(R, K * G * C)


def segment_kernels(
    config: ModelConfig,
    sessions: SessionStore,
    dtype: torch.dtype,
    device: torch.device | None,
    computed: Callable[[SegmentRequest, Task, Window], Compute],
) -> PrepareSegment:
    """Return what prepares Segments whose sessions are kept in `sessions`.

    `computed`: returns what computes the rows of requests like the first.
    """

    def prepare(first: SegmentRequest, task: Task) -> Kernel:
        layers, window = (first.first_layer, first.last_layer), Window(first.sinks, first.recent)
        _, heads, head_dim = config.heads
        shape = CacheShape(layers[1] - layers[0] + 1, heads, head_dim, dtype, device)
        compute = computed(first, task, window)

        def kernel(request: Any, incoming: Incoming | None) -> Result:
            parts = read_parts(request, config.context_length)
            outputs = read_outputs(request)
            client = b"" if incoming is None else incoming.client
            with sessions.running(client, layers, parts, shape, window) as caches:
                return compute(request, [part for part in parts if part.rows], caches, outputs)

        return kernel

    return prepare


def finish(running: Coroutine[Any, Any, torch.Tensor]) -> torch.Tensor:
    """Drive a forward pass that waits for nothing to its end; RuntimeError if it does wait."""
    try:
        running.send(None)
    except StopIteration as ended:
        found: torch.Tensor = ended.value
        return found
    running.close()
    raise RuntimeError("a forward pass waited that has nothing to wait for")


def _xielu(x: torch.Tensor, parameters: torch.Tensor | None) -> torch.Tensor:
    high, low, beta, eps = torch.zeros(4) if parameters is None else parameters
    below = (torch.expm1(torch.minimum(x, eps)) - x) * low
    found: torch.Tensor = torch.where(x > 0, high * x * x, below) + beta * x
    return found


_ACTIVATIONS: dict[ActivationName, Callable[..., torch.Tensor]] = {
    "silu": lambda x, _: silu(x),
    "gelu_pytorch_tanh": lambda x, _: gelu(x, approximate="tanh"),
    "relu2": lambda x, _: relu(x).square(),
    "xielu": _xielu,
}


class TorchMaths:
    """The local operators of a layer, as in `transformers`: norms in float32 inside.

    `order_Xc`: int64 [H + K, C / 2], which pair of RoPE (i, i + C / 2) stands at each place of each
    head; None: each at its own.
    """

    def __init__(self, order_Xc: torch.Tensor | None = None) -> None:
        self._order_Xc = order_Xc

    @staticmethod
    def rms_norm(x: torch.Tensor, norm: NormTensors, eps: float) -> torch.Tensor:
        """RMSNorm over the last axis, in float32 inside."""
        x32 = x.to(torch.float32)
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return norm.weight * (x32 * scale).to(x.dtype)

    @staticmethod
    def layer_norm(x: torch.Tensor, norm: NormTensors, eps: float) -> torch.Tensor:
        """LayerNorm over the last axis, in float32 inside."""
        return layer_norm(x, x.shape[-1:], norm.weight, norm.bias, eps)

    def apply_rope(
        self,
        x_TXC: torch.Tensor,
        cos_T1C: torch.Tensor,
        sin_T1c: torch.Tensor,
        dim: int,
        neighbours: bool,
    ) -> torch.Tensor:
        """Rotate pairs of the first `dim` elements, (i, i + dim / 2) or neighbours, by an angle."""
        turned_TXC, rest_TXC = x_TXC[..., :dim], x_TXC[..., dim:]
        if neighbours:
            first, second = turned_TXC[..., ::2], turned_TXC[..., 1::2]
        else:
            first, second = turned_TXC.chunk(2, dim=-1)
        cos, sin = cos_T1C[..., : sin_T1c.shape[-1]], sin_T1c
        if self._order_Xc is not None:
            cos, sin = cos[:, 0][:, self._order_Xc], sin[:, 0][:, self._order_Xc]
        turned = first * cos - second * sin, second * cos + first * sin
        join = torch.cat if not neighbours else lambda x, dim: torch.stack(x, dim).flatten(-2)
        return torch.cat((join(turned, dim=-1), rest_TXC), dim=-1)

    @staticmethod
    def activate(
        both_TX: torch.Tensor,
        kind: ActivationName,
        gated: bool,
        parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        """f(gate) * up, or f(x) without a gate."""
        x, up = both_TX.chunk(2, dim=-1) if gated else (both_TX, None)
        y = _ACTIVATIONS[kind](x, parameters)
        return y if up is None else y * up

    @staticmethod
    def residual(h_TD: torch.Tensor, y_TD: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Add; not in place: the first rows are the client's."""
        return torch.add(h_TD, y_TD, alpha=scale)


def torch_segments(
    weights: ServiceWeights, sessions: SessionStore, spin_us: float = 0.0
) -> PrepareSegment:
    """Return Segments on the weights' device, in their dtype.

    `weights.linears` and `weights.segment` are held. `protocol.model.forward` over sessions; shape
    suffixes are those of that module, c half of C.
    """
    config, held, linears = weights.config, there(weights.segment), there(weights.linears)
    layers = {
        at: Layer(**bound(light, config, at, TorchMaths(held.orders.get(at))))
        for at, light in held.light.items()
    }
    calls: dict[str, Any] = {
        name: {at: staying(matrices[name]) for at, matrices in linears.items()}
        for name in FUSED_MODULES
    }
    ropes = Rope(config, weights.dtype, weights.device)
    transfer = transfer_to(weights.device, spin_us)
    to_device = transfer.to_device

    async def attend(
        first: int,
        layer: Layer,
        q_THC: torch.Tensor,
        k_TKC: torch.Tensor,
        v_TKC: torch.Tensor,
        parts: Sequence[PartAttention],
    ) -> torch.Tensor:
        """Attend with each part's rows to its session, whose cache begins with layer `first`."""
        (H, K, C), window = layer.heads, config.sliding_windows[layer.index]
        if config.score_scale != C**-0.5:  # by which scores are multiplied
            q_THC = q_THC * (config.score_scale * C**0.5)
        q_TKGC = q_THC.reshape(-1, K, H // K, C)
        outputs = [
            part(layer.index - first, q_TKGC[part.rows], k_TKC[part.rows], v_TKC[part.rows], window)
            for part in parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def computed(first: SegmentRequest, task: Task, window: Window) -> Compute:
        its_layers = [layers[at] for at in range(first.first_layer, first.last_layer + 1)]
        ops: Ops[Layer, Sequence[PartAttention]] = Ops(
            embedding=staying(lambda hidden_TD: hidden_TD),
            attention=partial(attend, first.first_layer),
            **calls,
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
            h_TD = to_device(to_torch(request.hidden_states), weights.dtype)
            rope = ropes.of((one.start, one.start + one.rows, one.length) for one in parts)
            found = finish(forward(h_TD, its_layers, rope, ops, attention, rows))
            if first.lm_head:
                kind = getattr(TorchMaths, f"{config.table.norm}_norm")
                normed_ND = kind(found, there(held.norm), config.norm_eps)
                found = linear(normed_ND, there(held.lm_head))
            return transfer.reply(found, task)

        return compute

    return segment_kernels(config, sessions, weights.dtype, weights.device, computed)


def null_segments(
    config: ModelConfig, kernels: NullKernels, sessions: SessionStore
) -> PrepareSegment:
    """Return zeros, once an accelerator would be done. Of sessions their lengths alone are kept.

    `kernels`: those of the same accelerator, which works on one request after the other.
    """
    heads, K, C = config.heads

    def computed(first: SegmentRequest, task: Task, window: Window) -> Compute:
        reply, base_us = kernels.zeros(task), kernels.request_us(task)
        layers = first.last_layer - first.first_layer + 1

        def attention_us(profile: DeviceProfile, part: SegmentPart) -> float:
            context = part.start + part.rows
            if window.recent:
                context = min(context, window.sinks + window.recent + part.rows)
            # Two products for each head, of its rows by so many keys, which take as long.
            sizes = (K, heads // K * part.rows, C, context)
            return layers * 2 * profile.matmul_us(*sizes, kernels.dtype.itemsize)

        def compute(
            _request: SegmentRequest,
            parts: Sequence[SegmentPart],
            _caches: Sequence[SessionCache],
            _outputs: Outputs,
        ) -> Result:
            duration_us = base_us
            if (profile := kernels.profile) is not None:
                duration_us += sum(attention_us(profile, part) for part in parts)
            return reply, kernels.works_for(duration_us)

        return compute

    return segment_kernels(config, sessions, kernels.dtype, None, computed)
