"""SIGHUP and the list of clients: what is read when, and that nothing else depends on it."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from gpu_side import allow_list_reload
from gpu_side.access import ServiceKeys
from gpu_side.allow_list_reload import rereads_list
from gpu_side.service import _stop_signals
from gpu_side.transport.bind import open_listener
from gpu_side.transport.zap import ZapHandler
from gpu_side.transport.zmq_listener import ZmqListener

SECRET = zmq.curve_keypair()[1]
FRIEND = zmq.curve_keypair()[0]
OTHER = zmq.curve_keypair()[0]
PATH = Path("allow")


@contextmanager
def _listener(folder: Path) -> Iterator[ZmqListener]:
    listener = ZmqListener(f"ipc://{folder}/s", keys=ServiceKeys(SECRET, frozenset({FRIEND})))
    try:
        yield listener
    finally:
        listener.close()


def _until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.001)


def test_the_end_does_not_wait_for_a_list_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a disk of the network that hangs."""
    reading, going_on = threading.Event(), threading.Event()

    def hangs(_: Path) -> frozenset[bytes]:
        reading.set()
        going_on.wait()
        return frozenset({FRIEND})

    monkeypatch.setattr(allow_list_reload, "read_allow_list", hangs)
    monkeypatch.setattr(allow_list_reload, "_ENDING_S", 0.0)
    with _listener(tmp_path) as listener:
        with _stop_signals() as stop, rereads_list(listener.allow, PATH):
            os.kill(os.getpid(), signal.SIGHUP)
            assert reading.wait(30)
            # It is not our loop's business.
            assert not listener.wait(wakeup=stop.reader, timeout_ms=0)
            assert not stop.requested
            os.kill(os.getpid(), signal.SIGTERM)
            assert select.select([stop.reader], [], [], 30)[0]
            assert not listener.wait(wakeup=stop.reader)
            assert stop.requested
            # And a second one, which ends a drain.
            stop.rearm()
            os.kill(os.getpid(), signal.SIGINT)
            assert select.select([stop.reader], [], [], 30)[0]
            assert stop.requested
        (thread,) = [one for one in threading.enumerate() if one.name == "allow-list"]
        going_on.set()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_list_the_signal_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """By default it would end the process, and what waits there. A start does not speak of it."""
    before = signal.getsignal(signal.SIGHUP)
    listener = open_listener(f"{'unix' if stream else 'ipc'}://{tmp_path}/s")
    with (
        caplog.at_level(logging.INFO, "gpu_service"),
        _stop_signals() as stop,
        rereads_list(listener.allow, None),
    ):
        assert caplog.messages == []
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
    assert signal.getsignal(signal.SIGHUP) == before
    assert caplog.messages == ["sighup_ignored"] * 3
    listener.close()


def test_a_failure_of_ours_is_told_and_the_next_signal_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lists = iter([MemoryError(), frozenset({FRIEND}), frozenset({OTHER})])

    def fails_once(_: Path) -> frozenset[bytes]:
        found = next(lists)
        if isinstance(found, MemoryError):
            raise found
        return found

    def told(times: int) -> Callable[[], bool]:
        return lambda: caplog.messages.count("allow_list_unchanged") == times

    monkeypatch.setattr(allow_list_reload, "read_allow_list", fails_once)
    with (
        caplog.at_level(logging.INFO, "gpu_service"),
        _listener(tmp_path) as listener,
        _stop_signals(),
        rereads_list(listener.allow, PATH),
    ):
        os.kill(os.getpid(), signal.SIGHUP)
        _until(told(1), "a failure that is not told")
        assert listener.is_allowed(FRIEND)
        with monkeypatch.context() as patched:
            patched.setattr(ZapHandler, "replace_list", lambda *_: 1 / 0)
            os.kill(os.getpid(), signal.SIGHUP)
            _until(told(2), "a failure that is not told")
        os.kill(os.getpid(), signal.SIGHUP)
        _until(lambda: "allow_list" in caplog.messages, "a signal that is not heard")
        assert not listener.is_allowed(FRIEND)
        assert listener.is_allowed(OTHER)
