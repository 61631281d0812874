"""Runs steps in a thread of its own, for an event loop that serves many requests.

Requests come and are cancelled between two steps. Of those that wait, the next is one of the owner
who was served least. What a step gave to all samples of a request is one `Delivery`; those of a
step are handed to the event loop in one call, whatever the number of requests. Pads are made in the
background, as the load allows.
"""

import logging
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, Literal, TypeAlias, TypeVar

from protocol.errors import (
    ActivationRangeError,
    EngineError,
    LimitError,
    MaskError,
    ReplyError,
    TsqpError,
)
from tee_side.engine.engine import Counts, Engine
from tee_side.engine.generation import Totals
from tee_side.engine.request import NewToken, PromptRead, Request, SamplingSettings
from tee_side.engine.step import Sampled, Sequence, fail_step
from tee_side.protect.pads.background_maker import Load, TellLoad

log = logging.getLogger("tee_side")

R = TypeVar("R")
State: TypeAlias = Literal["starting", "ready", "failed"]

# Errors that a row of one sequence may be the cause of: the others are run again without it.
_OF_ONE = (ActivationRangeError, MaskError, ReplyError)
# Between two attempts to make a token, while none can be made.
_PROBE_S = 2.0


class QueueFullError(LimitError):
    """Too many requests wait."""


class WaitingQueue(Generic[R]):
    """First come, first served for each owner; between owners by what they were served so far.

    Served is counted in tokens, as the Virtual Token Counter does (arXiv 2401.00588): an owner that
    comes back after a while starts where the least served of the waiting ones is, or where the one
    is that left last, as nothing is saved up by staying away. `served`: tokens by owner, which who
    computes them counts.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._queues: dict[str, deque[R]] = {}
        self.served = Counter[str]()
        self._last: str | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, owner: str, request: R) -> R | None:
        """Put a request behind the others of its owner.

        Where all places are taken, the newest request of the owner that has most of them gives its
        place up, if that owner has more than this one will have, and is returned. Raises
        QueueFullError else.
        """
        displaced = None
        if len(self) >= self.limit:
            most = max(self._queues, key=lambda other: len(self._queues[other]))
            if len(self._queues[most]) <= len(self._queues.get(owner, ())) + 1:
                raise self.full()
            displaced = self._queues[most].pop()
        if owner not in self._queues:
            others = self._queues or ([] if self._last is None else [self._last])
            least = min((self.served[other] for other in others), default=0)
            self.served[owner] = max(self.served[owner], least)
        self._queues.setdefault(owner, deque()).append(request)
        return displaced

    def full(self) -> QueueFullError:
        """Return the error of a request that finds no place."""
        return QueueFullError("waiting requests (--max-waiting)", f"{len(self)}", f"< {self.limit}")

    def first(self) -> R | None:
        """Return whose turn it is, or None."""
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=self.served.__getitem__)][0]

    def remove(self, owner: str, request: R) -> None:
        """Take a request out, if it is still here."""
        queue = self._queues.get(owner, ())
        if request in queue:
            self._queues[owner].remove(request)
            if not queue:
                del self._queues[owner]
                self._last = owner


@dataclass(kw_only=True)
class EngineStats(Totals, Counts):
    """How the engine stands, and what it and the run have done since their start.

    `kv_usage`: 0 to 1.
    """

    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one step gave to one request, in the order of its samples' tokens.

    `prompt`: once, with the first delivery. `ended`: the request is over, well or by `error`.
    """

    tokens: tuple[NewToken, ...] = ()
    prompt: PromptRead | None = None
    error: TsqpError | None = None
    ended: bool = False


Deliver: TypeAlias = Callable[[Delivery], None]


@dataclass(eq=False)
class Ticket:
    """A request under way; `deliver` is called on the event loop."""

    request: Request
    deliver: Deliver
    sequences: list[Sequence] = field(default_factory=list)
    read: bool = False
    cancelled: bool = False


class BackgroundEngine:
    """Runs an engine's steps in a thread, from `start` to `close`.

    `filling`: a context in which pads are made, and which is told how busy this is. `totals`: of
    the rest of the run. `call`: runs a function on the event loop, from any thread. `state`: ready
    while a token could be made; failed after an error that was no single request's, until a token
    could be made again. `tell`: told of each change of it, on the event loop. `waits`: whether a
    step waits for a service that was lost.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        call: Callable[[Callable[[], None]], object],
        filling: Callable[[], AbstractContextManager[TellLoad]] = lambda: nullcontext(_unheard),
        totals: Callable[[], Totals] = Totals,
        waits: Callable[[], bool] = bool,
        tell: Callable[[State], None] = lambda _state: None,
    ) -> None:
        self.state: State = "starting"
        self._tell, self._waits = tell, waits
        self._engine, self._call, self._totals = engine, call, totals
        self._waiting = WaitingQueue[Request](engine.settings.max_waiting)
        self._filling = filling
        # Sequences that cannot go on, and why: their requests end with the step.
        self._refused: list[tuple[Sequence, TsqpError]] = []
        # Guards the queue and the tickets; the engine's own state is its thread's.
        self._changed = threading.Condition()
        self._tickets: dict[Request, Ticket] = {}
        self._cancelled: list[Ticket] = []
        self._out: list[tuple[Ticket, Delivery]] = []
        self._closing = self._died = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; `state` becomes ready once a first token was made."""
        self._thread.start()

    def close(self) -> None:
        """End after the step under way; what has not ended ends with an error."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._fail_all(EngineError("engine", "one that was closed", "one that runs"))

    def check(self, request: Request) -> None:
        """Raise PromptError or LimitError for what could never run."""
        self._engine.check(request)

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Put a request in the queue that `check` let pass; where it is full: `WaitingQueue.add`.

        Raises LimitError (a retry helps) where too many wait, and EngineError.
        """
        ticket = Ticket(request, deliver)
        with self._changed:
            if self._died or self._closing:
                raise EngineError("engine", "one that has ended", "one that runs")
            displaced = self._waiting.add(request.owner, request)
            self._tickets[request] = ticket
            self._changed.notify()
            other = None if displaced is None else self._tickets.pop(displaced)
        if other is not None:
            refusal = Delivery(error=self._waiting.full(), ended=True)
            self._call(lambda: other.deliver(refusal))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, if it has not ended, and give its place back; deliver nothing more."""
        ticket.cancelled = True
        with self._changed:
            if self._tickets.pop(ticket.request, None) is None:
                return
            self._waiting.remove(ticket.request.owner, ticket.request)
            self._cancelled.append(ticket)
            self._changed.notify()

    @property
    def can_step(self) -> bool:
        """Whether a token could be made now: it is ready, and no step waits for a service."""
        return self.state == "ready" and not self._waits()

    def stats(self) -> EngineStats:
        """Return how the engine stands."""
        engine = self._engine
        return EngineStats(
            **asdict(self._totals()),
            **asdict(engine.counts),
            running=len(engine.running),
            waiting=len(self._waiting),
            kv_usage=engine.kv_bytes / max(1, engine.max_kv_bytes),
        )

    def _run(self) -> None:
        try:
            with self._filling() as self._tell_load:
                while not self._closing:
                    self._turn()
        except BaseException as error:  # noqa: BLE001 - a mistake of ours: its text may quote a prompt
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            log.error("engine_died", extra={"fields": {"error": type(error).__name__, "at": place}})
            with self._changed:
                self._died = True
            self._become("failed")
            self._fail_all(EngineError("engine", "an internal error", "none"))

    def _turn(self) -> None:
        """Wait for work, take requests in, and run a step."""
        if self.state != "ready" and not self._probe():
            self._tell_load("idle")
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _PROBE_S)
            return
        if not self._has_work():
            self._tell_load("idle")
            with self._changed:
                self._changed.wait_for(self._has_work)
        self._admit()
        self._tell_load("steps")
        try:
            self._take(self._engine.step())
        except TsqpError as error:
            self._step_failed(error)
        self._end_refused()
        self._hand_out()

    def _has_work(self) -> bool:
        return bool(self._closing or self._cancelled or self._engine.running or self._waiting)

    def _probe(self) -> bool:
        """Say whether a token can be made, or a vector: by making one, which belongs to nobody."""
        request = Request(prompt_ids=(0,), max_new_tokens=2, sampling=SamplingSettings(seed=0))
        if not self._engine.generates:
            request = replace(request, max_new_tokens=0, pooling="last")
        with self._changed:
            self._drop_cancelled()
        self._engine.refuse = fail_step
        try:
            for _ in self._engine.run(self._engine.admit(request)):
                pass
        except TsqpError as error:
            log.warning("no_token", extra={"fields": {"detail": str(error)}})
            if self.state == "ready":
                self._become("failed")
            self._fail_all(error)
            return False
        finally:
            self._engine.refuse = self._refuse
        self._become("ready")
        return True

    def _become(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self._call(lambda: self._tell(state))

    def _admit(self) -> None:
        """Admit requests that wait, in the order of their turns, while there is room for them."""
        engine = self._engine
        with self._changed:
            self._drop_cancelled()
            while (request := self._waiting.first()) is not None:
                running, ticket = len(engine.running), self._tickets[request]
                if running and running + request.samples > engine.max_sequences:
                    break
                try:
                    ticket.sequences = engine.admit(request)
                except TsqpError as error:
                    if running and isinstance(error, LimitError):
                        break
                    self._end(ticket, error)
                else:
                    self._waiting.remove(request.owner, request)
                    self._waiting.served[request.owner] += len(request.prompt_ids)

    def _drop_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for ticket in cancelled:
            for sequence in ticket.sequences:
                self._engine.remove(sequence)

    def _take(self, sampled: Iterable[Sampled]) -> None:
        """Note what a step gave, for each request."""
        tokens: dict[Request, list[NewToken]] = defaultdict(list)
        for one in sampled:
            # Without the logits: a client that reads slowly would keep those of whole steps.
            new = NewToken(one.sample, one.token_id, one.logprob, one.finish_reason)
            tokens[one.sequence.request].append(new)
        with self._changed:
            for request, found in tokens.items():
                self._waiting.served[request.owner] += len(found)
            for ticket in list(self._tickets.values()):
                if not ticket.sequences:
                    continue
                ended = all(s.finish_reason is not None for s in ticket.sequences)
                made = tuple(tokens.get(ticket.request, ()))
                if made or ended:
                    delivery = Delivery(made, self._prompt_read(ticket), ended=ended)
                    self._out.append((ticket, delivery))
                if ended:
                    del self._tickets[ticket.request]

    def _prompt_read(self, ticket: Ticket) -> PromptRead | None:
        if ticket.read:
            return None
        ticket.read = True
        reader, reused = ticket.sequences[0].reader, ticket.sequences[0].reused_tokens
        return PromptRead(reused_tokens=reused) if reader is None else reader.result()

    def _step_failed(self, error: TsqpError) -> None:
        """Find the sequence that a step failed for, or end all of them.

        Where it fails for each, a token that belongs to nobody shows whether any can be made: a
        service that is asked no more gives the same error to all.
        """
        # The others wait for the first sample of their request.
        running = [sequence for sequence in self._engine.running if not sequence.follows]
        if not isinstance(error, _OF_ONE):
            log.warning("step_failed", extra={"fields": {"detail": str(error)}})
            self._become("failed")
            self._fail_all(error)
            return
        refused = 0
        for sequence in running:
            try:
                self._take(self._engine.step([sequence]))
            except _OF_ONE as its:
                self._refuse(sequence, its)
                refused += 1
            except TsqpError as its:
                self._step_failed(its)
                return
        if refused == len(running):
            self._end_refused()
            self._probe()

    def _refuse(self, sequence: Sequence, error: TsqpError) -> None:
        """Note what cannot go on: other samples of its request may be in the step under way."""
        self._refused.append((sequence, error))

    def _end_refused(self) -> None:
        refused, self._refused = self._refused, []
        with self._changed:
            for sequence, error in refused:
                if (ticket := self._tickets.get(sequence.request)) is not None:
                    self._end(ticket, error)

    def _fail_all(self, error: TsqpError) -> None:
        with self._changed:
            for ticket in list(self._tickets.values()):
                self._end(ticket, error)
        self._hand_out()

    def _end(self, ticket: Ticket, error: TsqpError) -> None:
        request = ticket.request
        del self._tickets[request]
        self._waiting.remove(request.owner, request)
        for sequence in ticket.sequences:
            self._engine.remove(sequence)
        self._out.append((ticket, Delivery(error=error, ended=True)))

    def _hand_out(self) -> None:
        out, self._out = self._out, []
        if not out:
            return

        def deliver() -> None:
            for ticket, delivery in out:
                if not ticket.cancelled:
                    ticket.deliver(delivery)

        self._call(deliver)


def _unheard(_load: Load) -> None:
    """Take note of nothing: there are no pads."""
