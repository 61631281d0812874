"""What services are asked and answer, the form of that, and for how long others may be asked.

A result that fails is used for nothing. Whoever computed it is asked no more, and the same masked
tensors go to somebody else, so that a failure shows nothing new to anyone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import DeadlineExceededError, ReplyError, TsqpError
from protocol.messages import Request, TensorReply
from protocol.tensors import short_name, to_torch
from tee_side.vocabulary import Operator


class Asked(NamedTuple):
    """One operator as services are asked for it.

    `requests`: one for each service; `shape`, `dtype`: of each one's reply.
    """

    operator: Operator
    layer: int | None
    requests: tuple[Request, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Answer(NamedTuple):
    """What one service was asked, and what it said."""

    channel: Channel
    request: Request
    exchange: Exchange
    output: torch.Tensor


class Deadline:
    """How long an operator may take, whoever is asked for it, and how often.

    Counts from when it was made. The first request has the channel's own deadline, which is as far
    away; those that follow have what is left, whether they ask for something else or once more.
    `timeout_s`: None for no end. `begun`: whether the first request was answered.
    """

    __slots__ = ("_until", "begun")

    def __init__(self, timeout_s: float | None) -> None:
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.begun = False

    def left_s(self, operator: Operator) -> float | None:
        """Return what a request may take; None for the channel's own deadline.

        Raises DeadlineExceededError where nothing is left: a request without any time would only
        have its service taken for lost.
        """
        if not self.begun or self._until == math.inf:
            return None
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(
                operator, got="the end of its time", expected="all replies that it needs"
            )
        return left_s

    def is_over(self) -> bool:
        """Say whether nobody is to be asked any more, and nothing to be looked into."""
        return time.monotonic() >= self._until

    def ask_again(self, error: TsqpError) -> None:
        """Raise what a result was refused with, if there is no time to ask for another."""
        if self.is_over():
            raise error


def open_replies(
    asked: Asked, channels: Sequence[Channel], exchanges: Sequence[Exchange]
) -> list[torch.Tensor] | ReplyError:
    """Check the form of every reply, and return their tensors.

    Whoever sent another form is asked no more. Returns the error where one was refused and somebody
    else can be asked, raises it where nobody can.
    """
    outputs = []
    refused: ReplyError | None = None
    for channel, exchange in zip(channels, exchanges, strict=True):
        try:
            outputs.append(_opened(asked, exchange))
        except ReplyError as error:
            channel.distrust(exchange, error)
            refused = error
    return outputs if refused is None else refused


def _opened(asked: Asked, exchange: Exchange) -> torch.Tensor:
    reply = exchange.response
    name = short_name(asked.dtype)
    if isinstance(reply, TensorReply):
        output = reply.output
        if output.dtype == name and output.shape == asked.shape:
            return to_torch(output)
        got, expected = f"{output.dtype} {list(output.shape)}", f"{name} {list(asked.shape)}"
    else:
        got, expected = type(reply).__name__, "a tensor"
    where = f"{asked.operator} reply from {exchange.endpoint}"
    raise ReplyError(where, got=got, expected=expected)
