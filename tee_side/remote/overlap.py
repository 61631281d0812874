"""Runs forward passes that wait for services, one while the others' replies are on their way.

A forward pass is a coroutine. Once it has asked a service it gives up control; when its turn comes
again it waits for the reply, and goes on. Driving several in turns is all there is to overlapping:
no threads, no locks, and always the same order.
"""

from __future__ import annotations

import math
import time
import types
from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from typing import TypeAlias, TypeVar

import torch

from protocol.channel import Channel
from protocol.errors import DeadlineExceededError
from protocol.messages import Request
from protocol.prepared import Exchange, PreparedRequest
from tee_side.protect.masks.mask import Seed
from tee_side.protect.resumption import watch
from tee_side.words import Operator

R = TypeVar("R")
# `None` is sent to it at each turn.
Running: TypeAlias = Coroutine[None, None, R]


@types.coroutine
def turn() -> Generator[None, None, None]:
    """Let the others have their turn."""
    yield


@types.coroutine
def ask(
    channels: Sequence[Channel],
    request: PreparedRequest,
    sent: Sequence[torch.Tensor | Seed],
    timeout_s: float | None,
) -> Generator[None, None, list[Exchange]]:
    """Send each service its tensor or seed, give up control, and return the replies in order.

    Raises ResumedError before anything is sent, and what sending and waiting raise; of what is
    still under way then, or when the coroutine is closed, no reply is waited for any more.
    """
    # Whatever was made ahead, or masked by any mask, leaves here or in `submit`.
    resumption = watch()
    if resumption is not None and resumption.told(0, 1):
        resumption.check()
    waiting: list[tuple[Channel, int]] = []
    try:
        for channel, payload in zip(channels, sent, strict=True):
            if isinstance(payload, Seed):
                request_id = channel.start(request.seeded, payload.words(), timeout_s)
            else:
                request_id = channel.start(request, payload, timeout_s)
            waiting.append((channel, request_id))
        yield
        exchanges = []
        for channel, request_id in waiting:  # a list comprehension is a call more
            exchanges.append(channel.wait(request_id))
    except BaseException:
        for channel, request_id in waiting:
            channel.abandon(request_id)
        raise
    return exchanges


@types.coroutine
def submit(
    channel: Channel, request: Request, timeout_s: float | None
) -> Generator[None, None, Exchange]:
    """Do the same with one whole message, such as a Segment. GPU sees: the message."""
    if (watching := watch()) is not None:
        watching.check()
    request_id = channel.submit(request, timeout_s)
    try:
        yield
        return channel.wait(request_id)
    except BaseException:
        channel.abandon(request_id)
        raise


def time_left(operator: Operator, until: float) -> float | None:
    """Return how long a further request of a call may take; None for the channel's own deadline.

    Raises DeadlineExceededError where nothing is left: the service that got a request without any
    time would be taken for lost.
    """
    if until == math.inf:
        return None
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError(operator, "the end of its time", "all replies that it needs")
    return left_s


def run(running: Running[R]) -> R:
    """Drive one coroutine to its end and return its result."""
    return run_overlapped([running])[0]


def run_overlapped(running: Sequence[Running[R]]) -> list[R]:
    """Drive coroutines in turns, and return their results in order.

    Each runs until it has asked a service, then the next has its turn. They begin one after
    another, each behind the second turn of the one before it: side by side all would want the TEE
    for the same long operator, and then leave it idle for the same long product. An error that a
    coroutine does not handle ends all of them: requests under way are abandoned.
    """
    results: dict[int, R] = {}
    # Of each that has begun: its index, and whether its first turn is still to come.
    turns = deque([(0, True)] if running else [])
    begun = 1
    try:
        while turns:
            index, first = turns.popleft()
            try:
                running[index].send(None)
            except StopIteration as ended:
                results[index] = ended.value
            else:
                turns.append((index, False))
            # It has had its second turn, or came to its end without one.
            settled = not first or index in results
            if settled and index == begun - 1 and begun < len(running):
                turns.appendleft((begun, True))
                begun += 1
    finally:
        for coroutine in running:
            coroutine.close()
    return [results[index] for index in range(len(running))]
