"""A request loop without sockets: messages that a test hands it, on a clock of the test's."""

import math
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
from gpu_side.handler import RequestHandler, ServiceState
from gpu_side.kernels import Result
from gpu_side.request_loop import RequestLoop, StopSignal
from gpu_side.transport.listener import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES, encode_request
from protocol.messages import MatmulRequest, Request, TensorReply
from protocol.tensors import Buffer, from_torch

MS = 1_000_000
Answer = Callable[[Request], Result]
REQUEST = MatmulRequest(a=from_torch(torch.ones(1, 1)), b=from_torch(torch.ones(1, 1)))
RESULT: Result = (TensorReply(output=from_torch(torch.ones(1, 1))), None)


def incoming_request(
    request_id: int,
    timeout_ms: int = 60_000,
    age_s: float = 0.0,
    client: str = "peer",
    request: Request = REQUEST,
    key: bytes = b"",
) -> Incoming:
    frames = [memoryview(bytes(f)) for f in encode_request(request, request_id, timeout_ms)]
    came_ns = time.perf_counter_ns() - int(age_s * 1e9)
    return Incoming((client.encode(),), frames, came_ns, key)


def incoming_bytes(body: bytes | dict[str, object], client: str = "peer") -> Incoming:
    frame = memoryview(body if isinstance(body, bytes) else msgpack.packb(body))
    return Incoming((client.encode(), b""), [frame], time.perf_counter_ns())


class Listener:
    """Stands in for the socket: hands out messages, keeps replies and tells `on_send` of each."""

    def __init__(self, incoming: Sequence[Incoming] = (), *, gone: bool = False) -> None:
        self.incoming, self.gone = deque(incoming), gone
        self.sent: list[dict[str, Any]] = []
        self.sent_bytes = 0
        self.revoked: set[bytes] = set()
        self.on_send: Callable[[dict[str, Any]], None] = lambda reply: None

    def is_allowed(self, key: bytes) -> bool:
        return key not in self.revoked

    def wait(self, *, wakeup: Any = None, timeout_ms: int | None = None) -> bool:
        return bool(self.incoming)

    def receive(self) -> Incoming | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        self.sent.append(msgpack.unpackb(frames[0]))
        self.sent_bytes += sum(map(len, frames))
        self.on_send(self.sent[-1])
        return not self.gone

    @property
    def outcomes(self) -> list[tuple[int, str | None]]:
        return [(reply.get("request_id", 0), reply.get("error")) for reply in self.sent]


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
    with stop.reader, stop.writer:
        yield stop


def make_loop(answer: Answer, state: ServiceState | None = None, **settings: Any) -> Any:
    """Return a loop whose requests are answered by a function of the test's."""

    def kernel(request: Request, _incoming: Incoming | None) -> Result:
        return answer(request)

    def prepare(request: Request) -> Any:
        return RequestHandler.prepare(handler, request) if request.method == "Health" else kernel

    # The loop asks only where there may be sessions to expire.
    sessions = SimpleNamespace(look_at_s=0.0, expire=lambda: math.inf)
    state = state or ServiceState()
    handler: Any = SimpleNamespace(
        prepare=prepare, sessions=sessions, state=state, max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES
    )
    return RequestLoop(handler, **settings)


def run_loop(
    listener: Listener,
    answer: Answer = lambda request: RESULT,
    state: ServiceState | None = None,
    stop: StopSignal | None = None,
    **settings: Any,
) -> None:
    """Run a loop until it is told to stop, or the listener has no more messages."""
    with stop_signal() as own:
        make_loop(answer, state, **settings).run(listener, stop or own)


class Clock:
    """Stands still while nothing waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**9
        monkeypatch.setattr(request_loop.time, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(request_loop, "wait_until", self.wait_until)
        monkeypatch.setattr(request_loop.time, "sleep", self.sleep)

    def wait_until(self, ns: int) -> None:
        self.now = max(self.now, ns)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


class Accelerator:
    """Works on each request for so long; `asked`: without saying when it ends; one may fail."""

    def __init__(
        self, clock: Clock, duration_ns: int, *, asked: bool = False, failing: int = 0
    ) -> None:
        self._clock, self._duration_ns = clock, duration_ns
        self._asked, self._failing = asked, failing
        self._free_ns = self._count = 0

    def __call__(self, request: Request) -> Result:
        self._count += 1
        self._free_ns = max(self._clock.now, self._free_ns) + self._duration_ns
        end_ns, fails = self._free_ns, self._count == self._failing

        def ends_ns() -> int:
            now = self._clock.now
            if fails and now >= end_ns:
                raise RuntimeError("canary")
            return now + 70_000 if self._asked and now < end_ns else end_ns

        return RESULT[0], ends_ns


class Timed(Listener):
    """Messages, or requests numbered from 1, that come at their times (ns), and when replies go."""

    def __init__(
        self, clock: Clock, *arrivals: int | tuple[int, Incoming], timeout_ms: int = 60_000
    ) -> None:
        super().__init__()
        self._clock, self._began = clock, clock.now
        self._coming = deque(
            (one, incoming_request(number, timeout_ms)) if isinstance(one, int) else one
            for number, one in enumerate(arrivals, 1)
        )
        self.sent_ns: list[int] = []
        self.on_send = lambda _: self.sent_ns.append(clock.now - self._began)
        self.received_ns: list[int] = []

    def _here(self) -> bool:
        return bool(self._coming) and self._began + self._coming[0][0] <= self._clock.now

    def wait(self, *, wakeup: Any = None, timeout_ms: int | None = None) -> bool:
        limit = self._clock.now + (10**12 if timeout_ms is None else timeout_ms * 10**6)
        if self._coming:
            self._clock.now = max(self._clock.now, min(limit, self._began + self._coming[0][0]))
        elif timeout_ms is not None:
            self._clock.now = limit
        return self._here()

    def receive(self) -> Incoming | None:
        if not self._here():
            return None
        _, incoming = self._coming.popleft()
        self.received_ns.append(self._clock.now - self._began)
        return incoming._replace(received_ns=self._clock.now)
