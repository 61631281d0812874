"""A channel over services that stand in for each other: what one fails at, another is asked.

A request is kept until its reply is there. Decoding is stateless on the GPU side, so all that a
lost service costs is to send it again: the same masked tensors, so nothing more is shown than
before, and no pad is drawn twice. Whoever is asked has passed the handshake on the very connection
that the request goes out on, and has the share that the request is a part of.

Waiting goes by `time.monotonic` and ends with the request's own deadline, whoever was asked when.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from protocol.channel import Exchange, Traffic
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
)
from protocol.messages import Request
from protocol.pending import OversizedRequestError
from tee_side.services.member import Line, Member
from tee_side.services.together import together

log = logging.getLogger("tee_side")

# How long one lost service is tried before the next one is, where several are.
TURN_S = 0.05
# Before a service that had no room for a request is asked again, doubled each time.
_BACK_OFF_S = 0.01
_MAX_BACK_OFF_S = 0.2

# A request that has lost so many connections to a service is not sent to it again: it may be what
# ends them.
_MOST_LOSSES = 5

# What a service says that may be over in a moment; it is asked again.
_PASSING = (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_EXCEEDED)


@dataclass(slots=True)
class _Troubles:
    """What went wrong with a request. `said`: the last error of each service that was asked.

    `refused`: will not do it. `busy`: when it may be asked again, and how long that was last time.
    `losses`: connections that were lost while this was waited for.
    """

    said: dict[Member, TsqpError] = field(default_factory=dict)
    refused: set[Member] = field(default_factory=set)
    busy: dict[Member, tuple[float, float]] = field(default_factory=dict)
    losses: Counter[Member] = field(default_factory=Counter)

    def lost(self, member: Member, error: TsqpError) -> None:
        """Note that a connection was lost with this under way."""
        self.said[member] = error
        self.losses[member] += 1
        if self.losses[member] >= _MOST_LOSSES:
            self.refused.add(member)


@dataclass(slots=True, eq=False)
class _Flight:
    """A request that has no reply yet. `line`, `inner_id`: where it is waited for; None: nowhere.

    `noted`: None as long as all is well, which costs nothing.
    """

    request: Request
    deadline: float
    timeout_s: float
    line: Line | None = None
    inner_id: int = 0
    member: Member | None = None
    noted: _Troubles | None = None

    @property
    def troubles(self) -> _Troubles:
        """What went wrong so far."""
        if self.noted is None:
            self.noted = _Troubles()
        return self.noted


class Replicas:
    """A `Channel` to whichever of some services is well. All requests go to one of them at a time.

    `on_quarantined`: told at which endpoint nobody is to be asked any more. Raises, beside what a
    channel does: for a single service its own last error; for several one error that
    says, endpoint by endpoint, what each answered. DeadlineExceededError where the time was up.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        timeout_s: float,
        traffic: Traffic,
        on_quarantined: Callable[[str, TsqpError], None] = lambda _endpoint, _error: None,
    ) -> None:
        self.members = tuple(members)
        self.traffic = traffic
        self.endpoint = members[0].endpoint
        self._timeout_s = timeout_s
        self._on_quarantined = on_quarantined
        self._current = members[0]
        self._last_id = 0
        # In the order in which they were submitted.
        self._flights: dict[int, _Flight] = {}
        # Of services that take nothing new, and may still answer what they have.
        self._leaving: list[Line] = []
        self._max_message_bytes: int | None = None

    # ---------------------------------------------------------------------------- as a channel

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`. Never waits for a service: that is for `wait` to do."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        flight = _Flight(request, time.monotonic() + timeout_s, timeout_s)
        if not self._send(flight, self._current, timeout_s):
            self._send_to_anybody(flight)
            if flight.line is None:
                self._require_anybody(flight)
        self._last_id = request_id = self._last_id + 1
        self._flights[request_id] = flight
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        flight = self._flights[request_id]
        try:
            while True:
                line = flight.line
                try:
                    if line is not None:
                        return line.channel.wait(flight.inner_id)
                except TsqpError as error:
                    self._troubled(flight, line, error)
                self._place(flight)
        finally:
            del self._flights[request_id]
            if self._leaving:
                self._close_left()

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """See `Channel.call`."""
        return self.wait(self.submit(request, timeout_s))

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        flight = self._flights.pop(request_id, None)
        if flight is not None and flight.line is not None:
            flight.line.channel.abandon(flight.inner_id)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`. Nobody at its endpoint is asked again in this run."""
        self.quarantine_endpoint(exchange.endpoint, error)
        if all(member.quarantined is not None for member in self.members):
            raise error

    def limit_messages(self, max_message_bytes: int) -> None:
        """See `Channel.limit_messages`. What one of the services says of itself limits it alone."""
        known = self._max_message_bytes
        self._max_message_bytes = min(max_message_bytes, known or max_message_bytes)
        for member in self.members:
            self._limit(member, self._max_message_bytes)

    def _limit(self, member: Member, max_message_bytes: int | None) -> None:
        if member.line is not None and max_message_bytes is not None:
            member.line.channel.limit_messages(max_message_bytes)

    def close(self) -> None:
        """See `Channel.close`."""
        for line in self._leaving:
            line.raw.close()
        self._leaving.clear()
        self._flights.clear()
        for member in self.members:
            member.close()

    # ------------------------------------------------------------------------------- for others

    @property
    def is_ready(self) -> bool:
        """Whether somebody can be asked now."""
        return any(member.line is not None for member in self.members)

    def knock(self, member: Member, until: float) -> bool:
        """Let a service try to become ready until then; True if it is."""
        quarantined = member.quarantined
        if not member.knock(until):
            if member.quarantined is not None and quarantined is None:
                self._say(member, "service_quarantined", member.quarantined)
                self._on_quarantined(member.endpoint, member.quarantined)
            return False
        self._limit(member, member.max_message_bytes)
        self._limit(member, self._max_message_bytes)
        return True

    def quarantine_endpoint(self, endpoint: str, error: TsqpError) -> None:
        """Ask nobody there any more. Raises `error` if nobody else is left."""
        for member in self.members:
            if member.endpoint == endpoint and member.quarantined is None:
                self._quarantine(member, error)
        if all(member.quarantined is not None for member in self.members):
            raise error

    # ---------------------------------------------------------------------------------- sending

    def _send(self, flight: _Flight, member: Member, timeout_s: float) -> bool:
        """Send a request to a service; False if it could not be done."""
        line = member.line
        if line is None:
            return False
        try:
            flight.inner_id = line.channel.submit(flight.request, timeout_s)
        except OversizedRequestError as error:
            # Another may take more.
            flight.troubles.said[member] = error
            flight.troubles.refused.add(member)
            return False
        except TsqpError as error:
            flight.member = member
            self._troubled(flight, line, error)
            return False
        except BaseException:
            # How much of it was sent is not known, and what comes next would be taken for the rest.
            self._drop(member, line, _half_sent(member))
            raise
        flight.member, flight.line = member, line
        return True

    def _send_to_anybody(self, flight: _Flight) -> None:
        """Send to the first service that is ready, and has room as far as we know."""
        now = time.monotonic()
        left_s = flight.deadline - now
        if left_s <= 0:
            return
        troubles = flight.troubles
        for member in self._in_order():
            free_at, _ = troubles.busy.get(member, (0.0, 0.0))
            ready = member.line is not None and member not in troubles.refused and free_at <= now
            if ready and self._send(flight, member, left_s):
                # Whoever would not do this one would keep the next ones waiting, too.
                self._current, self.endpoint = member, member.endpoint
                return

    def _in_order(self) -> Iterator[Member]:
        yield self._current
        for member in self.members:
            if member is not self._current:
                yield member

    def _send_all(self) -> None:
        """Send what waits to be sent, in the order of submission: the service may need it so."""
        for flight in list(self._flights.values()):
            if flight.line is None:
                self._send_to_anybody(flight)

    # -------------------------------------------------------------------------------- troubles

    def _troubled(self, flight: _Flight, line: Line | None, error: TsqpError) -> None:
        """Note what a service answered instead of a result. Raises what asking others cannot help.

        What is wrong with a reply is never believed to be wrong with the request.
        """
        member, flight.line = flight.member, None
        if member is None or line is None:
            raise error
        troubles = flight.troubles
        troubles.said[member] = error
        if isinstance(error, ServiceError):
            if error.code is ErrorCode.SHUTTING_DOWN:
                self._let_go(member, line, error)
            elif error.code in _PASSING:
                if error.code is ErrorCode.QUEUE_FULL:
                    troubles.said[member] = ServiceError(
                        error.where, code=error.code, known=member.room
                    )
                _, before_s = troubles.busy.get(member, (0.0, 0.0))
                pause_s = min(_MAX_BACK_OFF_S, 2 * before_s or _BACK_OFF_S)
                troubles.busy[member] = time.monotonic() + pause_s, pause_s
            else:
                troubles.refused.add(member)
        elif isinstance(error, EndpointError | DeadlineExceededError):
            troubles.lost(member, error)
            self._drop(member, line, error)
        elif isinstance(error, ProtocolError | ReplyError):
            self._quarantine(member, error, line)
        else:
            raise error

    def _let_go(self, member: Member, line: Line, error: TsqpError) -> None:
        """Ask a service nothing new that is about to end; what it has, it may still answer."""
        if member.line is line:
            member.lose(error)
            self._leaving.append(line)
            self._say(member, "service_leaving", error)

    def _drop(self, member: Member, line: Line, error: TsqpError) -> None:
        """Close a connection; what had arrived over it is kept, the rest has to be sent again."""
        for flight in self._flights.values():
            if flight.line is line and not _has_reply(line, flight.inner_id):
                flight.line = None
                flight.troubles.lost(member, error)
        self._hang_up(line)
        if member.line is line:
            member.lose(error)
            self._say(member, "service_lost", error)

    def _quarantine(self, member: Member, error: TsqpError, line: Line | None = None) -> None:
        """Ask a service no more in this run. What it has answered already is not looked at."""
        lines = {one for one in (line, member.line) if one is not None}
        for flight in self._flights.values():
            if flight.line in lines:
                flight.line = None
                flight.troubles.said[member] = error
        for one in lines:
            self._hang_up(one)
        member.quarantine(error)
        self._say(member, "service_quarantined", error)
        self._on_quarantined(member.endpoint, error)

    def _hang_up(self, line: Line) -> None:
        if line in self._leaving:
            self._leaving.remove(line)
        line.raw.close()

    def _close_left(self) -> None:
        """Close connections of services that are gone and owe us nothing any more."""
        awaited = {flight.line for flight in self._flights.values()}
        for line in [line for line in self._leaving if line not in awaited]:
            self._hang_up(line)

    def _say(self, member: Member, event: str, error: TsqpError) -> None:
        fields = {"endpoint": member.endpoint, "detail": str(error)}
        log.warning(event, extra={"fields": fields})

    # -------------------------------------------------------------------------------- recovery

    def _place(self, flight: _Flight) -> None:
        """Get a request that nobody has to somebody. Waits for a service that comes back."""
        while True:
            self._send_all()
            if flight.line is not None:
                return
            self._require_anybody(flight)
            now = time.monotonic()
            if now >= flight.deadline:
                self._fail(flight, too_late=True)
            self._wait_for_anybody(flight, now)

    def _wait_for_anybody(self, flight: _Flight, now: float) -> None:
        """Wait until a service has come back or may have room again, or for a moment."""
        troubles = flight.troubles
        left = [m for m in self.members if m.quarantined is None and m not in troubles.refused]
        lost = [member for member in left if member.line is None]
        # Those that are ready have said that they have no room.
        until = min(
            (troubles.busy.get(member, (now, 0))[0] for member in left if member.line is not None),
            default=flight.deadline,
        )
        until = min(until, flight.deadline)
        for member in lost:
            turn = until if len(lost) == 1 else min(until, time.monotonic() + TURN_S)
            if self.knock(member, turn):
                log.warning("service_ready", extra={"fields": {"endpoint": member.endpoint}})
                return
        if not lost:
            time.sleep(max(0.0, until - now))

    def _require_anybody(self, flight: _Flight) -> None:
        """Raise if nobody is left whom a request could be sent to, now or later."""
        for member in self.members:
            if member.quarantined is None and member not in flight.troubles.refused:
                return
        self._fail(flight, too_late=False)

    def _fail(self, flight: _Flight, *, too_late: bool) -> NoReturn:
        said: dict[str, TsqpError] = {}
        for member in self.members:
            error = member.quarantined or flight.troubles.said.get(member) or member.error
            if error is not None:
                said[member.endpoint] = error
        raise together(flight.request.method, said, flight.timeout_s if too_late else None)


def _half_sent(member: Member) -> EndpointError:
    return EndpointError(
        member.endpoint, got="a request that was interrupted half way", expected="all of it"
    )


def _has_reply(line: Line, request_id: int) -> bool:
    try:
        return line.raw.arrived(request_id)
    except TsqpError:
        return False
