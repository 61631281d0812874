"""The service's end of a stream transport: any number of clients, one thread, nothing that blocks.

What a client does not read waits in a queue of its own, and what it sends too slowly in a buffer of
its own; the others are served meanwhile, and in turn. A client that sends what is no message is
dropped.
"""

from __future__ import annotations

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
from protocol.liveness import Door
from protocol.memory_pool import MemoryPool
from protocol.pending import frame_bytes
from protocol.spin import AdaptiveSpin
from protocol.stream import prepare
from protocol.stream_wire import MessageReader, MessageWriter, patience_s
from protocol.tensors import Buffer

log = logging.getLogger("gpu_service")

MAX_CLIENTS = 256
# Replies of which some bytes still wait here because their client does not read.
QUEUED_REPLIES = 16
# More than a request may have, so that a slightly wrong one gets its error reply.
MAX_FRAMES = 64
# A client with so many requests, or so many bytes in them, that nobody has taken yet is not read
# from. Beside them at most one more is being received.
QUEUED_REQUESTS = 64
QUEUED_BYTES = 16 * 1024 * 1024
# Messages that are handed out before somebody looks whether others have sent something too.
_LOOK_AFTER = 16
# How long all clients together may keep us waiting in vain, in a row and as a share of all time.
_PATIENCE_S = 0.05
_PATIENCE_SHARE = 0.05
# A client that has taken nothing for so long is busy with something else; one that reads may be
# kept from its core for a moment.
_PAUSE_S = 0.002
_CLOSING_S = 0.5
_BACKLOG = 128


class _Patience:
    """What is left of the time for clients that do not read, however many they are.

    One for all of them: a new connection brings no new patience with it.
    """

    def __init__(self) -> None:
        self._left_s = _PATIENCE_S
        self._at = 0.0

    def left_s(self, now: float) -> float:
        """Return how long we may wait from `now` (time.monotonic), in seconds."""
        self._left_s = min(_PATIENCE_S, self._left_s + (now - self._at) * _PATIENCE_SHARE)
        self._at = now
        return self._left_s

    def spend(self, waited_s: float) -> None:
        """Take note of a wait that was in vain."""
        self._left_s -= waited_s


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
        # Whether it stands among those whose turn comes, because it has messages.
        self.has_turn = False

    @property
    def may_send_more(self) -> bool:
        """Whether to read from it, with what nobody has taken yet."""
        messages = self.reader.messages
        if not messages:
            return True
        if len(messages) >= QUEUED_REQUESTS:
            return False
        return sum(frame_bytes(frames) for frames, _ in messages) < QUEUED_BYTES

    def read(self) -> bool:
        """Receive what there is; False when the client has gone."""
        try:
            alive = self.reader.read(socket.MSG_DONTWAIT)
            if self.reader.in_large_message and alive:
                # Only its head was read, and the rest is probably there.
                alive = self.reader.read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        return alive


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
        # Turned away, or cut off because they sent what is no message.
        self.clients_refused = 0
        self._spin = AdaptiveSpin(spin_us)
        # One for all clients, so that their number does not multiply what it keeps.
        self._pool = MemoryPool()
        self._names = count(1)
        self._clients: dict[bytes, _Client] = {}
        self._by_file: dict[int, _Client] = {}
        # Clients with messages, the one whose turn it is first.
        self._turns: deque[_Client] = deque()
        # Whether somebody has looked what arrived since `receive` last said that there is nothing,
        # and how many messages were handed out since.
        self._looked = False
        self._handed_out = 0
        self._patience = _Patience()
        self._wakeup: socket.socket | None = None
        self._file: tuple[str, int, int] | None = None
        self._socket, self.endpoint = self._bind(parse_endpoint(endpoint, for_bind=True))
        self._epoll = select.epoll()
        self._door = Door(self._socket, max_clients=MAX_CLIENTS)
        self._epoll.register(self._door.bell, select.EPOLLIN)

    def wait(self, *, wakeup: socket.socket | None = None, timeout_ms: int | None = None) -> bool:
        """See `Listener.wait`."""
        if wakeup is not self._wakeup:
            self._watch_wakeup(wakeup)
        if not self._spin.is_on or timeout_ms == 0:
            return self._wait(timeout_ms)
        started_ns = time.perf_counter_ns()
        left_s = None if timeout_ms is None else timeout_ms / 1000
        arrived = self._spin_for_any(left_s) or self._wait(timeout_ms, started_ns)
        self._spin.waited(started_ns)
        return arrived

    def receive(self) -> Incoming | None:
        """See `Listener.receive`."""
        if self._handed_out >= _LOOK_AFTER or not (self._turns or self._looked):
            self._look(0)
        if self._turns:
            return self._take_turn()
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
            if not writer.send(frames):
                self._write_rest(client)
        except OSError:
            self._drop(client)
            return False
        if writer.unsent_messages:
            self._watch(client)
        return True

    def close(self) -> None:
        """See `Listener.close`."""
        self._door.stop()
        self._socket.close()
        self._remove_file()
        self._watch_wakeup(None)
        give_up = time.monotonic() + _CLOSING_S
        for client in list(self._clients.values()):
            if client.writer.unsent_messages:
                self._watch_only(client, select.EPOLLOUT)
            else:
                self._drop(client)
        # Whoever reads gets its replies, also where another does not.
        while self._clients and (left_s := give_up - time.monotonic()) > 0:
            for file, _ in self._epoll.poll(left_s):
                if (writing := self._by_file.get(file)) is not None:
                    self._finish(writing)
        for client in list(self._clients.values()):
            self._drop(client)
        # Last: who still reads its replies must not take us for dead.
        self._door.close()
        self._epoll.close()

    def _finish(self, client: _Client) -> None:
        """Write what a client takes of its last replies, and drop it after them."""
        try:
            done = client.writer.flush()
        except OSError:
            done = True
        if done:
            self._drop(client)

    def _write_rest(self, client: _Client) -> None:
        """Give a client that reads a moment for the rest of its reply, until others want something.

        What it has not read by then goes out while we wait for messages.
        """
        began = time.monotonic()
        limit_s = min(self._patience.left_s(began), patience_s(client.writer.unsent_bytes))
        alone = not any(other is not client for other in self._turns)
        if alone and limit_s > 0:
            self._watch_only(client, select.EPOLLOUT)
        while alone and (left_s := began + limit_s - time.monotonic()) > 0:
            ready = self._epoll.poll(min(left_s, _PAUSE_S))
            if not ready:
                break
            for file, _ in ready:
                if self._by_file.get(file) is not client:
                    alone = False
                elif client.writer.flush():
                    self._watch(client)
                    return
        self._patience.spend(time.monotonic() - began)

    def _take_turn(self) -> Incoming:
        """Take one message of the client whose turn it is: many of one do not hold up another's."""
        client = self._turns.popleft()
        messages = client.reader.messages
        frames, received_ns = messages.popleft()
        if messages:
            self._turns.append(client)
        else:
            client.has_turn = False
        self._handed_out += 1
        return Incoming((client.name,), frames, received_ns)

    def _wait(self, timeout_ms: int | None, started_ns: int = 0) -> bool:
        left_s = give_up = None
        if timeout_ms is not None:
            spent_s = (time.perf_counter_ns() - started_ns) / 1e9 if started_ns else 0.0
            left_s = max(0.0, timeout_ms / 1000 - spent_s)
            give_up = time.monotonic() + left_s
        while not self._look(0 if self._turns else left_s):
            if self._turns:
                return True
            if give_up is not None:
                if left_s == 0:
                    return False
                left_s = max(0.0, give_up - time.monotonic())
        return False

    def _spin_for_any(self, left_s: float | None) -> bool:
        """Look for messages without blocking; False where the time is over, or `wakeup` readable.

        It is mostly the client of the previous message that sends the next one.
        """

        def arrived() -> bool:
            return self._look(0) or bool(self._turns)

        return self._spin.expects_soon and self._spin.until(arrived, left_s) and bool(self._turns)

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
        self._handed_out = 0
        stopping = False
        for file, events in self._epoll.poll(timeout_s):
            client = self._by_file.get(file)
            if client is not None:
                self._serve(client, events)
            elif self._wakeup is not None and file == self._wakeup.fileno():
                stopping = True
            elif file == self._door.bell:
                for connection in self._door.arrivals():
                    self._let_in(connection)
        return stopping

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                client.writer.flush()
                self._watch(client)
            if events & ~select.EPOLLOUT and client.may_send_more and not client.read():
                self._drop(client)
        except OSError:
            self._drop(client)
        except ProtocolError as error:
            fields = {"peer": client.name.hex(), "code": error.code.value, "detail": str(error)}
            log.warning("dropped", extra={"fields": fields})
            self.clients_refused += 1
            self._drop(client)
        if client.reader.messages and not client.has_turn:
            client.has_turn = True
            self._turns.append(client)

    def _let_in(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            name = next(self._names).to_bytes(8)
            client = _Client(connection, self._pool, name, self._max_message_bytes)
            self._epoll.register(connection, client.watched)
        except (OSError, MemoryError):
            connection.close()
            self.clients_refused += 1
            self._door.left()
            self._door.rest()
            return
        self._clients[name] = self._by_file[connection.fileno()] = client
        # It has come to us because it has sent something.
        self._serve(client, select.EPOLLIN)

    def _watch(self, client: _Client) -> None:
        unsent = client.writer.unsent_messages
        self._watch_only(client, select.EPOLLIN | (select.EPOLLOUT if unsent else 0))

    def _watch_only(self, client: _Client, wanted: int) -> None:
        if wanted != client.watched:
            client.watched = wanted
            self._epoll.modify(client.socket, wanted)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.name, None) is None:
            return
        del self._by_file[client.socket.fileno()]
        # Closing takes it out of the epoll set too.
        client.socket.close()
        self._door.left()

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
