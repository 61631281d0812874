"""The service process: bind, load, answer until told to stop (`gpu_side.request_loop`)."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gpu_side.devices import Device, NullDevice, parse_device
from gpu_side.holdings import BOTH, Holdings, read_holdings
from gpu_side.kernels import NullWeights
from gpu_side.operators import Operators
from gpu_side.request_loop import RequestLoop, StopSignal
from gpu_side.weights import check_integers, load_weights
from protocol.connect import open_listener
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import KernelError
from protocol.messages import Arithmetic
from protocol.model.config import ModelConfig, read_config
from protocol.tensors import require_little_endian, torch_dtype

log = logging.getLogger("gpu_service")


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
            loop = _load(settings, device, stop)
            if loop is not None:
                log.info(
                    "ready",
                    extra={
                        "fields": {
                            "endpoint": listener.endpoint,
                            "start_s": round(time.monotonic() - started, 2),
                        }
                    },
                )
                loop.run(listener, stop)
        finally:
            listener.close()
    log.info("stopped", extra={"fields": {"endpoint": settings.bind}})


@contextmanager
def _stop_signals() -> Iterator[StopSignal]:
    stop = StopSignal()
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


def _load(settings: ServiceSettings, device: Device, stop: StopSignal) -> RequestLoop | None:
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
        return RequestLoop(Operators(NullWeights(held, device, torch_dtype(dtype)), limit), limit)
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
    return RequestLoop(Operators(weights, limit), limit)


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
