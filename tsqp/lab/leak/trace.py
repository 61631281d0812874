"""What reached one service: bytes, and what the service's owner reads in them.

Nothing else is known to an attack. A trace is one session: the requests of one prompt, in order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from gpu_side.encoding import open_request, read_request
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import InputError, ProtocolError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    LinearRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
    SeededRingLinearRequest,
    SegmentRequest,
)
from protocol.tensors import WireTensor, to_torch
from tee_side.words import OPERATORS, PHASES, PRODUCTS, Operator, Phase

# A layer (None: the operator belongs to none) and an operator.
Where: TypeAlias = tuple[int | None, Operator]

# What a policy sends away in a phase, and how many rows each request's mask adds.
Added: TypeAlias = Mapping[tuple[Where, Phase], int]

_OPERATOR_OF: dict[ModuleName, Operator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


class TraceError(InputError):
    """A trace that cannot be read, or was cut short."""


@dataclass(frozen=True, eq=False)
class Call:
    """One request as the service read it. `modules`: of a linear operator, else empty."""

    where: Where
    modules: tuple[ModuleName, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> torch.Tensor:
        """The first tensor, one row a token for all but products of attention: [R, I]."""
        first = self.tensors[0]
        return first if first.dim() == 1 else first.reshape(-1, first.shape[-1])


@dataclass(frozen=True, eq=False)
class TraceStep:
    """The requests of one forward pass.

    `first`: how many tokens went by in earlier steps of the trace; `tokens`: how many went through
    in this one, which is less than the rows where a mask adds some.
    """

    first: int
    tokens: int
    calls: tuple[Call, ...]

    def at(self, where: Where) -> Call | None:
        """Return the first request of an operator in this step, None if it was not sent."""
        return next((call for call in self.calls if call.where == where), None)


@dataclass(frozen=True)
class Trace:
    """The frames of every request that reached a service in one session, in order.

    `added`: what the policy says about the rows of every request, as public as the policy; empty
    where it is not known.
    """

    messages: tuple[tuple[bytes, ...], ...]
    added: Added = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """What carries tensors. Raises TraceError."""
        return tuple(_calls(self.messages))

    @cached_property
    def steps(self) -> tuple[TraceStep, ...]:
        """The forward passes. Raises TraceError.

        A step begins where the order of operators begins anew. Where the policy is not known, the
        smallest step tells how many rows a mask adds to each: a decoded token is one row.
        """
        groups = list(_groups(self.calls, self.added))
        # What has a row for each token of a step: the LM head has fewer.
        each = [
            [call for call in group if call.where[1] not in (*PRODUCTS, "lm_head")]
            for group in groups
        ]
        sizes = _counted(each, self.added) if self.added else _guessed(each)
        steps, first = [], 0
        for group, tokens in zip(groups, sizes, strict=True):
            steps.append(TraceStep(first, tokens, tuple(group)))
            first += tokens
        return tuple(steps)

    @property
    def tokens(self) -> int:
        """How many tokens went through the model while the service was asked."""
        return sum(step.tokens for step in self.steps)

    @property
    def places(self) -> list[Where]:
        """What the service was asked for, in the order of a forward pass."""
        return sorted({call.where for call in self.calls}, key=forward_order)


def read_frames(frames: Sequence[bytes]) -> Request:
    """Return the request in the frames of a message, as its service reads it.

    Raises ProtocolError.
    """
    request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
    return request.expanded() if isinstance(request, SeededRingLinearRequest) else request


def _calls(messages: Sequence[Sequence[bytes]]) -> Iterator[Call]:
    layer: int | None = None
    products = 0
    for number, frames in enumerate(messages):
        try:
            request = read_frames(frames)
        except ProtocolError as error:
            raise TraceError(
                f"trace: message {number + 1} of {len(messages)}",
                got=f"{error.where}: {error.got}",
                expected="a whole request",
            ) from error
        where: Where = None, "lm_head"
        modules: tuple[ModuleName, ...] = ()
        match request:
            case InitRequest() | HealthRequest():
                continue
            case LinearRequest() | RingLinearRequest():
                layer, modules, products = request.layer_idx, request.module_names, 0
                where = layer, _OPERATOR_OF[modules[0]]
            case EmbeddingRequest():
                where = None, "embedding"
            case SegmentRequest():
                where = request.first_layer, "segment"
            case MatmulRequest():
                # Products do not say whose they are; their order does.
                where = layer, "attn_values" if products % 2 else "attn_scores"
                products += 1
        tensors = tuple(to_torch(value) for _, value in request if isinstance(value, WireTensor))
        yield Call(where, modules, tensors)


def _groups(calls: Sequence[Call], added: Added) -> Iterator[list[Call]]:
    group: list[Call] = []
    # What is sent in one phase alone.
    alone = {
        where: phase
        for where, phase in added
        if (where, "decode") not in added or (where, "prefill") not in added
    }
    for call in calls:
        # The same modules of the same layer again, or earlier ones: another step.
        again = any((one.where, one.modules) == (call.where, call.modules) for one in group) or (
            bool(group) and forward_order(call.where) < forward_order(group[-1].where)
        )
        # Decode begins: it alone sends this, and prefill alone something before it.
        turns = alone.get(call.where) == "decode" and any(
            alone.get(one.where) == "prefill" for one in group
        )
        if again or turns:
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def place_name(where: Where) -> str:
    """Name a place for people."""
    layer, operator = where
    return operator if layer is None else f"layer {layer} {operator}"


def forward_order(where: Where) -> tuple[int, int]:
    """Return what sorts places as a forward pass goes through them."""
    layer, operator = where
    if layer is None:
        return (-1, 0) if operator == "embedding" else (2**31, 0)
    # A segment stands where its first layer begins.
    return layer, -1 if operator == "segment" else OPERATORS.index(operator)


def _guessed(groups: Sequence[Sequence[Call]]) -> list[int]:
    """Return the tokens of steps whose masks add as many rows to each request, in each step."""
    rows = [max((len(call.rows) for call in group), default=1) for group in groups]
    # One step alone may be a prompt: then nothing tells.
    added = min(rows) - 1 if len(rows) > 1 else 0
    return [max(1, count - added) for count in rows]


def _counted(groups: Sequence[Sequence[Call]], added: Added) -> list[int]:
    """Return the tokens of steps under masks that are known."""
    sizes: list[int] = []
    phase: Phase = "prefill" if any(phase == "prefill" for _, phase in added) else "decode"
    for group in groups:
        prompt, decoded = (_tokens(group, phase, added) for phase in PHASES)
        # The first step is of the prompt. Behind it, one of one token is decode: only the rest of
        # a prompt could be mistaken for it.
        if prompt is None or (sizes and decoded == {1}):
            phase = "decode"
        found = decoded if phase == "decode" else prompt
        sizes.append(max(1, *(found or {1})))
    return sizes


def _tokens(group: Sequence[Call], phase: Phase, added: Added) -> set[int] | None:
    """Return how many tokens requests are about in a phase, None where not all are sent in it."""
    if any((call.where, phase) not in added for call in group):
        return None
    return {len(call.rows) - added[call.where, phase] for call in group}
