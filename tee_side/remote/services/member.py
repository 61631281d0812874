"""One service: its connection, which is used only after the handshake, or why there is none.

The handshake checks, before anything secret is sent, that the service holds the model of our own
directory. This catches a service that was started with another model. It proves nothing about what
the service computes: it can answer all of this correctly and lie afterwards.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from protocol.channel import Channel, ChannelWrapper, PendingChannel
from protocol.errors import (
    DeadlineExceededError,
    EndpointError,
    ModelMismatchError,
    ReplyError,
    ServiceError,
    TsqpError,
)
from protocol.messages import NONCE_BYTES, Arithmetic, InitReply, InitRequest, Response
from protocol.model.checkpoint import Checkpoint, model_digest
from protocol.model.config import ModelConfig
from protocol.prepared import Traffic
from tee_side.remote.services.plan import ReplicaGroup, one_service

if TYPE_CHECKING:
    from tee_side.protect.masks.mask import MaskKey

log = logging.getLogger("tee_side")

# How long one lost service is tried before the next one is, where several are.
TURN_S = 0.05
# A handshake that is not answered by then is begun again, over a new connection.
_HANDSHAKE_S = 5.0
# Hardware takes its time for evidence.
_ATTESTED_HANDSHAKE_S = 30.0
# From one failed attempt to the next.
_PAUSE_S = 0.05
# How long one attempt to connect a stream may take.
_CONNECT_S = 0.02


class ServiceCheck:
    """What a service must say that it holds; made once, for every service and every connection.

    `arithmetic`: what it must be able to do; `key`: of the weights that a provisioned service must
    hold, None where it must hold the model's own; `linear`: the linear digest that these must have,
    None where the directory does not say. `whole_layers`: whether it is to be asked for segments,
    which ranks cannot compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        arithmetic: Arithmetic = "float",
        key: MaskKey | None = None,
        linear: str | None = None,
        whole_layers: bool = False,
    ) -> None:
        self._layers = config.num_hidden_layers
        self._arithmetic, self._whole_layers = arithmetic, whole_layers
        self._hint = (
            "start service and runner with the same model"
            if key is None
            else "start gpu-service with the directory that tsqp provision wrote with this key"
        )
        # The sizes come first, because they tell a person more than a digest that covers them.
        self._expected: dict[str, object] = {
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "provision_id": key.provision_id if key else None,
        }
        # The model digest covers the configuration (RoPE, too) and all norms. Computing it reads
        # some rows of every tensor, so it is not computed again for each connection.
        if key is None:
            self._expected["model_digest"] = model_digest(config, checkpoint)
        digest = key.server_linear_digest if key else linear
        if digest is not None:
            self._expected["linear_digest"] = digest

    def verify(
        self, endpoint: str, reply: Response | None, layers: tuple[int, int] | None = None
    ) -> InitReply:
        """Compare a service's Init reply with the TEE's own copy, and return it.

        `layers`: first and last that it is to be asked for, None for all. Raises ModelMismatchError
        naming the field, and ReplyError for an Init reply that is none.
        """
        if not isinstance(reply, InitReply):
            raise ReplyError(f"Init reply from {endpoint}", type(reply).__name__, "InitReply")

        said = vars(reply) | reply.config.model_dump()
        first, last = layers or (0, self._layers - 1)

        def require(holds: bool, name: str, got: str, expected: str) -> None:
            ModelMismatchError.unless(holds, f"model at {endpoint}: {name}", got, expected)

        for name, ours in self._expected.items():
            got, expected = str(said[name])[:16], f"{str(ours)[:16]} ({self._hint})"
            require(said[name] == ours, name, got, expected)
        require(
            self._arithmetic in reply.arithmetic,
            "arithmetic",
            " and ".join(reply.arithmetic) or "none",
            f"{self._arithmetic} (start gpu-service with --arithmetic {self._arithmetic} or both)",
        )
        require(
            reply.layers[0] <= first and reply.layers[1] >= last,
            "layers",
            "{}-{}".format(*reply.layers),
            f"{first}-{last}, which it is to be asked for (gpu-service --layers, tee-runner"
            " --gpu ENDPOINT=LAYERS)",
        )
        require(
            reply.ranks == 1 or not self._whole_layers,
            "ranks",
            str(reply.ranks),
            "1: the policy has segments (gpu-service without --tensor-parallel)",
        )
        return reply


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How every service is reached and checked.

    `open` returns a fresh channel; `verify` compares an Init reply from an endpoint with what is
    asked of it for some layers, and raises ModelMismatchError or ReplyError. `link`: what each
    channel is wrapped in. `timeout_s`: deadline of a request that names none. `appraise`: takes an
    endpoint, its statement and the nonce that it is of, and raises EvidenceError; None: services
    need not prove what they are. `barred`: the endpoints that nobody asks again who goes by these
    options, on whichever thread, and why.
    """

    open: Callable[[str], PendingChannel]
    verify: Callable[[str, Response | None, tuple[int, int]], InitReply]
    link: ChannelWrapper | None = None
    timeout_s: float = 60.0
    appraise: Callable[[str, bytes, bytes], None] | None = None
    barred: dict[str, TsqpError] = field(default_factory=dict)


# The service processes of a run, by the instance id that each gives itself: the dealer's number,
# and the endpoint that it was first seen at. An id belongs to that endpoint for the whole run, gone
# or not: the process may remember what it saw, and one that lied must not be asked under another
# name. Against mistakes only. An id is what a process claims, so it never counts against the
# endpoint that had it first, which may be no more than the one that was named.
Instances: TypeAlias = dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A connection to a service that has passed the handshake.

    `connection`: the transport's own; `channel`: what requests go through.
    """

    member: Member
    connection: PendingChannel
    channel: Channel


@dataclass(slots=True, eq=False)
class Member:
    """A service of a group, and the state of our relations with it.

    It is ready (`session`), lost (`error` says why; `try_connect` may bring it back), or
    quarantined for the rest of the run (`quarantined` says why).
    """

    endpoint: str
    group: ReplicaGroup
    options: ConnectOptions
    instances: Instances
    # Of all services together.
    traffic: Traffic
    session: Session | None = None
    error: TsqpError | None = None
    # What it said of itself in the last handshake, for people.
    reply: InitReply | None = field(default=None, repr=False)
    # A connection on which Init was asked, until when its answer is waited for, and its nonce.
    _handshake: tuple[PendingChannel, int, float, bytes] | None = field(
        default=None, init=False, repr=False
    )
    _next_attempt: float = field(default=0.0, init=False)

    @property
    def quarantined(self) -> TsqpError | None:
        """Why it is asked no more; None where it may be."""
        return self.options.barred.get(self.endpoint)

    def try_connect(self, until: float) -> bool:
        """Try to connect and to pass the handshake, until then; True once that is done.

        Goes on where the last call ended. Raises nothing of a service's: keeps what went wrong.
        """
        if self.session is not None or self.quarantined is not None:
            return self.session is not None
        try:
            self._try_connect(until)
        except (EndpointError, DeadlineExceededError, ServiceError) as error:
            self.lose(error)
        except TsqpError as error:
            self.quarantine(error)
        except BaseException:
            self._abort_handshake()
            raise
        return self.session is not None

    def _try_connect(self, until: float) -> None:
        options, group = self.options, self.group
        if self._handshake is None:
            now = time.monotonic()
            if now < self._next_attempt:
                time.sleep(max(0.0, min(until, self._next_attempt) - now))
                if until < self._next_attempt:
                    return
            connection = options.open(self.endpoint)
            # Whatever goes wrong from here on closes it.
            self._handshake = connection, 0, now, b""
            connection.use_one_connection()
            connection.traffic = self.traffic
            attested = options.appraise is not None
            within_s = _ATTESTED_HANDSHAKE_S if attested else _HANDSHAKE_S
            nonce = secrets.token_bytes(NONCE_BYTES) if attested else b""
            give_up = time.monotonic() + within_s
            request_id = connection.submit(
                InitRequest(nonce=nonce), within_s, send_within_s=_CONNECT_S
            )
            self._handshake = connection, request_id, give_up, nonce
        connection, request_id, give_up, nonce = self._handshake
        if not connection.arrived(request_id, until) and time.monotonic() < give_up:
            return
        response = connection.wait(request_id).response
        reply = options.verify(self.endpoint, response, (group.first, group.last))
        if options.appraise is not None:
            options.appraise(self.endpoint, reply.statement, nonce)
        said = group.dealer, self.endpoint
        dealer, where = self.instances.setdefault(reply.instance_id, said)
        if where != self.endpoint:
            raise one_service(where, self.endpoint, max(dealer, group.dealer))
        connection.limit_messages(reply.max_message_bytes)
        link = options.link
        channel = connection if link is None else link(connection, options.timeout_s)
        self._handshake, self.error, self.reply = None, None, reply
        self.session = Session(self, connection, channel)

    def lose(self, error: TsqpError) -> None:
        """Note that it cannot be asked now. Its session, if any, is for the caller to close."""
        self.session, self.error = None, error
        self._next_attempt = time.monotonic() + _PAUSE_S
        self._abort_handshake()

    def quarantine(self, error: TsqpError) -> None:
        """Never ask it again. The session: as in `lose`."""
        self.lose(error)
        if self.options.barred.setdefault(self.endpoint, error) is error:
            self.log("service_quarantined", error)

    def log(self, event: str, error: TsqpError | None = None) -> None:
        """Log what became of it, and why."""
        why = {} if error is None else {"detail": str(error)}
        log.warning(event, extra={"fields": {"endpoint": self.endpoint} | why})

    def log_waiting(self, deadline: float, option: str) -> None:
        """Say that it is waited for, how long, and what helps."""
        fields = {
            "endpoint": self.endpoint,
            "at_most_s": max(0, round(deadline - time.monotonic())),
            "detail": f"start a gpu-service there; {option} says how long it is waited for",
        }
        log.warning("waiting_for_service", extra={"fields": fields})

    def close(self) -> None:
        """Disconnect."""
        self._abort_handshake()
        if self.session is not None:
            self.session.connection.close()
            self.session = None

    def _abort_handshake(self) -> None:
        if self._handshake is not None:
            connection, self._handshake = self._handshake[0], None
            connection.close()
