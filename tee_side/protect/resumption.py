"""Notices that this VM was resumed from a snapshot: what was drawn before may be used elsewhere.

A VM that is resumed twice uses every pad, mask and key twice. Where its hypervisor gives it a
generation id, Linux draws new randomness on each new one, from 5.18 on (drivers/virt/vmgenid.c),
and says so in its log, a moment after the VM runs again. It tells programs in no other way: a
message to them came with 6.8 and was taken back with 6.9. What remains: docs/threat-model.md.
"""

import os
import select
import threading
from functools import cache
from pathlib import Path

from protocol.errors import ResumedError

# Of the platform's drivers from Linux 6.10 on, of ACPI's before.
_DRIVERS = [Path("/sys/bus", bus, "drivers/vmgenid") for bus in ("platform", "acpi")]
_LOG = Path("/dev/kmsg")
_MAX_BYTES = 8192  # of a record of the log
_FORKED = b"virtual machine fork"  # drivers/char/random.c: "crng reseeded due to ..."


class ResumeWatch:
    """Whether this VM was resumed since the watch began; any thread may ask.

    `log`: a file that gives one record of the kernel's log at a time, from now on, and never waits.
    `told`, called with (0, 1), returns nothing as long as there is nothing to `check`: it is called
    for every request, and takes 1 us and no Python call. `fileno`: readable when it returns more.
    """

    def __init__(self, log: int) -> None:
        self._log, self._lock, self._got = log, threading.Lock(), ""
        self._ended = os.eventfd(0)
        events = select.epoll()
        for source in (log, self._ended):
            events.register(source, select.EPOLLIN)
        self.told, self.fileno = events.poll, events.fileno

    def check(self) -> None:
        """Raise ResumedError if this VM was resumed, or may have been, and from then on always."""
        with self._lock:
            while not self._got and self.told(0, 1):
                try:
                    # A record of the log is no longer.
                    number, _, text = os.read(self._log, _MAX_BYTES).partition(b",")
                except OSError:  # of Linux: newer records have taken their place
                    self._got = "records of the kernel's log that were lost"
                else:
                    # Others write to the log, too, under a facility above 0: the number is 8 of it.
                    if _FORKED in text and int(number) < 8:
                        self._got = "resumed from a snapshot"
            if self._got:
                os.eventfd_write(self._ended, 1)  # it is not read: there is something to check
                raise ResumedError(
                    "this VM",
                    self._got,
                    "to run on: pads and keys of this run may be used twice (start it again)",
                )


def has_generation_id() -> bool:
    """Say whether this VM has a generation id that Linux knows of."""
    return any(any(driver.glob("*/driver")) for driver in _DRIVERS)


@cache
def watch() -> ResumeWatch | None:
    """Return the watch of this process, which begins with the first call: before secrets are drawn.

    None: this VM has no generation id, or this process may not read the kernel's log.
    """
    if not has_generation_id():
        return None
    try:
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
        return ResumeWatch(log)
    except OSError:  # in a container it may be no log at all
        return None
