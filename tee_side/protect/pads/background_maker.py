"""Makes pads beside a run: a thread that fills a store as far as the load allows."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal, TypeAlias

from protocol.errors import TsqpError
from tee_side.protect.pads.store import PadStore

# What else is to be done: nothing, or steps.
Load: TypeAlias = Literal["idle", "steps"]
# Tells what it is now.
TellLoad: TypeAlias = Callable[[Load], None]

# A run that finds none left waits for the batch in work.
BACKGROUND_BATCH_TOKENS = 32
# Of the thread, and of those that its kernels start: where all cores are taken, steps go first. Not
# by more: a run may wait for it, and for the interpreter's lock that it has. As a thread for idle
# cores it cost 64 streams 5 % less, and held a run up for as long as others took its core.
_NICENESS = 5

# After which what failed is tried again, where nothing else has changed: a dealer may be back.
_AGAIN_S = 5.0


class BackgroundMaker:
    """Calls `make` in turns with a run of one thread: one of them at a time makes pads.

    `wanted`: for how many tokens pads should be made now, under a load. `make`: makes them, and
    fails with TsqpError where that is no mistake of this program: a full disk, weights that
    changed. It is called again when the load changes, or after a while; `failure` is what it met
    last.
    """

    def __init__(self, wanted: Callable[[Load], int], make: Callable[[int], None]) -> None:
        self.failure: TsqpError | None = None
        self._wanted, self._make = wanted, make
        # Guards all below; `wanted` may be another number when it is notified.
        self._changed = threading.Condition()
        # None while no thread is to run.
        self._load: Load | None = None
        self._makes = self._held_off = False
        # By the monotonic clock: what failed is not tried before.
        self._not_before = 0.0
        # Of the thread: what it met by a mistake of this program, too.
        self._ended: Future[None] = Future()

    def notify(self) -> None:
        """Say that `wanted` may have changed."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Wait for the batch in work, if there is one, and let none begin while the block runs."""
        with self._changed:
            self._held_off = True
            self._changed.wait_for(lambda: not self._makes)
        try:
            yield
            # What it met, the run has not: it may try again.
            self._not_before, self.failure = 0.0, None
        finally:
            with self._changed:
                self._held_off = False
                self._changed.notify_all()

    @contextmanager
    def running(self) -> Iterator[TellLoad]:
        """Make pads while the block runs, which says again and again what the load is.

        At first it is idle. Leaving the block waits for the batch in work. A failure does not end
        the run, which goes on with the pads that are left; one that waits for pads gets the error
        then. What `wanted` and `make` raise by a mistake of this program ends the thread, and is
        raised where the load is told, or when the block is left.
        """
        self._load, self._not_before, self._ended = "idle", 0.0, Future()
        # A program that ends without leaving the block is not to wait for the thread.
        thread = threading.Thread(target=self._run, name="pads", daemon=True)
        thread.start()
        try:
            yield self._set_load
        finally:
            with self._changed:
                self._load = None
                self._changed.notify_all()
            thread.join()
        self._ended.result()

    def _set_load(self, load: Load) -> None:
        if self._ended.done():
            self._ended.result()
        if self._load not in (None, load):
            with self._changed:
                self._load, self._not_before = load, 0.0
                self._changed.notify_all()

    def _run(self) -> None:
        os.nice(_NICENESS)  # on Linux, of this thread
        try:
            while tokens := self._next_batch():
                failure: TsqpError | None = None
                try:
                    self._make(tokens)
                except TsqpError as error:
                    failure = error
                finally:
                    with self._changed:
                        self._makes, self.failure = False, failure
                        self._not_before = time.monotonic() + _AGAIN_S if failure else 0.0
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised where the load is told
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _next_batch(self) -> int:
        """Wait until pads are wanted, and return for how many tokens; 0: the end."""
        with self._changed:
            while self._load is not None:
                pause_s = self._not_before - time.monotonic()
                tokens = 0 if self._held_off or pause_s > 0 else self._wanted(self._load)
                if tokens > 0:
                    self._makes = True
                    return tokens
                # Steps that take pads notify it oftener than that: they do not put the time off.
                self._changed.wait(pause_s if pause_s > 0 else None)
            return 0


def missing(store: PadStore, kept: int, load: Load) -> int:
    """Return for how many tokens pads are to be made next; `kept`: that they are kept ready for.

    While nothing runs, for all. Beside steps for half of them, by whole batches: what is ready is
    used at full speed, and what it falls to is held. So many also where more requests wait than
    run: made later, they would be made between two tokens.
    """
    wanted = min(store.room, (kept if load == "idle" else kept // 2) - store.available)
    if load != "idle" and wanted < BACKGROUND_BATCH_TOKENS:
        return 0
    return min(wanted, BACKGROUND_BATCH_TOKENS)
