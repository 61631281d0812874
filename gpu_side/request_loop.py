"""Answers requests, one after the other, until told to stop.

One thread does everything. Whatever has arrived is picked up between two requests, from its clients
in turn. What waits in the transport while the processor computes a product is not seen before the
product is done, so the queueing time in a reply is a lower bound; while an accelerator works,
messages come in and replies go out. A malformed message gets an error reply with a code and a line
in the log; nothing that a client sends ends the loop.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from types import FrameType
from typing import NamedTuple

import torch

from gpu_side.answers import Working
from gpu_side.operators import Operators
from protocol.channel import Incoming, Listener
from protocol.clock import wait_until
from protocol.encoding import (
    EnvelopeError,
    Form,
    OpenedRequest,
    encode_reply,
    likely_form,
    open_request,
    read_request,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import Response, Timing

log = logging.getLogger("gpu_service")

# Picked up but not yet started. Beyond it messages wait in the transport's bounded queues.
MAX_QUEUED_REQUESTS = 64
# Given to an accelerator: one that it works on, and the next, so that it need not wait for us. The
# others stay in the queue, where their deadlines are checked, and take no memory for an output.
MAX_UNDERWAY = 2
_STOPPING_S = 0.1
# A wait for messages takes whole milliseconds. In the last of them before an accelerator is done we
# look for messages so often.
_LOOK_NS = 200_000


class StopSignal:
    """Turns SIGTERM and SIGINT into a readable socket, so that a blocked poll wakes at once."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.requested = False

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.requested = True


class _Origin(NamedTuple):
    """What a reply says of its request, and where it goes."""

    incoming: Incoming
    form: Form
    request_id: int
    method: str


class _Underway(NamedTuple):
    """A request that an accelerator was given, and when (perf_counter_ns)."""

    origin: _Origin
    response: Response
    work: Working
    given_ns: int


class RequestLoop:
    """Takes messages from a listener and gives it the replies."""

    def __init__(self, operators: Operators, max_message_bytes: int) -> None:
        self._operators = operators
        self._max_message_bytes = max_message_bytes
        self._queue: deque[Incoming] = deque()
        # What an accelerator works on, in the order in which it will be done.
        self._underway: deque[_Underway] = deque()
        # When it was done with the last one (perf_counter_ns).
        self._free_ns = 0

    def run(self, listener: Listener, stop: StopSignal) -> None:
        """Answer until told to stop."""
        with torch.inference_mode():
            self._run(listener, stop)
        self._stop(listener)

    def _run(self, listener: Listener, stop: StopSignal) -> None:
        queue, underway = self._queue, self._underway
        while not stop.requested:
            if queue and len(underway) < MAX_UNDERWAY:
                self._answer(listener, queue.popleft())
            elif underway:
                self._wait_for_accelerator(listener, stop)
            elif not listener.wait(wakeup=stop.reader):
                break
            elif (incoming := listener.receive()) is not None:
                self._answer(listener, incoming)
            while underway and self._send_ended(listener, underway[0]):
                underway.popleft()
            # After the reply, not before it: finding nothing takes time, too.
            while len(queue) < MAX_QUEUED_REQUESTS and (later := listener.receive()):
                queue.append(later)

    def _wait_for_accelerator(self, listener: Listener, stop: StopSignal) -> None:
        """Wait until it is done with what it works on, or a message can be received."""
        full = len(self._queue) >= MAX_QUEUED_REQUESTS
        while (left_ns := self._left_ns()) > 0 and not stop.requested:
            timeout_ms = max(0, left_ns // 1_000_000 - 1)
            if not full and listener.wait(wakeup=stop.reader, timeout_ms=timeout_ms):
                return
            if left_ns <= 2 * _LOOK_NS:
                wait_until(time.perf_counter_ns() + left_ns)
            elif full or not timeout_ms:
                time.sleep(_LOOK_NS / 1e9)

    def _left_ns(self) -> int:
        """Say how long the accelerator works on the first request, or when to ask again."""
        try:
            return self._underway[0].work.ends_ns() - time.perf_counter_ns()
        except RuntimeError:
            return 0  # it has failed, as `_send_ended` will find

    def _answer(self, listener: Listener, incoming: Incoming) -> None:
        started_ns = time.perf_counter_ns()
        origin = _Origin(incoming, likely_form(incoming.frames), 0, "")
        try:
            opened = open_request(incoming.frames, self._max_message_bytes)
            origin = _Origin(incoming, opened.form, opened.request_id, opened.method)
            _check_deadline(opened, (started_ns - incoming.received_ns) // 1000)
            answer = self._operators.apply(read_request(opened))
        except ProtocolError as error:
            if isinstance(error, EnvelopeError):
                origin = origin._replace(form=error.form, request_id=error.request_id)
            extra = _fields(origin, code=error.code.value, detail=str(error))
            log.warning("refused", extra=extra)
            self._send(listener, origin, error.code)
        except Exception:
            # Exhausted memory, a device fault or a mistake of ours: this request fails, the
            # others go on. The traceback stays in our own log.
            log.exception("failed", extra=_fields(origin, method=origin.method))
            self._send(listener, origin, ErrorCode.INTERNAL)
        else:
            if answer.work is None:
                ended_ns = time.perf_counter_ns()
                self._send_result(listener, origin, answer.response, started_ns, ended_ns)
            else:
                # What was received has been read, or copied: its memory can be used again.
                origin = origin._replace(incoming=incoming._replace(frames=[]))
                given = _Underway(origin, answer.response, answer.work, started_ns)
                self._underway.append(given)

    def _send_ended(self, listener: Listener, underway: _Underway) -> bool:
        """Send a result if the accelerator is done with it, or has failed."""
        origin, response, work, given_ns = underway
        try:
            ends_ns = work.ends_ns()
        except RuntimeError:
            log.exception("failed", extra=_fields(origin, method=origin.method))
            self._send(listener, origin, ErrorCode.INTERNAL)
            return True
        if ends_ns > time.perf_counter_ns():
            return False
        self._send_result(listener, origin, response, max(given_ns, self._free_ns), ends_ns)
        self._free_ns = ends_ns
        return True

    def _send_result(
        self,
        listener: Listener,
        origin: _Origin,
        response: Response,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        queue_us = (started_ns - origin.incoming.received_ns) // 1000
        compute_us = (ended_ns - started_ns) // 1000
        timing = Timing(queue_us=max(0, queue_us), compute_us=max(0, compute_us))
        self._send(listener, origin, response, timing)

    def _send(
        self,
        listener: Listener,
        origin: _Origin,
        result: Response | ErrorCode,
        timing: Timing | None = None,
    ) -> None:
        incoming, form, request_id, method = origin
        try:
            frames = encode_reply(form, request_id, method, result, timing)
        except Exception:
            log.exception("failed", extra=_fields(origin, method=method))
            frames = encode_reply(form, request_id, method, ErrorCode.INTERNAL)
        if not listener.send(incoming.route, frames):
            log.warning("client_gone", extra=_fields(origin))

    def _stop(self, listener: Listener) -> None:
        """Refuse what is left.

        Requests that arrive in the moment of stopping get an answer, not a passed deadline.
        Bounded, so that a client that goes on sending cannot keep the service from stopping.
        """
        until = time.monotonic() + _STOPPING_S
        for underway in self._underway:
            if not self._send_ended(listener, underway):
                self._send(listener, underway.origin, ErrorCode.SHUTTING_DOWN)
        while self._queue or listener.wait(
            timeout_ms=max(0, int((until - time.monotonic()) * 1000))
        ):
            if time.monotonic() > until:
                break
            incoming = self._queue.popleft() if self._queue else listener.receive()
            if incoming is not None:
                self._refuse(listener, incoming)

    def _refuse(self, listener: Listener, incoming: Incoming) -> None:
        try:
            opened = open_request(incoming.frames, self._max_message_bytes)
        except ProtocolError:
            return
        origin = _Origin(incoming, opened.form, opened.request_id, opened.method)
        self._send(listener, origin, ErrorCode.SHUTTING_DOWN)


def _fields(origin: _Origin, **more: str) -> dict[str, dict[str, object]]:
    """Return what a line of the log says of a request, as `extra`."""
    return {"fields": {"peer": origin.incoming.peer, "request_id": origin.request_id, **more}}


def _check_deadline(opened: OpenedRequest, queue_us: int) -> None:
    if opened.timeout_ms is not None and queue_us > opened.timeout_ms * 1000:
        raise ProtocolError(
            opened.method,
            got=f"{queue_us / 1e6:.3f} s in the queue",
            expected=f"a start within {opened.timeout_ms / 1e3:g} s",
            code=ErrorCode.DEADLINE_EXCEEDED,
        )
