"""The program that starts the runner in the guest: what it says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.kernel_log import PLUGGED, RESUMED, KernelLog
from tsqp.deploy.guest.start import Resumed, seeded


def test_a_generator_without_a_seed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seeded()

    def unseeded(size: int, flags: int) -> bytes:
        assert (size, flags) == (1, os.GRND_NONBLOCK)
        raise BlockingIOError

    monkeypatch.setattr(os, "getrandom", unseeded)
    assert not seeded()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelLog]:
    """In place of /dev/kmsg."""

    def opened(path: str, flags: int) -> int:
        assert (Path(path), flags) == (Path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
        return made.reader

    def sought(descriptor: int, offset: int, whence: int) -> None:
        assert (descriptor, offset, whence) == (made.reader, 0, os.SEEK_END)

    with KernelLog() as made, monkeypatch.context() as patched:
        patched.setattr(os, "open", opened)
        patched.setattr(os, "lseek", sought)
        yield made


def test_it_says_from_the_kernels_log_that_it_was_resumed(log: KernelLog) -> None:
    resumed = Resumed()
    assert not resumed
    log.say(PLUGGED, PLUGGED)
    assert not resumed
    log.say(RESUMED, PLUGGED)
    assert resumed
    assert resumed
