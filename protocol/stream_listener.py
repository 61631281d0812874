"""The service's end of a stream transport: any number of clients, one thread, nothing that blocks.

What a client does not read waits in a queue of its own, and what it sends too slowly in a buffer of
its own; the others are served meanwhile. A client that sends what is no message is dropped.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from protocol.channel import Incoming
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import SPELLINGS, VSOCK_ANY, Endpoint, parse_endpoint, refuse_live_socket
from protocol.errors import EndpointError, ProtocolError
from protocol.memory_pool import MemoryPool
from protocol.spin import AdaptiveSpin
from protocol.stream import prepare, set_timeout
from protocol.stream_wire import MessageReader, MessageWriter
from protocol.tensors import Buffer

log = logging.getLogger("gpu_service")

MAX_CLIENTS = 256
# Replies of which some bytes still wait here because their client does not read.
QUEUED_REPLIES = 16
# More than a request may have, so that a slightly wrong one gets its error reply.
MAX_FRAMES = 64
# How long the rest of a large request may keep the others waiting once it has begun.
READ_PATIENCE_S = 0.002
# A client that made us wait in vain, or for longer than this, is not waited for in the next while.
_SLOW_AFTER_S = 0.05
_SLOW_FOR_S = 1.0
_CLOSING_S = 0.5
_BACKLOG = 128


class _Client:
    """One connection."""

    def __init__(
        self, connection: socket.socket, pool: MemoryPool, name: bytes, max_message_bytes: int
    ) -> None:
        self.socket = connection
        self.name = name
        self.reader = MessageReader(
            connection,
            pool,
            where=f"client {name.hex()}",
            max_frames=MAX_FRAMES,
            max_message_bytes=max_message_bytes,
        )
        self.writer = MessageWriter(connection)
        self.watched = select.EPOLLIN
        self._slow_until = 0.0

    def read(self) -> bool:
        """Receive what there is; False when the client has gone."""
        try:
            alive = self.reader.read(socket.MSG_DONTWAIT)
            if self.reader.in_large_message and alive and self._may_wait():
                began = time.monotonic()
                try:
                    alive = self.reader.read(socket.MSG_WAITALL)
                finally:
                    self._note_wait(began, finished=not self.reader.in_large_message)
        except BlockingIOError:
            return True
        return alive

    def send(self, frames: Sequence[Buffer]) -> None:
        """Write a message, or keep what is left of it."""
        if not self.writer.send(frames, socket.MSG_DONTWAIT) and self._may_wait():
            began = time.monotonic()
            self._note_wait(began, finished=self.writer.flush())

    def _may_wait(self) -> bool:
        return not self._slow_until or time.monotonic() >= self._slow_until

    def _note_wait(self, began: float, *, finished: bool) -> None:
        now = time.monotonic()
        if not finished or now - began > _SLOW_AFTER_S:
            self._slow_until = now + _SLOW_FOR_S


class StreamListener:
    """A listening stream socket that hands out messages and takes replies.

    Raises EndpointError when the endpoint is malformed, in use or not ours to bind. `spin_us`: see
    `protocol.spin`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._spin = AdaptiveSpin(spin_us)
        # One for all clients, so that their number does not multiply what it keeps.
        self._pool = MemoryPool()
        self._names = count(1)
        self._clients: dict[bytes, _Client] = {}
        self._by_file: dict[int, _Client] = {}
        self._ready: deque[Incoming] = deque()
        # Whether somebody has looked what arrived since `receive` last said that there is nothing.
        self._looked = False
        self._accepting = True
        self._wakeup: socket.socket | None = None
        self._file: tuple[str, int, int] | None = None
        self._socket, self.endpoint = self._bind(parse_endpoint(endpoint, for_bind=True))
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """See `Listener.wait`."""
        if wakeup is not self._wakeup:
            self._watch_wakeup(wakeup)
        if not self._spin.is_on:
            return self._wait(timeout_ms)
        started_ns = time.perf_counter_ns()
        arrived = self._spin_for_any() or self._wait(timeout_ms)
        self._spin.waited(started_ns)
        return arrived

    def receive(self) -> Incoming | None:
        """See `Listener.receive`."""
        if not self._ready and not self._looked:
            self._look(0)
        if self._ready:
            return self._ready.popleft()
        self._looked = False
        return None

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """See `Listener.send`."""
        client = self._clients.get(route[0])
        if client is None:
            return False
        writer = client.writer
        if (
            writer.unsent_messages >= QUEUED_REPLIES
            or writer.unsent_bytes > self._max_message_bytes
        ):
            return False
        try:
            client.send(frames)
        except OSError:
            self._drop(client)
            return False
        if writer.unsent_messages:
            self._watch(client)
        return True

    def close(self) -> None:
        """See `Listener.close`."""
        self._socket.close()
        self._remove_file()
        give_up = time.monotonic() + _CLOSING_S
        for client in list(self._clients.values()):
            set_timeout(client.socket, socket.SO_SNDTIMEO, give_up - time.monotonic())
            with suppress(OSError):
                client.writer.flush()
            self._drop(client)
        self._epoll.close()

    def _wait(self, timeout_ms: int | None) -> bool:
        left_s = give_up = None
        if timeout_ms is not None:
            left_s = timeout_ms / 1000
            give_up = time.monotonic() + left_s
        while not self._look(0 if self._ready else left_s):
            if self._ready:
                return True
            if give_up is not None:
                if left_s == 0:
                    return False
                left_s = max(0.0, give_up - time.monotonic())
        return False

    def _spin_for_any(self) -> bool:
        """Look for messages without blocking; False where the time is over, or `wakeup` readable.

        It is mostly the client of the previous message that sends the next one.
        """

        def arrived() -> bool:
            return self._look(0) or bool(self._ready)

        return self._spin.expects_soon and self._spin.until(arrived) and bool(self._ready)

    # ---------------------------------------------------------------------------- binding

    def _bind(self, endpoint: Endpoint) -> tuple[socket.socket, str]:
        address = endpoint.address
        if address is None:
            raise EndpointError(endpoint.text, got="no stream", expected=f"a stream of {SPELLINGS}")
        refuse_live_socket(endpoint)
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_VSOCK
        try:
            listening = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise _unbindable(endpoint, error) from None
        try:
            if endpoint.socket_path is not None:
                _remove_stale(endpoint.socket_path)
            listening.bind(address)
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            if endpoint.socket_path is not None:
                status = os.stat(endpoint.socket_path)
                self._file = endpoint.socket_path, status.st_dev, status.st_ino
        except OSError as error:
            listening.close()
            raise _unbindable(endpoint, error) from None
        if isinstance(address, str):
            return listening, endpoint.text
        cid, port = listening.getsockname()
        return listening, f"vsock://{'any' if cid == VSOCK_ANY else cid}:{port}"

    def _remove_file(self) -> None:
        """Remove our socket's file, unless it is another's by now."""
        if self._file is None:
            return
        path, device, inode = self._file
        try:
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) == (device, inode):
                os.unlink(path)
        except OSError:
            pass

    # ---------------------------------------------------------------------------- clients

    def _look(self, timeout_s: float | None) -> bool:
        """Take in what has arrived, waiting for it; True if `wakeup` is readable."""
        self._looked = True
        stopping = False
        for file, events in self._epoll.poll(timeout_s):
            client = self._by_file.get(file)
            if client is not None:
                self._serve(client, events)
            elif self._wakeup is not None and file == self._wakeup.fileno():
                stopping = True
            else:
                self._accept()
        return stopping

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                client.writer.flush(socket.MSG_DONTWAIT)
                self._watch(client)
            if events & ~select.EPOLLOUT and not client.read():
                self._drop(client)
        except OSError:
            self._drop(client)
        except ProtocolError as error:
            fields = {"peer": client.name.hex(), "code": error.code.value, "detail": str(error)}
            log.warning("dropped", extra={"fields": fields})
            self._drop(client)
        messages = client.reader.messages
        while messages:
            frames, received_ns = messages.popleft()
            self._ready.append(Incoming((client.name,), frames, received_ns))

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            # A client that has gone again is nothing; without file descriptors those that come
            # wait in the backlog until another leaves.
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                log.warning("no_more_clients", extra={"fields": {"clients": len(self._clients)}})
                self._accept_more(False)
            return
        prepare(connection)
        set_timeout(connection, socket.SO_RCVTIMEO, READ_PATIENCE_S)
        name = next(self._names).to_bytes(8)
        client = _Client(connection, self._pool, name, self._max_message_bytes)
        self._clients[name] = self._by_file[connection.fileno()] = client
        self._epoll.register(connection, client.watched)
        if len(self._clients) >= MAX_CLIENTS:
            log.warning("no_more_clients", extra={"fields": {"clients": len(self._clients)}})
            self._accept_more(False)

    def _accept_more(self, accepting: bool) -> None:
        self._accepting = accepting
        self._epoll.modify(self._socket, select.EPOLLIN if accepting else 0)

    def _watch(self, client: _Client) -> None:
        wanted = select.EPOLLIN | (select.EPOLLOUT if client.writer.unsent_messages else 0)
        if wanted != client.watched:
            client.watched = wanted
            self._epoll.modify(client.socket, wanted)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.name, None) is None:
            return
        del self._by_file[client.socket.fileno()]
        # Closing takes it out of the epoll set too.
        client.socket.close()
        if not self._accepting and self._socket.fileno() >= 0:
            self._accept_more(True)

    def _watch_wakeup(self, wakeup: socket.socket | None) -> None:
        if wakeup is self._wakeup:
            return
        if self._wakeup is not None and self._wakeup.fileno() >= 0:
            self._epoll.unregister(self._wakeup)
        if wakeup is not None:
            self._epoll.register(wakeup, select.EPOLLIN)
        self._wakeup = wakeup


def _remove_stale(path: str) -> None:
    """Remove the socket of a dead service; what is no socket stays, and bind will refuse it.

    `refuse_live_socket` has found that nobody listens.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _unbindable(endpoint: Endpoint, error: OSError) -> EndpointError:
    return EndpointError(
        endpoint.text, got=os.strerror(error.errno or 0), expected="an address to bind"
    )
