"""Results that an accelerator may still be working on, and the way of tensors to it and back.

On CUDA, copies go through pinned host memory, which the device reads and writes by itself; from
pageable memory the driver would stage every copy a second time and wait. torch keeps pinned blocks
and hands them out again once the device is done with them, so none is allocated per request.
Products with weights have a way of their own there (`gpu_side.cuda.products`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from gpu_side.cuda.device import Event
from gpu_side.transport.listener import Incoming
from protocol.messages import Request, Response


class Working(Protocol):
    """What an accelerator was given; the host has other things to do meanwhile."""

    def ends_ns(self) -> int:
        """Return when it ends or ended (perf_counter_ns), or when to ask again.

        Raises RuntimeError where the device has failed.
        """


# A reply, and what has to end before its tensors may be read; None: nothing.
Result: TypeAlias = tuple[Response, Working | None]

# Computes requests that differ in the numbers of their tensors only. It gets the message that the
# request came in, too: in a slot of shared memory the result may be left where the reply goes.
Kernel: TypeAlias = Callable[[Request, Incoming | None], Result]

# A sleeping thread wakes up as late as this; the rest of a wait is spent awake.
_WAKE_UP_NS = 120_000


def wait_until(
    deadline_ns: int,
    clock: Callable[[], int] = time.perf_counter_ns,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return at that reading of the clock, a few microseconds late and never early.

    Sleeps for all but the last tenth of a millisecond or so: a sleep alone comes back too late, and
    staying awake takes a core from the program that is being measured.
    """
    spare_ns = deadline_ns - clock() - _WAKE_UP_NS
    if spare_ns > 0:
        sleep(spare_ns / 1e9)
    while clock() < deadline_ns:
        pass


# When to ask again whether the device is done: at once as long as we may spin, then after this, or
# a part of the time that it has taken so far, whichever is longer, so that long work costs no core.
_ASK_AGAIN_NS = 50_000

_ASK_AGAIN_PART = 8


# Two ways to carry tensors to the device and back:
#   to_device   returns a CPU tensor as it is needed there; the original may be freed at once
#   to_host     returns a device tensor on the CPU, complete once the work with it has ended


class InPlace:
    """The device is the CPU: nothing moves, and only another dtype is a copy."""

    # Without a Python call: it is asked for every request.
    to_device = staticmethod(torch.Tensor.to)

    def to_host(
        self, tensor: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Working | None]:
        """Return a tensor of the device on the CPU."""
        return tensor.to(dtype), None


def _empty_pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def _record(device: torch.device) -> Event:
    # The device's own stream: the current device may be another.
    event: Event = torch.cuda.current_stream(device).record_event()
    return event


class Queued:
    """What stands in a stream before an event: work of which only the device knows when it ends.

    `spin_us`: for how long to ask again without a pause; the loop looks for messages in between.
    `ended`: what is left to do then, on the host.
    """

    def __init__(
        self, event: Event, spin_us: float = 0.0, ended: Callable[[], None] | None = None
    ) -> None:
        self._event = event
        self._ended = ended
        self._began_ns = time.perf_counter_ns()
        self._spin_ns = int(spin_us * 1000)
        self._ended_ns = 0

    def ends_ns(self) -> int:
        """See `Working.ends_ns`."""
        if not self._ended_ns:
            now_ns = time.perf_counter_ns()
            if not self._event.query():
                taken_ns = now_ns - self._began_ns
                if taken_ns < self._spin_ns:
                    return now_ns + 1
                return now_ns + max(_ASK_AGAIN_NS, taken_ns // _ASK_AGAIN_PART)
            if self._ended is not None:
                self._ended()
            self._ended_ns = now_ns
        return self._ended_ns


class PinnedStaging:
    """The device is a CUDA one: copies through pinned memory, all on the current stream.

    Copies and kernels of requests queue up behind each other, and the host waits for none of them.
    dtypes are converted on the device, where it is cheap, and cross the bus as sent.
    """

    def __init__(
        self,
        device: torch.device,
        spin_us: float = 0.0,
        *,
        empty: Callable[[torch.Size, torch.dtype], torch.Tensor] = _empty_pinned,
        record: Callable[[torch.device], Event] = _record,
    ) -> None:
        self._device = device
        self._spin_us = spin_us
        self._empty = empty
        self._record = record

    def to_device(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a CPU tensor on the device."""
        # Dropping the pinned tensor early is safe: torch reuses its block only after the copy.
        pinned = self._empty(tensor.shape, tensor.dtype).copy_(tensor)
        return pinned.to(self._device, non_blocking=True).to(dtype)

    def to_host(
        self, tensor: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Working | None]:
        """Return a tensor of the device on the CPU."""
        pinned = self._empty(tensor.shape, dtype)
        pinned.copy_(tensor.to(dtype), non_blocking=True)
        return pinned, Queued(self._record(self._device), self._spin_us)


Transfer: TypeAlias = InPlace | PinnedStaging


def transfer_to(device: torch.device, spin_us: float = 0.0) -> Transfer:
    """Return what carries tensors to a device. `spin_us`: see `Queued`."""
    return PinnedStaging(device, spin_us) if device.type == "cuda" else InPlace()
