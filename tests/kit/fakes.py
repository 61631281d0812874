"""Services that are lost, refuse and come back as a test says, without processes or sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from protocol.messages import (
    InitRequest,
    LinearOperator,
    LMHeadRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.model.config import read_config
from protocol.pending import OversizedRequestError
from protocol.tensors import from_torch, to_torch
from tee_side.protect.masking import HideAt, MaskRules, linear_masking
from tee_side.protect.masks.mask import Mask
from tee_side.protect.randomness import Randomness
from tee_side.protect.sites import FloatSite, Sites
from tee_side.protect.verifier import UNVERIFIED
from tee_side.remote.linear import CallSettings, RemoteLinear
from tee_side.remote.services.connected import Services
from tee_side.remote.services.member import ConnectOptions
from tee_side.remote.services.plan import ReplicaGroup
from tee_side.words import Operator, Site, is_linear
from tests.kit.model import LoopbackChannel, SavedModel
from tsqp.lab.link import Link
from tsqp.lab.research.operators import embedding_call, lm_head_call, product_call


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


Models = Callable[..., SavedModel]
Change = Callable[[torch.Tensor], torch.Tensor]

# Inputs of every operator for the model of `tests.kit.model.SIZES`, and the shapes that come back.
ARGUMENTS: dict[Operator, tuple[tuple[int | torch.Tensor, ...], list[tuple[int, ...]]]] = {
    "embedding": ((torch.tensor([1, 2, 3]),), [(3, 48)]),
    "qkv_proj": ((0, torch.ones(3, 48)), [(3, 96 + 32 + 32)]),
    "attn_scores": ((0, torch.ones(2, 9, 16), torch.ones(2, 5, 16)), [(2, 9, 5)]),
    "attn_values": ((0, torch.ones(2, 9, 5), torch.ones(2, 5, 16)), [(2, 9, 16)]),
    "o_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "gate_up_proj": ((0, torch.ones(3, 48)), [(3, 192)]),
    "down_proj": ((0, torch.ones(3, 96)), [(3, 48)]),
    "lm_head": ((torch.ones(3, 48),), [(3, 320)]),
}


class ChangingChannel(LoopbackChannel):
    """A service that changes every tensor before it sends it."""

    def __init__(self, directory: Path, change: Change) -> None:
        super().__init__(directory)
        self._change = change

    def answer(self, request: Request) -> Response:
        """Compute the true reply and change it."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply):
            return reply
        return TensorReply(output=from_torch(self._change(to_torch(reply.output))))


class OneSite:
    """Doubles inputs into integers, and halves products; of every site."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __getitem__(self, site: Site) -> OneSite:
        return self

    def encode(self, x_TI: torch.Tensor) -> torch.Tensor:
        return (2 * x_TI).to(self._dtype)

    def decode(self, y_TO: torch.Tensor, _x_TI: torch.Tensor) -> torch.Tensor:
        return y_TO.float() / 2


class Remote:
    """Every operator as it leaves under one mask: `remote.o_proj(layer, x)`, and so on.

    `sites`: None where the service adds the bias, in the clear and unchecked.
    """

    def __init__(
        self,
        model: SavedModel,
        channels: Sequence[Channel],
        mask: Mask | None,
        *,
        hide: HideAt | None = None,
        check: Any = UNVERIFIED,
        sites: Sites | None = None,
        one_rpc_per_module: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._config, self._mask, self._check = read_config(model.directory), mask, check
        self._settings = CallSettings(lambda _layer: channels, timeout_s, None)
        self._randomness = Randomness(bytes(32))
        self._hide = hide or linear_masking(mask, self._randomness)
        self._sites, self._alone = sites, one_rpc_per_module

    def linear(self, layer: int, operator: LinearOperator, x: torch.Tensor) -> Any:
        site = (layer, operator)
        return RemoteLinear(
            site,
            self._config,
            self._settings,
            hide=self._hide(site),
            rules=MaskRules(self._mask),
            check=self._check,
            linear=FloatSite() if self._sites is None else self._sites[site],
            bias_leaves=self._sites is None,
            one_rpc_per_module=self._alone,
        )(x)

    def __getattr__(self, operator: Operator) -> Callable[..., Any]:
        if is_linear(operator):
            return lambda layer, x: self.linear(layer, operator, x)
        given = (self._mask, self._check, self._settings, self._randomness)
        if operator == "attn_scores":
            return lambda layer, q, k: product_call(operator, layer, *given)((q, k.transpose(1, 2)))
        if operator == "attn_values":
            return lambda layer, p, v: product_call(operator, layer, *given)((p, v))
        make = embedding_call if operator == "embedding" else lm_head_call
        return make(self._config, torch.float32, 0, *given)


def remote_under(
    model: SavedModel, channels: Sequence[Channel], mask: Mask | None, **settings: Any
) -> Remote:
    """Return operators that ask these services under a mask, in float32."""
    return Remote(model, channels, mask, **settings)
