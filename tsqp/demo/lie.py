"""The GPU side lies once: one number of one reply is another than the service computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.encoding import decode_reply
from protocol.errors import ProtocolError
from protocol.messages import TensorReply
from protocol.tensors import to_torch
from tsqp.demo.intercepting_proxy import Seen

# Late enough that there is a story, early enough that everybody sees it end.
LIES_AT = 150


@dataclass(frozen=True)
class Lie:
    """What was changed: one number, in the reply to `asked`, from `true` to `told`."""

    asked: Seen
    index: int
    count: int
    true: int
    told: int

    @property
    def what(self) -> str:
        """Name the reply."""
        return f"{self.asked.what} in layer {self.asked.layer}"


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
