"""Requests that wait for their turn: of the owners, the one that was served least goes first."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from protocol.errors import LimitError

R = TypeVar("R")


class QueueFullError(LimitError):
    """Too many requests wait."""


class WaitingQueue(Generic[R]):
    """First come, first served for each owner; between owners by what they were served so far.

    Served is counted in tokens, as the Virtual Token Counter does (arXiv 2401.00588): an owner that
    comes back after a while starts where the least served of the waiting ones is, or where the one
    is that left last, as nothing is saved up by staying away.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._queues: dict[str, deque[R]] = {}
        self._served: dict[str, int] = {}
        self._last: str | None = None

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, owner: str, request: R) -> R | None:
        """Put a request behind the others of its owner.

        Where all places are taken, the newest request of the owner that has most of them gives its
        place up, if that owner has more than this one will have, and is returned. Raises
        QueueFullError else.
        """
        displaced = None
        if len(self) >= self.limit:
            most = max(self._queues, key=lambda other: len(self._queues[other]))
            if len(self._queues[most]) <= len(self._queues.get(owner, ())) + 1:
                raise self.full()
            displaced = self._queues[most].pop()
        if owner not in self._queues:
            others = self._queues or ([] if self._last is None else [self._last])
            least = min((self._served[other] for other in others), default=0)
            self._served[owner] = max(self._served.get(owner, 0), least)
        self._queues.setdefault(owner, deque()).append(request)
        return displaced

    def full(self) -> QueueFullError:
        """Return the error of a request that finds no place."""
        where = "waiting requests (--max-waiting)"
        return QueueFullError(where, f"{len(self)}", f"< {self.limit}")

    def first(self) -> R | None:
        """Return whose turn it is, or None."""
        if not self._queues:
            return None
        return self._queues[self._least()][0]

    def pop(self) -> R:
        """Take the one whose turn it is."""
        owner = self._least()
        request = self._queues[owner].popleft()
        self._forget_empty(owner)
        return request

    def remove(self, owner: str, request: R) -> None:
        """Forget a request, if it is still here."""
        queue = self._queues.get(owner)
        if queue is not None and request in queue:
            queue.remove(request)
            self._forget_empty(owner)

    def serve(self, owner: str, tokens: int) -> None:
        """Count tokens that were computed for an owner."""
        self._served[owner] = self._served.get(owner, 0) + tokens

    def _least(self) -> str:
        return min(self._queues, key=lambda owner: self._served[owner])

    def _forget_empty(self, owner: str) -> None:
        if not self._queues[owner]:
            del self._queues[owner]
            self._last = owner
