"""Services that are lost, refuse and come back as a test says, without processes or sockets."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from protocol.channel import Channel, Exchange, Traffic
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ServiceError,
    TsqpError,
    VerificationError,
)
from protocol.messages import InitRequest, LMHeadRequest, Request, Response, TensorReply
from protocol.pending import OversizedRequestError
from protocol.tensors import from_torch
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup
from tsqp.lab.link import Link


@dataclass
class FakeInit:
    """What `verify` reads of an Init reply."""

    instance_id: str
    max_message_bytes: int = 2**20
    max_queued_requests: int = 8
    max_queued_bytes: int = 4096
    statement: bytes = b"stated"
    ranks: int = 1


@dataclass
class FakeService:
    """A service. `answers`: what it does with requests one after another, then it answers well.

    An error is raised by `wait`; "lost" ends the connection, "lost at submit" before sending.
    `held`: what its Init reply is checked to be; an error is what the check finds. `swallows`: how
    many of the next Inits it never answers. `nonces`: of Inits. `given_s`: how long each request
    in `got` might take.
    """

    endpoint: str
    instance: str = ""
    up: bool = True
    answers: deque[TsqpError | str] = field(default_factory=deque)
    held: TsqpError | None = None
    max_message_bytes: int = 2**20
    got: list[Request] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    given_s: list[float] = field(default_factory=list)
    swallows: int = 0
    nonces: list[bytes] = field(default_factory=list)
    connections: int = 0
    comes_back: float = float("inf")
    checked_layers: list[tuple[int, int]] = field(default_factory=list)
    checked_columns: list[tuple[int, int]] = field(default_factory=list)
    ranks: int = 1

    @property
    def is_up(self) -> bool:
        """Whether it is there, or has come back by now."""
        return self.up or time.monotonic() >= self.comes_back


class FakeConnection(Channel):
    """One connection to a `FakeService`."""

    def __init__(self, service: FakeService) -> None:
        self.endpoint = service.endpoint
        self.traffic = Traffic()
        self.service = service
        self.limit = 2**40
        self.closed = False
        self.one_connection = False
        self._last_id = 0
        self._waiting: dict[int, Request] = {}
        # Until when the reply to each is waited for.
        self._swallowed: dict[int, float] = {}
        self._lost = False
        service.connections += 1

    def use_one_connection(self) -> None:
        self.one_connection = True

    def limit_messages(self, max_message_bytes: int) -> None:
        self.limit = min(self.limit, max_message_bytes)

    def submit(
        self,
        request: Request,
        timeout_s: float | None = None,
        *,
        send_within_s: float | None = None,
    ) -> int:
        assert not self.closed
        assert self.one_connection
        assert timeout_s is not None
        service = self.service
        if isinstance(request, InitRequest):
            # Who is not there is found out long before the handshake's own time is up.
            assert send_within_s is not None
            assert send_within_s < timeout_s
            service.events.append("Init")
            service.nonces.append(request.nonce)
            if not service.is_up:
                raise DeadlineExceededError(self.endpoint, got="nobody", expected="somebody")
        else:
            if request.hidden_states.payload_bytes > self.limit:
                raise OversizedRequestError(
                    self.endpoint, got="more", expected="less", code=ErrorCode.LIMIT_EXCEEDED
                )
            if self._lost or (service.answers and service.answers[0] == "lost at submit"):
                if service.answers and service.answers[0] == "lost at submit":
                    service.answers.popleft()
                raise lost(self.endpoint)
            assert send_within_s is None
            service.got.append(request)
            service.given_s.append(timeout_s)
            service.events.append("request")
        self._last_id += 1
        if isinstance(request, InitRequest) and service.swallows:
            service.swallows -= 1
            self._swallowed[self._last_id] = time.monotonic() + timeout_s
        self._waiting[self._last_id] = request
        return self._last_id

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        if request_id in self._swallowed:
            end = min(until, self._swallowed[request_id])
            time.sleep(max(0.0, end - time.monotonic()))
            return False
        if isinstance(self._waiting[request_id], InitRequest):
            return True
        if self._lost:
            raise lost(self.endpoint)
        return not self.service.answers

    def wait(self, request_id: int) -> Exchange:
        request = self._waiting.pop(request_id)
        if self._lost:
            raise lost(self.endpoint)
        if request_id in self._swallowed:
            raise DeadlineExceededError(self.endpoint, got="no reply to Init", expected="one")
        if isinstance(request, InitRequest):
            response: Any = FakeInit(
                self.service.instance or self.endpoint, ranks=self.service.ranks
            )
        else:
            if self.service.answers:
                self._answer(self.service.answers.popleft())
            response = TensorReply(output=request.hidden_states)
        self.traffic.round_trips += 1
        return Exchange(response, 1, 1, 0, 0, 0, None, 0, self.endpoint)

    def _answer(self, answer: TsqpError | str) -> None:
        if answer == "lost":
            self._lost = True
            raise lost(self.endpoint)
        if isinstance(answer, BaseException):
            raise answer
        assert answer == "good"

    def abandon(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def close(self) -> None:
        self.closed = True
        self._lost = True


@dataclass
class World:
    """Some services, and what a runner has of them."""

    services: dict[str, FakeService] = field(default_factory=dict)
    opened: list[FakeConnection] = field(default_factory=list)
    # Connections to one service that were open at the same time.
    most_open: int = 0
    made: list[Services] = field(default_factory=list)
    link: Link | None = None

    def add(self, *names: str, **settings: Any) -> list[FakeService]:
        """Let there be services."""
        for name in names:
            self.services[name] = FakeService(name, **settings)
        return [self.services[name] for name in names]

    def open(self, endpoint: str) -> FakeConnection:
        """Connect."""
        connection = FakeConnection(self.services[endpoint])
        self.opened.append(connection)
        is_open = [one for one in self.opened if one.endpoint == endpoint and not one.closed]
        self.most_open = max(self.most_open, len(is_open))
        return connection

    def verify(
        self, endpoint: str, reply: Response, layers: tuple[int, int], columns: tuple[int, int]
    ) -> Any:
        """Check an Init reply."""
        service = self.services[endpoint]
        service.checked_layers.append(layers)
        service.checked_columns.append(columns)
        if service.held is not None:
            raise service.held
        reply.max_message_bytes = service.max_message_bytes  # type: ignore[union-attr]
        return reply

    def connect(
        self,
        *groups: ReplicaGroup,
        layers: int = 1,
        timeout_s: float = 5.0,
        connect_s: float = 1.0,
        config: Any = None,
    ) -> Services:
        """Return connected services."""
        made = Services(
            groups, layers, ConnectOptions(self.open, self.verify, self.link, timeout_s), config
        )
        self.made.append(made)
        made.connect(connect_s)
        return made

    def replicas(self, *names: str, timeout_s: float = 5.0) -> Any:
        """Return the channel over services that stand in for each other."""
        return self.connect(ReplicaGroup(1, 0, 0, names), timeout_s=timeout_s).at(0)[0]


def lost(endpoint: str) -> EndpointError:
    """Return what a lost connection is."""
    return EndpointError(endpoint, got="a lost connection", expected="a service")


def service_error(code: ErrorCode) -> ServiceError:
    """Return what an error reply is."""
    return ServiceError("LMHead at somewhere", code=code)


def wrong() -> VerificationError:
    """Return what a wrong result is."""
    return VerificationError("down_proj", got="a wrong product", expected="x W")


def ask(value: float = 1.0, elements: int = 4) -> LMHeadRequest:
    """Return a request that is its own answer."""
    return LMHeadRequest(hidden_states=from_torch(torch.full((elements,), value)))
