"""What an observer is told of the operators, and how it is told."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from protocol.prepared import Exchange
from tee_side.words import LightOperator, Operator, Place, TeeStage

# Everything that reports give a row of its own.
AnyOperator: TypeAlias = Operator | LightOperator
R = TypeVar("R")


class Observer(Protocol):
    """Told about every operator; reports and traces are built on it.

    Times are those of `time.perf_counter_ns`. `layer`: None for an operator that no layer has.
    """

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        """Count a call of an operator, and note where it runs."""

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: TeeStage,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        """Count a stretch of time in the TEE."""

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        """Take note of round trips made side by side: one, or one a service."""


# Returns the observer of a micro-batch of a step, by its index.
Observers: TypeAlias = Callable[[int], Observer]


def timed(
    function: Callable[..., R], observer: Observer | None, operator: AnyOperator, layer: int | None
) -> Callable[..., R]:
    """Return an operator that is computed in the TEE, timed; the function itself for no observer.

    Nothing in the TEE waits: no other micro-batch has its turn in between.
    """
    if observer is None:
        return function

    def call(*arguments: Any, **named: Any) -> R:
        observer.called(operator, layer, "tee")
        started_ns = time.perf_counter_ns()
        result = function(*arguments, **named)
        observer.spent(operator, layer, "tee", started_ns, time.perf_counter_ns())
        return result

    return call


class StageClock:
    """Tells an observer of the calls of one remote operator, stage by stage."""

    def __init__(self, observer: Observer, operator: Operator, layer: int | None) -> None:
        self._observer, self._operator, self._layer = observer, operator, layer
        self._stage: TeeStage | None = None
        self._started_ns = 0

    def called(self) -> None:
        """Tell of a call that begins. Of one that an error ended, the last stage is not told."""
        self._observer.called(self._operator, self._layer, "gpu")
        self._stage = None

    def mark(self, stage: TeeStage | None) -> None:
        """End the stage before, if there is one, and begin another; None: begin none."""
        now_ns = time.perf_counter_ns()
        if self._stage is not None:
            self._observer.spent(self._operator, self._layer, self._stage, self._started_ns, now_ns)
        self._stage, self._started_ns = stage, time.perf_counter_ns()

    def exchanged(self, exchanges: Sequence[Exchange]) -> None:
        """Tell of round trips made side by side."""
        self._observer.exchanged(self._operator, self._layer, exchanges)


class Untimed:
    """Stands where a `StageClock` would, without an observer.

    Each method is the built-in `bool`, which enters no Python frame.
    """

    called = mark = exchanged = staticmethod(bool)


UNTIMED = Untimed()
