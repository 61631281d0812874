"""Stands on the wire between one tee-runner and a gpu-service, as the owner of the GPU can.

Frames are forwarded untouched unless it is told to tamper with replies, as the `Liar` does once; a
copy of each request is decoded with the public schema alone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from gpu_side.encoding import open_request, read_request
from gpu_side.service import open_listener
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, decode_reply
from protocol.errors import ProtocolError, TsqpError
from protocol.messages import TensorReply
from protocol.tensors import to_torch
from protocol.transport import open_channel
from tsqp.page.seen import ReceivedTensors, Seen, describe_request

# Longer than any of the demo model's requests takes.
_TIMEOUT_S = 60.0
# Late enough that there is a story, early enough that it is still being told.
LIES_AT = 150

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


@dataclass(eq=False)
class TapFeed(ReceivedTensors):
    """Collects what a tap sees in one act.

    `first`, `last`: up to `kept` requests each. `dtypes`: names, of all tensors.
    """

    kept: int = 4
    first: list[Seen] = field(default_factory=list)
    last: list[Seen] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Take note of a request; called from the tap's thread."""
        super().add(seen)
        self.first = [*self.first, seen][: self.kept]
        self.last = [*self.last, seen][-self.kept :]
        for tensor in seen.tensors:
            if (name := str(tensor.dtype).removeprefix("torch.")) not in self.dtypes:
                self.dtypes.append(name)


@dataclass(frozen=True)
class Lie:
    """What was changed: one number, in the reply to `asked`, from `true` to `told`."""

    asked: Seen
    index: int
    count: int
    true: int
    told: int


class Liar:
    """Changes one number of the reply to the request number `at`, by 1, and never lies again.

    One runner that asks one thing after another is listened to: a reply belongs to the last
    request. `lie`: None until it was told.
    """

    def __init__(self, at: int) -> None:
        self.lie: Lie | None = None
        self._at = at
        self._asked: Seen | None = None
        self._count = 0

    def hear(self, asked: Seen) -> None:
        """Take note of a request."""
        self._asked = asked
        self._count += 1

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """Forward a reply, or the lie instead."""
        if self.lie is not None or self._asked is None or self._count < self._at:
            return frames
        try:
            reply = decode_reply([memoryview(frame) for frame in frames]).response
        except ProtocolError:
            return frames
        if not isinstance(reply, TensorReply) or reply.output.dtype != "int32":
            return frames
        numbers = to_torch(reply.output).numpy().copy().reshape(-1)
        index = len(numbers) // 2
        true = int(numbers[index])
        with np.errstate(over="ignore"):
            numbers[index] += 1
        self.lie = Lie(self._asked, index, len(numbers), true, int(numbers[index]))
        return [frames[0], numbers.tobytes()]
