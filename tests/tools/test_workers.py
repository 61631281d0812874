"""Services that are forked are what gpu-service is."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from tests.kit.service import Workers
from tests.kit.wire import exchange, inline

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


def test_threads_that_start_at_once_each_get_one() -> None:
    with Workers() as workers, ThreadPoolExecutor(4) as pool:
        started = list(pool.map(lambda _: workers.start(*_ARGUMENTS), range(4)))
        assert len({worker.endpoint for worker in started}) == 4
