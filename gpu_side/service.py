"""The service process: bind, load, answer until told to stop.

One thread does everything. Whatever has arrived is picked up between two requests, from its clients
in turn. What waits in the transport while a product runs is not seen before the product is done, so
the queueing time in a reply is a lower bound. A malformed message gets an error
reply with a code and a line in the log; nothing that a client sends ends the service.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from gpu_side.devices import Device, NullDevice, parse_device
from gpu_side.holdings import BOTH, Holdings, read_holdings
from gpu_side.kernels import NullWeights
from gpu_side.operators import Operators
from gpu_side.weights import check_integers, load_weights
from protocol.channel import Incoming, Listener
from protocol.connect import open_listener
from protocol.encoding import (
    DEFAULT_MAX_MESSAGE_BYTES,
    EnvelopeError,
    OpenedRequest,
    encode_reply,
    likely_form,
    open_request,
    read_request,
)
from protocol.errors import ErrorCode, KernelError, ProtocolError
from protocol.messages import Arithmetic, Timing
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import require_little_endian, torch_dtype

log = logging.getLogger("gpu_service")

# Picked up but not yet started. Beyond it messages wait in the transport's bounded queues.
MAX_QUEUED_REQUESTS = 64
_STOPPING_S = 0.1


@dataclass(frozen=True)
class ServiceSettings:
    """What `gpu-service` is told. `dtype`: a short name, or None for the model's own.

    `device`: as `parse_device` reads it. `arithmetic`: which linear weights to hold; "both" does
    without int8 ones where the device's int8 products are not exact, or the weights are transformed
    for a feature mask. `spin_us`: how long to look for the next message before blocking, as long as
    messages come that fast.
    """

    model: Path
    bind: str
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    arithmetic: Literal["float", "int8", "both"] = "both"
    spin_us: float = 0.0


def serve(settings: ServiceSettings) -> None:
    """Run the service until SIGTERM or SIGINT.

    Raises SettingsError, EndpointError, ModelError or KernelError while starting, and nothing
    afterwards.
    """
    started = time.monotonic()
    require_little_endian()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = parse_device(settings.device)
    with _stop_signals() as stop:
        # Bound before loading, so that a taken address is known at once and not minutes later.
        listener = open_listener(
            settings.bind,
            max_message_bytes=settings.max_message_bytes,
            spin_us=settings.spin_us,
        )
        try:
            log.info("bound", extra={"fields": {"endpoint": listener.endpoint}})
            service = _load(settings, device, stop)
            if service is not None:
                log.info(
                    "ready",
                    extra={
                        "fields": {
                            "endpoint": listener.endpoint,
                            "start_s": round(time.monotonic() - started, 2),
                        }
                    },
                )
                service.run(listener, stop)
        finally:
            listener.close()
    log.info("stopped", extra={"fields": {"endpoint": settings.bind}})


class _StopSignal:
    """Turns SIGTERM and SIGINT into a readable socket, so that a blocked poll wakes at once."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.requested = False

    def request(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


@contextmanager
def _stop_signals() -> Iterator[_StopSignal]:
    stop = _StopSignal()
    previous = {n: signal.signal(n, stop.request) for n in (signal.SIGTERM, signal.SIGINT)}
    previous_fd = signal.set_wakeup_fd(stop.writer.fileno())
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        stop.reader.close()
        stop.writer.close()


class _StoppedWhileLoadingError(Exception):
    """A stop signal came before the weights were read."""


def _load(settings: ServiceSettings, device: Device, stop: _StopSignal) -> _Service | None:
    """Read the weights; None if a stop signal came meanwhile."""
    began = time.monotonic()
    config = read_config(settings.model)
    dtype = settings.dtype or config.dtype
    log.info(
        "loading",
        extra={
            "fields": {
                "model": settings.model.name,
                "architecture": config.architecture,
                "layers": config.num_hidden_layers,
                "device": str(device),
                "dtype": dtype,
            }
        },
    )
    limit = settings.max_message_bytes
    arithmetic = _arithmetic(settings, config, device)
    if isinstance(device, NullDevice):
        held, _ = read_holdings(settings.model, arithmetic, weights=False)
        log.warning(
            "null_device",
            extra={"fields": {"device": str(device), "computes": "nothing", "replies": "zeros"}},
        )
        _log_loaded(held, 0, time.monotonic() - began)
        return _Service(Operators(NullWeights(held, device, torch_dtype(dtype)), limit), limit)
    logged = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged
        if stop.requested:
            raise _StoppedWhileLoadingError
        if time.monotonic() - logged > 5.0:
            logged = time.monotonic()
            log.info("loading", extra={"fields": {"layers_done": done, "layers": total}})

    try:
        weights = load_weights(
            settings.model,
            device=device,
            dtype=torch_dtype(dtype),
            arithmetic=arithmetic,
            progress=progress,
        )
    except _StoppedWhileLoadingError:
        return None
    _log_loaded(weights, weights.weight_bytes, time.monotonic() - began)
    return _Service(Operators(weights, limit), limit)


def _log_loaded(held: Holdings, weight_bytes: int, load_s: float) -> None:
    log.info(
        "loaded",
        extra={
            "fields": {
                "weight_bytes": weight_bytes,
                "load_s": round(load_s, 2),
                "digest": held.model_digest[:16],
                "arithmetic": "+".join(held.arithmetic),
                **({} if held.provision is None else {"mask": held.provision.mask}),
            }
        },
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
        log.warning("no_int8", extra={"fields": {"serving": "float", "detail": str(error)}})
        return ("float",)
    return BOTH if settings.arithmetic == "both" else ("int8",)


class _Service:
    """The request loop."""

    def __init__(self, operators: Operators, max_message_bytes: int) -> None:
        self._operators = operators
        self._max_message_bytes = max_message_bytes

    def run(self, listener: Listener, stop: _StopSignal) -> None:
        """Answer until told to stop."""
        with torch.inference_mode():
            self._run(listener, stop)

    def _run(self, listener: Listener, stop: _StopSignal) -> None:
        queue: deque[Incoming] = deque()
        while not stop.requested:
            if queue:
                incoming: Incoming | None = queue.popleft()
            elif listener.wait(wakeup=stop.reader):
                incoming = listener.receive()
            else:
                break
            if incoming is not None:
                self._answer(listener, incoming)
            # After the reply, not before it: finding nothing takes time, too.
            while len(queue) < MAX_QUEUED_REQUESTS and (later := listener.receive()):
                queue.append(later)
        # Requests that arrive in the moment of stopping get an answer, not a passed deadline.
        # Bounded, so that a client that goes on sending cannot keep the service from stopping.
        until = time.monotonic() + _STOPPING_S
        while queue or listener.wait(timeout_ms=max(0, int((until - time.monotonic()) * 1000))):
            if time.monotonic() > until:
                break
            incoming = queue.popleft() if queue else listener.receive()
            if incoming is not None:
                self._refuse_while_stopping(listener, incoming)

    def _answer(self, listener: Listener, incoming: Incoming) -> None:
        started_ns = time.perf_counter_ns()
        form, request_id, method = likely_form(incoming.frames), 0, ""
        try:
            opened = open_request(incoming.frames, self._max_message_bytes)
            form, request_id, method = opened.form, opened.request_id, opened.method
            queue_us = (started_ns - incoming.received_ns) // 1000
            _check_deadline(opened, queue_us)
            result = self._operators.apply(read_request(opened))
            compute_us = (time.perf_counter_ns() - started_ns) // 1000
            timing = Timing(queue_us=max(0, queue_us), compute_us=compute_us)
            frames = encode_reply(form, request_id, method, result, timing)
        except ProtocolError as error:
            if isinstance(error, EnvelopeError):
                form, request_id = error.form, error.request_id
            frames = encode_reply(form, request_id, method, error.code)
            log.warning(
                "refused",
                extra={
                    "fields": {
                        "peer": incoming.peer,
                        "request_id": request_id,
                        "code": error.code.value,
                        "detail": str(error),
                    }
                },
            )
        except Exception:
            # Exhausted memory, a device fault or a mistake of ours: this request fails, the
            # others go on. The traceback stays in our own log.
            frames = encode_reply(form, request_id, method, ErrorCode.INTERNAL)
            log.exception(
                "failed",
                extra={
                    "fields": {"peer": incoming.peer, "request_id": request_id, "method": method}
                },
            )
        if not listener.send(incoming.route, frames):
            log.warning(
                "client_gone", extra={"fields": {"peer": incoming.peer, "request_id": request_id}}
            )

    def _refuse_while_stopping(self, listener: Listener, incoming: Incoming) -> None:
        try:
            opened = open_request(incoming.frames, self._max_message_bytes)
        except ProtocolError:
            return
        listener.send(
            incoming.route,
            encode_reply(opened.form, opened.request_id, opened.method, ErrorCode.SHUTTING_DOWN),
        )


def _check_deadline(opened: OpenedRequest, queue_us: int) -> None:
    if opened.timeout_ms is not None and queue_us > opened.timeout_ms * 1000:
        raise ProtocolError(
            opened.method,
            got=f"{queue_us / 1e6:.3f} s in the queue",
            expected=f"a start within {opened.timeout_ms / 1e3:g} s",
            code=ErrorCode.DEADLINE_EXCEEDED,
        )
