"""How the laboratory measures: times, what a process has used, processes of its own, scripts.

`processes` is how work is done in other processes: on a job that is measured (`run_job`), or on
policies that are attacked side by side.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib.metadata
import json
import multiprocessing
import os
import pickle
import platform
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Lock
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import BaseModel

from protocol.errors import TsqpError
from tee_side.plugins import load_module, sources
from tsqp.end_with_parent import end_with
from tsqp.processes import END_TIMEOUT_S, ProcessError, failure

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
Tell: TypeAlias = Callable[[Any], None]


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


def in_turns(work: Sequence[Callable[[], R]], rounds: int, warm_up: int = 0) -> list[list[R]]:
    """Return a row a round of what each returns; each round begins with another of them."""
    for one in work:
        for _ in range(warm_up):
            one()
    gc.collect()
    gc.freeze()  # as tee-runner does
    count = len(work)
    rows: list[list[R]] = []
    try:
        for number in range(rounds):
            row = {n % count: work[n % count]() for n in range(number, number + count)}
            rows.append([row[n] for n in range(count)])
    finally:
        gc.unfreeze()
    return rows


def random_ids(vocab_size: int, tokens: int, *, seed: int, sequences: int = 1) -> torch.Tensor:
    """Return random token ids, int64 [sequences, tokens]: what they say costs no time."""
    import torch  # which takes a second, and pages are drawn without it

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (sequences, tokens), generator=generator)


def describe_machine() -> dict[str, str | int]:
    """Return processor, cores, memory and versions; nothing that names the machine itself."""
    said = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    model = re.search(r"^model name\s*:\s*(.*\S)", said, re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    packages = ("torch", "transformers", "pyzmq", "msgpack", "numpy", "safetensors")
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def peak_bytes(pid: int | str = "self") -> int:
    """Return the largest resident set that a living process ever had. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:  # a zombie: it has ended, and its memory is gone
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(pid))
    return int(found[1]) * 1024


def cpu_ns(pid: int = 0) -> int:
    """Return the CPU time of a process so far, of threads that have ended as well. 0: this one.

    Raises ProcessError if it has ended.
    """
    # The clock that clock_getcpuclockid(3) gives: Python has its call for threads alone.
    clock = ~pid << 3 | 2
    with ProcessError.instead_of(OSError, f"process {pid}", "its end", "it to run"):
        return time.clock_gettime_ns(clock)


# ---------------------------------------------------------------------------------- processes

# Of a process that `processes` has started: what tells the one that it belongs to.
_telling: list[tuple[Connection, Lock]] = []


def tell(what: Any) -> None:
    """Tell the process that this one works for. Raises ValueError where there is none."""
    ((writer, lock),) = _telling
    with lock:
        writer.send(what)


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
    files = [
        Path(module.__file__)
        for name, module in [*sys.modules.items()]
        if name in sources and module.__file__
    ]
    first = (os.getpid(), files, writer, context.Lock(), pickle.dumps((begin, given)))

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


def in_fresh_process(function: Callable[..., R], *arguments: Any, where: str = "") -> R:
    """Return what a function returns, called in a process of its own, which ends with this one.

    `where`: names the work in errors; the function's name does if it is empty. Raises ProcessError
    with what it raises, or if it is killed.
    """
    where = where or function.__name__.strip("_").replace("_", " ")
    with processes(1, where, lambda _: None) as submit:
        found: R = submit(function, *arguments).result()
        return found


def run_job(where: str, measure: Callable[..., Iterator[Any]], *given: Any) -> Iterator[Any]:
    """Have a process of its own measure something, and yield what it finds as it comes.

    `where`: names the work in errors. Raises ProcessError if it fails.
    """
    told = SimpleQueue[Any]()

    def ended(done: Future[Any]) -> None:
        # One that is killed, or has not begun, does not say so itself.
        if not isinstance(done.exception(), ProcessError | None):
            told.put(None)

    with processes(1, where, told.put) as submit:
        running = submit(_measured, measure, *given)
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
    _telling.append((writer, lock))
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


def _measured(measure: Callable[..., Iterator[Any]], *given: Any) -> None:
    """Measure, and tell of what is found and of the end, behind all else."""
    try:
        for found in measure(*given):
            tell(found)
    finally:
        tell(None)


# ------------------------------------------------------------------------------------ scripts


def write_results(results: object, path: Path | None) -> None:
    """Write results, documents among them, as JSON to a file, or to stdout where none is named."""
    text = json.dumps(results, indent=1, default=BaseModel.model_dump)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")


def script(
    about: str | None, measure: Callable[[Any], R], *arguments: str, **options: Any
) -> tuple[R, Path | None]:
    """Return what `measure` makes of a command line, and where to write it (`--json`).

    `arguments`: names of what must be given; `options`: each with its default, whose type is the
    option's. A list is a repeatable option, False one without a value; of numbers in a tuple more
    may be given, with commas, and of words one is chosen, by default the first. An error of ours is
    said in one line.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in arguments:
        parser.add_argument(name)
    for name, default in options.items():
        how: dict[str, Any] = {"default": default, "type": type(default)}
        match default:
            case bool():
                how = {"action": "store_true"}
            case list():
                how = {"default": default, "action": "append"}
            case (str() as first, *_):
                how = {"default": first, "choices": default}
            case tuple():
                how = {"default": default, "type": _numbers}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    parser.add_argument("--json", type=Path, help="write the result here instead of to stdout")
    given = parser.parse_args()
    try:
        return measure(given), given.json
    except TsqpError as error:
        sys.exit(f"{parser.prog}: error: {error}")


def _numbers(text: str) -> tuple[int, ...]:
    found = {int(part) for part in text.split(",")}
    if min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected whole numbers from 1, with commas"
        )
    return tuple(sorted(found))
