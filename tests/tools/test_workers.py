"""Services that are forked are what gpu-service is."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import zmq

from tests.fault.wire import exchange, inline
from tests.tools import workers as workers_module
from tests.tools.workers import Workers

_ARGUMENTS = ("demo", "--bind", "tcp://127.0.0.1:*", "--threads", "1")


def is_answering(endpoint: str) -> bool:
    return b"success" in exchange(zmq.REQ, endpoint, [inline("Init", {})])[0]


def test_services_answer_and_end_with_the_block(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Workers() as workers:
        first, second = (workers.start(*_ARGUMENTS, log=log) for _ in range(2))
        assert first.pid != second.pid
        assert is_answering(first.endpoint)
        assert is_answering(second.endpoint)
        assert log.read_text(encoding="utf-8").count(" ready ") == 2
        with Workers() as others:
            third = others.start(*_ARGUMENTS)
        assert (third.is_running, first.is_running) == (False, True)
    assert (first.is_running, second.is_running) == (False, False)


def test_killed_one_comes_back_at_its_endpoint() -> None:
    with Workers() as workers:
        worker = workers.start(*_ARGUMENTS)
        worker.signal(signal.SIGSTOP)
        worker.kill()
        assert not worker.is_running
        again = workers.restart(worker)
        assert (again.endpoint, again.pid != worker.pid) == (worker.endpoint, True)
        assert is_answering(again.endpoint)


def test_one_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with Workers() as workers, pytest.raises(RuntimeError, match="expected it ready"):
        workers.start("no-such-model", "--bind", "tcp://127.0.0.1:*")


def test_threads_that_start_at_once_have_one_forker(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    together = threading.Barrier(2)

    class Forker:
        def __init__(self) -> None:
            made.append(self)
            # Until another is made too, which never is.
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)

        def close(self) -> None:
            pass

    monkeypatch.setattr(workers_module, "_Forker", Forker)
    fresh = cache(workers_module._only_forker.__wrapped__)
    monkeypatch.setattr(workers_module, "_only_forker", fresh)
    start = threading.Barrier(8)

    def found(_: int) -> object:
        start.wait()
        return workers_module._forker()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(found, range(8))) == set(made)
    assert len(made) == 1
