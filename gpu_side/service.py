"""The service process: bind, load, answer until told to stop (`gpu_side.request_loop`)."""

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmq import curve_public

from gpu_side.access import HttpKeys, ServiceKeys, read_allow_list, read_tokens, rereads_list
from gpu_side.cuda.products import check_integers
from gpu_side.defaults import DRAIN_S
from gpu_side.devices import Device, NullDevice, parse_device
from gpu_side.event_log import limited, log
from gpu_side.handler import (
    Attest,
    QueueLimits,
    RequestHandler,
    Served,
    ServiceState,
    served_zeros,
)
from gpu_side.kernels import NullKernels, there
from gpu_side.ranks.head import Ranks
from gpu_side.ranks.worker import RankJob, by_torchrun, device_at, placed, work
from gpu_side.request_loop import RequestLoop, StoppedWhileLoadingError, StopSignal
from gpu_side.sessions import SessionSettings
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import Listener
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.transport.zmq_listener import ZmqListener
from gpu_side.weights import ServedModel, ServiceWeights, read_served_model
from protocol import native
from protocol.curve import read_key, require_zmq_keys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import is_beyond_loopback, parse_endpoint
from protocol.errors import KernelError, SettingsError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S
from protocol.messages import WHOLE
from protocol.model.config import read_config
from protocol.tensors import require_little_endian, torch_dtype


@dataclass(frozen=True)
class ServiceSettings:
    """What `gpu-service` is told. `job`: what to compute, as the head of so many ranks.

    `sessions`: how much of them to keep. `metrics`: as `gpu_side.metrics.parse_address` reads it,
    None: not served. `queue`: how much may wait. `drain_timeout_s`: how long to go on with what was
    taken, once told to stop. `identity`: the file of our secret key (or `secret`: the key itself,
    made in this process), and `allow`: the list of the clients that are let in, which SIGHUP reads
    again; without them every client is let in, and other machines have to be allowed by
    `allow_anyone`. `heartbeat_timeout_s`: see `protocol.zmq_channel`. `http_`: see HttpKeys, for a
    URL as `bind`; SIGHUP reads the tokens again.
    """

    job: RankJob
    bind: str
    sessions: SessionSettings = field(default_factory=SessionSettings)
    metrics: str | None = None
    queue: QueueLimits = field(default_factory=QueueLimits)
    drain_timeout_s: float = DRAIN_S
    identity: Path | None = None
    secret: bytes | None = field(default=None, repr=False)
    allow: Path | None = None
    allow_anyone: bool = False
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    http_tokens: Path | None = None
    http_cert: Path | None = None
    http_key: Path | None = None

    def read_http(self) -> HttpKeys | None:
        """Read what HTTP needs, None for another transport. Raises KeyFileError, SettingsError."""
        if self.bind.startswith(("http:", "https:")):
            return HttpKeys.read(self.http_tokens, self.http_cert, self.http_key)
        for name in ("http_tokens", "http_cert", "http_key"):
            SettingsError.unless(
                getattr(self, name) is None,
                f"--{name.replace('_', '-')}",
                f"--bind {self.bind}",
                "--http",
            )
        return None

    def read_keys(self) -> ServiceKeys | None:
        """Read our key and the list of allowed clients; None: every client is allowed.

        Raises KeyFileError, and SettingsError where that is not what was meant.
        """
        if self.secret is not None:
            if self.allow is None or self.identity or self.allow_anyone:
                raise SettingsError(
                    "--attest",
                    got="other options of keys",
                    expected="--allow alone: the key of an attested service is made inside",
                )
            return ServiceKeys(self.secret, read_allow_list(self.allow))
        if self.identity is None and self.allow is None:
            SettingsError.unless(
                self.http_tokens is None or not self.allow_anyone,
                "keys",
                "--http-tokens and --allow-anyone",
                "one of them",
            )
            keys = "--identity and --allow (tsqp keys new makes keys)"
            if self.bind.startswith("http"):
                keys = "--http-tokens (tsqp api-key NAME --digest makes one)"
            SettingsError.unless(
                not is_beyond_loopback(self.bind) or self.http_tokens or self.allow_anyone,
                f"--bind {self.bind}",
                "an address that other machines reach, open to all of them",
                f"{keys}, or --allow-anyone",
            )
            return None
        if self.identity is None or self.allow is None or self.allow_anyone:
            names = [name for name in ("identity", "allow") if getattr(self, name) is not None]
            names += ["allow-anyone"] * self.allow_anyone
            raise SettingsError(
                "keys",
                got=" and ".join(f"--{name}" for name in names),
                expected="--identity and --allow, or neither",
            )
        return ServiceKeys(read_key(self.identity, secret=True), read_allow_list(self.allow))


def open_listener(
    endpoint: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    spin_us: float = 0.0,
    keys: ServiceKeys | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    http: HttpKeys | None = None,
) -> Listener:
    """Bind a service's endpoint. `spin_us`: see `protocol.liveness`.

    `keys`: ours and those of the clients that are let in; None lets in every client.
    `heartbeat_timeout_s`: see `protocol.zmq_channel`; only ZeroMQ has any. `http`: of use for URLs
    alone. Raises EndpointError, and SettingsError for keys where the endpoint has no use for them.
    """
    parsed = parse_endpoint(endpoint, for_bind=True)
    if keys is not None:
        require_zmq_keys(endpoint)
    if parsed.is_http:
        return HttpListener(endpoint, max_message_bytes=max_message_bytes, keys=http)
    if parsed.is_stream:
        return StreamListener(endpoint, max_message_bytes=max_message_bytes, spin_us=spin_us)
    return ZmqListener(
        endpoint,
        max_message_bytes=max_message_bytes,
        spin_us=spin_us,
        keys=keys,
        heartbeat_timeout_s=heartbeat_timeout_s,
    )


def serve(settings: ServiceSettings, attest: Attest | None = None) -> None:
    """Run the service until SIGTERM or SIGINT. `attest`: see RequestHandler.

    Raises SettingsError, KeyFileError, EndpointError, ModelError or KernelError while starting;
    afterwards EndpointError alone: a key was revoked and the address cannot be bound again, or the
    thread that accepts clients has died. A service without it should not look healthy.
    """
    started = time.monotonic()
    require_little_endian()
    # Every connection takes a descriptor.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    job = placed(settings.job)
    native.set_up(job.kernels, job.threads)
    device = parse_device(device_at(job.place, job.device))
    if job.place[0]:
        work(_settled(job, device))
        return
    settings.queue.check(job.max_message_bytes)
    keys, http = settings.read_keys(), settings.read_http()
    settings.sessions.check()
    with limited(log.logger), _stop_signals() as stop, ExitStack() as beside:
        # Bound before loading, so that a taken address is known at once and not minutes later.
        listener = open_listener(
            settings.bind,
            max_message_bytes=job.max_message_bytes,
            spin_us=job.spin_us,
            keys=keys,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            http=http,
        )
        state = ServiceState(
            settings.queue, device=str(device), clients_refused=lambda: listener.clients_refused
        )
        ranks: Ranks | None = None
        try:
            # At once: until then SIGHUP ends the process.
            allowed = (
                (settings.http_tokens, read_tokens)
                if settings.http_tokens
                else (settings.allow, read_allow_list)
            )

            def allow(found: frozenset[bytes]) -> None:
                listener.allow(found)
                stop.note_list()

            beside.enter_context(rereads_list(allow, *allowed))
            lets_in: dict[str, Any] = {"lets_in": "anyone"}
            if http is not None and http.tokens is not None:
                lets_in = {"lets_in": len(http.tokens)}
            elif keys is not None:
                key = curve_public(keys.secret).decode("ascii")
                lets_in = {"lets_in": len(keys.allowed), "key": key}
            log.info("bound", endpoint=listener.endpoint, **lets_in)
            _serve_metrics(settings, state, beside)
            job = _settled(job, device)
            if job.place != WHOLE:
                ranks = Ranks(job, stop, starts_them=not by_torchrun())
                beside.callback(ranks.close)
                ranks.start()
            operators = _load(job, device, state, stop, attest, settings.sessions, ranks)
            state.sessions = lambda: operators.sessions.totals
            if isinstance(listener, StreamListener):
                # Other transports do not know, or know a client by more than a connection.
                listener.on_gone = operators.sessions.forget_client
            log.info(
                "ready",
                endpoint=listener.endpoint,
                kernels=native.choice().variant,
                start_s=round(time.monotonic() - started, 2),
            )
            RequestLoop(operators, settings.drain_timeout_s).run(listener, stop)
        except StoppedWhileLoadingError:
            pass  # as it was told
        finally:
            listener.close()
    if ranks is not None and ranks.failure is not None:
        raise ranks.failure
    log.info("stopped", endpoint=listener.endpoint)


def _serve_metrics(settings: ServiceSettings, state: ServiceState, stack: ExitStack) -> None:
    if settings.metrics is None:
        return
    with SettingsError.instead_of(
        ModuleNotFoundError,
        "metrics",
        "no prometheus_client",
        "it installed: pip install '.[metrics]'",
    ):
        # Not imported, and need not be installed, where the operator asks for no metrics.
        from gpu_side.metrics import serving_metrics
    log.info("metrics", url=stack.enter_context(serving_metrics(settings.metrics, state)))


@contextmanager
def _stop_signals() -> Iterator[StopSignal]:
    stop = StopSignal()
    with stop.reader, stop.writer, ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, stop.request))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(stop.writer.fileno()))
        yield stop


def _load(
    job: RankJob,
    device: Device,
    state: ServiceState,
    stop: StopSignal,
    attest: Attest | None,
    sessions: SessionSettings,
    ranks: Ranks | None,
) -> RequestHandler:
    """Read the weights. Raises StoppedWhileLoadingError if a stop signal comes meanwhile."""
    began = logged = time.monotonic()
    config, layers = read_config(job.model), job.layers
    several: dict[str, Any] = {} if ranks is None else {"ranks": job.place[1]}
    log.info(
        "loading",
        model=job.model.name,
        architecture=config.architecture,
        layers=config.num_hidden_layers if layers is None else f"{layers[0]}-{layers[1]}",
        device=str(device),
        dtype=job.dtype,
        **several,
    )

    def progress(done: int, total: int) -> None:
        nonlocal logged
        if stop.requested:
            raise StoppedWhileLoadingError
        if time.monotonic() - logged > 5.0:
            logged = time.monotonic()
            log.info("loading", layers_done=done, layers=total)

    held: ServedModel
    if isinstance(device, NullDevice):
        held = read_served_model(job.model, job.arithmetic, weights=False, layers=layers)
        log.warning("null_device", device=str(device), computes="nothing", replies="zeros")
        served: ServiceWeights | Served = served_zeros(
            held, NullKernels(device, torch_dtype(there(job.dtype)))
        )
    else:
        if ranks is not None:
            ranks.join(device)
        held = served = job.load(device, progress)
    masked: dict[str, Any] = {} if held.provision is None else {"mask": held.provision.mask}
    log.info(
        "loaded",
        weight_bytes=held.weight_bytes if isinstance(held, ServiceWeights) else 0,
        load_s=round(time.monotonic() - began, 2),
        digest=held.model_digest[:16],
        arithmetic="+".join(held.arithmetic),
        **masked,
    )
    if ranks is not None and isinstance(served, ServiceWeights):
        served = ranks.served(served)
    return RequestHandler(served, job.max_message_bytes, state, job.spin_us, attest, sessions)


def _settled(job: RankJob, device: Device) -> RankJob:
    """Return what every rank is told, and a service that has no other ranks.

    With the model's dtype where none was said, and without int8 weights where their products are
    not exact. Raises KernelError where these were insisted on.
    """
    config, arithmetic = read_config(job.model), job.arithmetic
    if "int8" in arithmetic:
        try:
            check_integers(config, None if isinstance(device, NullDevice) else device)
        except KernelError as error:
            if "float" not in arithmetic:
                raise
            log.warning("no_int8", serving="float", detail=str(error))
            arithmetic = ("float",)
    return job.model_copy(update={"dtype": job.dtype or config.dtype, "arithmetic": arithmetic})
