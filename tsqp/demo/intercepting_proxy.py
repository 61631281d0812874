"""Stands on the wire between one tee-runner and a gpu-service, as the owner of the GPU can.

Frames are forwarded untouched unless it is told to tamper with replies; a copy of each request is
decoded with the public schema alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from gpu_side.encoding import open_request, read_request
from gpu_side.transport.bind import open_listener
from protocol.connect import open_channel
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import ProtocolError, TsqpError
from protocol.messages import (
    LinearRequest,
    Request,
    RingLinearRequest,
    SeededRingLinearRequest,
)
from protocol.tensors import WireTensor, to_torch

# Longer than any of the demo model's requests takes.
_TIMEOUT_S = 60.0


@dataclass(frozen=True, eq=False)
class Seen:
    """One request as the GPU side receives it; `tensors`: all that it carries, in their order."""

    what: str
    layer: int | None
    tensors: tuple[torch.Tensor, ...]

    @property
    def first(self) -> torch.Tensor:
        """The first tensor, which every request but Init has."""
        return self.tensors[0]

    def numbers(self, count: int) -> list[float]:
        """Return the first few numbers of the first tensor."""
        shown: list[float] = self.first.flatten()[:count].tolist()
        return shown


# Gets the frames of a reply, returns those to forward instead.
Tamper: TypeAlias = Callable[[list[bytes]], list[bytes]]


class Tap:
    """Forwards between a client and `service`, calling `on_request` from a thread of its own.

    It listens at `endpoint`, over the transport of the service's; "" for a free port of this host.
    `tamper`: called from the same thread, with each reply. A request is shown before its reply is.
    """

    def __init__(
        self,
        service: str,
        on_request: Callable[[Seen], None],
        tamper: Tamper = lambda frames: frames,
        endpoint: str = "",
    ) -> None:
        self._on_request = on_request
        self._tamper = tamper
        self._front = open_listener(endpoint or "tcp://127.0.0.1:*")
        self.endpoint = self._front.endpoint
        self._back = open_channel(service)
        self._wakeup, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._forward, name="tap", daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        self._wakeup.close()
        self._front.close()
        self._back.close()

    def _forward(self) -> None:
        while self._front.wait(wakeup=self._wakeup):
            while (incoming := self._front.receive()) is not None:
                # Copies: what a client shares is another message's after the reply.
                frames = list(map(bytes, incoming.frames))
                if (reply := self._exchange(frames)) is not None:
                    self._front.send(incoming.route, self._tamper(reply))

    def _exchange(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the service's reply, whatever it is; None for none, as the client will notice."""
        # Below what a channel makes of a request and its reply: these are others'.
        try:
            self._back._send("a request", frames, sum(map(len, frames)), _TIMEOUT_S)
            # After forwarding, so that looking at a request does not delay it.
            self._show(frames)
            until = time.monotonic() + _TIMEOUT_S
            while time.monotonic() < until:
                if (received := self._back._receive(until)) is not None:
                    return list(map(bytes, received[0]))
        except TsqpError:
            pass
        return None

    def _show(self, frames: list[bytes]) -> None:
        try:
            request = read_request(open_request(frames, DEFAULT_MAX_MESSAGE_BYTES))
        except ProtocolError:
            return
        if (seen := describe_request(request)) is not None:
            self._on_request(seen)


def describe_request(request: Request) -> Seen | None:
    """Say what a request shows to its receiver; None for Init, which carries no tensor."""
    tensors = tuple(to_torch(value) for _, value in request if isinstance(value, WireTensor))
    if not tensors:
        return None
    what, layer = request.method, None
    if isinstance(request, LinearRequest | RingLinearRequest | SeededRingLinearRequest):
        what, layer = " ".join(request.module_names), request.layer_idx
    return Seen(what, layer, tensors)
