"""A channel over services that stand in for each other: what one fails at, another is asked.

A request is kept until its reply is there. Decoding is stateless on the GPU side, so all that a
lost service costs is to send it again: the same masked tensors, so nothing more is shown than
before, and no pad is drawn twice. The service asked has passed the handshake on the very connection
that the request goes out on, and has the share that the request is a part of.

Waiting goes by `time.monotonic` and ends with the request's own deadline, however many services
were asked.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from protocol.channel import Channel, OversizedRequestError
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ModelMismatchError,
    ProtocolError,
    ReplyError,
    ServiceError,
    TsqpError,
    VerificationError,
)
from protocol.messages import SegmentRequest
from protocol.prepared import Exchange, Payload, PreparedRequest, Traffic
from tee_side.remote.services.member import Member, Session

log = logging.getLogger("tee_side")

# How long one lost service is tried before the next one is, where several are.
TURN_S = 0.05
# A start that takes longer says what it waits for.
TELL_S = 1.0
# Before a service that had no room for a request is asked again, doubled each time.
_BACK_OFF_S = 0.01
_MAX_BACK_OFF_S = 0.2

# A request that has lost so many connections to a service is not sent to it again: it may be what
# ends them. A refusal because the service is about to end counts: such a service refuses Init, so
# one that passes Init and says so time after time is not about to end.
_MOST_LOSSES = 5

# Of errors of different kinds, the one that says most of what to do. A ProtocolError has a code.
_GRAVEST = (VerificationError, ModelMismatchError, ReplyError)


@dataclass(slots=True)
class _Trouble:
    """What went wrong with a request at one service. `error`: the last thing, None for nothing.

    `losses`: connections that were lost while the reply was waited for, or over which a service
    that was about to end refused. `refused`: it will not do it. `free_at`, `pause_s`: when it may
    be asked again, and how long that was after it had no room; 0 if it was not out of it.
    """

    error: TsqpError | None = None
    losses: int = 0
    refused: bool = False
    free_at: float = 0.0
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class _InFlight:
    """A request that has no reply yet, and its tensors.

    `session`, `inner_id`: where it is waited for, if anywhere.
    """

    prepared: PreparedRequest
    payload: Payload
    deadline: float
    timeout_s: float
    session: Session | None = None
    inner_id: int = 0
    # What went wrong at each service so far.
    troubles: dict[Member, _Trouble] = field(default_factory=lambda: defaultdict(_Trouble))

    def note_lost(self, member: Member, error: TsqpError) -> None:
        """Note that a connection was of no more use."""
        trouble = self.troubles[member]
        trouble.error = error
        trouble.losses += 1
        trouble.refused |= trouble.losses >= _MOST_LOSSES

    def may_ask(self, member: Member) -> bool:
        """Say whether a service may be asked, now or later."""
        return member.quarantined is None and not self.troubles[member].refused


class Replicas(Channel):
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
        # Whether a request waits for a service that was lost; any thread may ask.
        self.waits = False
        # Whether it was said, since a service was last ready, that one is waited for.
        self._told = False
        # In the order in which they were submitted.
        self._in_flight: dict[int, _InFlight] = {}
        # Of services that take nothing new, and may still answer what they have: one of each.
        self._draining: dict[Member, Session] = {}

    # ---------------------------------------------------------------------------- as a channel

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`. Never waits for a service: that is for `wait` to do."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        in_flight = _InFlight(prepared, payload, time.monotonic() + timeout_s, timeout_s)
        session = self._current.session
        if session is not None:  # as in `_send_to_any`, in fewer calls
            try:
                in_flight.inner_id = session.channel.start(prepared, payload, timeout_s)
                in_flight.session = session
            except BaseException as error:  # noqa: BLE001 - raised again there, or noted
                self._note_unsent(in_flight, session, error)
        if in_flight.session is None:
            self._send_to_any(in_flight)
        if in_flight.session is None:
            self._require_any(in_flight)  # one that can be asked later is left to `wait`
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

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        in_flight = self._in_flight.pop(request_id, None)
        if in_flight is not None and in_flight.session is not None:
            in_flight.session.channel.abandon(in_flight.inner_id)
            self._close_drained()

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`. Its endpoint is not asked again in this run.

        By the endpoint, which is ours to say, and not by the instance id that the service has given
        itself: it might have given another's.
        """
        for member in self.members:
            if member.endpoint == exchange.endpoint and member.quarantined is None:
                self._quarantine(member, error)
        if all(member.quarantined is not None for member in self.members):
            raise error

    def turn_away(self) -> None:
        """Ask another service first from now on, where one is ready."""
        ready = [one for one in self.members if one.session is not None]
        if ready:
            at = ready.index(self._current) if self._current in ready else -1
            self._current = ready[(at + 1) % len(ready)]
            self.endpoint = self._current.endpoint

    def close(self) -> None:
        """See `Channel.close`."""
        for session in self._draining.values():
            session.connection.close()
        self._draining.clear()
        self._in_flight.clear()
        for member in self.members:
            member.close()

    # ------------------------------------------------------------------------------- for others

    def ranks(self, exchange: Exchange) -> int:
        """Return by how many ranks the service computes that sent this, in its own words."""
        found = (member.ranks for member in self.members if member.endpoint == exchange.endpoint)
        return next(found, 1)

    @property
    def is_ready(self) -> bool:
        """Whether a service can be asked now."""
        return any(member.session is not None for member in self.members)

    def try_connect(self, member: Member, until: float) -> bool:
        """Let a service try to become ready until then; True if it is."""
        before = member.quarantined
        ready = member.try_connect(until)
        if member.quarantined is not None and before is None:
            # Nor may it still answer what it was asked over an earlier connection.
            self._quarantine(member, member.quarantined)
        return ready

    # ---------------------------------------------------------------------------------- sending

    def _note_unsent(self, in_flight: _InFlight, session: Session, error: BaseException) -> None:
        """Note why a request could not be sent. Raises the error if it is none of a channel's."""
        member = session.member
        if isinstance(error, OversizedRequestError):
            # Another may take more.
            in_flight.troubles[member] = _Trouble(error, refused=True)
        elif isinstance(error, TsqpError):
            self._note_failure(in_flight, session, error)
        else:
            # How much of it was sent is not known, and what comes next would be taken for the rest.
            got = "a request that was interrupted half way"
            self._drop(session, EndpointError(member.endpoint, got, "all of it"))
            raise error

    def _send_to_any(self, in_flight: _InFlight) -> None:
        """Send to the first service that is ready, and has room as far as is known.

        The current one comes first, and one that could not do it in time after all others.
        """
        now = time.monotonic()
        left_s = in_flight.deadline - now
        if left_s <= 0:
            return
        order = [self._current, *(one for one in self.members if one is not self._current)]
        for member in sorted(order, key=lambda one: in_flight.troubles[one].free_at > 0):
            session, free_at = member.session, in_flight.troubles[member].free_at
            if session is None or not in_flight.may_ask(member) or free_at > now:
                continue
            try:
                in_flight.inner_id = session.channel.start(
                    in_flight.prepared, in_flight.payload, left_s
                )
            except BaseException as error:  # noqa: BLE001 - raised again there, or noted
                self._note_unsent(in_flight, session, error)
            else:
                in_flight.session = session
                # A service that would not do this one would keep the next ones waiting, too.
                self._current, self.endpoint = member, member.endpoint
                return

    # -------------------------------------------------------------------------------- failures

    def _note_failure(self, in_flight: _InFlight, session: Session, error: TsqpError) -> None:
        """Note what a service answered instead of a result. Raises what asking others cannot help.

        What is wrong with a reply is never believed to be wrong with the request.
        """
        in_flight.session = None
        member = session.member
        trouble = in_flight.troubles[member]
        trouble.error = error
        unknown = isinstance(error, ServiceError) and error.code is ErrorCode.UNKNOWN_SESSION
        if unknown and in_flight.prepared.method == SegmentRequest.method:
            message = in_flight.prepared.request(in_flight.payload)
            if isinstance(message, SegmentRequest) and message.goes_on:
                raise error  # no other service has the session either
        if isinstance(error, ServiceError) and error.code is ErrorCode.SHUTTING_DOWN:
            in_flight.note_lost(member, error)
            self._drain(session, error)
        elif isinstance(error, ServiceError):
            if error.code is ErrorCode.QUEUE_FULL:
                known = member.queue_limits
                trouble.error = ServiceError(error.where, code=error.code, known=known)
            # What may be over in a moment: it is asked again.
            if error.code in (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_EXCEEDED):
                trouble.pause_s = min(_MAX_BACK_OFF_S, 2 * trouble.pause_s or _BACK_OFF_S)
                trouble.free_at = time.monotonic() + trouble.pause_s
            else:
                trouble.refused = True
        elif isinstance(error, EndpointError | DeadlineExceededError):
            in_flight.note_lost(member, error)
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
                # A service that says this over every new connection must not have us hold them all.
                self._drop(earlier, error)
            self._draining[member] = session
            warn("service_draining", member, error)
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
            in_flight.note_lost(member, error)
        self._hang_up(session)
        if broken is not None:
            self._quarantine(member, broken)
        elif member.session is session:
            member.lose(error)
            warn("service_lost", member, error)

    def _quarantine(self, member: Member, error: TsqpError) -> None:
        """Ask a service no more in this run. What it has answered is not looked at.

        Over whatever connection: one that is draining, or was lost with replies that had come.
        """
        for in_flight in self._in_flight.values():
            if in_flight.session is not None and in_flight.session.member is member:
                in_flight.session = None
        for session in (member.session, self._draining.get(member)):
            if session is not None:
                self._hang_up(session)
        member.quarantine(error)
        warn("service_quarantined", member, error)

    def _hang_up(self, session: Session) -> None:
        if self._draining.get(session.member) is session:
            del self._draining[session.member]
        session.connection.close()

    def _close_drained(self) -> None:
        """Close connections of services that are gone and owe us nothing any more."""
        awaited = {in_flight.session for in_flight in self._in_flight.values()}
        for session in [one for one in self._draining.values() if one not in awaited]:
            self._hang_up(session)

    # -------------------------------------------------------------------------------- recovery

    def _resend(self, in_flight: _InFlight) -> None:
        """Send a request that no service has. Waits for a service that comes back."""
        try:
            while in_flight.session is None:
                self._require_any(in_flight)
                # Before others are sent, which would take time that is up.
                if time.monotonic() >= in_flight.deadline:
                    self._fail(in_flight, in_flight.timeout_s)
                # All that wait, in the order of submission: the service may need it so.
                for waiting in list(self._in_flight.values()):
                    if waiting.session is None:
                        self._send_to_any(waiting)
                if in_flight.session is None:
                    self._wait_for_any(in_flight)
        finally:
            self.waits = False

    def _wait_for_any(self, in_flight: _InFlight) -> None:
        """Wait until a service has come back or may have room again, or for a moment."""
        now = time.monotonic()
        left = [member for member in self.members if in_flight.may_ask(member)]
        if not left:
            return
        lost = [member for member in left if member.session is None]
        self.waits = lost == left
        # Those that are ready have said that they have no room.
        free = [in_flight.troubles[one].free_at or now for one in left if one.session is not None]
        until = min([*free, in_flight.deadline])
        for member in lost:
            alone = len(lost) == 1 and self._told
            turn = until if alone else min(until, time.monotonic() + TURN_S)
            if self.try_connect(member, turn):
                self._told = False
                log.warning("service_ready", extra={"fields": {"endpoint": member.endpoint}})
                return
        if not lost:
            time.sleep(max(0.0, until - now))
        elif lost == left and not self._told:
            self._told = True
            for member in lost:
                log_waiting(member.endpoint, in_flight.deadline, "--request-timeout-s")

    def _require_any(self, in_flight: _InFlight) -> None:
        """Raise if no service is left that a request could be sent to, now or later."""
        if not any(in_flight.may_ask(member) for member in self.members):
            self._fail(in_flight, None)

    def _fail(self, in_flight: _InFlight, timeout_s: float | None) -> NoReturn:
        said: dict[str, TsqpError] = {}
        for member in self.members:
            error = member.quarantined or in_flight.troubles[member].error or member.error
            if error is not None:
                said[member.endpoint] = error
        raise aggregate_errors(in_flight.prepared.method, said, timeout_s)


def log_waiting(endpoint: str, deadline: float, option: str) -> None:
    """Say which service is waited for, how long, and what helps."""
    fields = {
        "endpoint": endpoint,
        "at_most_s": max(0, round(deadline - time.monotonic())),
        "detail": f"start a gpu-service there; {option} says how long it is waited for",
    }
    log.warning("waiting_for_service", extra={"fields": fields})


def warn(event: str, member: Member, error: TsqpError) -> None:
    """Log what became of a service."""
    log.warning(event, extra={"fields": {"endpoint": member.endpoint, "detail": str(error)}})


def aggregate_errors(
    method: str, said: Mapping[str, TsqpError], timeout_s: float | None
) -> TsqpError:
    """Return one error that says in one line what each of some services said, by endpoint.

    `timeout_s`: that was up, which makes it a DeadlineExceededError; None: no service is left to
    ask, and it is of the gravest kind among them. What a single one said is returned as it is.
    """
    errors = list(said.values())
    where = f"{method} at {' and '.join(said)}" if said else method
    if timeout_s is not None:
        # That one was asked last with little time left says nothing.
        each = _each({e: x for e, x in said.items() if not isinstance(x, DeadlineExceededError)})
        got = f"no reply within {timeout_s:g} s" + (f" ({each})" if each else "")
        return DeadlineExceededError(where, got, "a gpu-service that answers there")
    if len(errors) == 1:
        return errors[0]
    got = _each(said)
    expected = "one of them that answers"
    for kind in _GRAVEST:
        if any(isinstance(error, kind) for error in errors):
            return kind(where, got, expected)
    for error in errors:
        if isinstance(error, ProtocolError):
            return ProtocolError(where, got, expected, code=error.code)
    codes = {error.code if isinstance(error, ServiceError) else None for error in errors}
    if len(codes) == 1 and (code := codes.pop()) is not None:
        return ServiceError(where, code=code)
    return EndpointError(where, got, expected)


def _each(said: Mapping[str, TsqpError]) -> str:
    return "; ".join(f"{endpoint}: {error.got}" for endpoint, error in said.items())
