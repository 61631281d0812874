"""Call plans, the one function that carries a plan out, and how several calls overlap.

A plan holds what is known before an operator is called: the channels, the requests, the mask, the
check, the scales and the form of the reply. It is made once for each site (an operator of a layer)
and protection. `carry_out` reads from top to bottom; the slow path, which it enters where a result
is refused, is in `tee_side.remote.fault_attribution`.

A forward pass is a coroutine. Once it has asked a service it gives up control; when its turn comes
again it waits for the reply, and goes on. Driving several in turns is all there is to overlapping:
no threads, no locks, and always the same order.
"""

import math
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from protocol.channel import Channel
from protocol.errors import DeadlineExceededError, PolicyError, ReplyError, TsqpError
from protocol.messages import LinearRequest, ModuleName, RingLinearRequest, RingLMHeadRequest
from protocol.model.checkpoint import Checkpoint
from protocol.model.config import ModelConfig
from protocol.model.forward import Call
from protocol.prepared import Exchange, Payload, PreparedRequest
from protocol.tensors import WireTensor, short_name
from tee_side.observer import UNTIMED, Observer, StageClock, Untimed
from tee_side.policy.placement import Policy
from tee_side.protect.masking import MaskRules, Padded, PaddedSite
from tee_side.protect.masks.mask import Hide, Masked, Seed
from tee_side.protect.randomness import Randomness
from tee_side.protect.resumption import watch
from tee_side.protect.sites import LinearSite
from tee_side.protect.verification import ResultCheck, Unverified
from tee_side.words import Operator, Phase, Site, layer_of, registered_name

# What an operator is called with: a tensor, or the two operands of an attention product.
Operand: TypeAlias = Any
# The service of a layer, and the dealers of its pads, where a policy has these dealt. The
# embedding goes where layer 0 is, the LM head where the last one is.
ChannelsAt: TypeAlias = Callable[[int], Sequence[Channel]]
# Shapes that a plan keeps prepared requests for: every decode batch, and whole prefill chunks.
MAX_PREPARED = 64
# The entry points of operators that are not linear.
REGISTERED = "tsqp.operators"
R = TypeVar("R")
# Returns the error for a place where a pad was wrong; None where no dealer has multiplied it.
Accuse: TypeAlias = Callable[[str], TsqpError | None]
# `None` is sent to it at each turn.
Running: TypeAlias = Coroutine[None, None, R]


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the operators of a run are made from; the policy has been checked against the model."""

    policy: Policy
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CallSettings:
    """What all calls of a micro-batch have in common.

    `channels_at`: the services of each layer. `timeout_s`: after which no other service is asked
    for what was refused; infinite: each request has its channel's own deadline. `observer`: told of
    every stage; None for none.
    """

    channels_at: ChannelsAt
    timeout_s: float
    observer: Observer | None

    def clock(self, operator: Operator, layer: int | None) -> StageClock | Untimed:
        """Return what tells the observer of an operator's stages."""
        return UNTIMED if self.observer is None else StageClock(self.observer, operator, layer)


@dataclass(frozen=True, slots=True, eq=False)
class CallPlan:
    """How an operator leaves the TEE under one protection.

    `channels`: of the service, and of each dealer that multiplies the pad now. `encode`: turns an
    input into what is multiplied, and what is remembered of it; `decode`: a product, with that,
    into the output. `hide`: masks the encoded input, and refuses what must not cross. `requests`:
    returns the prepared requests for what is sent, by its shape and dtype: one, or one for each
    module that travels alone. `shape`: of the unmasked result of an encoded input; its dtype is
    that of the replies. `check`: of its numbers, or `UNVERIFIED`. `timeout_s`: of the whole call,
    infinite for the channels' own deadlines. `clock`: told of each stage. `padded`: does all that
    `encode`, `hide`, `check` and `decode` do, in two passes that the clock calls "mask" and
    "unmask"; None for what has no compiled form. `accuse`: told of a result that is wrong though
    the service was right: a dealer was not.
    """

    operator: Operator
    layer: int | None
    channels: tuple[Channel, ...]
    encode: Callable[[Operand], tuple[Operand, Any]]
    hide: Callable[[Operand], Masked]
    requests: Callable[[Any, Any], tuple[PreparedRequest, ...]]
    rules: MaskRules
    shape: Callable[[Operand], tuple[int, ...]]
    check: ResultCheck | Unverified
    decode: Callable[[torch.Tensor, Any], torch.Tensor]
    timeout_s: float
    clock: StageClock | Untimed
    padded: PaddedSite | None = None
    accuse: Accuse | None = None


def plan_linear(
    site: Site,
    linear: LinearSite,
    mask: Hide,
    rules: MaskRules,
    check: ResultCheck | Unverified,
    config: ModelConfig,
    settings: CallSettings,
    *,
    bias_leaves: bool = False,
    one_rpc_per_module: bool = False,
    padded: PaddedSite | None = None,
    accuse: Accuse | None = None,
) -> Call:
    """Return the call of a linear operator of one layer, or of the LM head: [T, I] -> [T, O].

    The output has the outputs of the operator's modules side by side, biases included.
    `mask`: hides what `linear` has encoded, under `rules`; `check`: of the product. `bias_leaves`:
    the service adds the bias, as nothing is masked or checked. `one_rpc_per_module`: q, k, v, gate
    and up travel alone, as in the published schema, instead of together with what shares their
    input. `padded`: does all of this compiled, where it can be. `accuse`: see `CallPlan`.

    GPU sees: the input, as the mask leaves it. The call raises as `carry_out` does.
    """
    at, operator = site
    layer = layer_of(site)
    rows, (outputs, _) = config.row_layout(operator)
    sizes = {module: its.stop - its.start for module, its in rows.items()}
    messages = [(module,) for module in sizes] if one_rpc_per_module else [tuple(sizes)]

    def hide(encoded: torch.Tensor) -> Masked:
        masked = mask(encoded)
        rules.check_sent(operator, encoded, masked)
        return masked

    @lru_cache(MAX_PREPARED)
    def requests(shape: tuple[int, ...], of: torch.dtype) -> tuple[PreparedRequest, ...]:
        dtype, sent = short_name(of), shape[0]
        wire = WireTensor(dtype, tuple(shape), b"")
        if layer is None or of is torch.int32:
            found = tuple(ring_request(config, site, wire, names) for names in messages)
            # By compiled code, in one pass. Several are put side by side, which is a copy.
            found[0].read_once = padded is not None and len(found) == 1
            return found
        return tuple(
            PreparedRequest(
                LinearRequest(
                    layer_idx=layer, module_names=names, hidden_states=wire, bias=bias_leaves
                ),
                (sent, sum(sizes[name] for name in names)),
                dtype,
            )
            for names in messages
        )

    plan = CallPlan(
        operator=operator,
        layer=layer,
        channels=tuple(settings.channels_at(at)[: rules.parties]),
        encode=linear.encode,
        hide=hide,
        requests=requests,
        rules=rules,
        shape=lambda encoded: (len(encoded), outputs),
        check=check,
        decode=linear.decode,
        timeout_s=settings.timeout_s,
        clock=settings.clock(operator, layer),
        padded=padded,
        accuse=accuse,
    )
    return partial(carry_out, plan)


def ring_request(
    config: ModelConfig, site: Site, elements: WireTensor, names: tuple[ModuleName, ...] = ()
) -> PreparedRequest:
    """Prepare the product of ring elements int32 [rows, I] with a site's weights.

    `names`: with those of some modules alone; none: of all, side by side.
    """
    layer, (rows, (outputs, _)) = layer_of(site), config.row_layout(site[1])
    message: RingLMHeadRequest | RingLinearRequest
    if layer is None:
        message = RingLMHeadRequest(elements=elements)
    else:
        names = names or tuple(rows)
        outputs = sum(rows[name].stop - rows[name].start for name in names)
        message = RingLinearRequest(layer_idx=layer, module_names=names, elements=elements)
    return PreparedRequest(message, (elements.shape[0], outputs), elements.dtype)


class RegisteredOperator(Protocol):
    """An operator of a run that is not linear, as an installed package computes it at a service.

    The entry points `tsqp.operators` name a class each for `embedding`, `attention` (whose products
    are `attn_scores` and `attn_values`) and `lm_head`. What they send goes through `carry_out`.
    """

    def __init__(self, parts: RunParts) -> None:
        """Read what is needed, and draw the secrets of checks; once a run."""

    def bind(
        self, layer: int, phase: Phase, settings: CallSettings, randomness: Randomness
    ) -> Callable[..., Awaitable[torch.Tensor]]:
        """Return what the forward pass calls, in a layer and phase in which the operator leaves.

        `embedding` and `lm_head` get a tensor, `attention` what `RemoteAttention` does.
        """


def find_registered(
    policy: str, operators: Sequence[Operator]
) -> dict[str, type[RegisteredOperator]]:
    """Return the classes that send operators of a policy, by the names they are registered under.

    Raises PolicyError that says what to install, and PluginError for a package that does not load.
    """
    found: dict[str, type[RegisteredOperator]] = {}
    for operator in operators:
        from tee_side.plugins import load_entry_point, one_entry_point  # of no use to most runs

        name = registered_name(operator)
        if (entry := one_entry_point(REGISTERED, name)) is None:
            raise PolicyError(
                f"policy {policy}: {operator}",
                "a placement that leaves, without a package that sends it",
                f"an installed package that registers {name!r} in the entry points"
                f' {REGISTERED}, as tsqp does, or place = "tee"',
            )
        found[name] = load_entry_point(entry)
    return found


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
    else:
        clock.mark("tee")
        encoded, remembered = plan.encode(x)
        clock.mark("mask")
        masked = plan.hide(encoded)
    first = masked.sent[0]
    requests = plan.requests(first.shape, first.dtype)
    clock.mark(None)
    until = time.monotonic() + plan.timeout_s
    left_s: float | None = None  # the channel's own deadline, which is as far away
    while True:
        exchanges: list[Exchange] = []
        outputs: list[list[torch.Tensor]] = []  # of each request, one a service
        changed = False
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
            # Each service's product: the outputs of all modules side by side.
            parts = outputs[0] if len(outputs) == 1 else _side_by_side(outputs)
            clock.mark("unmask")
            if not isinstance(masked, Padded):
                revealed = _reveal(plan, encoded, remembered, masked, parts)
            elif (revealed := masked.reveal(parts)) is None:
                changed = _put_right(masked, parts, exchanges)
            clock.mark(None)
            if revealed is not None:
                return revealed
        # The slow path, imported when it is first needed.
        from tee_side.remote.fault_attribution import Refused, refuse

        refuse(
            Refused(
                operator=plan.operator,
                layer=plan.layer,
                channels=plan.channels,
                mask=plan.rules.name,
                in_the_clear=plan.rules.mask is None,
                check=plan.check,
                until=until,
                accuse=plan.accuse,
                changed=changed,
            ),
            requests,
            masked.sent,
            exchanges,
        )
        left_s = time_left(plan.operator, until)


def _side_by_side(outputs: Sequence[Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    return [torch.cat(several, dim=-1) for several in zip(*outputs, strict=True)]


def _put_right(masked: Padded, parts: Sequence[torch.Tensor], of: Sequence[Exchange]) -> bool:
    """Say whether what was refused is right by now, of copies that the exchanges then keep.

    A service may still change a reply that is lent, which is one of a single request. One that put
    it right since, so that nothing wrong is found any more, has been caught by that alone.
    """
    if not any(exchange.lent for exchange in of):
        return False
    copies = [part.clone() for part in parts]
    for exchange, copy in zip(of, copies, strict=True):
        exchange.output = copy
    return masked.reveal(copies) is not None


def _reveal(
    plan: CallPlan, encoded: Operand, remembered: Any, masked: Masked, parts: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Unmask a result, check it and turn it into the output; None for wrong numbers."""
    clock, check = plan.clock, plan.check
    y = masked.unmask(*parts)
    plan.rules.check_unmasked(plan.operator, y, plan.shape(encoded), parts[0].dtype)
    if not isinstance(check, Unverified):
        clock.mark("verify")
        if not check.holds(encoded, y, masked.sent):
            return None
    clock.mark("tee")
    return plan.decode(y, remembered)


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the others have their turn."""
    yield


@types.coroutine
def ask(
    channels: Sequence[Channel],
    request: PreparedRequest,
    sent: Sequence[Payload | Seed],
    timeout_s: float | None,
) -> Generator[None, None, list[Exchange]]:
    """Send the service its tensors and each dealer its seed, give up control; return the replies.

    Raises ResumedError before anything is sent, and what sending and waiting raise; of what is
    still under way then, or when the coroutine is closed, no reply is waited for any more.
    """
    # Whatever was made ahead, or masked by any mask, leaves here.
    resumption = watch()
    if resumption is not None and resumption.told(0, 1):
        resumption.check()
    waiting: list[tuple[Channel, int]] = []
    try:
        for channel, payload in zip(channels, sent, strict=True):
            if isinstance(payload, Seed):
                request_id = channel.start(*payload.crossing(request), timeout_s)
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
