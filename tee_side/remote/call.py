"""A call plan, the one function that carries a plan out, and how several calls overlap.

A plan holds what is known before an operator is called: the channels, the prepared requests, the
mask, the check, the scales and the form of the reply. It is made once for each site (an operator
of a layer) and row count. `carry_out` reads from top to bottom; the slow path, which it enters
where a result is refused, is in `tee_side.remote.fault_attribution`.

A forward pass is a coroutine. Once it has asked a service it gives up control; when its turn comes
again it waits for the reply, and goes on. Driving several in turns is all there is to overlapping:
no threads, no locks, and always the same order.
"""

from __future__ import annotations

import math
import time
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from protocol.channel import Channel
from protocol.errors import DeadlineExceededError, ReplyError
from protocol.messages import Request
from protocol.prepared import Exchange, PreparedRequest
from tee_side.observer import StageClock, Untimed
from tee_side.protect.masking import MaskRules, Padded, PaddedSite
from tee_side.protect.masks.mask import Masked, Seed
from tee_side.protect.resumption import watch
from tee_side.protect.verification import ResultCheck, Unverified
from tee_side.words import Operator

if TYPE_CHECKING:
    from tee_side.remote.fault_attribution import Refused

# What an operator is called with: a tensor, or the two operands of an attention product.
Operand: TypeAlias = Any
# Row counts that an operator keeps plans for: every decode batch, and whole prefill chunks.
_MAX_PLANS = 64
R = TypeVar("R")
# `None` is sent to it at each turn.
Running: TypeAlias = Coroutine[None, None, R]


@dataclass(frozen=True, slots=True, eq=False)
class CallPlan:
    """How an operator leaves the TEE, for one number of rows.

    `channels`: one for each share. `encode`: turns an input into what is multiplied; `decode`: a
    product, and the input, into the output. `hide`: masks the encoded input. `requests`: checks
    what the mask sends, and returns the prepared requests for it: one, or one for each module that
    travels alone. `shape`: of the unmasked result, whose dtype is that of the replies. `check`: of
    its numbers, or `UNVERIFIED`. `timeout_s`: of the whole call, infinite for the channels' own
    deadlines. `clock`: told of each stage. `padded`: does all that `encode`, `hide`, `check` and
    `decode` do, in two passes that the clock calls "mask" and "unmask", and `prepared` are its
    requests; None for what has no compiled form.
    """

    operator: Operator
    layer: int | None
    channels: tuple[Channel, ...]
    encode: Callable[[Operand], Operand]
    hide: Callable[[Operand], Masked]
    requests: Callable[[Operand, Masked], tuple[PreparedRequest, ...]]
    rules: MaskRules
    shape: tuple[int, ...]
    check: ResultCheck | Unverified
    decode: Callable[[torch.Tensor, Operand], torch.Tensor]
    timeout_s: float
    clock: StageClock | Untimed
    padded: PaddedSite | None = None
    prepared: tuple[PreparedRequest, ...] = ()


class Planned(ABC):
    """An operator that keeps its plans, one for each row count; call it with its input [T, I]."""

    def __init__(self) -> None:
        self._plans: dict[int, CallPlan] = {}

    @abstractmethod
    def plan(self, x_TI: torch.Tensor) -> CallPlan:
        """Make the plan for the row count of this input."""

    def __call__(self, x_TI: torch.Tensor) -> Awaitable[torch.Tensor]:
        """Return the output, as `carry_out` does."""
        rows = x_TI.shape[0]
        plan = self._plans.get(rows)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[rows] = self.plan(x_TI)
        return carry_out(plan, x_TI)


async def carry_out(plan: CallPlan, x: Operand) -> torch.Tensor:
    """Return an operator's output for the input x.

    GPU sees: `Masked.sent` of the plan's mask. A result that is refused is used for nothing; the
    same masked tensors are then sent again, to another service. Raises the channels' errors;
    ReplyError (form) and VerificationError (numbers) where no other service is left to ask;
    MaskError for a mask that sends, or returns, what it must not.
    """
    clock = plan.clock
    clock.called()
    padded = plan.padded
    masked: Masked | Padded
    if padded is not None:
        clock.mark("mask")
        masked = padded.hide(x)
        encoded = masked.encoded
        requests = plan.prepared
    else:
        clock.mark("tee")
        encoded = plan.encode(x)
        clock.mark("mask")
        masked = plan.hide(encoded)
        requests = plan.requests(encoded, masked)
    clock.mark(None)
    until = time.monotonic() + plan.timeout_s
    left_s: float | None = None  # the channel's own deadline, which is as far away
    while True:
        exchanges: list[Exchange] = []
        outputs: list[list[torch.Tensor]] = []  # of each request, one a service
        for request in requests:
            if exchanges:
                left_s = time_left(plan.operator, until)
            answered = await ask(plan.channels, request, masked.sent, left_s)
            clock.exchanged(answered)
            clock.mark("verify")
            exchanges += answered
            outputs.append([])
            try:
                for exchange in answered:
                    taken = exchange.output  # where compiled code has taken it
                    outputs[-1].append(request.output(exchange) if taken is None else taken)
            except ReplyError:  # of another form than was asked for
                outputs[-1].clear()
            clock.mark(None)
            if not outputs[-1]:
                break
        if outputs[-1]:
            parts = outputs[0] if len(outputs) == 1 else _joined(outputs)
            clock.mark("unmask")
            revealed = (
                masked.reveal(parts)
                if isinstance(masked, Padded)
                else _reveal(plan, x, encoded, masked, parts)
            )
            clock.mark(None)
            if revealed is not None:
                return revealed
        # The slow path, imported when it is first needed.
        from tee_side.remote.fault_attribution import refuse

        left_s = refuse(_refused(plan, requests, masked, exchanges, bool(outputs[-1])), until)


def _reveal(
    plan: CallPlan, x: Operand, encoded: Operand, masked: Masked, parts: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Unmask a result, check it and turn it into the output; None for wrong numbers."""
    clock, check = plan.clock, plan.check
    y = masked.unmask(*parts)
    plan.rules.check_unmasked(plan.operator, y, plan.shape, parts[0].dtype)
    if not isinstance(check, Unverified):
        clock.mark("verify")
        if not check.holds(encoded, y, masked.sent):
            return None
    clock.mark("tee")
    return plan.decode(y, x)


def _joined(outputs: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """Return each service's product, with the outputs of all modules side by side."""
    return [torch.cat(parts, dim=-1) for parts in zip(*outputs, strict=True)]


def _refused(
    plan: CallPlan,
    requests: Sequence[PreparedRequest],
    masked: Masked | Padded,
    exchanges: Sequence[Exchange],
    well_formed: bool,
) -> Refused:
    """Collect what the slow path needs to know of a result that is not used."""
    from tee_side.remote.fault_attribution import Answer, Refused

    asked = [
        (channel, request.seeded, payload.words())
        if isinstance(payload, Seed)
        else (channel, request, payload)
        for request in requests
        for channel, payload in zip(plan.channels, masked.sent, strict=True)
    ]
    answers = [Answer(*one, exchange) for one, exchange in zip(asked, exchanges, strict=False)]
    return Refused(plan.operator, plan.layer, answers, plan.check, plan.rules, well_formed)


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the others have their turn."""
    yield


@types.coroutine
def ask(
    channels: Sequence[Channel],
    request: PreparedRequest,
    sent: Sequence[torch.Tensor | Seed],
    timeout_s: float | None,
) -> Generator[None, None, list[Exchange]]:
    """Send each service its tensor or seed, give up control, and return the replies in order.

    Raises ResumedError before anything is sent, and what sending and waiting raise; of what is
    still under way then, or when the coroutine is closed, no reply is waited for any more.
    """
    # Whatever was made ahead, or masked by any mask, leaves here or in `submit`.
    resumption = watch()
    if resumption is not None and resumption.told(0, 1):
        resumption.check()
    waiting: list[tuple[Channel, int]] = []
    try:
        for channel, payload in zip(channels, sent, strict=True):
            if isinstance(payload, Seed):
                request_id = channel.start(request.seeded, payload.words(), timeout_s)
            else:
                request_id = channel.start(request, payload, timeout_s)
            waiting.append((channel, request_id))
        yield
        exchanges = []
        for channel, request_id in waiting:  # a list comprehension is a call more
            exchanges.append(channel.wait(request_id))
    except BaseException:
        for channel, request_id in waiting:
            channel.abandon(request_id)
        raise
    return exchanges


@types.coroutine
def submit(
    channel: Channel, request: Request, timeout_s: float | None
) -> Generator[None, None, Exchange]:
    """Do the same with one whole message, such as a Segment. GPU sees: the message."""
    if (watching := watch()) is not None:
        watching.check()
    request_id = channel.submit(request, timeout_s)
    try:
        yield
        return channel.wait(request_id)
    except BaseException:
        channel.abandon(request_id)
        raise


def time_left(operator: Operator, until: float) -> float | None:
    """Return how long a further request of a call may take; None for the channel's own deadline.

    Raises DeadlineExceededError where nothing is left: the service that got a request without any
    time would be taken for lost.
    """
    if until == math.inf:
        return None
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError(operator, "the end of its time", "all replies that it needs")
    return left_s


def run(running: Running[R]) -> R:
    """Drive one coroutine to its end and return its result."""
    return run_overlapped([running])[0]


def run_overlapped(running: Sequence[Running[R]]) -> list[R]:
    """Drive coroutines in turns, and return their results in order.

    Each runs until it has asked a service, then the next has its turn. They begin one after
    another, each behind the second turn of the one before it: side by side all would want the TEE
    for the same long operator, and then leave it idle for the same long product. An error that a
    coroutine does not handle ends all of them: requests under way are abandoned.
    """
    results: dict[int, R] = {}
    # Of each that has begun: its index, and whether its first turn is still to come.
    turns = deque([(0, True)] if running else [])
    begun = 1
    try:
        while turns:
            index, first = turns.popleft()
            try:
                running[index].send(None)
            except StopIteration as ended:
                results[index] = ended.value
            else:
                turns.append((index, False))
            # It has had its second turn, or came to its end without one.
            settled = not first or index in results
            if settled and index == begun - 1 and begun < len(running):
                turns.appendleft((begun, True))
                begun += 1
    finally:
        for coroutine in running:
            coroutine.close()
    return [results[index] for index in range(len(running))]
