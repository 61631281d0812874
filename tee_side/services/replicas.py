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
from collections.abc import Iterator, Sequence
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
from tee_side.services.aggregate import aggregate_errors
from tee_side.services.member import Member, Session

log = logging.getLogger("tee_side")

# How long one lost service is tried before the next one is, where several are.
TURN_S = 0.05
# Before a service that had no room for a request is asked again, doubled each time.
_BACK_OFF_S = 0.01
_MAX_BACK_OFF_S = 0.2

# A request that has lost so many connections to a service is not sent to it again: it may be what
# ends them. Told to go away counts: a service that is about to end refuses Init, so who passes that
# and says so time after time is no such service.
_MOST_LOSSES = 5

# What a service says that may be over in a moment; it is asked again.
_PASSING = (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_EXCEEDED)


@dataclass(slots=True)
class _Failures:
    """What went wrong with a request. `last`: the last error of each service that was asked.

    `refused`: will not do it. `busy`: when it may be asked again, and how long that was last time.
    `losses`: connections that were lost while this was waited for, or over which it was refused by
    a service that was about to end.
    """

    last: dict[Member, TsqpError] = field(default_factory=dict)
    refused: set[Member] = field(default_factory=set)
    busy: dict[Member, tuple[float, float]] = field(default_factory=dict)
    losses: Counter[Member] = field(default_factory=Counter)

    def lost(self, member: Member, error: TsqpError) -> None:
        """Note that a connection was of no more use to this."""
        self.last[member] = error
        self.losses[member] += 1
        if self.losses[member] >= _MOST_LOSSES:
            self.refused.add(member)


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request that has no reply yet. `session`, `inner_id`: where it is waited for, if anywhere.

    `noted`: None as long as all is well, which costs nothing.
    """

    request: Request
    deadline: float
    timeout_s: float
    session: Session | None = None
    inner_id: int = 0
    noted: _Failures | None = None

    @property
    def failures(self) -> _Failures:
        """What went wrong so far."""
        if self.noted is None:
            self.noted = _Failures()
        return self.noted


class Replicas:
    """A `Channel` to whichever of some services is well. All requests go to one of them at a time.

    Raises, beside what a channel does: for a single service its own last error; for several one
    error that says, endpoint by endpoint, what each answered. DeadlineExceededError where the time
    was up. Of each service at most two connections are open at any time, whatever it answers.
    """

    def __init__(self, members: Sequence[Member], *, timeout_s: float, traffic: Traffic) -> None:
        self.members = tuple(members)
        self.traffic = traffic
        self.endpoint = members[0].endpoint
        self._timeout_s = timeout_s
        self._current = members[0]
        self._last_id = 0
        # In the order in which they were submitted.
        self._in_flight: dict[int, _InFlight] = {}
        # Of services that take nothing new, and may still answer what they have: one of each.
        self._draining: dict[Member, Session] = {}

    # ---------------------------------------------------------------------------- as a channel

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`. Never waits for a service: that is for `wait` to do."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        in_flight = _InFlight(request, time.monotonic() + timeout_s, timeout_s)
        if not self._send(in_flight, self._current, timeout_s):
            self._send_to_anybody(in_flight)
            if in_flight.session is None:
                self._require_anybody(in_flight)
        self._last_id = request_id = self._last_id + 1
        self._in_flight[request_id] = in_flight
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        in_flight = self._in_flight[request_id]
        try:
            while True:
                session = in_flight.session
                if session is not None:
                    try:
                        return session.channel.wait(in_flight.inner_id)
                    except TsqpError as error:
                        self._note_failure(in_flight, session, error)
                self._resend(in_flight)
        finally:
            del self._in_flight[request_id]
            if self._draining:
                self._close_drained()

    def call(self, request: Request, timeout_s: float | None = None) -> Exchange:
        """See `Channel.call`."""
        return self.wait(self.submit(request, timeout_s))

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        in_flight = self._in_flight.pop(request_id, None)
        if in_flight is not None and in_flight.session is not None:
            in_flight.session.channel.abandon(in_flight.inner_id)
            self._close_drained()

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`. Nobody at its endpoint is asked again in this run.

        By the endpoint, which is ours to say, and not by the instance id that whoever is there has
        given itself: it might have given another's.
        """
        for member in self.members:
            if member.endpoint == exchange.endpoint and member.quarantined is None:
                self._quarantine(member, error)
        if all(member.quarantined is not None for member in self.members):
            raise error

    def close(self) -> None:
        """See `Channel.close`."""
        for session in self._draining.values():
            session.connection.close()
        self._draining.clear()
        self._in_flight.clear()
        for member in self.members:
            member.close()

    # ------------------------------------------------------------------------------- for others

    @property
    def is_ready(self) -> bool:
        """Whether somebody can be asked now."""
        return any(member.session is not None for member in self.members)

    def try_connect(self, member: Member, until: float) -> bool:
        """Let a service try to become ready until then; True if it is."""
        quarantined = member.quarantined
        if not member.try_connect(until):
            if member.quarantined is not None and quarantined is None:
                # Nor may it still answer what it was asked over an earlier connection.
                self._quarantine(member, member.quarantined)
            return False
        return True

    # ---------------------------------------------------------------------------------- sending

    def _send(self, in_flight: _InFlight, member: Member, timeout_s: float) -> bool:
        """Send a request to a service; False if it could not be done."""
        session = member.session
        if session is None:
            return False
        try:
            in_flight.inner_id = session.channel.submit(in_flight.request, timeout_s)
        except OversizedRequestError as error:
            # Another may take more.
            in_flight.failures.last[member] = error
            in_flight.failures.refused.add(member)
            return False
        except TsqpError as error:
            self._note_failure(in_flight, session, error)
            return False
        except BaseException:
            # How much of it was sent is not known, and what comes next would be taken for the rest.
            self._drop(session, _half_sent(member))
            raise
        in_flight.session = session
        return True

    def _send_to_anybody(self, in_flight: _InFlight) -> None:
        """Send to the first service that is ready, and has room as far as we know."""
        now = time.monotonic()
        left_s = in_flight.deadline - now
        if left_s <= 0:
            return
        failures = in_flight.failures
        # Whoever could not do it in time is asked again only where nobody else can be asked.
        for member in sorted(self._in_order(), key=failures.busy.__contains__):
            free_at, _ = failures.busy.get(member, (0.0, 0.0))
            ready = member.session is not None and free_at <= now
            if ready and member not in failures.refused and self._send(in_flight, member, left_s):
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
        for in_flight in list(self._in_flight.values()):
            if in_flight.session is None:
                self._send_to_anybody(in_flight)

    # -------------------------------------------------------------------------------- failures

    def _note_failure(self, in_flight: _InFlight, session: Session, error: TsqpError) -> None:
        """Note what a service answered instead of a result. Raises what asking others cannot help.

        What is wrong with a reply is never believed to be wrong with the request.
        """
        in_flight.session = None
        member, failures = session.member, in_flight.failures
        failures.last[member] = error
        if isinstance(error, ServiceError):
            if error.code is ErrorCode.SHUTTING_DOWN:
                failures.lost(member, error)
                self._drain(session, error)
            elif error.code in _PASSING:
                if error.code is ErrorCode.QUEUE_FULL:
                    failures.last[member] = ServiceError(
                        error.where, code=error.code, known=member.queue_limits
                    )
                _, before_s = failures.busy.get(member, (0.0, 0.0))
                pause_s = min(_MAX_BACK_OFF_S, 2 * before_s or _BACK_OFF_S)
                failures.busy[member] = time.monotonic() + pause_s, pause_s
            else:
                failures.refused.add(member)
        elif isinstance(error, EndpointError | DeadlineExceededError):
            failures.lost(member, error)
            self._drop(session, error)
        elif isinstance(error, ProtocolError | ReplyError):
            self._quarantine(member, error)
        else:
            raise error

    def _drain(self, session: Session, error: TsqpError) -> None:
        """Ask a service nothing new that is about to end; what it has, it may still answer."""
        member = session.member
        if member.session is session:
            member.lose(error)
            if (earlier := self._draining.get(member)) is not None:
                # Who says this over every new connection must not have us hold them all.
                self._drop(earlier, error)
            self._draining[member] = session
            self._log(member, "service_draining", error)
        self._close_drained()

    def _drop(self, session: Session, error: TsqpError) -> None:
        """Close a connection; what had arrived over it is kept, the rest has to be sent again.

        What had arrived and breaks the rules ends the service for the rest of the run.
        """
        member = session.member
        broken: TsqpError | None = None
        for in_flight in self._in_flight.values():
            if in_flight.session is not session:
                continue
            try:
                if session.connection.arrived(in_flight.inner_id):
                    continue
            except (ProtocolError, ReplyError) as refused:
                broken = refused
            except TsqpError:
                pass  # lost, which is why this is done
            in_flight.session = None
            in_flight.failures.lost(member, error)
        self._hang_up(session)
        if broken is not None:
            self._quarantine(member, broken)
        elif member.session is session:
            member.lose(error)
            self._log(member, "service_lost", error)

    def _quarantine(self, member: Member, error: TsqpError) -> None:
        """Ask a service no more in this run. What it has answered is not looked at.

        Over whatever connection: one that is draining, or was lost with replies that had come.
        """
        for in_flight in self._in_flight.values():
            if in_flight.session is not None and in_flight.session.member is member:
                in_flight.session = None
                in_flight.failures.last[member] = error
        for session in (member.session, self._draining.get(member)):
            if session is not None:
                self._hang_up(session)
        member.quarantine(error)
        self._log(member, "service_quarantined", error)

    def _hang_up(self, session: Session) -> None:
        if self._draining.get(session.member) is session:
            del self._draining[session.member]
        session.connection.close()

    def _close_drained(self) -> None:
        """Close connections of services that are gone and owe us nothing any more."""
        awaited = {in_flight.session for in_flight in self._in_flight.values()}
        for session in [one for one in self._draining.values() if one not in awaited]:
            self._hang_up(session)

    def _log(self, member: Member, event: str, error: TsqpError) -> None:
        fields = {"endpoint": member.endpoint, "detail": str(error)}
        log.warning(event, extra={"fields": fields})

    # -------------------------------------------------------------------------------- recovery

    def _resend(self, in_flight: _InFlight) -> None:
        """Get a request that nobody has to somebody. Waits for a service that comes back."""
        while True:
            self._require_anybody(in_flight)
            # Before others are sent, which takes time that this has not.
            if time.monotonic() >= in_flight.deadline:
                self._fail(in_flight, too_late=True)
            self._send_all()
            if in_flight.session is not None:
                return
            self._wait_for_anybody(in_flight)

    def _wait_for_anybody(self, in_flight: _InFlight) -> None:
        """Wait until a service has come back or may have room again, or for a moment."""
        now = time.monotonic()
        failures = in_flight.failures
        left = [m for m in self.members if m.quarantined is None and m not in failures.refused]
        if not left:
            return
        lost = [member for member in left if member.session is None]
        # Those that are ready have said that they have no room.
        until = min(
            (failures.busy.get(m, (now, 0))[0] for m in left if m.session is not None),
            default=in_flight.deadline,
        )
        until = min(until, in_flight.deadline)
        for member in lost:
            turn = until if len(lost) == 1 else min(until, time.monotonic() + TURN_S)
            if self.try_connect(member, turn):
                log.warning("service_ready", extra={"fields": {"endpoint": member.endpoint}})
                return
        if not lost:
            time.sleep(max(0.0, until - now))

    def _require_anybody(self, in_flight: _InFlight) -> None:
        """Raise if nobody is left whom a request could be sent to, now or later."""
        for member in self.members:
            if member.quarantined is None and member not in in_flight.failures.refused:
                return
        self._fail(in_flight, too_late=False)

    def _fail(self, in_flight: _InFlight, *, too_late: bool) -> NoReturn:
        said: dict[str, TsqpError] = {}
        for member in self.members:
            error = member.quarantined or in_flight.failures.last.get(member) or member.error
            if error is not None:
                said[member.endpoint] = error
        timeout_s = in_flight.timeout_s if too_late else None
        raise aggregate_errors(in_flight.request.method, said, timeout_s)


def _half_sent(member: Member) -> EndpointError:
    return EndpointError(
        member.endpoint, got="a request that was interrupted half way", expected="all of it"
    )
