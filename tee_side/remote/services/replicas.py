"""A channel over services that stand in for each other: what one fails at, another is asked.

A request is kept until its reply is there. Decoding is stateless on the GPU side, so all that a
lost service costs is to send a request again: the same masked tensors, so nothing more is shown
than before, and no pad is drawn twice. The service asked has passed the handshake on the very
connection that the request goes out on, and is of the owner that the request is for.

`Replicas` is the ordinary way, and all there is to it while no service fails; `Failover` is what
comes after a failure: another is asked, or it is waited for. Waiting goes by `time.monotonic` and
ends with the request's own deadline, however many services were asked.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
from tee_side.remote.services.member import TURN_S, Member, Session

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
class Trouble:
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

    def note_lost(self, error: TsqpError) -> None:
        """Note that a connection was of no more use."""
        self.error = error
        self.losses += 1
        self.refused |= self.losses >= _MOST_LOSSES


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that has no reply yet, and its tensors.

    `session`, `inner_id`: where it is waited for, if anywhere. `troubles`: what went wrong with it
    at each service so far.
    """

    prepared: PreparedRequest
    payload: Payload
    deadline: float
    timeout_s: float
    session: Session | None = None
    inner_id: int = 0
    troubles: dict[Member, Trouble] = field(default_factory=dict)


class Replicas(Channel):
    """A `Channel` to whichever of some services is well. All requests go to one of them at a time.

    `current`: that one. `in_flight`: in the order in which they were submitted.

    Raises, beside what a channel does: for a single service its own last error; for several one
    error that says, endpoint by endpoint, what each answered. DeadlineExceededError where the time
    was up. Of each service at most two connections are open at any time, whatever it answers.
    """

    def __init__(self, members: Sequence[Member], *, timeout_s: float, traffic: Traffic) -> None:
        self.members = tuple(members)
        self.traffic = traffic
        self.prefer(members[0])
        self.in_flight: dict[int, InFlight] = {}
        self._timeout_s = timeout_s
        self._last_id = 0
        self._failover = Failover(self)

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`. Never waits for a service: that is for `wait` to do."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        in_flight = InFlight(prepared, payload, time.monotonic() + timeout_s, timeout_s)
        session, options = self.current.session, self.current.options
        # As in `Failover.send`, in fewer calls.
        if session is not None and self.endpoint not in options.barred:
            try:
                in_flight.inner_id = session.channel.start(prepared, payload, timeout_s)
                in_flight.session = session
            except BaseException as error:  # noqa: BLE001 - raised again there, or noted
                self._failover.note(in_flight, session, error)
        if in_flight.session is None:
            self._failover.start(in_flight)
        self._last_id = request_id = self._last_id + 1
        self.in_flight[request_id] = in_flight
        return request_id

    def wait(self, request_id: int) -> Exchange:
        """See `Channel.wait`."""
        in_flight = self.in_flight[request_id]
        session = in_flight.session
        try:
            while True:
                if session is not None:
                    try:
                        return session.channel.wait(in_flight.inner_id)
                    except TsqpError as error:
                        self._failover.note(in_flight, session, error)
                self._failover.resend(in_flight)
                session = in_flight.session
        finally:
            del self.in_flight[request_id]
            if session is not None and session.member.session is not session:
                self._failover.close_drained(session)

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        in_flight = self.in_flight.pop(request_id, None)
        if in_flight is not None and in_flight.session is not None:
            in_flight.session.channel.abandon(in_flight.inner_id)
            self._failover.close_drained(in_flight.session)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`. Its endpoint is not asked again in this run."""
        self._failover.distrust(exchange.endpoint, error)

    def prefer(self, member: Member) -> None:
        """Ask this service first from now on."""
        self.current, self.endpoint = member, member.endpoint

    def turn_away(self) -> None:
        """Ask another service first from now on, where one is ready."""
        at = self.members.index(self.current)
        others = (*self.members[at + 1 :], *self.members[:at])
        self.prefer(next((one for one in others if one.session is not None), self.current))

    def close(self) -> None:
        """See `Channel.close`."""
        for in_flight in self.in_flight.values():
            if in_flight.session is not None:
                in_flight.session.connection.close()
        self.in_flight.clear()
        for member in self.members:
            member.close()

    @property
    def is_ready(self) -> bool:
        """Whether a service can be asked now."""
        return any(member.session is not None for member in self.members)

    @property
    def waits(self) -> bool:
        """Whether a request waits for a service that was lost. Any thread may ask."""
        return self._failover.waits


class Failover:
    """Whom the requests of a `Replicas` go to instead, and what becomes of failed connections.

    `waits`: whether a request waits for a service that was lost.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.waits = False
        self._replicas = replicas
        # Whether it was said, since a service was last ready, that one is waited for.
        self._told = False

    # ---------------------------------------------------------------------------------- sending

    def start(self, in_flight: InFlight) -> None:
        """Send a new request, or leave it to `resend` if a service can be asked later."""
        self._send(in_flight)
        if in_flight.session is None:
            self._require_any(in_flight)

    def resend(self, in_flight: InFlight) -> None:
        """Send a request that no service has. Waits for a service that comes back."""
        try:
            while in_flight.session is None:
                self._require_any(in_flight)
                # Before others are sent, which would take time that is up.
                if time.monotonic() >= in_flight.deadline:
                    raise self._error(in_flight, in_flight.timeout_s)
                # All that wait, in the order of submission: the service may need it so.
                for waiting in list(self._replicas.in_flight.values()):
                    if waiting.session is None:
                        self._send(waiting)
                if in_flight.session is None:
                    self._wait_for_any(in_flight)
        finally:
            self.waits = False

    def _send(self, in_flight: InFlight) -> None:
        """Send to the first service that is ready, and has room as far as is known.

        The current one comes first, and one that could not do it in time after all others.
        """
        now, current = time.monotonic(), self._replicas.current
        left_s = in_flight.deadline - now
        if left_s <= 0:
            return
        for member in sorted(
            self._replicas.members,
            key=lambda one: (_trouble(in_flight, one).free_at > 0, one is not current),
        ):
            session, is_free = member.session, _trouble(in_flight, member).free_at <= now
            if session is None or not _may_ask(in_flight, member) or not is_free:
                continue
            try:
                in_flight.inner_id = session.channel.start(
                    in_flight.prepared, in_flight.payload, left_s
                )
            except BaseException as error:  # noqa: BLE001 - raised again there, or noted
                self.note(in_flight, session, error)
            else:
                in_flight.session = session
                # A service that would not do this one would keep the next ones waiting, too.
                self._replicas.prefer(member)
                return

    def _wait_for_any(self, in_flight: InFlight) -> None:
        """Wait until a service has come back or may have room again, or for a moment."""
        left = [member for member in self._replicas.members if _may_ask(in_flight, member)]
        if not left:
            return
        lost = [member for member in left if member.session is None]
        self.waits = lost == left
        # Those that are ready have said that they have no room.
        free = [_trouble(in_flight, one).free_at for one in left if one.session is not None]
        until = min([*free, in_flight.deadline])
        for member in lost:
            turn = until if len(lost) == 1 and self._told else min(until, time.monotonic() + TURN_S)
            if member.try_connect(turn):
                self._told = False
                member.log("service_ready")
                return
            if member.quarantined is not None:
                # Nor may it still answer what it was asked over an earlier connection.
                self._quarantine(member, member.quarantined)
        if not lost:
            time.sleep(max(0.0, until - time.monotonic()))
        elif self.waits and not self._told:
            self._told = True
            for member in lost:
                member.log_waiting(in_flight.deadline, "--request-timeout-s")

    # --------------------------------------------------------------------------------- failures

    def note(self, in_flight: InFlight, session: Session, error: BaseException) -> None:
        """Note what came instead of a result, and so whether this service may be asked again.

        Raises what asking others cannot help, and errors of sending that are none of a channel's.
        What is wrong with a reply is never believed to be wrong with the request.
        """
        in_flight.session = None
        member = session.member
        if not isinstance(error, TsqpError):
            # How much of it was sent is not known, and what comes next would be taken for the rest.
            got = "a request that was interrupted half way"
            self._drop(session, EndpointError(member.endpoint, got, "all of it"))
            raise error
        trouble = _trouble(in_flight, member)
        trouble.error = error
        code = error.code if isinstance(error, ServiceError) else None
        if code is ErrorCode.UNKNOWN_SESSION and in_flight.prepared.method == SegmentRequest.method:
            message = in_flight.prepared.request(in_flight.payload)
            if isinstance(message, SegmentRequest) and message.goes_on:
                raise error  # no other service has the session either
        if code is ErrorCode.SHUTTING_DOWN:
            trouble.note_lost(error)
            self._drain(session, error)
        elif code in (ErrorCode.QUEUE_FULL, ErrorCode.DEADLINE_EXCEEDED):
            if code is ErrorCode.QUEUE_FULL and (said := member.reply) is not None:
                known = (
                    f"it queues {said.max_queued_requests} requests and {said.max_queued_bytes}"
                    " bytes of one client"
                )
                trouble.error = ServiceError(error.where, code=code, known=known)
            # What may be over in a moment: it is asked again.
            trouble.pause_s = min(_MAX_BACK_OFF_S, 2 * trouble.pause_s or _BACK_OFF_S)
            trouble.free_at = time.monotonic() + trouble.pause_s
        elif code is not None or isinstance(error, OversizedRequestError):
            trouble.refused = True  # another may do it, or take more
        elif isinstance(error, EndpointError | DeadlineExceededError):
            trouble.note_lost(error)
            self._drop(session, error)
        elif isinstance(error, ProtocolError | ReplyError):
            self._quarantine(member, error)
        else:
            raise error
        self.close_drained(session)

    def distrust(self, endpoint: str, error: TsqpError) -> None:
        """Ask a service no more in this run. Raises the error if that leaves none.

        By the endpoint, which is ours to say, and not by the instance id that the service has given
        itself: it might have given another's.
        """
        members = self._replicas.members
        for member in members:
            if member.endpoint == endpoint and member.quarantined is None:
                self._quarantine(member, error)
        if all(member.quarantined is not None for member in members):
            raise error

    def close_drained(self, session: Session) -> None:
        """Close the connection of a service that is gone, if it owes us nothing any more."""
        if session not in self._connections(session.member):
            session.connection.close()

    def _connections(self, member: Member) -> set[Session]:
        """Return the connection that a service is asked over, and those it may still answer on."""
        waiting = [in_flight.session for in_flight in self._replicas.in_flight.values()]
        return {one for one in (member.session, *waiting) if one and one.member is member}

    def _drain(self, session: Session, error: TsqpError) -> None:
        """Ask a service nothing new that is about to end; what it has, it may still answer."""
        member = session.member
        if member.session is session:
            member.lose(error)
            for earlier in self._connections(member) - {session}:
                # A service that says this over every new connection must not have us hold them all.
                self._drop(earlier, error)
            member.log("service_draining", error)

    def _drop(self, session: Session, error: TsqpError) -> None:
        """Close a connection; what had arrived over it is kept, the rest has to be sent again.

        What had arrived and breaks the rules ends the service for the rest of the run.
        """
        member = session.member
        broken: TsqpError | None = None
        for in_flight in self._replicas.in_flight.values():
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
            _trouble(in_flight, member).note_lost(error)
        session.connection.close()
        if broken is not None:
            self._quarantine(member, broken)
        elif member.session is session:
            member.lose(error)
            member.log("service_lost", error)

    def _quarantine(self, member: Member, error: TsqpError) -> None:
        """Ask a service no more in this run. What it has answered is not looked at.

        Over whatever connection: one that is draining, or was lost with replies that had come.
        """
        gone = self._connections(member)
        for in_flight in self._replicas.in_flight.values():
            if in_flight.session in gone:
                in_flight.session = None
        for session in gone:
            session.connection.close()
        member.quarantine(error)

    def _require_any(self, in_flight: InFlight) -> None:
        """Raise if no service is left that a request could be sent to, now or later."""
        if not any(_may_ask(in_flight, member) for member in self._replicas.members):
            raise self._error(in_flight, None)

    def _error(self, in_flight: InFlight, timeout_s: float | None) -> TsqpError:
        errors = {
            member.endpoint: member.quarantined or _trouble(in_flight, member).error or member.error
            for member in self._replicas.members
        }
        said = {endpoint: error for endpoint, error in errors.items() if error is not None}
        return aggregate_errors(in_flight.prepared.method, said, timeout_s)


def _trouble(in_flight: InFlight, member: Member) -> Trouble:
    """Return what went wrong with a request at a service."""
    return in_flight.troubles.setdefault(member, Trouble())


def _may_ask(in_flight: InFlight, member: Member) -> bool:
    """Say whether a service may be asked, now or later."""
    return member.quarantined is None and not _trouble(in_flight, member).refused


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
