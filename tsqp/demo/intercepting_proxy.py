"""Stands on the wire between one tee-runner and a gpu-service, as the owner of the GPU can.

Frames are forwarded untouched unless it is told to tamper with replies; a copy of each request is
decoded with the public schema alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import zmq

from gpu_side.encoding import open_request, read_request
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.errors import ProtocolError
from protocol.messages import LinearRequest, Request, RingLinearRequest
from protocol.tensors import WireTensor, to_torch


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

    `tamper`: called from the same thread, with each reply. A request is shown before its reply is.
    """

    def __init__(
        self,
        service: str,
        on_request: Callable[[Seen], None],
        tamper: Tamper = lambda frames: frames,
    ) -> None:
        self._on_request = on_request
        self._tamper = tamper
        self._context = zmq.Context()
        self._front: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind("tcp://127.0.0.1:*")
        self._back: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._back.setsockopt(zmq.LINGER, 0)
        self._back.connect(service)
        self.endpoint = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._forward, name="tap", daemon=True)

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._front.close()
        self._back.close()
        self._context.term()

    def _forward(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        client = b""
        while not self._stopping.is_set():
            ready = dict(poller.poll(100))
            if self._front in ready:
                client, *frames = self._front.recv_multipart()
                self._back.send_multipart(frames)
                # After forwarding, so that looking at a request does not delay it.
                self._show(frames)
            if self._back in ready:
                self._front.send_multipart([client, *self._tamper(self._back.recv_multipart())])

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
    if isinstance(request, LinearRequest | RingLinearRequest):
        what, layer = " ".join(request.module_names), request.layer_idx
    return Seen(what, layer, tensors)
