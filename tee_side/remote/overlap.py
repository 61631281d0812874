"""Runs forward passes that wait for services, one while the others' replies are on their way.

A forward pass is a coroutine. Where it asks a service it gives up control, with what it waits for;
whoever drives it collects the replies and lets it go on. Driving several in turns is all there is
to overlapping: no threads, no locks, and always the same order.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Coroutine, Generator, Sequence
from typing import TypeAlias, TypeVar

from protocol.channel import Channel, Exchange

# Requests that were sent side by side, one a service, and are waited for together.
Waiting: TypeAlias = Sequence[tuple[Channel, int]]
R = TypeVar("R")
# `None` is sent to start it.
Running: TypeAlias = Coroutine[Waiting, list[Exchange] | None, R]


@types.coroutine
def replies(waiting: Waiting) -> Generator[Waiting, list[Exchange], list[Exchange]]:
    """Give up control until the replies are there, and return them in the order of the requests.

    Empty: only let the others have their turn. Raises what waiting raises.
    """
    exchanges = yield waiting
    return exchanges


def run(running: Running[R]) -> R:
    """Drive one coroutine to its end and return its result."""
    return run_overlapped([running])[0]


def run_overlapped(running: Sequence[Running[R]]) -> list[R]:
    """Drive coroutines in turns, and return their results in order.

    Each runs until it waits for a reply, then the next has its turn. They begin one after another,
    each behind the second turn of the one before it: side by side all would want the TEE for the
    same long operator, and then leave it idle for the same long product. An error that a coroutine
    does not handle ends all of them: requests under way are abandoned.
    """
    results: dict[int, R] = {}
    turns: deque[tuple[int, Waiting | None]] = deque([(0, None)] if running else [])
    begun = 1
    try:
        while turns:
            index, waiting = turns[0]
            try:
                now_waiting = _resume(running[index], waiting)
            except StopIteration as ended:
                turns.popleft()
                results[index] = ended.value
            else:
                turns.popleft()
                turns.append((index, now_waiting))
            # It has had its second turn, or came to its end without one.
            settled = waiting is not None or index in results
            if settled and index == begun - 1 and begun < len(running):
                turns.appendleft((begun, None))
                begun += 1
    finally:
        for _, waiting in turns:
            _abandon(waiting or ())
        for coroutine in running:
            coroutine.close()
    return [results[index] for index in range(len(running))]


def _resume(coroutine: Running[R], waiting: Waiting | None) -> Waiting:
    """Hand over what was waited for, or the error that came instead; return what is next."""
    if waiting is None:
        return coroutine.send(None)
    try:
        exchanges = []
        for channel, request_id in waiting:  # a list comprehension is a call more
            exchanges.append(channel.wait(request_id))
    except Exception as error:  # noqa: BLE001 - raised where the coroutine waits
        _abandon(waiting)
        return coroutine.throw(error)
    return coroutine.send(exchanges)


def _abandon(waiting: Waiting) -> None:
    """Drop replies that nobody will wait for; those that were waited for are unknown by now."""
    for channel, request_id in waiting:
        channel.abandon(request_id)
