"""What services answered: its form, who of them computed wrongly, and whether others may be asked.

A result that fails is used for nothing. Whoever computed it is asked no more, and the same masked
tensors go to somebody else, so that a failure shows nothing new to anyone.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from protocol.channel import Channel, Exchange
from protocol.errors import (
    ActivationRangeError,
    MaskError,
    ReplyError,
    TsqpError,
    VerificationError,
)
from protocol.messages import Request, TensorReply
from protocol.tensors import short_name, to_torch
from tee_side.mask_rules import MaskRules
from tee_side.verifier import Verifier
from tee_side.vocabulary import Operator

log = logging.getLogger("tee_side")


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
    away; those that follow a refused result have what is left. `timeout_s`: None for no end.
    """

    __slots__ = ("_refused", "_until")

    def __init__(self, timeout_s: float | None) -> None:
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._refused = False

    @property
    def left_s(self) -> float | None:
        """What a request may take; None for the channel's own deadline."""
        if not self._refused or self._until == math.inf:
            return None
        return self._until - time.monotonic()

    def is_over(self) -> bool:
        """Say whether nobody is to be asked any more, and nothing to be looked into."""
        return time.monotonic() >= self._until

    def ask_again(self, error: TsqpError) -> None:
        """Note that a result was refused with this. Raises it if there is no time for another."""
        self._refused = True
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


def distrust_liars(
    operator: Operator,
    layer: int | None,
    answers: Sequence[Answer],
    verifier: Verifier,
    deadline: Deadline,
    rules: MaskRules,
) -> VerificationError:
    """Let those who computed wrongly be asked no more, and return what is said of the last.

    `answers`: all that one refused result was made of. Raises that where nobody else is left, and
    MaskError where all answers are right.
    """
    where = operator if layer is None else f"{operator} in layer {layer}"
    liars = _liars(operator, layer, answers, verifier, deadline, rules)
    known = liars is not None
    if liars is None:
        liars = answers
    if not liars:
        raise MaskError(
            f"{rules.name}: {where}",
            got="a wrong result, unmasked from right answers",
            expected="factors that were made from these weights, and an unmask that undoes mask",
        )
    everybody = " or ".join(dict.fromkeys(answer.exchange.endpoint for answer in liars))
    nobody_left: VerificationError | None = None
    for channel, _, exchange, _ in liars:
        error = VerificationError(
            f"{where} at {exchange.endpoint if known else everybody}",
            got="a wrong result",
            expected="what the weights of the TEE's own model give",
        )
        try:
            channel.distrust(exchange, error)
        except VerificationError as last:
            nobody_left = last
    if nobody_left is not None:
        raise nobody_left
    return error


def _liars(
    operator: Operator,
    layer: int | None,
    answers: Sequence[Answer],
    verifier: Verifier,
    deadline: Deadline,
    rules: MaskRules,
) -> Sequence[Answer] | None:
    """Return whose answers are wrong, nobody's where they were unmasked wrongly; None: unknown."""
    if rules.in_the_clear and len(answers) == 1:
        return answers  # the result that was refused is the answer itself
    try:
        asked = [(answer.request, answer.output) for answer in answers]
        found = [answers[index] for index in verifier.liars(asked, deadline.is_over)]
    except ActivationRangeError:
        raise  # of what our own mask sent: nobody can compute with it
    except TsqpError as unknown:
        # The time is up, or the weights on disk, read once more for this, are not there or are
        # others by now. A liar must not be spared for it.
        fields = {"operator": operator, "layer": layer, "detail": str(unknown)}
        log.warning("liar_unknown", extra={"fields": fields})
        return None
    # In the clear nothing was unmasked: who is not off alone is off together with others.
    return answers if rules.in_the_clear and not found else found
