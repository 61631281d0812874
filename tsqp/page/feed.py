"""What services received for each answer of the chat page, as it was sent to them.

A `Feed` wraps the runner's channels (`RunnerSettings.link`), and is told which answers are under
way. What crosses while one page alone is answered belongs to that page; while others are answered
too, it is counted, and neither kept nor shown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from protocol.channel import Channel, WrappedChannel
from protocol.messages import FUSED_MODULES, Request
from protocol.prepared import Payload, PreparedRequest
from tsqp.page.seen import ReceivedTensors, Seen, describe_request, summarise

HEAD_BYTES = 64
MAX_PAGES = 8  # whose last answer is kept
_MAX_SAMPLES = 32
_MAX_ROWS = 1024  # of the first layer, for the attack
# For so long a request that was broken off may still have a step under way.
_SETTLING_S = 1.0
_OPERATORS = {
    **{" ".join(modules): operator for operator, modules in FUSED_MODULES.items()},
    **dict.fromkeys(("LMHead", "RingLMHead"), "lm_head"),
}


@dataclass(slots=True, eq=False)
class PageAnswer:
    """What crossed for one request to the server. `page`: whose, None for another client's.

    `others`: requests that crossed while others were answered too. `until`: when it is certainly
    over. `samples`: the beginnings of requests, as JSON has them. Of each, `head` is up to 64 bytes
    in hex, `ms` is since the answer began, and its first tensor has `rows` of `width` numbers.
    """

    number: int
    page: str | None
    began: float = field(default_factory=time.monotonic)
    until: float = float("inf")
    running: bool = True
    others: int = 0
    received: ReceivedTensors = field(default_factory=lambda: ReceivedTensors(_MAX_ROWS))
    samples: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

    def add(self, seen: Seen) -> None:
        """Take note of a request."""
        self.received.add(seen)
        first = seen.first
        self.samples.append(
            {
                "number": self.received.requests,
                "ms": round((time.monotonic() - self.began) * 1e3, 1),
                "operator": _OPERATORS.get(seen.what, seen.what),
                "layer": seen.layer,
                "rows": first.numel() // first.shape[-1],
                "width": first.shape[-1],
                "dtype": str(first.dtype).removeprefix("torch."),
                "head": first.reshape(-1).view(torch.uint8)[:HEAD_BYTES].numpy().tobytes().hex(),
            }
        )

    def described(self, since: int) -> dict[str, Any]:
        """Return all of it as JSON has it, with the samples that came after one."""
        summary = summarise(self.received.counts)
        return {
            "answer": self.number,
            "running": self.running,
            "requests": self.received.requests,
            "others": self.others,
            "rows": self.received.rows,
            "bytes": None if summary is None else asdict(summary),
            "histogram": self.received.counts.tolist(),
            "samples": [sample for sample in self.samples if sample["number"] > since],
        }


class Feed:
    """The last answer of each page; wraps channels (`protocol.channel.ChannelWrapper`).

    Channels write from the engine's thread, pages are answered from others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[PageAnswer] = []
        self._last: dict[str, PageAnswer] = {}
        self._answers = 0

    def __call__(self, channel: Channel, timeout_s: float) -> TappedChannel:
        """Return the channel with this feed looking on."""
        return TappedChannel(channel, self._saw)

    @contextmanager
    def answering(self, page: str | None) -> Iterator[Callable[[], None]]:
        """Attribute what crosses in the block to a page; None for a client that has none.

        Call what it gives once the answer is complete: else a step may still be under way.
        """
        with self._lock:
            self._answers += 1
            answer = PageAnswer(self._answers, page)
            self._running.append(answer)
            if page is not None:
                self._last.pop(page, None)
                self._last[page] = answer
                if len(self._last) > MAX_PAGES:
                    del self._last[next(iter(self._last))]
        complete = threading.Event()
        try:
            yield complete.set
        finally:
            with self._lock:
                answer.running = False
                answer.until = time.monotonic() + (0 if complete.is_set() else _SETTLING_S)

    def described(self, page: str, since: int) -> dict[str, Any] | None:
        """Return the page's last answer, see `PageAnswer.described`; None if it has none."""
        with self._lock:
            answer = self._last.get(page)
            return None if answer is None else answer.described(since)

    def inputs(self, page: str) -> list[torch.Tensor]:
        """Return what the first layer was given for the page's last answer."""
        with self._lock:
            return list(self._last[page].received.inputs) if page in self._last else []

    def _saw(self, request: Request) -> None:
        with self._lock:
            now = time.monotonic()
            self._running = [answer for answer in self._running if now < answer.until]
            pages = {answer.page for answer in self._running}
            if not pages or (seen := describe_request(request)) is None:
                return
            if len(pages) == 1 and None not in pages:
                self._running[-1].add(seen)
                return
            for answer in self._running:
                answer.others += 1


class TappedChannel(WrappedChannel):
    """A `Channel` of which each request is shown once it is sent, before its reply is taken."""

    def __init__(self, channel: Channel, saw: Callable[[Request], None]) -> None:
        super().__init__(channel)
        self._saw = saw

    def submit(self, request: Request, timeout_s: float | None = None) -> int:
        """See `Channel.submit`."""
        request_id = self._channel.submit(request, timeout_s)
        self._saw(request)
        return request_id

    def start(
        self, prepared: PreparedRequest, payload: Payload, timeout_s: float | None = None
    ) -> int:
        """See `Channel.start`."""
        request_id = self._channel.start(prepared, payload, timeout_s)
        self._saw(prepared.request(payload))
        return request_id
