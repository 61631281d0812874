"""What reached one service: bytes, and what whoever owns the service reads in them.

Nothing else is known to an attack. A trace is one session: the requests of one prompt, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, open_request, read_request
from protocol.errors import InputError, ProtocolError
from protocol.messages import (
    FUSED_MODULES,
    EmbeddingRequest,
    HealthRequest,
    InitRequest,
    LinearRequest,
    LMHeadRequest,
    MatmulRequest,
    ModuleName,
    Request,
    RingLinearRequest,
)
from protocol.tensors import WireTensor, to_torch
from tee_side.vocabulary import OPERATORS, Operator

# A layer (None: the operator belongs to none) and an operator.
Where: TypeAlias = tuple[int | None, Operator]

_OPERATOR_OF: dict[ModuleName, Operator] = {
    module: operator for operator, modules in FUSED_MODULES.items() for module in modules
}


class TraceError(InputError):
    """A trace that cannot be read, or was cut short."""


@dataclass(frozen=True, eq=False)
class Call:
    """One request as the service read it. `modules`: of a linear operator, else empty."""

    operator: Operator
    layer: int | None
    modules: tuple[ModuleName, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def where(self) -> Where:
        """Layer and operator."""
        return self.layer, self.operator

    @property
    def rows(self) -> torch.Tensor:
        """The first tensor, one row a token for all but products of attention: [R, I]."""
        first = self.tensors[0]
        return first if first.dim() == 1 else first.reshape(-1, first.shape[-1])


@dataclass(frozen=True, eq=False)
class Step:
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
    """The frames of every request that reached a service in one session, in order."""

    messages: tuple[tuple[bytes, ...], ...]

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """What carries tensors. Raises TraceError."""
        return tuple(_calls(self.messages))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The forward passes. Raises TraceError.

        A step begins where the order of operators begins anew. A decoded token is one row, so the
        smallest step tells how many rows a mask adds to each.
        """
        groups = list(_groups(self.calls))
        # One step alone may be a prompt: then nothing tells.
        added = min(map(_rows, groups)) - 1 if len(groups) > 1 else 0
        steps, first = [], 0
        for group in groups:
            tokens = max(1, _rows(group) - added)
            steps.append(Step(first, tokens, tuple(group)))
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

    @property
    def payload_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(len(frame) for message in self.messages for frame in message)


def _calls(messages: Sequence[Sequence[bytes]]) -> Iterator[Call]:
    layer: int | None = None
    products = 0
    for number, frames in enumerate(messages):
        try:
            request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
        except ProtocolError as error:
            raise TraceError(
                f"trace: message {number + 1} of {len(messages)}",
                got=f"{error.where}: {error.got}",
                expected="a whole request",
            ) from error
        if isinstance(request, InitRequest | HealthRequest):
            continue
        tensors = tuple(to_torch(value) for _, value in request if isinstance(value, WireTensor))
        if isinstance(request, LinearRequest | RingLinearRequest):
            layer, products = request.layer_idx, 0
            operator = _OPERATOR_OF[request.module_names[0]]
            yield Call(operator, layer, request.module_names, tensors)
            continue
        yield Call(*_named(request, layer, products), (), tensors)
        products += isinstance(request, MatmulRequest)


def _named(request: Request, layer: int | None, products: int) -> tuple[Operator, int | None]:
    """Name what is no linear operator. Products do not say whose they are; their order does."""
    if isinstance(request, EmbeddingRequest):
        return "embedding", None
    if isinstance(request, LMHeadRequest):
        return "lm_head", None
    return ("attn_values" if products % 2 else "attn_scores"), layer


def _groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    group: list[Call] = []
    for call in calls:
        # The same module of the same layer again, or an earlier one: another step.
        if (
            group
            and forward_order(call.where) <= forward_order(group[-1].where)
            and not _goes_on(group, call)
        ):
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def _goes_on(group: Sequence[Call], call: Call) -> bool:
    """Whether this is another module of the same operator."""
    if call.where != group[-1].where:
        return False
    return not any(call.modules == other.modules for other in group if other.where == call.where)


def forward_order(where: Where) -> tuple[int, int]:
    """Return what sorts places as a forward pass goes through them."""
    layer, operator = where
    if layer is None:
        return (-1, 0) if operator == "embedding" else (2**31, 0)
    return layer, OPERATORS.index(operator)


def _rows(group: Sequence[Call]) -> int:
    """Rows of a step: the most of any request that has one a token. The LM head has fewer."""
    sizes = [
        len(c.rows) for c in group if c.operator not in ("attn_scores", "attn_values", "lm_head")
    ]
    return max(sizes, default=1)
