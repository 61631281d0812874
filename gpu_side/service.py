"""The service process: bind, load, answer until told to stop (`gpu_side.request_loop`)."""

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zmq import curve_public

from gpu_side.access import HttpKeys, ServiceKeys, read_allow_list, read_tokens, rereads_list
from gpu_side.cuda.device import check_integers
from gpu_side.defaults import ALL_CLIENTS, DRAIN_S, QUEUED_REQUESTS, QUEUED_TOTAL_REQUESTS
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
from gpu_side.kernels import NullKernels
from gpu_side.ranks.head import Ranks
from gpu_side.ranks.worker import OPTION, RankJob, by_torchrun, device_at, place_of, work
from gpu_side.request_loop import RequestLoop, StoppedWhileLoadingError, StopSignal
from gpu_side.served_model import BOTH, ServedModel, check_columns, read_served_model
from gpu_side.sessions import SessionSettings
from gpu_side.transport.http_listener import HttpListener
from gpu_side.transport.listener import Listener
from gpu_side.transport.stream_listener import StreamListener
from gpu_side.transport.zmq_listener import ZmqListener
from gpu_side.weights import ServiceWeights
from protocol import native
from protocol.curve import read_secret_key, require_zmq_keys
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import is_beyond_loopback, parse_endpoint
from protocol.errors import KernelError, SettingsError
from protocol.liveness import DEFAULT_HEARTBEAT_TIMEOUT_S
from protocol.messages import WHOLE, Arithmetic, Columns
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import require_little_endian, torch_dtype


@dataclass(frozen=True)
class ServiceSettings:
    """What `gpu-service` is told. `dtype`: a short name, or None for the model's own.

    `device`: as `parse_device` reads it. `arithmetic`: which linear weights to hold; "both" does
    without int8 ones where the device's int8 products are not exact, or the weights are transformed
    for a feature mask. `spin_us`: how long to look for the next message before blocking, as long as
    messages come that fast, and to ask a GPU whether it is done. `layers`: first and last whose
    weights to hold, None: all. `tensor_parallel`: by how many processes to compute, each with its
    part of the output columns. `sessions`: how much of them to keep. `metrics`: as
    `gpu_side.metrics.parse_address` reads it, None: not served. `max_queued_`: how much of one
    client may wait, in bytes None: one message as large as allowed; and of all together, None: as
    much as of four. `drain_timeout_s`: how long to go on with what was taken, once told to stop.
    `identity`: our secret key (or `secret`: itself, made in this process), and `allow`: the list of
    the clients that are let in, which SIGHUP reads again; without them every client is let in, and
    other machines have to be allowed by `allow_anyone`. `heartbeat_timeout_s`: see
    `protocol.zmq_channel`. `kernels`: those of the CPU, see `protocol.native.use`; None: those in
    use. `http_`: see HttpKeys, for a URL as `bind`; SIGHUP reads the tokens again.
    """

    model: Path
    bind: str
    device: str = "cpu"
    dtype: str | None = None
    kernels: str | None = None
    threads: int | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    arithmetic: Literal["float", "int8", "both"] = "both"
    spin_us: float = 0.0
    layers: tuple[int, int] | None = None
    tensor_parallel: int = 1
    sessions: SessionSettings = field(default_factory=SessionSettings)
    metrics: str | None = None
    max_queued_requests: int = QUEUED_REQUESTS
    max_queued_bytes: int | None = None
    max_queued_total_requests: int = QUEUED_TOTAL_REQUESTS
    max_queued_total_bytes: int | None = None
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
        return ServiceKeys(read_secret_key(self.identity), read_allow_list(self.allow))

    @property
    def limits(self) -> QueueLimits:
        """Limits of the queue. Raises SettingsError for such as can never be reached, or passed."""
        of_one = self.max_queued_bytes or self.max_message_bytes
        of_all = self.max_queued_total_bytes or ALL_CLIENTS * of_one
        one, together, message = (size / 2**20 for size in (of_one, of_all, self.max_message_bytes))
        for option, value, least, why in (
            ("--max-queued-mib", one, message, "--max-message-mib"),
            ("--max-queued-total-mib", together, one, "--max-queued-mib"),
            (
                "--max-queued-total-requests",
                self.max_queued_total_requests,
                self.max_queued_requests,
                "--max-queued-requests",
            ),
        ):
            SettingsError.unless(
                value >= least, option, f"{value:.9g}", f"at least {least:.9g}, which is {why}"
            )
        return QueueLimits(self.max_queued_requests, of_one, self.max_queued_total_requests, of_all)


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
    place = WHOLE if settings.tensor_parallel == 1 else place_of(settings.tensor_parallel)
    native.set_up(settings.kernels, _threads(settings))
    device = parse_device(device_at(place, settings.device))
    if place[0]:
        work(_job(settings, place, device))
        return
    limits, keys, http = settings.limits, settings.read_keys(), settings.read_http()
    settings.sessions.check()
    with limited(log.logger), _stop_signals() as stop, ExitStack() as beside:
        # Bound before loading, so that a taken address is known at once and not minutes later.
        listener = open_listener(
            settings.bind,
            max_message_bytes=settings.max_message_bytes,
            spin_us=settings.spin_us,
            keys=keys,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            http=http,
        )
        state = ServiceState(
            limits, device=str(device), clients_refused=lambda: listener.clients_refused
        )
        ranks: Ranks | None = None
        try:
            # At once: until then SIGHUP ends the process.
            tokens = settings.http_tokens
            allowed = (tokens, read_tokens) if tokens else (settings.allow, read_allow_list)

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
            job = _job(settings, place, device)
            if place != WHOLE:
                ranks = Ranks(job, stop, starts_them=not by_torchrun())
                beside.callback(ranks.close)
                ranks.start()
            operators = _load(settings, job, device, state, stop, attest, ranks)
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
    settings: ServiceSettings,
    job: RankJob,
    device: Device,
    state: ServiceState,
    stop: StopSignal,
    attest: Attest | None,
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
            held, NullKernels(device, torch_dtype(job.dtype))
        )
    else:
        if ranks is not None:
            ranks.join()
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
    return RequestHandler(
        served,
        settings.max_message_bytes,
        state,
        settings.spin_us,
        attest,
        settings.sessions,
    )


def _threads(settings: ServiceSettings) -> int | None:
    """Return how many a process uses: of several each has its share of the cores; None: all."""
    ranks = settings.tensor_parallel
    return settings.threads or (None if ranks == 1 else max(1, native.usable_cores() // ranks))


def _job(settings: ServiceSettings, place: Columns, device: Device) -> RankJob:
    """Return what every rank is told, and a service that has no other ranks."""
    config = read_config(settings.model)
    check_columns(config, (0, place[1]), OPTION)
    return RankJob(
        place=place,
        store=None,
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype or config.dtype,
        arithmetic=_arithmetic(settings, config, device),
        kernels=settings.kernels,
        threads=_threads(settings),
        spin_us=settings.spin_us,
        layers=settings.layers,
        max_message_bytes=settings.max_message_bytes,
    )


def _arithmetic(
    settings: ServiceSettings, config: ModelConfig, device: Device
) -> tuple[Arithmetic, ...]:
    """Decide which linear weights to hold. Raises KernelError where int8 was insisted on."""
    if settings.arithmetic == "float":
        return ("float",)
    try:
        check_integers(config, None if isinstance(device, NullDevice) else device)
    except KernelError as error:
        if settings.arithmetic == "int8":
            raise
        log.warning("no_int8", serving="float", detail=str(error))
        return ("float",)
    return BOTH if settings.arithmetic == "both" else ("int8",)
