"""Makes pads in a thread of its own, beside a run, as far as what else is to be done allows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from protocol.errors import TsqpError

# What else is to be done: nothing, or steps.
Load: TypeAlias = Literal["idle", "steps"]
# Tells what it is now.
TellLoad: TypeAlias = Callable[[Load], None]

# Of the thread, and of those that its kernels start: where all cores are taken, steps go first. Not
# by more: a run may wait for it, and for the interpreter's lock that it has. As a thread for idle
# cores it cost 64 streams 5 % less, and held a run up for as long as others took its core.
_NICENESS = 5


class BackgroundMaker:
    """Calls `make` in turns with a run of one thread: one of them at a time makes pads.

    `wanted`: for how many tokens pads should be made now, under a load. `make`: makes them, and
    fails with TsqpError where that is no mistake of this program: a full disk, weights that
    changed. It is called again when the load changes; `failure` is what it met last.
    """

    def __init__(self, wanted: Callable[[Load], int], make: Callable[[int], None]) -> None:
        self.failure: TsqpError | None = None
        self._wanted, self._make = wanted, make
        self._load: Load = "idle"
        # Guards all below; `wanted` may be another number when it is notified.
        self._changed = threading.Condition()
        self._runs = self._makes = self._held_off = self._failed = self._ending = False
        self._mistake: BaseException | None = None

    def notify(self) -> None:
        """Say that `wanted` may have changed."""
        if self._runs:
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Wait for the batch in work, if there is one, and let none begin while the block runs."""
        with self._changed:
            self._held_off = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._makes)
        try:
            yield
            # What it met, the run has not: it may try again.
            self._failed, self.failure = False, None
        finally:
            with self._changed:
                self._held_off = False
                self._changed.notify_all()

    @contextmanager
    def running(self) -> Iterator[TellLoad]:
        """Make pads while the block runs, which says again and again what the load is.

        At first it is idle. Leaving the block waits for the batch in work. What `wanted` and `make`
        raise by a mistake of this program ends the thread, and is raised where the load is told, or
        when the block is left.
        """
        self._load, self._ending, self._failed, self._mistake = "idle", False, False, None
        self._runs = True
        thread = threading.Thread(target=self._run, name="pads", daemon=True)
        thread.start()
        try:
            yield self._set_load
        finally:
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            thread.join()
            self._runs = False
        self._raise_mistake()

    def _set_load(self, load: Load) -> None:
        self._raise_mistake()
        if load != self._load:
            with self._changed:
                self._load, self._failed = load, False
                self._changed.notify_all()

    def _raise_mistake(self) -> None:
        if self._mistake is not None:
            raise self._mistake

    def _run(self) -> None:
        os.nice(_NICENESS)  # on Linux, of this thread
        try:
            while tokens := self._next_batch():
                failure: TsqpError | None = None
                try:
                    self._make(tokens)
                except TsqpError as error:
                    failure = error
                with self._changed:
                    self._makes, self._failed, self.failure = False, failure is not None, failure
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that tells the load
            with self._changed:
                self._makes, self._mistake = False, error
                self._changed.notify_all()

    def _next_batch(self) -> int:
        """Wait until pads are wanted, and return for how many tokens; 0: the end."""
        with self._changed:
            while not self._ending:
                if (tokens := self._now()) > 0:
                    self._makes = True
                    return tokens
                self._changed.wait()
            return 0

    def _now(self) -> int:
        return 0 if self._held_off or self._failed else self._wanted(self._load)
