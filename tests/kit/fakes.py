"""Services that are lost, refuse and come back as a test says, without processes or sockets."""

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.channel import Channel, OversizedRequestError
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ErrorCode,
    ServiceError,
    VerificationError,
)
from protocol.messages import InitRequest, LMHeadRequest, TensorReply
from protocol.prepared import Exchange, PreparedRequest, Traffic
from protocol.tensors import from_torch
from tee_side.remote.services import connected, member, replicas
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup


@dataclass
class FakeService:
    """A service. `answers`: what it does with requests one after another, then it answers well.

    An error is raised by `wait`; "lost" ends the connection, "lost at submit" before sending.
    `held`: what its Init reply is checked to be; an error is what the check finds. `swallows`: how
    many of the next Inits it never answers. `nonces`: of Inits. `given_s`: how long each request
    in `got` might take. `checked`: which layers each Init reply was checked for.
    """

    endpoint: str
    instance: str = ""
    up: bool = True
    answers: deque[BaseException | str] = field(default_factory=deque)
    held: BaseException | None = None
    max_message_bytes: int = 2**20
    ranks: int = 1
    swallows: int = 0
    comes_back: float = float("inf")
    connections: int = 0
    got: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    given_s: list[float] = field(default_factory=list)
    nonces: list[bytes] = field(default_factory=list)
    checked: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)


class FakeConnection(Channel):
    """One connection to a `FakeService`."""

    def __init__(self, service: FakeService) -> None:
        self.endpoint, self.traffic, self.service = service.endpoint, Traffic(), service
        self.limit = 2**40
        self.closed = self.one_connection = self._lost = False
        self._last_id = 0
        self._waiting: dict[int, Any] = {}
        # Until when the reply to each is waited for.
        self._swallowed: dict[int, float] = {}
        service.connections += 1

    def use_one_connection(self) -> None:
        self.one_connection = True

    def limit_messages(self, max_message_bytes: int) -> None:
        self.limit = min(self.limit, max_message_bytes)

    def submit(self, request: InitRequest, timeout_s: float, *, send_within_s: float) -> int:
        # A service that is not there is found out long before the handshake's own time is up.
        assert send_within_s < timeout_s
        service, request_id = self.service, self._asked(request)
        service.events.append("Init")
        service.nonces.append(request.nonce)
        if not service.up and time.monotonic() < service.comes_back:
            raise DeadlineExceededError(self.endpoint, got="no service", expected="one")
        if service.swallows:
            service.swallows -= 1
            self._swallowed[request_id] = time.monotonic() + timeout_s
        return request_id

    def start(self, prepared: Any, payload: Any, timeout_s: float) -> int:  # type: ignore[override]
        request, service = prepared.request(payload), self.service
        request_id = self._asked(request)
        if request.hidden_states.payload_bytes > self.limit:
            raise OversizedRequestError(
                self.endpoint, got="more", expected="less", code=ErrorCode.LIMIT_EXCEEDED
            )
        if service.answers and service.answers[0] == "lost at submit":
            service.answers.popleft()
            raise lost(self.endpoint)
        self._require_connection()
        service.got.append(payload)
        service.given_s.append(timeout_s)
        service.events.append("request")
        return request_id

    def _asked(self, request: Any) -> int:
        assert self.one_connection
        assert not self.closed
        # Where nothing but the clock ends a mistake, it is seen before the time of the test is up.
        assert self._last_id < 1000, "a connection that is asked without end"
        self._last_id += 1
        self._waiting[self._last_id] = request
        return self._last_id

    def arrived(self, request_id: int, until: float = 0.0) -> bool:
        if request_id in self._swallowed:
            time.sleep(max(0.0, min(until, self._swallowed[request_id]) - time.monotonic()))
            return False
        if isinstance(self._waiting[request_id], InitRequest):
            return True
        self._require_connection()
        return not self.service.answers

    def wait(self, request_id: int) -> Exchange:
        request, service = self._waiting.pop(request_id), self.service
        self._require_connection()
        if request_id in self._swallowed:
            raise DeadlineExceededError(self.endpoint, got="no reply to Init", expected="one")
        if isinstance(request, InitRequest):
            response = SimpleNamespace(
                instance_id=service.instance or self.endpoint,
                max_message_bytes=service.max_message_bytes,
                max_queued_requests=8,
                max_queued_bytes=4096,
                statement=b"stated",
                ranks=service.ranks,
            )
        else:
            answer = service.answers.popleft() if service.answers else "good"
            self._lost |= answer == "lost"
            self._require_connection()
            if isinstance(answer, BaseException):
                raise answer
            assert answer == "good"
            response = TensorReply(output=request.hidden_states)
        self.traffic.round_trips += 1
        return Exchange(response, 1, 1, 0, 0, 0, None, 0, self.endpoint)

    def _require_connection(self) -> None:
        if self._lost:
            raise lost(self.endpoint)

    def abandon(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def close(self) -> None:
        self.closed = self._lost = True


@dataclass
class World:
    """Some services, and what a runner has of them.

    `most_open`: how many connections to one service were open at the same time.
    """

    services: dict[str, FakeService] = field(default_factory=dict)
    opened: list[FakeConnection] = field(default_factory=list)
    most_open: int = 0
    made: list[Services] = field(default_factory=list)

    def add(self, *names: str, **settings: Any) -> list[FakeService]:
        for name in names:
            self.services[name] = FakeService(name, **settings)
        return [self.services[name] for name in names]

    def open(self, endpoint: str) -> Any:
        connection = FakeConnection(self.services[endpoint])
        self.opened.append(connection)
        is_open = [one for one in self.opened if one.endpoint == endpoint and not one.closed]
        self.most_open = max(self.most_open, len(is_open))
        return connection

    def verify(self, endpoint: str, reply: Any, layers: tuple[int, int]) -> Any:
        service = self.services[endpoint]
        service.checked.append(layers)
        if service.held is not None:
            raise service.held
        return reply

    def connect(
        self,
        *groups: ReplicaGroup,
        layers: int = 1,
        timeout_s: float = 5.0,
        connect_s: float = 1.0,
    ) -> Services:
        made = Services(groups, layers, ConnectOptions(self.open, self.verify, timeout_s=timeout_s))
        self.made.append(made)
        made.connect(connect_s)
        return made

    def replicas(self, *names: str) -> Any:
        """Return the channel over services that stand in for each other."""
        return self.connect(ReplicaGroup(0, 0, 0, names)).at(0)[0]


def stopped_clock(patch: pytest.MonkeyPatch) -> Any:
    """Return the only clock that services go by: sleeping sets it forward, and takes no time."""
    found = SimpleNamespace(now=1000.0, slept=[])
    found.monotonic = lambda: found.now

    def sleep(seconds: float) -> None:
        found.slept.append(seconds)
        # A little more: what is compared with a moment afterwards has been rounded.
        found.now += seconds + 1e-5

    found.sleep = sleep
    for module in (member, replicas, connected, sys.modules[__name__]):
        patch.setattr(module, "time", found)
    return found


def lost(endpoint: str) -> EndpointError:
    return EndpointError(endpoint, got="a lost connection", expected="a service")


def service_error(code: ErrorCode) -> ServiceError:
    return ServiceError("LMHead at somewhere", code=code)


def wrong() -> VerificationError:
    return VerificationError("down_proj", got="a wrong product", expected="x W")


def ask(value: float = 1.0, elements: int = 4) -> tuple[PreparedRequest, torch.Tensor]:
    """Return a request that is its own answer, and its tensor."""
    tensor = torch.full((elements,), value)
    message = LMHeadRequest(hidden_states=from_torch(tensor))
    return PreparedRequest(message, (elements,), "float32"), tensor


def call(channel: Any, asked: Any, timeout_s: float | None = None) -> Any:
    return channel.wait(channel.start(*asked, timeout_s))
