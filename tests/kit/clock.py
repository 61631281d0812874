"""A request loop without sockets: messages that a test hands it, on a clock of the test's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch

from gpu_side import request_loop
from gpu_side.replies import Kernel, Result
from gpu_side.request_loop import RequestLoop
from gpu_side.state import ServiceState
from gpu_side.stop_signal import StopSignal
from gpu_side.transport.listener import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.messages import MatmulRequest, Request, TensorReply
from protocol.tensors import Buffer, from_torch

MS = 1_000_000
# Computes a request, wherever it came from.
Answer = Callable[[Request], Result]
REQUEST = MatmulRequest(a=from_torch(torch.ones(1, 1)), b=from_torch(torch.ones(1, 1)))
RESULT: Result = (TensorReply(output=from_torch(torch.ones(1, 1))), None)


class Listener:
    """Stands in for the socket: hands out messages, keeps replies."""

    def __init__(self, incoming: list[Incoming], *, gone: bool = False) -> None:
        self.incoming, self.gone = deque(incoming), gone
        self.sent: list[dict[str, Any]] = []
        self.clients_refused = 0
        self.revoked: set[bytes] = set()

    def is_allowed(self, key: bytes) -> bool:
        return key not in self.revoked

    def allow(self, allowed: frozenset[bytes]) -> None:
        raise NotImplementedError

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        return bool(self.incoming)

    def receive(self) -> Incoming | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent.append(msgpack.unpackb(frames[0]))
        return not self.gone


class Handler:
    """Stands in for the weights: answers by a function of the test's."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        # The loop asks only where there may be sessions to expire.
        self.sessions: Any = SimpleNamespace(look_at_s=0.0)

    def expire_sessions(self) -> int | None:
        return None

    def prepare(self, request: Request) -> Kernel:
        return lambda request, _slot: self._answer(request)


def incoming_request(
    request_id: int,
    timeout_ms: int = 60_000,
    age_s: float = 0.0,
    client: bytes = b"peer",
    request: Request = REQUEST,
) -> Incoming:
    frames = [memoryview(bytes(f)) for f in encode_request(request, request_id, timeout_ms)]
    return Incoming((client,), frames, time.perf_counter_ns() - int(age_s * 1e9))


class EndsWhenIdle(StopSignal):
    """Stops a loop that is woken without a message: a listener of the test has no more of them."""

    def forget_wakeup(self) -> None:
        self.requested = True

    def rearm(self) -> None:
        super().forget_wakeup()
        self.requested = False


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    stop = EndsWhenIdle()
    try:
        yield stop
    finally:
        stop.reader.close()
        stop.writer.close()


def make_loop(answer: Answer, state: ServiceState | None = None, **settings: Any) -> Any:
    handler: Any = Handler(answer)
    return RequestLoop(handler, DEFAULT_MAX_MESSAGE_BYTES, state, **settings)


def run_loop(
    listener: Listener,
    answer: Answer,
    state: ServiceState | None = None,
    stop: StopSignal | None = None,
    **settings: Any,
) -> None:
    with stop_signal() as own:
        make_loop(answer, state, **settings).run(listener, stop or own)


def errors_of(listener: Listener) -> list[tuple[int, str | None]]:
    return [(reply["request_id"], reply.get("error")) for reply in listener.sent]


class Clock:
    """Stands still but for who waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**9
        monkeypatch.setattr(request_loop.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(request_loop, "wait_until", self.wait_until)
        monkeypatch.setattr(request_loop.time, "sleep", self.sleep)

    def wait_until(self, ns: int) -> None:
        self.now = max(self.now, ns)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class Work:
    """Takes from one time of the clock to another, or fails then."""

    def __init__(self, clock: Clock, end_ns: int, fails: bool) -> None:
        self._clock, self._end_ns, self._fails = clock, end_ns, fails

    def ends_ns(self) -> int:
        if self._fails and self._clock.now >= self._end_ns:
            raise RuntimeError("canary")
        return self._end_ns


class Asked(Work):
    """Does not say when it ends."""

    def ends_ns(self) -> int:
        if self._clock.now < self._end_ns:
            return self._clock.now + 70_000
        return self._end_ns


class Accelerator:
    """Works on each request for so long, one after the other, on a clock of its own."""

    def __init__(
        self,
        clock: Clock,
        duration_ns: int,
        *,
        kind: type[Work] = Work,
        failing: int = 0,
    ) -> None:
        self._clock, self._duration_ns = clock, duration_ns
        self._kind, self._failing = kind, failing
        self._free_ns = self._count = 0

    def __call__(self, request: Request) -> Result:
        self._count += 1
        self._free_ns = max(self._clock.now, self._free_ns) + self._duration_ns
        fails = self._count == self._failing
        work = self._kind(self._clock, self._free_ns, fails)
        return RESULT[0], work


class Timed(Listener):
    """Requests that come at their times, in ns behind the beginning, and when replies go."""

    def __init__(self, clock: Clock, *arrivals_ns: int, timeout_ms: int = 60_000) -> None:
        super().__init__([])
        self._clock, self._began, self._timeout_ms = clock, clock.now, timeout_ms
        self._coming = deque(enumerate(arrivals_ns, 1))
        self.sent_ns: list[int] = []
        self.received_ns: list[int] = []

    def _here(self) -> bool:
        return bool(self._coming) and self._began + self._coming[0][1] <= self._clock.now

    def wait(self, *, wakeup: object = None, timeout_ms: int | None = None) -> bool:
        limit = self._clock.now + (10**12 if timeout_ms is None else timeout_ms * 10**6)
        if self._coming:
            self._clock.now = max(self._clock.now, min(limit, self._began + self._coming[0][1]))
        elif timeout_ms is not None:
            self._clock.now = limit
        return self._here()

    def receive(self) -> Incoming | None:
        if not self._here():
            return None
        number, _ = self._coming.popleft()
        self.received_ns.append(self._clock.now - self._began)
        incoming = incoming_request(number, self._timeout_ms)
        return incoming._replace(received_ns=self._clock.now)

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent_ns.append(self._clock.now - self._began)
        return super().send(route, frames)
