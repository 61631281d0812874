"""What the service answers, and how it is: what waits for it, and what it has counted.

For each request there is what computes it: a request is checked, then computed, in the same way
whatever computes it.

The loop's thread writes the numbers; the threads that report health and metrics read them. They
hold no contents, and no name that a client can choose: methods are those of the schema, outcomes
its error codes.

What waits is bounded in number and bytes, and served to its clients in turn (`FairQueue`). A client
is a connection or, with keys, all connections of one key. The requests of one are taken in the
order in which they came; between clients, each has one turn and goes to the end of the line, so
that a client with many requests delays another's by one of its own. What does not fit is handed
back to be refused. Where all clients together fill the queue, the client with the most loses its
newest request: clients that flood do not shut a newcomer out. No client loses a request to one that
does not fit even then. No client loses its only request, with one exception: a client that has
nothing waiting finds room for its fair share of the bytes, which is all of them divided by the
clients that wait, itself included. For that, richer clients give up even their last.
"""

import secrets
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, Literal, TypeAlias

import torch

from gpu_side.cuda.products import device_kernels
from gpu_side.defaults import ALL_CLIENTS, QUEUED_REQUESTS, QUEUED_TOTAL_REQUESTS
from gpu_side.kernels import Kernel, NullKernels, Prepare, Result, there
from gpu_side.segment_kernels import PrepareSegment, null_segments, torch_segments
from gpu_side.sessions import SessionSettings, SessionStore, SessionTotals, free_bytes
from gpu_side.tasks import RequestChecker
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServedModel, ServiceWeights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import ErrorCode, EvidenceError, ProtocolError, SettingsError
from protocol.keystream import expanded
from protocol.messages import (
    REQUEST_TYPES,
    EmbeddingRequest,
    HealthReply,
    HealthRequest,
    InitConfig,
    InitReply,
    InitRequest,
    NormWeight,
    Request,
    RotaryParams,
    SeededRingLinearRequest,
    SegmentRequest,
)
from protocol.model.forward import rope_frequencies
from protocol.tensors import from_torch


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait: of one client, and (`total_`) of all together."""

    requests: int = QUEUED_REQUESTS
    bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    total_requests: int = QUEUED_TOTAL_REQUESTS
    total_bytes: int = ALL_CLIENTS * DEFAULT_MAX_MESSAGE_BYTES

    def check(self, max_message_bytes: int) -> None:
        """Raise SettingsError for such as can never be reached, or passed."""
        sizes = (self.bytes, self.total_bytes, max_message_bytes)
        one, together, message = (size / 2**20 for size in sizes)
        for option, value, least, why in (
            ("--max-queued-mib", one, message, "--max-message-mib"),
            ("--max-queued-total-mib", together, one, "--max-queued-mib"),
            (
                "--max-queued-total-requests",
                self.total_requests,
                self.requests,
                "--max-queued-requests",
            ),
        ):
            SettingsError.unless(
                value >= least, option, f"{value:.9g}", f"at least {least:.9g}, which is {why}"
            )


# A message that does not wait; which field of the limits it hit; what the message needs of it
# (requests or bytes); and what is left of it.
Rejected: TypeAlias = tuple[Incoming, str, int, int]


@dataclass(slots=True, eq=False)
class _OfClient:
    """What waits of one client."""

    messages: deque[tuple[Incoming, int]] = field(default_factory=deque)
    size: int = 0


class FairQueue:
    """Received messages, by client."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        # Of all clients.
        self.requests = 0
        self.bytes = 0
        # Those with something waiting, in the order of their turns.
        self._turns: OrderedDict[bytes, _OfClient] = OrderedDict()
        # Who had the last turn, perhaps without waiting.
        self.served = b""

    def put(self, incoming: Incoming) -> Sequence[Rejected]:
        """Let a message wait; return what does not: this one, or others in its place."""
        limits, size = self.limits, sum(map(len, incoming.frames))
        name = incoming.client
        client = self._turns.get(name)
        count, held = (0, 0) if client is None else (len(client.messages), client.size)
        if count >= limits.requests:
            return ((incoming, "requests", 1, 0),)
        if held + size > limits.bytes:
            return ((incoming, "bytes", size, limits.bytes - held),)
        refused: Sequence[Rejected] = ()
        if self.requests >= limits.total_requests or self.bytes + size > limits.total_bytes:
            victims = self._choose_victims(count + 1, held + size, size)
            if victims is None:
                if self.requests >= limits.total_requests:
                    return ((incoming, "total_requests", 1, 0),)
                return ((incoming, "total_bytes", size, limits.total_bytes - self.bytes),)
            refused = [self._take_newest(*victim) for victim in victims]
        if client is None:
            client = self._turns[name] = _OfClient()
        client.messages.append((incoming, size))
        self._count(client, 1, size)
        return refused

    def take(self) -> Incoming:
        """Return the message whose turn it is. Raises KeyError where nothing waits."""
        turns = self._turns
        if next(iter(turns), None) == self.served and len(turns) > 1:
            turns.move_to_end(self.served)
        self.served, client = turns.popitem(last=False)
        incoming, size = client.messages.popleft()
        self._count(client, -1, -size)
        if client.messages:
            turns[incoming.client] = client
        return incoming

    def _count(self, client: _OfClient, requests: int, size: int) -> None:
        """Count what has come to wait, or (less than 0) waits no more."""
        client.size += size
        self.requests += requests
        self.bytes += size

    def _choose_victims(
        self, count: int, held: int, size: int
    ) -> list[tuple[_OfClient, str]] | None:
        """Return the clients that must give up their newest message, and for which limit.

        Those with more than the newcomer would have (`count`, `held`), the one with most first. A
        client's only message stays, as it might never be served otherwise, unless the newcomer has
        nothing waiting and needs no more than a fair share of the bytes: as the richest give first,
        it fits before a client within such a share must give. `size`: bytes that must fit. None
        where they do not fit even then, and no client gives up anything.
        """
        limits = self.limits
        victims: list[tuple[_OfClient, str]] = []
        to_free = self.bytes + size - limits.total_bytes
        is_modest = count == 1 and size <= limits.total_bytes // (len(self._turns) + 1)
        keeps = 0 if is_modest else 1
        # Most bytes first, then in the order of turns: what each has left, and what it gave up.
        richest = [
            (-client.size, turn, 0, client)
            for turn, client in enumerate(self._turns.values())
            if client.size > held and len(client.messages) > keeps
        ]
        heapify(richest)
        while to_free > 0:
            if not richest:
                return None
            negative, turn, given, client = heappop(richest)
            freed = client.messages[-1 - given][1]
            victims.append((client, "total_bytes"))
            to_free -= freed
            left, given = -negative - freed, given + 1
            if left > held and len(client.messages) - given > keeps:
                heappush(richest, (-left, turn, given, client))
        # A client that gave up bytes made room in number, too.
        if not victims and self.requests >= limits.total_requests:
            most = max(self._turns.values(), key=lambda client: len(client.messages), default=None)
            if most is None or len(most.messages) <= count:
                return None
            victims.append((most, "total_requests"))
        return victims

    def _take_newest(self, client: _OfClient, limit: str) -> Rejected:
        incoming, freed = client.messages.pop()
        self._count(client, -1, -freed)
        if not client.messages:
            del self._turns[incoming.client]
        return (incoming, limit, freed if limit == "total_bytes" else 1, 0)


SUCCESS = "OK"

# Requests whose method could not be read, or is none of ours.
UNKNOWN_METHOD = "unknown"

OUTCOMES = (SUCCESS, *(code.value for code in ErrorCode))

# Upper bounds of the histograms: 20 us to 100 s, three a decade.
BOUNDS_NS = (*(step * 10**exponent for exponent in range(4, 11) for step in (2, 5, 10)),)


@dataclass(slots=True)
class Histogram:
    """How many durations were up to each bound but not the one before, and the sum of all.

    `buckets` has one more than there are bounds: what is longer than all of them.
    """

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_NS) + 1))
    sum_ns: int = 0

    def add(self, ns: int) -> None:
        """Count one."""
        self.buckets[bisect_left(BOUNDS_NS, ns)] += 1
        self.sum_ns += ns


@dataclass(slots=True)
class MethodCounters:
    """Of one method: requests by outcome, and the durations of those that succeeded."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    compute: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)


class ServiceState:
    """Of one service, from its start. `clients_refused`: says how many were turned away so far.

    `methods`: what was counted of each, all of which are there from the beginning.
    """

    def __init__(
        self,
        limits: QueueLimits | None = None,
        *,
        device: str = "cpu",
        clients_refused: Callable[[], int] = lambda: 0,
    ) -> None:
        self.queue = FairQueue(limits or QueueLimits())
        self.methods = {name: MethodCounters() for name in (*REQUEST_TYPES, UNKNOWN_METHOD)}
        self.received_bytes = self.sent_bytes = 0
        # Replies that were not delivered: the client has gone, does not read, or may not any more.
        self.dropped_replies = 0
        self.device = device
        self.clients_refused = clients_refused
        self.status: Literal["loading", "ready", "draining"] = "loading"
        # Says what there is of them; none without whole layers.
        self.sessions: Callable[[], SessionTotals] = SessionTotals
        # Given to an accelerator and not done.
        self.underway = 0
        # By a clock that does not go back.
        self.started = time.monotonic()

    def health(self) -> HealthReply:
        """Return the reply to Health."""
        return HealthReply(
            status="draining" if self.status == "draining" else "ready",
            uptime_s=time.monotonic() - self.started,
            queued_requests=self.queue.requests,
            queued_bytes=self.queue.bytes,
        )


# Hardware takes its time for evidence, and everything waits for it: a third of the time at most.
_PAUSES = 2
Attest: TypeAlias = Callable[[bytes, str], bytes]


@dataclass(frozen=True)
class Served:
    """What answers the requests of a service, with weights, or with what is there instead.

    `model`: what it says that it holds; `prepare`: of what computes. `segments`: makes what runs
    Segments on sessions, where there are whole layers; None: there are none. `device`: where
    sessions take their memory; None: nowhere.
    """

    model: ServedModel
    prepare: Prepare
    segments: Callable[[SessionStore], PrepareSegment] | None = None
    device: torch.device | None = None


def served_zeros(model: ServedModel, kernels: NullKernels) -> Served:
    """Return a null device in the place of weights. `model`: what it says that it holds."""
    return Served(model, kernels.prepare, partial(null_segments, model.config, kernels))


class RequestHandler:
    """Answers requests from weights, or from what is there instead of them.

    Stateless between requests, but for the sessions of Segments, of which `sessions` says how many
    are kept. `state`: of the service, for Init and Health; the loop keeps it.
    `spin_us`: how long to ask a GPU without a pause whether it is done. `attest`: returns what the
    service states of itself, with evidence, for a nonce and the digest of what it serves; None: it
    gives no evidence. Call it under `torch.inference_mode`, which costs more than some requests do.
    """

    def __init__(
        self,
        weights: ServiceWeights | Served,
        max_message_bytes: int,
        state: ServiceState | None = None,
        spin_us: float = 0.0,
        attest: Attest | None = None,
        sessions: SessionSettings | None = None,
    ) -> None:
        # Weights that this process holds alone, unless it is said what serves them.
        served = (
            weights
            if isinstance(weights, Served)
            else Served(
                weights,
                device_kernels(weights, spin_us).prepare,
                partial(torch_segments, weights, spin_us=spin_us),
                weights.device,
            )
        )
        self._model, self._prepare = served.model, served.prepare
        self.max_message_bytes = max_message_bytes
        self._checker = RequestChecker(self._model, max_message_bytes)
        self.state = state or ServiceState()
        # The same for every client, but for what it is told about one nonce.
        model, config, limits = self._model, self._model.config, self.state.queue.limits
        inv_freq, attention_scaling = rope_frequencies(config, config.ropes[0])
        self._init_reply = InitReply(
            config=InitConfig(
                num_layers=config.num_hidden_layers,
                hidden_size=config.hidden_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
            rotary_emb_params=RotaryParams(
                inv_freq=from_torch(inv_freq), attention_scaling=attention_scaling
            ),
            norm_weights={
                name: NormWeight(weight=from_torch(norm), eps=config.norm_eps)
                for name, norm in model.norms.items()
            },
            model_digest=model.model_digest,
            linear_digest=model.linear_digest,
            max_message_bytes=max_message_bytes,
            arithmetic=model.arithmetic,
            provision_id=None if model.provision is None else model.provision.provision_id,
            instance_id=secrets.token_hex(16),
            layers=(model.held_layers[0], model.held_layers[-1]),
            max_queued_requests=limits.requests,
            max_queued_bytes=limits.bytes,
            ranks=model.ranks,
        )
        self._attest, self._attest_from_s = attest, 0.0
        # Empty where there are no whole layers.
        self.sessions = SessionStore(sessions or SessionSettings(), free_bytes(served.device))
        self._segments = there(served.segments)(self.sessions) if self._model.has_segments else None

    def prepare(self, request: Request) -> Kernel:
        """Return what computes all requests that have this one's header.

        Raises ProtocolError where it does not fit; so does the kernel, for token ids.
        """
        if isinstance(request, InitRequest):
            return self._init
        if isinstance(request, HealthRequest):
            return lambda _request, _incoming: (self.state.health(), None)
        # Nothing is allocated for what the check refuses.
        task = self._checker.check(request)
        if isinstance(request, SegmentRequest):
            return there(self._segments)(request, task)
        if isinstance(request, SeededRingLinearRequest):
            of_elements = self._prepare(request.standing_for(), task)

            def drawn(request: Any, incoming: Incoming | None) -> Result:
                return of_elements(expanded(request), incoming)

            return drawn
        kernel = self._prepare(request, task)
        return self._checks_ids(kernel) if isinstance(request, EmbeddingRequest) else kernel

    def apply(self, request: Request) -> Result:
        """Compute one request. Raises ProtocolError."""
        return self.prepare(request)(request, None)

    def _checks_ids(self, kernel: Kernel) -> Kernel:
        def checked(request: Any, incoming: Incoming | None) -> Result:
            # What is checked must be what is used, and a client may change memory that it shares.
            ids = replace(request.input_ids, data=bytearray(request.input_ids.data))
            self._checker.check_ids(ids)
            return kernel(request.model_copy(update={"input_ids": ids}), incoming)

        return checked

    def _init(self, request: Any, _incoming: Incoming | None) -> Result:
        if not request.nonce or self._attest is None:
            return self._init_reply, None
        began_s = time.monotonic()
        ProtocolError.unless(
            began_s >= self._attest_from_s,
            "evidence",
            "one soon after another",
            "a pause, in which others are answered",
            code=ErrorCode.QUEUE_FULL,
        )
        try:
            statement = self._attest(request.nonce, self._model.model_digest)
        except EvidenceError as error:
            raise ProtocolError(
                error.where,
                got=error.got,
                expected=error.expected,
                code=ErrorCode.UNAVAILABLE,
            ) from None
        finally:
            ended_s = time.monotonic()
            self._attest_from_s = ended_s + _PAUSES * (ended_s - began_s)
        return self._init_reply.model_copy(update={"statement": statement}), None
