"""One service: its connection, which is used only after the handshake, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from protocol.channel import Channel, Traffic
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    KeyFileError,
    ServiceError,
    TsqpError,
)
from protocol.link import Link, ModelledLink
from protocol.messages import InitReply, InitRequest, Request, Response
from tee_side.services.plan import ReplicaGroup, one_service

# A handshake that is not answered by then is begun again, over a new connection.
_KNOCK_S = 5.0
# From one failed attempt to the next.
_PAUSE_S = 0.05
# How long one attempt to connect a stream may take.
_CONNECT_S = 0.02


class Connection(Channel, Protocol):
    """What a channel must be able to do beside, to be one of several (`PendingChannel`)."""

    def submit(
        self,
        request: Request,
        timeout_s: float | None = None,
        *,
        send_within_s: float | None = None,
    ) -> int:
        """See `PendingChannel.submit`."""
        ...

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        """See `PendingChannel.arrived`."""
        ...

    def use_one_connection(self) -> None:
        """See `PendingChannel.use_one_connection`."""
        ...


@dataclass(frozen=True, slots=True)
class Dialling:
    """How every service is reached and checked.

    `open` returns a fresh channel; `verify` compares an Init reply from an endpoint with what is
    asked of it for some layers, and raises ModelMismatchError or ReplyError. `link`: a slower one
    to model. `timeout_s`: deadline of a request that names none.
    """

    open: Callable[[str], Connection]
    verify: Callable[[str, Response, tuple[int, int]], InitReply]
    link: Link | None = None
    timeout_s: float = 60.0


@dataclass(slots=True)
class Roster:
    """What is known of service processes, by the name that each gives itself.

    A name that had a share once keeps it for the whole run, gone or not: whoever is behind it may
    remember what it saw.
    """

    _shares: dict[str, tuple[int, str]] = field(default_factory=dict)

    def admit(self, instance: str, share: int, endpoint: str) -> None:
        """Take a process in. Raises SettingsError where it has another share."""
        known, where = self._shares.setdefault(instance, (share, endpoint))
        if known != share:
            raise one_service(where, endpoint)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A connection to a service that has passed the handshake.

    `raw`: the transport's own; `channel`: what requests go through, with the modelled link.
    """

    raw: Connection
    channel: Channel


class Member:
    """A service of a group, and the state of our relations with it.

    It is ready (`line`), lost (`error` says why: `knock` may bring it back), or quarantined for the
    rest of the run (`quarantined` says why).
    """

    def __init__(
        self, endpoint: str, group: ReplicaGroup, dialling: Dialling, roster: Roster, total: Traffic
    ) -> None:
        self.endpoint = endpoint
        self.line: Line | None = None
        self.error: TsqpError | None = None
        self.quarantined: TsqpError | None = None
        self.max_message_bytes: int | None = None
        # What it says that it lets one client have waiting, for people.
        self.room = ""
        self._group = group
        self._dialling = dialling
        self._roster = roster
        self._total = total
        # A connection on which Init was asked, and until when its answer is waited for.
        self._knocking: tuple[Connection, int, float] | None = None
        self._next_attempt = 0.0

    def knock(self, until: float) -> bool:
        """Try to connect and to pass the handshake, until then; True once that is done.

        Goes on where the last call ended. Keeps what went wrong: raises KeyFileError alone, which
        is about a file of our own.
        """
        if self.line is not None or self.quarantined is not None:
            return self.line is not None
        try:
            self._knock(until)
        except (EndpointError, DeadlineExceededError, ServiceError) as error:
            self.lose(error)
        except KeyFileError:
            self._stop_knocking()
            raise
        except TsqpError as error:
            self.quarantine(error)
        except BaseException:
            self._stop_knocking()
            raise
        return self.line is not None

    def _knock(self, until: float) -> None:
        if self._knocking is None:
            now = time.monotonic()
            if now < self._next_attempt:
                time.sleep(max(0.0, min(until, self._next_attempt) - now))
                if until < self._next_attempt:
                    return
            self._knocking = self._begin()
        raw, request_id, give_up = self._knocking
        if not raw.arrived(request_id, until) and time.monotonic() < give_up:
            return
        reply = self._dialling.verify(
            self.endpoint, raw.wait(request_id).response, (self._group.first, self._group.last)
        )
        self._roster.admit(reply.instance_id, self._group.share, self.endpoint)
        self.max_message_bytes = reply.max_message_bytes
        self.room = (
            f"it queues {reply.max_queued_requests} requests and {reply.max_queued_bytes} bytes"
            " of one client"
        )
        dialling = self._dialling
        link = dialling.link
        timeout_s = dialling.timeout_s
        channel = raw if link is None else ModelledLink(raw, link, timeout_s=timeout_s)
        self._knocking, self.error = None, None
        self.line = Line(raw, channel)

    def _begin(self) -> tuple[Connection, int, float]:
        raw = self._dialling.open(self.endpoint)
        try:
            raw.use_one_connection()
            raw.traffic = self._total
            give_up = time.monotonic() + _KNOCK_S
            request_id = raw.submit(InitRequest(), _KNOCK_S, send_within_s=_CONNECT_S)
        except BaseException:
            raw.close()
            raise
        return raw, request_id, give_up

    def lose(self, error: TsqpError) -> None:
        """Note that it cannot be asked now. Its line, if any, is for whoever calls to close."""
        self.line, self.error = None, error
        self._next_attempt = time.monotonic() + _PAUSE_S
        self._stop_knocking()

    def quarantine(self, error: TsqpError) -> None:
        """Never ask it again. The line: as in `lose`."""
        self.lose(error)
        self.quarantined = error

    def close(self) -> None:
        """Disconnect."""
        self._stop_knocking()
        if self.line is not None:
            self.line.raw.close()
            self.line = None

    def _stop_knocking(self) -> None:
        if self._knocking is not None:
            raw, self._knocking = self._knocking[0], None
            raw.close()
