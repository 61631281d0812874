"""What the operators of a step send, by calling them.

Nothing is estimated. The operators that a policy places on the GPU are built as for a run and
called with zeros of a step's shapes; what they send is encoded as for the wire and counted. Neither
weights nor services, keys or pads are needed: sizes do not depend on their contents.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeAlias

import torch

from gpu_side.encoding import encode_reply
from protocol.channel import Channel
from protocol.encoding import encode_request
from protocol.messages import (
    LinearRequest,
    Request,
    RingLinearRequest,
    SeededRingLinearRequest,
    SegmentRequest,
    TensorReply,
    Timing,
)
from protocol.model.config import ModelConfig
from protocol.prepared import Exchange, Payload, PreparedRequest, Traffic
from protocol.tensors import WireTensor, from_torch
from tee_side.model.batch import Batch, KVCache, Take
from tee_side.model.segment import SegmentCall, Sessions
from tee_side.policy.placement import Policy, Segment
from tee_side.protect.masking import MaskRules
from tee_side.protect.masks.mask import (
    AdditiveMask,
    Factors,
    Given,
    Hide,
    Mask,
    Masked,
    MaskKey,
    in_the_clear,
)
from tee_side.protect.pads.dealt import FreshPads
from tee_side.protect.randomness import KEY_BYTES, Randomness
from tee_side.protect.sites import FloatSite, IntegerSite, PadLayout
from tee_side.protect.verification import UNVERIFIED
from tee_side.remote.call import CallSettings, plan_linear, run
from tee_side.words import (
    OPERATORS,
    PRODUCTS,
    Operator,
    Phase,
    Site,
    Verify,
    is_linear,
    is_projection,
)
from tsqp.lab.bench.results import Document
from tsqp.lab.research.operators import product_call, rows_call
from tsqp.mask_kinds import GAINS, FeatureMask, site_transform


class Cost(Document):
    """RPCs, and bytes of all their frames, header included."""

    rpcs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            rpcs=self.rpcs + other.rpcs,
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
        )


class Crossing(Document):
    """One RPC. `service`: 1, or 2 for the second one; `modules`: of a linear operator.

    `sent`, `received`: dtype and shape of each tensor as it crosses, dummy rows included.
    """

    service: int
    method: str
    modules: tuple[str, ...]
    sent: tuple[str, ...]
    received: str


class PhaseCost(Document):
    """What an operator costs in a phase: in all its layers together.

    `messages`: of one layer; of the first step, where a prompt takes several.
    """

    messages: tuple[Crossing, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class Headers:
    """Numbers in headers that take more bytes the larger they are: 1 to 5, or 9, in msgpack.

    `first_request_id`: of a measured step; ids count up from it, for each service by itself. The
    default takes as many bytes as all ids from 256 to 65,535. `timing`: the service's claim.
    """

    first_request_id: int = 1000
    timeout_ms: int = 60_000
    timing: Timing = field(default_factory=lambda: Timing(queue_us=50, compute_us=1000))


# Which service was asked, counted from 0, for what, and what it said.
_Captured: TypeAlias = tuple[int, Request, TensorReply]


class AtOnce(Channel):
    """A `Channel` whose replies are there before they are waited for. `endpoint`: its name."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.traffic = endpoint, Traffic()
        self._replies: dict[int, Exchange] = {}
        self._submitted = 0

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        exchange = self._replies.pop(request_id)
        self.traffic.round_trips += 1
        self.traffic.bytes_sent += exchange.bytes_sent
        self.traffic.bytes_received += exchange.bytes_received
        return exchange

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        self._replies.pop(request_id, None)

    def close(self) -> None:
        """See `Channel.close`."""


class _Recorder(AtOnce):
    """Answers every request with zeros of the right shape, and keeps both."""

    def __init__(self, service: int, log: list[_Captured]) -> None:
        super().__init__("nowhere")
        self._service, self._log = service, log

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """Keep a request with the reply that it is prepared for."""
        zeros = torch.zeros(prepared.reply_shape, dtype=prepared.reply_torch_dtype)
        reply = TensorReply(output=from_torch(zeros))
        self._log.append((self._service, prepared.request(payload), reply))
        self._submitted += 1
        self._replies[self._submitted] = Exchange(reply, endpoint=self.endpoint)
        return self._submitted


class StepTraffic:
    """Runs steps of a policy over recorders, and adds up what each operator and layer costs.

    One decoded token of one sequence, the last of `context` tokens, and a prompt of one sequence in
    steps of `step_tokens`, up to the first token that is sampled from it.
    """

    def __init__(
        self,
        policy: Policy,
        config: ModelConfig,
        dtype: torch.dtype,
        headers: Headers,
        *,
        context: int,
        prompt_tokens: int,
        step_tokens: int,
    ) -> None:
        self._policy = policy
        self._config = config
        self._dtype = dtype
        self._headers = headers
        self._log: list[_Captured] = []
        # Of the requests of a phase to a service.
        self._ids = defaultdict[tuple[Phase, int], Iterator[int]](
            partial(count, headers.first_request_id)
        )
        self._costs: dict[tuple[Phase, Operator, int], Cost] = {}
        self._messages: dict[tuple[Phase, Operator, int], tuple[Crossing, ...]] = {}
        # Of the first request of each: how many cross, those that a mask adds included.
        self.rows: dict[tuple[Phase, Operator, int], int] = {}

        self._step("decode", rows=1, context=context, outputs=1)
        for start in range(0, prompt_tokens, step_tokens):
            end = min(start + step_tokens, prompt_tokens)
            self._step("prefill", rows=end - start, context=end, outputs=int(end == prompt_tokens))

    def phase_cost(self, phase: Phase, operator: Operator, layers: range) -> PhaseCost | None:
        """Return what an operator costs in some layers; None if it has no request of its own."""
        messages = self._messages.get((phase, operator, layers.start))
        if messages is None:
            return None
        # Of a segment its first layer has it all.
        costs = [self._costs.get((phase, operator, layer), Cost()) for layer in layers]
        return PhaseCost(messages=messages, cost=sum(costs, start=Cost()))

    def total(self, phase: Phase) -> Cost:
        """Return what a phase costs."""
        found = (cost for (measured, *_), cost in self._costs.items() if measured == phase)
        return sum(found, start=Cost())

    def _step(self, phase: Phase, *, rows: int, context: int, outputs: int) -> None:
        """Call the operators in the order of the forward pass."""
        first, *inner, last = OPERATORS
        num_layers = self._config.num_hidden_layers
        segments = {one.first: one for one in self._policy.segments(num_layers)}
        within = {at for one in segments.values() for at in range(one.first, one.last + 1)}
        # Layers differ in nothing but their number, so each operator is called once a mask.
        called: dict[tuple[Operator, Mask | None, Verify], list[_Captured]] = {}
        order: list[tuple[Operator, int]] = [(first, 0)]
        for layer in range(num_layers):
            whole: list[Operator] = ["segment"] if layer in segments else []
            order += [(op, layer) for op in (whole if layer in within else inner)]
        head_within = any(one.head for one in segments.values())
        order += [(last, 0)] if outputs and not head_within else []
        for operator, layer in order:
            placement = self._policy.at(operator, layer, phase)
            if placement.place == "tee":
                continue
            key = (operator, placement.mask, placement.verify)
            if operator == "segment" or key not in called:
                self._log.clear()
                if operator == "segment":
                    run(self._segment(segments[layer], rows, context, outputs))
                else:
                    run(self._call(*key, phase, rows, context, outputs))
                called[key] = [*self._log]
            at = (phase, operator, layer)
            self._messages.setdefault(at, tuple(map(_message, called[key])))
            self.rows.setdefault(at, _rows(called[key][0][1]))
            costs = [self._count(captured, phase, layer) for captured in called[key]]
            self._costs[at] = sum(costs, start=self._costs.get(at, Cost()))

    async def _call(
        self,
        operator: Operator,
        mask: Mask | None,
        verify: Verify,
        phase: Phase,
        rows: int,
        context: int,
        outputs: int,
    ) -> None:
        config, dtype = self._config, self._dtype
        # A prompt's pads are dealt as they are used.
        dealt = isinstance(mask, AdditiveMask) and mask.dealt and phase == "prefill"
        dealers = int(dealt and self._policy.prefill == "always")
        settings = self._settings(dealers)
        K, C = config.num_key_value_heads, config.head_dim
        R = config.num_attention_heads // K * rows
        if is_projection(operator) and operator in self._policy.projections:
            _, (width, in_features) = config.row_layout(operator)
            sent = outputs if operator == "lm_head" else rows
            integers, site = self._policy.arithmetic == "int8", (0, operator)
            linear = plan_linear(
                site,
                # What scales there are does not change a size.
                IntegerSite(torch.ones(width), None, dtype, 127) if integers else FloatSite(),
                self._hide(mask, site, dealers),
                MaskRules(mask, dealers),
                UNVERIFIED,  # results are zeros, and what they are checked with sends nothing
                config,
                settings,
                bias_leaves=not integers and mask is None and verify == "none",
                one_rpc_per_module=self._policy.one_rpc_per_module,
            )
            await linear(self._zeros(sent, in_features))
        elif operator in PRODUCTS:
            scores = operator == "attn_scores"
            a = self._zeros(K, R, C) if scores else self._zeros(K, R, context)
            b = self._zeros(K, C, context) if scores else self._zeros(K, context, C)
            product = product_call(operator, 0, mask, UNVERIFIED, settings, Randomness())
            await product((a, b))
        else:
            embeds = operator == "embedding"
            ids_T = torch.zeros(rows, dtype=torch.int64)
            call = rows_call(
                "embedding" if embeds else "lm_head",
                config,
                dtype,
                0,
                mask,
                UNVERIFIED,
                settings,
                Randomness(),
            )
            await call(ids_T if embeds else self._zeros(outputs, config.hidden_size))

    async def _segment(self, segment: Segment, rows: int, context: int, outputs: int) -> None:
        """Call a segment in the clear: its masks change no size."""
        config, settings = self._config, self._settings()
        cache = KVCache(config, context, self._dtype, range(config.num_hidden_layers))
        cache.length = context - rows
        segment = segment._replace(placed=segment.placed.model_copy(update={"mask": None}))
        call = SegmentCall(config, settings, Sessions(), None, segment)
        take = Take(cache, [0] * rows, 0, logits=bool(outputs))
        await call(self._zeros(rows, config.hidden_size), Batch.of([take]))

    def _count(self, captured: _Captured, phase: Phase, layer: int) -> Cost:
        """Encode a request and its reply as for the wire, in a layer, under the next id."""
        (service, request, reply), headers = captured, self._headers
        if isinstance(request, LinearRequest | RingLinearRequest | SeededRingLinearRequest):
            request = request.model_copy(update={"layer_idx": layer})
        request_id = next(self._ids[phase, service])
        sent = encode_request(request, request_id, headers.timeout_ms)
        received = encode_reply("framed", request_id, request.method, reply, headers.timing)
        return Cost(
            rpcs=1,
            bytes_sent=sum(memoryview(frame).nbytes for frame in sent),
            bytes_received=sum(memoryview(frame).nbytes for frame in received),
        )

    def _settings(self, dealers: int = 0) -> CallSettings:
        channels: list[Channel] = [_Recorder(n, self._log) for n in range(1 + dealers)]
        return CallSettings(lambda _layer: channels, math.inf, None)

    def _hide(self, mask: Mask | None, site: Site, dealers: int) -> Hide:
        layer, operator = site
        if mask is not None and dealers:
            pads = FreshPads(PadLayout.of(self._config, [site]), dealers, Randomness())
            return mask.hiding(Given(site, Randomness(), deal=pads.deal))
        if isinstance(mask, AdditiveMask):
            _, (outputs, _) = self._config.row_layout(operator)
            return partial(_under_zeros, mask, outputs)
        key: MaskKey | None = None
        if isinstance(mask, FeatureMask) and is_linear(operator):
            # From a key that is not kept.
            seed = bytes(Randomness().bytes(KEY_BYTES))
            gain_D = torch.ones(self._config.hidden_size) if operator in GAINS else None
            found = site_transform(mask, self._config, seed, layer, operator, gain_D)
            key = MaskKey("", "", {site: found.mask})
        return in_the_clear if mask is None else mask.hiding(Given(site, Randomness(), key=key))

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype)


def _under_zeros(mask: AdditiveMask, outputs: int, x_TI: torch.Tensor) -> Masked:
    dtype = torch.int32 if mask.arithmetic == "int8" else torch.float32
    r_TI = mask.draw(torch.zeros(x_TI.shape, dtype=torch.int32))
    return mask.mask(x_TI, Factors(r_TI, torch.zeros(len(x_TI), outputs, dtype=dtype)))


def _rows(request: Request) -> int:
    if isinstance(request, SeededRingLinearRequest):
        return request.rows
    return next(value.shape[0] for _, value in request if isinstance(value, WireTensor))


def _message(captured: _Captured) -> Crossing:
    service, request, reply = captured
    tensors = [value for _, value in request if isinstance(value, WireTensor)]
    if isinstance(request, SegmentRequest):
        tensors = [request.hidden_states]  # the others are of whom and which
    return Crossing(
        service=service + 1,
        method=request.method,
        modules=getattr(request, "module_names", ()),
        sent=tuple(map(_described, tensors)),
        received=_described(reply.output),
    )


def _described(tensor: WireTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
