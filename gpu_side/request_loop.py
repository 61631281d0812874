"""Answers requests, one after the other, until told to stop; then what it has taken before.

One thread does everything. Whatever has arrived is picked up between two requests and waits in a
bounded queue, from which its clients are served in turn (`gpu_side.handler`). What waits in the
transport while the processor computes a product is not seen before the product is done, so the
queueing time in a reply is a lower bound; while an accelerator works, messages come in and replies
go out. A malformed message gets an error reply with a code and a line in the log; nothing that a
client sends ends the loop; the lines of the log it can cause are limited (`gpu_side.event_log`).
"""

import math
import socket
import time
from collections import deque
from contextlib import suppress
from types import FrameType
from typing import Any, TypeAlias

import torch

from gpu_side.defaults import DRAIN_S
from gpu_side.encoding import OpenedRequest, RequestReader, encode_reply, unread
from gpu_side.event_log import log
from gpu_side.handler import SUCCESS, UNKNOWN_METHOD, RequestHandler
from gpu_side.kernels import Working, wait_until
from gpu_side.transport.listener import Incoming, Listener
from protocol.encoding import MAX_HEADER_BYTES
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import HealthRequest, Response, checked_timing


class StoppedWhileLoadingError(Exception):
    """A stop signal came before the weights were read."""


class StopSignal:
    """Turns SIGTERM and SIGINT into a readable socket, so that a blocked poll wakes at once.

    As `writer` it may be given to `signal.set_wakeup_fd` besides: a signal that comes just before a
    poll blocks then ends it, whose handler would have to wait for the poll's end.

    `list_changed`: whether the list of clients was read again; the loop sets it back.
    """

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.requested = self.list_changed = False

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.requested = True
        self._wake()

    def note_list(self) -> None:
        """Have the loop look which of its clients are still let in; from another thread."""
        self.list_changed = True
        self._wake()

    def _wake(self) -> None:
        # Where it is full, its reader has been woken.
        with suppress(BlockingIOError):
            self.writer.send(b"\0")

    def forget_wakeup(self) -> None:
        """Read what has woken the loop: it may be the number of a signal that ends nothing."""
        with suppress(BlockingIOError):
            while self.reader.recv(64):
                pass

    def rearm(self) -> None:
        """Wait for another one."""
        self.requested = False
        self.forget_wakeup()


# Between two requests, answers to what does not wait (refusals, and how we are): so many, and more
# for so long, or for this part of the time that the last request took. A flood takes little of the
# others' time then, and they wait little for what came before their own in the transport, which has
# turns by connection and not by key.
MAX_REFUSED_AT_ONCE = 4

REFUSING_NS = 1_000_000

REFUSING_PART = 4

# Given to an accelerator: one that it works on, and the next, so that it need not wait for us. The
# others stay in the queue, where their deadlines are checked, and take no memory for an output.
MAX_UNDERWAY = 2

_STOPPING_S = 0.1

# How long to wait at most before sessions are looked at: no transport waits for any time.
_MOST_MS = 60_000

# More than a request for our health has in either form.
_HEALTH_BYTES = 256

# A wait for messages takes whole milliseconds. In the last of them before an accelerator is done we
# look for messages so often.
_LOOK_NS = 200_000


# A request that an accelerator was given, and when (perf_counter_ns).
_Underway: TypeAlias = tuple[Incoming, OpenedRequest, Response, Working, int]


class RequestLoop:
    """Takes messages from a listener and gives it the replies.

    `handler`: answers them, and has the state with the queue and what is counted.
    `drain_timeout_s`: how long it goes on, once told to stop, with what it has taken. What was
    taken from a client that is not let in any more (`Listener.is_allowed`) gets no reply.
    """

    def __init__(self, handler: RequestHandler, drain_timeout_s: float = DRAIN_S) -> None:
        self._sessions = handler.sessions
        self._reader = RequestReader(handler.max_message_bytes, handler.prepare)
        self._state = handler.state
        self._queue = self._state.queue
        self._drain_ns = int(drain_timeout_s * 1e9)
        # When the last request was begun (perf_counter_ns).
        self._began_ns = 0
        # What an accelerator works on, in the order in which it will be done.
        self._underway: deque[_Underway] = deque()
        # When it was done with the last one (perf_counter_ns).
        self._free_ns = 0

    def run(self, listener: Listener, stop: StopSignal) -> None:
        """Answer until told to stop, and then what was taken before.

        Raises EndpointError where the listener does.
        """
        self._state.status = "ready"
        with torch.inference_mode():
            try:
                self._run(listener, stop)
            finally:
                # Also where the listener has failed: no client is to come to a service that ends.
                self._state.status = "draining"
            self._drain(listener, stop)
        self._refuse_rest(listener)

    def _run(self, listener: Listener, stop: StopSignal) -> None:
        queue, underway, sessions = self._queue, self._underway, self._sessions
        while not stop.requested:
            if stop.list_changed:
                stop.list_changed = False
                stop.forget_wakeup()
                sessions.forget_revoked(listener.is_allowed)
                # What woke the loop may also have been the signal to stop.
                continue
            expires_s = sessions.expire() if sessions.look_at_s < math.inf else math.inf
            expires_ms = None
            if expires_s < math.inf:
                expires_ms = max(1, min(math.ceil(1000 * expires_s), _MOST_MS))
            if queue.requests and len(underway) < MAX_UNDERWAY:
                self._answer(listener, queue.take())
            elif underway:
                self._wait_for_accelerator(listener, stop)
            elif not listener.wait(wakeup=stop.reader, timeout_ms=expires_ms):
                stop.forget_wakeup()
                continue
            elif (incoming := listener.receive()) is not None:
                # Nothing waits: it need not either.
                queue.served = incoming.client
                self._answer(listener, incoming)
            if underway:
                self._send_what_ended(listener)
            # After the reply, not before it: finding nothing takes time, too.
            if not stop.requested and (incoming := listener.receive()) is not None:
                self._pick_up(listener, incoming)

    def _drain(self, listener: Listener, stop: StopSignal) -> None:
        """Finish what was taken; what still comes is refused.

        Ends early where that takes too long, or at a second signal.
        """
        queue, underway = self._queue, self._underway
        if queue.requests or underway:
            log.info("draining", queued_requests=queue.requests, underway_requests=len(underway))
        stop.rearm()
        until_ns = time.perf_counter_ns() + self._drain_ns
        while (
            (queue.requests or underway)
            and not stop.requested
            and time.perf_counter_ns() < until_ns
        ):
            if len(underway) < MAX_UNDERWAY and queue.requests:
                self._answer(listener, queue.take())
            else:
                self._wait_for_accelerator(listener, stop, until_ns)
            self._send_what_ended(listener)
            if (incoming := listener.receive()) is not None:
                self._pick_up(listener, incoming)

    def _pick_up(self, listener: Listener, incoming: Incoming | None) -> None:
        """Let everything wait that has arrived; answer at once what asks how we are.

        Until enough had to be refused: a client that sends too much must not delay the others.
        """
        refused, draining = 0, self._state.status == "draining"
        now = time.perf_counter_ns()
        until = now + max(REFUSING_NS, (now - self._began_ns) // REFUSING_PART)
        while incoming is not None:
            if self._asks_for_health(incoming):
                self._answer(listener, incoming)
                refused += 1
            elif draining:
                self._refuse(listener, incoming, ErrorCode.SHUTTING_DOWN)
                refused += 1
            else:
                for full, limit, requested, available in self._queue.put(incoming):
                    opened = self._refuse(listener, full, ErrorCode.QUEUE_FULL)
                    log.warning(
                        "queue_full",
                        **_fields(full, opened),
                        code=ErrorCode.QUEUE_FULL.value,
                        limit=f"max_queued_{limit}",
                        allowed=getattr(self._queue.limits, limit),
                        requested=requested,
                        available=available,
                    )
                    refused += 1
            if refused >= MAX_REFUSED_AT_ONCE and time.perf_counter_ns() >= until:
                break
            incoming = listener.receive()

    def _asks_for_health(self, incoming: Incoming) -> bool:
        frames = incoming.frames
        if len(frames) != 1 or frames[0].nbytes > _HEALTH_BYTES:
            return False
        return self._reader.open(frames).method == HealthRequest.method

    def _wait_for_accelerator(
        self, listener: Listener, stop: StopSignal, until_ns: int | None = None
    ) -> None:
        """Wait until it is done with what it works on, or a message can be received."""
        while (left_ns := self._left_ns(until_ns)) > 0 and not stop.requested:
            timeout_ms = max(0, left_ns // 1_000_000 - 1)
            if listener.wait(wakeup=stop.reader, timeout_ms=timeout_ms):
                return
            if left_ns <= 2 * _LOOK_NS:
                wait_until(time.perf_counter_ns() + left_ns)
            elif not timeout_ms:
                time.sleep(_LOOK_NS / 1e9)

    def _left_ns(self, until_ns: int | None) -> int:
        """Say how long the accelerator works on the first request, or when to ask again."""
        *_, work, _ = self._underway[0]
        try:
            ends_ns = work()
        except RuntimeError:
            return 0  # it has failed, as `_send_what_ended` will find
        return (ends_ns if until_ns is None else min(ends_ns, until_ns)) - time.perf_counter_ns()

    def _send_what_ended(self, listener: Listener) -> None:
        """Send what the accelerator is done with, or has failed in."""
        underway = self._underway
        while underway:
            incoming, opened, response, work, given_ns = underway[0]
            try:
                ends_ns = work()
            except RuntimeError:
                self._send_failure(listener, incoming, opened)
            else:
                if ends_ns > time.perf_counter_ns():
                    break
                started_ns = max(given_ns, self._free_ns)
                self._send(listener, incoming, opened, response, started_ns, ends_ns)
                self._free_ns = ends_ns
            underway.popleft()
        self._state.underway = len(underway)

    def _answer(self, listener: Listener, incoming: Incoming) -> None:
        self._began_ns = started_ns = time.perf_counter_ns()
        frames = incoming.frames
        self._state.received_bytes += sum(map(len, frames))
        if not listener.is_allowed(incoming.key):
            self._drop(incoming, unread(frames))
            return
        opened: OpenedRequest | None = None
        try:
            opened = self._reader.open(frames)
            queue_us = (started_ns - incoming.received_ns) // 1000
            if opened.timeout_ms is not None and queue_us > opened.timeout_ms * 1000:
                raise ProtocolError(
                    opened.method,
                    got=f"{queue_us / 1e6:.3f} s in the queue",
                    expected=f"a start within {opened.timeout_ms / 1e3:g} s",
                    code=ErrorCode.DEADLINE_EXCEEDED,
                )
            request, kernel = self._reader.read(opened)
            response, work = kernel(request, incoming)
        except ProtocolError as error:
            self._send_refusal(listener, incoming, opened or unread(frames), error)
        except Exception:  # noqa: BLE001 - it is logged, with a traceback
            # Exhausted memory, a device fault or a mistake of ours: this request fails, the
            # others go on. The traceback stays in our own log.
            self._send_failure(listener, incoming, opened or unread(frames))
        else:
            if work is None:
                ended_ns = time.perf_counter_ns()
                self._send(listener, incoming, opened, response, started_ns, ended_ns)
            else:
                # What was received has been read, or copied: its memory can be used again.
                incoming, opened = incoming._replace(frames=[]), opened._replace(frames=())
                self._underway.append((incoming, opened, response, work, started_ns))

    def _send_failure(self, listener: Listener, incoming: Incoming, opened: OpenedRequest) -> None:
        """Log the exception that is being handled, and reply that this request has failed."""
        log.exception("failed", **_fields(incoming, opened, method=opened.method))
        self._send(listener, incoming, opened, ErrorCode.INTERNAL)

    def _send(
        self,
        listener: Listener,
        incoming: Incoming,
        opened: OpenedRequest,
        result: Response | ErrorCode,
        started_ns: int | None = None,
        ended_ns: int = 0,
    ) -> None:
        """Reply, and count it. `started_ns`, `ended_ns`: of the work; None: there was none."""
        form, request_id, _, method, *_ = opened
        state = self._state
        if not listener.is_allowed(incoming.key):
            self._drop(incoming, opened)
            return
        timing = None
        if started_ns is not None:
            queue_ns = max(0, started_ns - incoming.received_ns)
            compute_ns = max(0, ended_ns - started_ns)
            timing = checked_timing(
                {"queue_us": queue_ns // 1000, "compute_us": compute_ns // 1000}
            )
        try:
            frames = encode_reply(form, request_id, method, result, timing)
        except Exception:
            log.exception("failed", **_fields(incoming, opened, method=method))
            result = ErrorCode.INTERNAL
            frames = encode_reply(form, request_id, method, result)
        sent = listener.send(incoming.route, frames)
        # The client has its reply by now.
        of_method = state.methods.get(method, state.methods[UNKNOWN_METHOD])
        if started_ns is not None:
            of_method.queue.add(queue_ns)
            of_method.compute.add(compute_ns)
        of_method.outcomes[result.value if type(result) is ErrorCode else SUCCESS] += 1
        if sent:
            state.sent_bytes += sum(map(len, frames))
        else:
            state.dropped_replies += 1
            log.warning("client_gone", **_fields(incoming, opened))

    # ------------------------------------------------------------------------------- refusals

    def _drop(self, incoming: Incoming, opened: OpenedRequest) -> None:
        """Take note of a request that gets no reply: its client's key has been revoked."""
        self._state.dropped_replies += 1
        log.warning(
            "dropped",
            **_fields(incoming, opened),
            reason="revoked_key",
            detail="the key has been revoked",
        )

    def _send_refusal(
        self, listener: Listener, incoming: Incoming, opened: OpenedRequest, error: ProtocolError
    ) -> None:
        log.warning(
            "refused", **_fields(incoming, opened, code=error.code.value, detail=str(error))
        )
        self._send(listener, incoming, opened, error.code)

    def _refuse(self, listener: Listener, incoming: Incoming, code: ErrorCode) -> OpenedRequest:
        """Answer with a code what is not even looked at, as far as its envelope can be read."""
        frames = incoming.frames
        self._state.received_bytes += sum(map(len, frames))
        opened = unread(frames)
        # One frame as large as no header is: inline, which has no id that we would have to find.
        if len(frames) > 1 or frames[0].nbytes <= MAX_HEADER_BYTES:
            opened = self._reader.open(frames)
        if opened.error is None:
            self._send(listener, incoming, opened, code)
        else:
            self._send_refusal(listener, incoming, opened, opened.error)
        return opened

    def _refuse_rest(self, listener: Listener) -> None:
        """Refuse what the drain has left.

        Requests that arrive in the moment of stopping get an answer, not a passed deadline.
        Bounded, so that a client that goes on sending cannot keep the service from stopping.
        """
        left = list(self._underway)
        if left or self._queue.requests:
            log.warning("drain_ended", refused_requests=len(left) + self._queue.requests)
        for incoming, opened, *_ in left:
            self._send(listener, incoming, opened, ErrorCode.SHUTTING_DOWN)
        while self._queue.requests:
            self._refuse(listener, self._queue.take(), ErrorCode.SHUTTING_DOWN)
        # Not a part of the time since the last request, which may be hours.
        self._began_ns = time.perf_counter_ns()
        until = time.monotonic() + _STOPPING_S
        while listener.wait(timeout_ms=max(0, int((until - time.monotonic()) * 1000))):
            self._pick_up(listener, listener.receive())
            if time.monotonic() > until:
                break


def _fields(incoming: Incoming, opened: OpenedRequest, **more: Any) -> dict[str, Any]:
    """Return what a line of the log says of a request."""
    return {"peer": incoming.peer, "request_id": opened.request_id, **more}
