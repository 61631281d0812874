"""A channel over services that stand in for each other: what one fails at, another is asked.

A request is kept until its reply is there. While no service fails, this is all there is to it; what
comes after a failure is `tee_side.remote.services.failover`, imported when there is a first one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.channel import Channel
from protocol.errors import TsqpError
from protocol.prepared import Exchange, Payload, PreparedRequest, Traffic
from tee_side.remote.services.member import Member, Session

if TYPE_CHECKING:
    from tee_side.remote.services.failover import Failover, Trouble


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
        self._failed: Failover | None = None

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`. Never waits for a service: that is for `wait` to do."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        in_flight = InFlight(prepared, payload, time.monotonic() + timeout_s, timeout_s)
        session = self.current.session
        if session is not None:  # as in `Failover.send`, in fewer calls
            try:
                in_flight.inner_id = session.channel.start(prepared, payload, timeout_s)
                in_flight.session = session
            except BaseException as error:  # noqa: BLE001 - raised again there, or noted
                self._failover().note(in_flight, session, error)
        if in_flight.session is None:
            self._failover().start(in_flight)
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
                        self._failover().note(in_flight, session, error)
                self._failover().resend(in_flight)
                session = in_flight.session
        finally:
            del self.in_flight[request_id]
            if session is not None and session.member.session is not session:
                self._failover().close_drained(session)

    def abandon(self, request_id: int) -> None:
        """See `Channel.abandon`."""
        in_flight = self.in_flight.pop(request_id, None)
        if in_flight is not None and in_flight.session is not None:
            in_flight.session.channel.abandon(in_flight.inner_id)
            if self._failed is not None:
                self._failed.close_drained(in_flight.session)

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """See `Channel.distrust`. Its endpoint is not asked again in this run."""
        self._failover().distrust(exchange.endpoint, error)

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
        return self._failed is not None and self._failed.waits

    def _failover(self) -> Failover:
        if self._failed is None:
            from tee_side.remote.services.failover import Failover

            self._failed = Failover(self)
        return self._failed
