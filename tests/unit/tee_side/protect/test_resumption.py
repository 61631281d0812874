"""A VM that was resumed from a snapshot: the kernel's own word for it, and no other's."""

import errno
import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest

from protocol.errors import ResumedError
from tee_side.protect import resumption
from tee_side.protect.resumption import ResumeWatch, has_generation_id, watch
from tests.kit.kernel_log import PLUGGED, RESUMED, KernelLog
from tests.kit.rows import each_row


@pytest.fixture
def log() -> Iterator[KernelLog]:
    with KernelLog() as made:
        yield made


def _is_readable(watched: ResumeWatch) -> bool:
    return bool(select.select([watched.fileno()], [], [], 0)[0])


def test_the_kernels_word_raises_for_ever_in_every_thread(log: KernelLog) -> None:
    watched = ResumeWatch(log.reader)
    for records in ([], [PLUGGED, PLUGGED]):  # others are passed over, and hide nothing
        log.say(*records)
        assert watched.told(0, 1) or not records
        watched.check()
        assert not watched.told(0, 1)
        assert not _is_readable(watched)
    log.say(*[PLUGGED] * 50, RESUMED)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(watched.check) for _ in range(4)]
    assert [type(one.exception()) for one in asked] == [ResumedError] * 4
    for _ in range(2):
        assert watched.told(0, 1)
        assert _is_readable(watched)
        with pytest.raises(ResumedError, match="this VM: got resumed from a snapshot, expected to"):
            watched.check()


@each_row(
    ("number", "believed"),
    [("0", True), ("5", True), ("7", True), ("8", False), ("13", False), ("133", False)],
)
def test_a_program_that_writes_to_the_log_is_not_believed(number: str, believed: bool) -> None:
    """The kernel gives what others write a facility above 0: 8 of the number."""
    with KernelLog() as log:
        watched = ResumeWatch(log.reader)
        log.say(f"{number},{RESUMED.partition(',')[2]}")
        if believed:
            with pytest.raises(ResumedError):
                watched.check()
        else:
            watched.check()
            assert not watched.told(0, 1)


def test_lost_records_may_have_been_the_one(
    log: KernelLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, read = ResumeWatch(log.reader), os.read
    log.say(PLUGGED)

    def overwritten(descriptor: int, size: int) -> NoReturn:
        read(descriptor, size)
        raise OSError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(os, "read", overwritten)
    for _ in range(2):  # nothing is left to read the second time
        with pytest.raises(ResumedError, match="got records of the kernel's log that were lost"):
            watched.check()
        assert watched.told(0, 1)


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the driver is, as a module and without a device."""
    for bus in ("platform", "acpi"):
        (tmp_path / bus / "module" / "drivers").mkdir(parents=True)
        (tmp_path / bus / "bind").touch()
    monkeypatch.setattr(resumption, "_DRIVERS", [tmp_path / "platform", tmp_path / "acpi"])
    watch.cache_clear()
    yield tmp_path
    watch.cache_clear()


@pytest.mark.parametrize("bus", ["platform", "acpi"])
def test_with_a_device_the_log_is_read_from_its_end_on(
    bus: str, drivers: Path, log: KernelLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (has_generation_id(), watch()) == (False, None)
    watch.cache_clear()
    opened, sought = [], []

    def opens(path: Path, flags: int) -> int:
        opened.append((path, flags))
        return log.reader

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "lseek", lambda *where: sought.append(where))
    (drivers / bus / "VMGENCTR:00" / "driver").mkdir(parents=True)
    watched = watch()
    assert watched is not None
    assert watch() is watched
    assert opened == [(Path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)]
    assert sought == [(log.reader, 0, os.SEEK_END)]
    # In a container there may be none to read, or none to seek in.
    for broken in ("open", "lseek"):
        watch.cache_clear()
        monkeypatch.setattr(os, broken, Mock(side_effect=PermissionError))
        assert (has_generation_id(), watch()) == (True, None)
        monkeypatch.setattr(os, "open", opens)
