"""Measures in processes of their own: what each operator of each layer costs, stage by stage.

`Collector` is the observer that bench and plan hand to the engine. `run_job` starts the process
that measures and `serve_job` is its other end: a job as JSON on stdin, answers on stdout, a line
each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from protocol.errors import TsqpError
from protocol.prepared import Exchange
from tee_side.observer import AnyOperator
from tee_side.words import Operator, Place, TeeStage
from tsqp.lab.bench.model import OperatorCost, Span, Stages
from tsqp.processes import ProcessError, failure, worker

J = TypeVar("J", bound=BaseModel)
A = TypeVar("A", bound=BaseModel)

Site = tuple[AnyOperator, int | None]
_NS = 1e-3  # microseconds in a nanosecond


@dataclass(slots=True)
class _Sums:
    """One operator of one layer, over all measured steps; times in nanoseconds."""

    place: Place = "tee"
    calls: int = 0
    rpcs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    stages: dict[str, int] = field(default_factory=dict)

    def add(self, stage: str, elapsed_ns: int) -> None:
        self.stages[stage] = self.stages.get(stage, 0) + elapsed_ns


class Collector:
    """Adds up steps since `reset`. Hand `lane(0)`, `lane(1)`, ... to the operators.

    `keep_spans`: keep every piece of a step as well.
    """

    def __init__(self, *, keep_spans: bool = False) -> None:
        self._keep_spans = keep_spans
        self._sums: dict[Site, _Sums] = {}
        # Of a piece what `Span` says; made into one later, as that takes time.
        self._pieces: list[tuple[int, Site, str, float, float]] = []
        self._origin_ns = 0

    def lane(self, index: int) -> _Lane:
        """See `tee_side.observer.Observers.lane`."""
        return _Lane(self, index)

    def reset(self, origin_ns: int) -> None:
        """Forget everything; spans are counted from this moment on."""
        self._sums, self._pieces, self._origin_ns = {}, [], origin_ns

    def costs(self, steps: int) -> tuple[OperatorCost, ...]:
        """Return the mean of `steps` steps, in the order in which operators were first called."""
        return tuple(
            OperatorCost(
                operator=operator,
                layer=layer,
                place=sums.place,
                calls=sums.calls / steps,
                rpcs=sums.rpcs / steps,
                bytes_sent=sums.bytes_sent / steps,
                bytes_received=sums.bytes_received / steps,
                stages=Stages(
                    **{f"{name}_us": _NS * spent / steps for name, spent in sums.stages.items()}
                ),
            )
            for (operator, layer), sums in self._sums.items()
        )

    def spans(self) -> tuple[Span, ...]:
        """Return the pieces, by their start."""
        spans = [
            Span(
                lane=lane,
                operator=operator,
                layer=layer,
                stage=stage,
                start_us=_NS * (started_ns - self._origin_ns),
                duration_us=_NS * elapsed_ns,
            )
            for lane, (operator, layer), stage, started_ns, elapsed_ns in self._pieces
        ]
        return tuple(sorted(spans, key=lambda span: (span.start_us, span.lane)))

    def sums(self, operator: AnyOperator, layer: int | None) -> _Sums:
        """Return what is counted for one operator of one layer."""
        return self._sums.setdefault((operator, layer), _Sums())

    def piece(
        self, lane: int, site: Site, stage: str, started_ns: float, elapsed_ns: float
    ) -> None:
        """Keep a piece of the timeline, if they are to be kept."""
        if self._keep_spans and elapsed_ns > 0:
            self._pieces.append((lane, site, stage, started_ns, elapsed_ns))


class _Lane:
    """The observer of one micro-batch. See `tee_side.observer.Observer`."""

    def __init__(self, collector: Collector, index: int) -> None:
        self._collector = collector
        self._index = index

    def called(self, operator: AnyOperator, layer: int | None, place: Place) -> None:
        sums = self._collector.sums(operator, layer)
        sums.place = place
        sums.calls += 1

    def spent(
        self,
        operator: AnyOperator,
        layer: int | None,
        stage: TeeStage,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        elapsed_ns = ended_ns - started_ns
        self._collector.sums(operator, layer).add(stage, elapsed_ns)
        self._collector.piece(self._index, (operator, layer), stage, started_ns, elapsed_ns)

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        sums, site = self._collector.sums(operator, layer), (operator, layer)
        for exchange in exchanges:
            sums.rpcs += 1
            sums.bytes_sent += exchange.bytes_sent
            sums.bytes_received += exchange.bytes_received
            sums.add("encode", exchange.encode_ns)
            sums.add("decode", exchange.decode_ns)
            began_ns = exchange.sent_ns - exchange.encode_ns
            received_ns = exchange.sent_ns + exchange.elapsed_ns
            self._piece(site, "encode", began_ns, exchange.encode_ns)
            self._piece(site, "decode", received_ns, exchange.decode_ns)
        # Requests side by side: the slowest is the time that they took.
        slowest = max(exchanges, key=lambda exchange: exchange.elapsed_ns)
        timing = slowest.timing
        queue_ns = timing.queue_us * 1000 if timing else 0
        gpu_ns = timing.compute_us * 1000 if timing else 0
        # The service's clock is its own and its claims are not checked: they are made to fit.
        queue_ns = min(queue_ns, slowest.elapsed_ns)
        gpu_ns = min(gpu_ns, slowest.elapsed_ns - queue_ns)
        wire_ns = slowest.elapsed_ns - queue_ns - gpu_ns
        for stage, elapsed_ns in (("wire", wire_ns), ("queue", queue_ns), ("gpu", gpu_ns)):
            sums.add(stage, elapsed_ns)
        # How the wire's time divides into there and back is not known: in halves.
        start_ns = float(slowest.sent_ns)
        for stage, spent_ns in (
            ("wire", wire_ns / 2),
            ("queue", queue_ns),
            ("gpu", gpu_ns),
            ("wire", wire_ns / 2),
        ):
            self._piece(site, stage, start_ns, spent_ns)
            start_ns += spent_ns

    def _piece(self, site: Site, stage: str, started_ns: float, elapsed_ns: float) -> None:
        self._collector.piece(self._index, site, stage, started_ns, elapsed_ns)


# ---------------------------------------------------------------------------------- processes


class Line(BaseModel):
    """What crosses between two of our processes as a line of JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Failed(Line):
    """The error that ended the process early, in its three parts."""

    kind: Literal["failed"] = "failed"
    where: str
    got: str
    expected: str


def run_job(module: str, job: Line, answers: TypeAdapter[A | Failed], where: str) -> Iterator[A]:
    """Start a module that calls `serve_job`, and yield its answers as they come.

    `where`: names the work in errors. Raises ProcessError if the process fails.
    """
    with worker(module, job) as (process, lines, errors):
        for line in lines:
            answer = answers.validate_json(line)
            if isinstance(answer, Failed):
                named = f"{where}: {answer.where}"
                raise ProcessError(named, got=answer.got, expected=answer.expected)
            yield answer
        status = process.wait()
        errors.join()
        if status != 0:
            raise failure(where, status, errors.last, expected="a run to its end")


def serve_job(kind: type[J], measure: Callable[[J, Callable[[Line], None]], None]) -> None:
    """Read a job from stdin, and print what `measure` tells; exit with 1 if it raises TsqpError."""

    def tell(answer: Line) -> None:
        sys.stdout.write(answer.model_dump_json() + "\n")
        sys.stdout.flush()

    job = kind.model_validate_json(sys.stdin.read())
    try:
        measure(job, tell)
    except TsqpError as error:
        tell(Failed(where=error.where, got=error.got, expected=error.expected))
        sys.exit(1)
