"""The head: sends each product to the other ranks, and puts their columns beside its own.

Where torchrun has not, it starts their processes, which end when it ends.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from gpu_side.cuda.products import device_kernels
from gpu_side.event_log import log
from gpu_side.handler import Served
from gpu_side.kernels import Kernel, Prepare, Result, Working, there
from gpu_side.ranks.worker import Group, RankJob
from gpu_side.request_loop import StoppedWhileLoadingError, StopSignal
from gpu_side.tasks import Computed, RequestChecker, Task
from gpu_side.transport.listener import Incoming
from gpu_side.weights import ServiceWeights
from protocol.encoding import REQUEST, request_template
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.messages import (
    MAX_TIMEOUT_MS,
    WHOLE,
    EmbeddingRequest,
    LMHeadRequest,
    MatmulRequest,
    RingLinearRequest,
    RingLMHeadRequest,
)
from protocol.tensors import WireTensor

# How long the others may go on loading when the head has loaded, and computing when it has its own
# part: so long, and so many times what the head took. A rank that hangs must not hang the service.
LOAD_S = 600.0
COMPUTE_S = 60.0
_TIMES = 10.0
# How long to wait for the end of the others.
_END_S = 10.0
# A connection ends with its process, whose end is known a moment later.
_NOTICE_S = 1.0


class Ranks:
    """The other ranks, from the head. `starts_them`: their processes are ours to start and to end.

    `failure`: what one of them has done wrong; from then on requests are refused, and the service
    is told to stop.
    """

    def __init__(self, job: RankJob, stop: StopSignal, *, starts_them: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-service-")) if starts_them else None
        store = None if self._folder is None else self._folder / "store"
        self.job = job.model_copy(update={"store": store})
        # Each with the thread that waits for its end.
        self._started: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []
        self._one_ended = threading.Event()
        self.failure: EndpointError | None = None
        self._stop = stop
        self._group: Group | None = None
        self._ending = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the others, where that is ours to do.

        In the main thread: Linux ends them with the thread that started them.
        """
        if self._folder is None:
            return
        _, ranks = self.job.place
        for rank in range(1, ranks):
            its_job = self.job.model_copy(update={"place": (rank, ranks)})
            command = [sys.executable, "-P", "-m", "gpu_side.ranks.worker", str(os.getpid())]
            process = subprocess.Popen(  # noqa: S603 - a module of ours, and settings as JSON
                [*command, its_job.model_dump_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(self.job.threads)},
            )

            def watch(rank: int = rank, process: subprocess.Popen[bytes] = process) -> None:
                self._has_ended(rank, process.wait())
                self._one_ended.set()

            watcher = threading.Thread(target=watch, name=f"rank-{rank}", daemon=True)
            watcher.start()
            self._started.append((process, watcher))

    def join(self, device: torch.device) -> None:
        """Wait until the others are there. `device`: of this rank.

        Raises StoppedWhileLoadingError if told to stop before, and EndpointError.
        """
        stop = self._stop
        try:
            job = self.job
            self._group = Group(job.place, job.store, device, lambda: stop.requested)
        except RuntimeError:
            if stop.requested and self.failure is None:
                raise StoppedWhileLoadingError from None
            raise self.fail(None, "no answer") from None

    def served(self, weights: ServiceWeights) -> Served:
        """Return what all of them hold, once the others have loaded. Raises EndpointError."""
        group = there(self._group)
        expected = self.job.holds(weights)
        for rank in group.others:
            with self._of_others("no weights"):
                said, _ = group.receive(rank, timedelta(seconds=LOAD_S))
            if said != expected:
                raise self.fail(rank, "other weights than ours")
        model = replace(weights, columns=WHOLE, ranks=self.job.place[1])
        return Served(model, rank_kernels(self, weights))

    def compute(
        self,
        header: bytes,
        request: WireTensor,
        buffers: list[torch.Tensor],
        own: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Send a request, compute our own part, and return it when the others' are in `buffers`.

        On a GPU, when both will be, before whatever its stream is given next. Raises ProtocolError
        where one of them is gone; what our own part raises.
        """
        with self._of_requests():
            group = there(self._group)
            sent = group.send(header, request.data, group.others)
            coming = group.begin_results(buffers)
        began = time.monotonic()
        try:
            return own()
        finally:
            # Also where we have failed: the next message must find all of them waiting for it.
            limit = timedelta(seconds=COMPUTE_S + _TIMES * (time.monotonic() - began))
            with self._of_requests():
                for work in sent + coming:
                    work.wait(limit)

    def fail(self, rank: int | None, got: str) -> EndpointError:
        """Note the first failure, tell the service to stop, and return what has failed."""
        with self._lock:
            if self.failure is None:
                where = "a rank" if rank is None else f"rank {rank}"
                self.failure = EndpointError(where, got=got, expected="one that goes on")
                log.error("rank_failed", rank="unknown" if rank is None else rank, got=got)
        self._stop.request(0, None)
        return self.failure

    def close(self) -> None:
        """Tell the others to end, wait for it, and leave the group."""
        self._ending = True
        at_once = self.failure is not None or self._group is None
        if self._group is not None and not at_once:
            try:
                for work in self._group.send(b"", b"", self._group.others):
                    work.wait(timedelta(seconds=COMPUTE_S))
            except RuntimeError:
                at_once = True
        until = time.monotonic() + (0.0 if at_once else _END_S)
        for process, watcher in self._started:
            watcher.join(max(0.0, until - time.monotonic()))
            process.kill()  # nothing where it has ended
        for _, watcher in self._started:
            watcher.join()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._group is not None and not at_once:
            self._group.leave()  # where it has failed, it could wait for ever

    def _has_ended(self, rank: int, status: int) -> None:
        if not self._ending:
            names = {-number: number.name for number in signal.Signals}
            how = f"killed by {names.get(status, f'signal {-status}')}"
            self.fail(rank, f"a process {how if status < 0 else f'that ended with {status}'}")

    @contextmanager
    def _of_others(self, got: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            if self._started and not self._stop.requested:
                # Its own end says more, and is known in a moment.
                self._one_ended.wait(_NOTICE_S)
            raise self.fail(None, got) from None

    @contextmanager
    def _of_requests(self) -> Iterator[None]:
        try:
            if self.failure is not None:
                raise RuntimeError("a rank has failed")
            with self._of_others("no reply"):
                yield
        except (RuntimeError, EndpointError):
            raise ProtocolError(
                "ranks",
                got=str(self.failure),
                expected="all of them",
                code=ErrorCode.SHUTTING_DOWN,
            ) from None


def rank_kernels(ranks: Ranks, weights: ServiceWeights) -> Prepare:
    """Return products by all ranks; what needs no weight, by the head alone."""
    own, (_, count) = device_kernels(weights, ranks.job.spin_us), ranks.job.place
    parts = [replace(weights, columns=(rank, count)) for rank in range(count)]
    checkers = [RequestChecker(part, ranks.job.max_message_bytes) for part in parts]

    def prepare(request: Computed, task: Task) -> Kernel:
        if isinstance(request, MatmulRequest):
            return own.prepare(request, task)
        tasks = [checker.check(request) for checker in checkers]
        product = own.product(request, tasks[0])
        # Rounded for the reply once they are together.
        integer = isinstance(request, RingLinearRequest | RingLMHeadRequest)
        dtype = torch.int32 if integer else weights.dtype
        field = next(name for name, value in request if isinstance(value, WireTensor))
        header = REQUEST.header(request_template(request, [b""]), 1, MAX_TIMEOUT_MS)
        join = _join(request, parts)

        def kernel(request: Any, _incoming: Incoming | None) -> Result:
            others = [
                torch.empty(part.shape, dtype=dtype, device=weights.device) for part in tasks[1:]
            ]
            first = ranks.compute(header, getattr(request, field), others, lambda: product(request))
            reply, working = own.transfer.reply(join([first, *others]), task)
            return reply, None if working is None else _of_all(ranks, working)

        return kernel

    return prepare


def _of_all(ranks: Ranks, working: Working) -> Working:
    """Return work on a GPU that goes on when all parts have come; if they do, in time."""
    until_ns = time.perf_counter_ns() + int(COMPUTE_S * 1e9)

    def ends_ns() -> int:
        ends_ns, now_ns = working(), time.perf_counter_ns()
        if ends_ns > now_ns and (ranks.failure is not None or now_ns > until_ns):
            raise RuntimeError(str(ranks.fail(None, "no reply")))
        return ends_ns

    return ends_ns


def _join(
    request: Computed, models: Sequence[ServiceWeights]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Return what makes one output of the ranks' parts."""
    if isinstance(request, EmbeddingRequest):
        # Each token's row is one rank's, and zeros elsewhere.
        return lambda parts: reduce(torch.Tensor.add_, parts)
    if isinstance(request, LMHeadRequest | RingLMHeadRequest | MatmulRequest):
        return lambda parts: torch.cat(parts, dim=-1)
    names = request.module_names
    widths = [[part.part.module_shape(name)[0] for name in names] for part in models]

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        of_ranks = [part.split(sizes, dim=-1) for part, sizes in zip(parts, widths, strict=True)]
        return torch.cat(
            [piece for module in zip(*of_ranks, strict=True) for piece in module], dim=-1
        )

    return join
