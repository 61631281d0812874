"""Measures in processes of their own: what each operator of each layer costs, stage by stage.

`Collector` is the observer that bench and plan hand to the engine. `processes` is how the
laboratory works in other processes: on a job that is measured (`run_job`), or on policies that are
attacked side by side.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from protocol.errors import TsqpError
from protocol.prepared import Exchange
from tee_side.observer import AnyOperator
from tee_side.plugins import load_module, loaded_files
from tee_side.words import Operator, Place, TeeStage
from tsqp.end_with_parent import end_with
from tsqp.lab.bench.model import OperatorCost, Span, Stages
from tsqp.processes import END_TIMEOUT_S, ProcessError, failure

J = TypeVar("J")
R = TypeVar("R")
Tell: TypeAlias = Callable[[Any], None]

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
    stages: dict[str, float] = field(default_factory=dict)


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
        self._spent((operator, layer), stage, started_ns, ended_ns - started_ns)

    def exchanged(
        self, operator: Operator, layer: int | None, exchanges: Sequence[Exchange]
    ) -> None:
        sums, site = self._collector.sums(operator, layer), (operator, layer)
        for exchange in exchanges:
            sums.rpcs += 1
            sums.bytes_sent += exchange.bytes_sent
            sums.bytes_received += exchange.bytes_received
            began_ns = exchange.sent_ns - exchange.encode_ns
            received_ns = exchange.sent_ns + exchange.elapsed_ns
            self._spent(site, "encode", began_ns, exchange.encode_ns)
            self._spent(site, "decode", received_ns, exchange.decode_ns)
        # Requests side by side: the slowest is the time that they took.
        slowest = max(exchanges, key=lambda exchange: exchange.elapsed_ns)
        timing = slowest.timing
        queue_ns = timing.queue_us * 1000 if timing else 0
        gpu_ns = timing.compute_us * 1000 if timing else 0
        # The service's clock is its own and its claims are not checked: they are made to fit.
        queue_ns = min(queue_ns, slowest.elapsed_ns)
        gpu_ns = min(gpu_ns, slowest.elapsed_ns - queue_ns)
        # How the wire's time divides into there and back is not known: in halves.
        half_ns = (slowest.elapsed_ns - queue_ns - gpu_ns) / 2
        start_ns = float(slowest.sent_ns)
        for stage, spent_ns in (
            ("wire", half_ns),
            ("queue", queue_ns),
            ("gpu", gpu_ns),
            ("wire", half_ns),
        ):
            self._spent(site, stage, start_ns, spent_ns)
            start_ns += spent_ns

    def _spent(self, site: Site, stage: str, started_ns: float, elapsed_ns: float) -> None:
        stages = self._collector.sums(*site).stages
        stages[stage] = stages.get(stage, 0) + elapsed_ns
        self._collector.piece(self._index, site, stage, started_ns, elapsed_ns)


def rounds(most: int, budget_s: float, least: int = 1) -> Iterator[int]:
    """Count to `most`, or until the time is over; to `least` in any case."""
    started = time.perf_counter()
    for number in range(most):
        if number >= least and time.perf_counter() - started > budget_s:
            return
        yield number


def elapsed_us(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started_ns) / 1e3


# ---------------------------------------------------------------------------------- processes

# Of a process that `processes` has started: what tells the one that it belongs to.
_telling: list[Tell] = []


def tell(what: Any) -> None:
    """Tell the process that this one works for. Raises ValueError where there is none."""
    (telling,) = _telling
    telling(what)


@contextmanager
def processes(
    count: int, where: str, told: Tell, begin: Callable[..., None] | None = None, *given: Any
) -> Iterator[Callable[..., Future[Any]]]:
    """Give what submits calls of functions to so many processes; they end with the block.

    They end with this process, too, whatever ends it. `begin` is called with `given` in each of
    them first. `told`: gets what they tell, in a thread. Raises ProcessError about `where` for a
    process that is killed; so do calls that end with an error.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    listener = threading.Thread(target=_listen, args=(reader, told), daemon=True)
    listener.start()
    before, own = {*multiprocessing.active_children()}, set[BaseProcess]()
    # Classes from a user's files are found again where the files have been loaded before.
    first = (os.getpid(), loaded_files(), writer, context.Lock(), pickle.dumps((begin, given)))

    def submit(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = pool.submit(_called, where, pickle.dumps((function, arguments)))
        own.update({*multiprocessing.active_children()} - before)
        return future

    try:
        with ProcessPoolExecutor(count, context, _begin, first) as pool:
            try:
                yield submit
            except BaseException:
                for process in {*multiprocessing.active_children()} - before:
                    process.kill()
                raise
    except BrokenProcessPool:
        # The one that ended first: the pool has ended the others.
        ended = [one.exitcode for one in own if one.exitcode not in (None, 0, -signal.SIGTERM)]
        status = min(ended, key=lambda one: one == -signal.SIGKILL, default=None)
        raise failure(where, status, f"exit status {status}", expected="a run to its end") from None
    finally:
        writer.close()
        listener.join(END_TIMEOUT_S)


def in_fresh_process(function: Callable[..., R], *arguments: Any) -> R:
    """Return what a function returns, called in a process of its own, which ends with this one.

    Raises ProcessError with what it raises, or if it is killed.
    """
    where = function.__name__.strip("_").replace("_", " ")
    with processes(1, where, lambda _: None) as submit:
        found: R = submit(function, *arguments).result()
        return found


def run_job(where: str, measure: Callable[[J, Tell], None], job: J) -> Iterator[Any]:
    """Have a process of its own measure a job, and yield what it tells as it comes.

    `where`: names the work in errors. Raises ProcessError if it fails.
    """
    told = SimpleQueue[Any]()

    def ended(done: Future[Any]) -> None:
        # One that is killed, or has not begun, does not say so itself.
        if not isinstance(done.exception(), ProcessError | None):
            told.put(None)

    with processes(1, where, told.put) as submit:
        running = submit(_measured, measure, job)
        running.add_done_callback(ended)
        yield from iter(told.get, None)
        running.result()


def passed_on(error: BaseException, where: str = "") -> ProcessError:
    """Return an error as one that another process can read. `where`: whose work it ended."""
    prefix = f"{where}: " if where else ""
    if isinstance(error, TsqpError):
        return ProcessError(f"{prefix}{error.where}", error.got, error.expected)
    if isinstance(error, OSError):
        reason = error.strerror or type(error).__name__
        return ProcessError(f"{prefix}{error.filename or 'a file'}", reason, "none")
    last = traceback.format_exception_only(error)[-1].strip()
    return ProcessError(where or "a worker", last, "no error (its traceback is above)")


def _listen(reader: Connection, told: Tell) -> None:
    """Pass on what processes tell, until all have ended, or one amid a message."""
    with reader, suppress(EOFError, OSError):
        while True:
            told(reader.recv())


def _begin(parent: int, files: list[Path], writer: Connection, lock: Lock, work: bytes) -> None:
    """Begin in a new process. `files`: what the classes in `work` were loaded from."""
    end_with(parent)
    # An interrupt from the keyboard is for the parent process, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The parent's stdout is for its tables.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for path in files:
        load_module(path)

    def telling(what: Any) -> None:
        with lock:
            writer.send(what)

    _telling.append(telling)
    begin, given = pickle.loads(work)  # noqa: S301 - from our parent
    if begin is not None:
        begin(*given)


def _called(where: str, work: bytes) -> Any:
    """Call a function. Its errors are passed on."""
    function, arguments = pickle.loads(work)  # noqa: S301 - from our parent
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of any kind; passed on
        if not isinstance(error, TsqpError | OSError):
            traceback.print_exc()
        raise passed_on(error, where) from None


def _measured(measure: Callable[[J, Tell], None], job: J) -> None:
    """Measure a job, and tell of the end, behind all else."""
    try:
        measure(job, tell)
    finally:
        tell(None)
