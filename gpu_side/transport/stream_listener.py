"""The service's end of a stream transport: any number of clients, one thread, nothing that blocks.

What a client does not read waits in a queue of its own, and what it sends too slowly in a buffer of
its own; the others are served meanwhile, and in turn. For large messages that have not been handed
out there is one limit for all clients: beyond it they stay in the kernel, where their senders wait.
The listener drops clients that send malformed frames, and clients that hold buffer space with an
unfinished message while others wait for it.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from gpu_side.event_log import log
from gpu_side.transport.listener import (
    BACKLOG,
    CLOSING_S,
    FileSocket,
    Incoming,
    WaitingListener,
    admits_no_client,
    cannot_bind,
    refuse_live_socket,
)
from gpu_side.transport.stream_client import (
    STALLED_S,
    Acceptor,
    Client,
    DeviceMemory,
    handed_over,
)
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.endpoint import SPELLINGS, VSOCK_ANY, parse_endpoint
from protocol.errors import EndpointError, ErrorCode, ProtocolError
from protocol.shared_memory import Lane, require_library
from protocol.stream_wire import BUFFER_BYTES, MemoryPool, patience_s, prepare
from protocol.tensors import Buffer

MAX_CLIENTS = 256
# Replies of which some bytes still wait here because their client does not read.
QUEUED_REPLIES = 16
# The budget for large messages of all clients together, in multiples of max_message_bytes: those
# that are being received, or wait to be handed out, and are too large for a receive buffer.
RECEIVED_MESSAGES = 2
# The part of it that each client may always have: a client that fills the budget delays large
# requests only.
ALWAYS_BYTES = 1024 * 1024
# How often to look for clients that hold room for a message that does not grow.
_LOOK_FOR_STALLED_S = 0.5
# Messages that are handed out before `receive` looks whether others have sent one too.
_LOOK_AFTER = 16
# A client that has taken nothing for so long is busy with something else; one that reads may be
# kept from its core for a moment.
_PAUSE_S = 0.002
# How long all clients together may keep us waiting in vain, in a row and as a share of all time.
_PATIENCE_S = 0.05
_PATIENCE_SHARE = 0.05
# How long slots alone are looked at while we spin, before the sockets are once more.
_LOOK_US = 20


class StreamListener(WaitingListener):
    """A listening stream socket that hands out messages and takes replies.

    Of `shm://`, each client shares memory with it, and the socket carries what does not fit there.
    Of `ivshmem://` that memory is one for all, and a client is refused while another has it.
    Raises EndpointError when the endpoint is malformed, in use or not ours to bind. `spin_us`: see
    `protocol.liveness`.
    """

    # Turned away, or cut off because they sent what is no message.
    clients_refused: int = 0
    # Whatever it waits for wakes it up.
    _longest_s = 3600.0

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        spin_us: float = 0.0,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        # Told that a client has gone (`Incoming.client`), and once more where a reply was for it.
        self.on_gone: Callable[[bytes], None] = lambda _client: None
        super().__init__(spin_us)
        # One for all clients, so that their number does not multiply what it keeps.
        self._pool = MemoryPool()
        self._names = count(1)
        self._clients: dict[bytes, Client] = {}
        self._by_file: dict[int, Client] = {}
        # Clients with messages, the one whose turn it is first.
        self._turns: deque[Client] = deque()
        # Whether arrivals were looked at since `receive` last said that there is nothing,
        # and how many messages were handed out since.
        self._looked = False
        self._handed_out = 0
        # What is left of the time for clients that do not read, and when that was reckoned. One for
        # all of them, however many: a new connection brings no new patience with it.
        self._patience_s, self._patience_at = _PATIENCE_S, 0.0
        # The clients that wait to send a large message, the first one first; when to look for
        # stalled ones (time.monotonic).
        self._wanting_room: dict[bytes, Client] = {}
        self._look_for_stalled_at = 0.0
        parsed = parse_endpoint(endpoint, for_bind=True)
        EndpointError.unless(parsed.is_stream, endpoint, "no stream", f"a stream of {SPELLINGS}")
        # Those that share memory with us: all or none.
        self._sharing: dict[bytes, Client] = {}
        if parsed.scheme in ("shm", "ivshmem"):
            require_library()
            self._sharing = self._clients
        self._memory = DeviceMemory(parsed.memory) if parsed.memory else None
        refuse_live_socket(parsed)
        address, self.endpoint = parsed.address, endpoint
        try:
            if isinstance(address, str):
                self._socket: socket.socket = FileSocket(address)
            elif address is not None:
                vsock = socket.AF_VSOCK
                self._socket = socket.create_server(address, family=vsock, backlog=BACKLOG)
                cid, port = self._socket.getsockname()
                before = f"ivshmem://{parsed.memory}," if parsed.memory else "vsock://"
                self.endpoint = f"{before}{'any' if cid == VSOCK_ANY else cid}:{port}"
            self._socket.setblocking(False)
        except OSError as error:
            raise cannot_bind(endpoint, error.errno) from None
        self._epoll = self._waits_with = select.epoll()
        self._acceptor = Acceptor(self._socket, max_clients=MAX_CLIENTS)
        self._epoll.register(self._acceptor.ready_fd, select.EPOLLIN)

    def receive(self) -> Incoming | None:
        """See `Listener.receive`.

        One message of the client whose turn it is: many of one do not hold up another's.
        """
        if self._handed_out >= _LOOK_AFTER or not (self._turns or self._looked):
            self._has_come(0.0, spin_us=0)
        if not self._turns:
            self._looked = False
            return None
        client = self._turns.popleft()
        messages = client.reader.messages
        if client.in_slots:
            (header, *tensors), seen_ns, slot = client.in_slots.popleft()
            # Copied only now: what the service takes it also bounds.
            frames = [memoryview(bytearray(header)), *tensors]
            route = client.name, bytes([slot])
            incoming = Incoming(route, frames, seen_ns, slot=client.slots[slot])
        else:
            incoming = Incoming((client.name,), *messages.popleft())
        if client.in_slots or messages:
            self._turns.append(client)
        self._handed_out += 1
        if client.large_bytes and incoming.slot is None:
            self._count_large(client, -sum(map(len, incoming.frames)))
        return incoming

    def send(self, route: Sequence[bytes], frames: Sequence[Buffer]) -> bool:
        """See `Listener.send`."""
        client = self._clients.get(route[0])
        if client is None:
            self.on_gone(route[0])
            return False
        writer = client.writer
        try:
            if len(route) > 1 and client.reply_in_slot(route[1][0], frames):
                return True
            limit = self._max_message_bytes
            if len(writer.unsent) >= QUEUED_REPLIES or writer.unsent_bytes > limit:
                return False
            if not writer.send(frames):
                self._write_rest(client)
        except OSError:
            self._drop(client)
            return False
        if writer.unsent:
            self._watch(client)
        return True

    def close(self) -> None:
        """See `Listener.close`."""
        self._acceptor.stop()
        self._socket.close()
        give_up = time.monotonic() + CLOSING_S
        while self._clients:
            over = time.monotonic() >= give_up
            # A client that reads gets its replies, also where another does not.
            for client in list(self._clients.values()):
                try:
                    done = client.writer.flush()
                except OSError:
                    done = True
                if done or over:
                    self._drop(client)
            if self._clients:
                time.sleep(_PAUSE_S)
        # Last: a client that still reads its replies must not take us for dead.
        self._acceptor.close()
        self._epoll.close()

    def _write_rest(self, client: Client) -> None:
        """Give a client that reads a moment for the rest of its reply, until others want something.

        What it has not read by then goes out while we wait for messages.
        """
        began = time.monotonic()
        grown_s = self._patience_s + (began - self._patience_at) * _PATIENCE_SHARE
        self._patience_s, self._patience_at = min(_PATIENCE_S, grown_s), began
        limit_s = min(self._patience_s, patience_s(client.writer.unsent_bytes))
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
        self._patience_s -= time.monotonic() - began

    # ---------------------------------------------------------------------------- clients

    def _has_come(self, patience_s: float, spin_us: int = _LOOK_US) -> bool:
        """Take in what has arrived, waiting for it; slots alone for `spin_us` while we spin."""
        timeout_s = 0.0 if self._turns else patience_s
        if self._sharing and timeout_s == 0 and self._handed_out < _LOOK_AFTER:
            # It is mostly the client of the previous message that sends the next one.
            spins = self._spin.is_on and not self._turns
            if self._look_at_slots(spin_us if spins else 0):
                return True
        self._looked = True
        self._handed_out = 0
        if self._wanting_room:
            self._give_room()
        kept_out = bool(self._wanting_room) or not self._acceptor.accepting
        if kept_out:
            timeout_s = min(timeout_s, _LOOK_FOR_STALLED_S)
        for file, events in (self._poll if self._sharing else self._epoll.poll)(timeout_s):
            client = self._by_file.get(file)
            if client is not None:
                self._serve(client, events)
            elif file == self._acceptor.ready_fd:
                for connection in self._acceptor.arrivals():
                    self._let_in(connection)
                if self._acceptor.failed:
                    raise admits_no_client(self.endpoint)
        # After those that have sent something by now were read.
        if kept_out and time.monotonic() >= self._look_for_stalled_at:
            self._drop_stalled()
        return bool(self._turns)

    def _poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """Wait for the sockets, and look at the slots before and after it."""
        sleeps = timeout_s != 0
        if sleeps:
            self._say_asleep(True)
        if self._look_at_slots():
            timeout_s = 0
        found = self._epoll.poll(timeout_s)
        if sleeps:
            self._say_asleep(False)
            self._look_at_slots()
        return found

    def _say_asleep(self, asleep: bool) -> None:
        for client in self._sharing.values():
            if client.lane is not None:
                client.lane.sleeps(asleep)

    def _look_at_slots(self, spin_us: int = 0) -> bool:
        """Take in the requests in slots of all clients; False if there are none.

        `spin_us`: how long to wait for one of a client that is alone.
        """
        found = False
        sharing = list(self._sharing.values())
        for client in sharing:
            try:
                found |= client.look_at_slots(spin_us if len(sharing) == 1 else 0)
            except ProtocolError as error:
                self._refuse(client, str(error), error.code)
            if client.in_slots and client not in self._turns:
                self._turns.append(client)
        return found

    def _serve(self, client: Client, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                client.writer.flush()
                self._watch(client)
            if events & ~select.EPOLLOUT:
                reader, alive = client.reader, True
                if reader.wants_room:
                    # Its going would be reported again and again as long as it is not read from.
                    alive = not events & (select.EPOLLHUP | select.EPOLLERR)
                elif not reader.messages or client.may_send_more:
                    alive = client.read()
                    if alive and client.reader.wants_room:
                        self._wanting_room[client.name] = client
                        self._give_room()
                        if client.name in self._clients:
                            self._watch(client)
                    if alive and reader.large is not None:
                        # Perhaps only its head was read, and the rest is probably there.
                        alive = client.read()
                if not alive:
                    self._drop(client)
        except OSError:
            self._drop(client)
        except ProtocolError as error:
            self._refuse(client, str(error), error.code)
        if client.reader.messages and client not in self._turns:
            self._turns.append(client)

    def _refuse(self, client: Client, detail: str, code: ErrorCode) -> None:
        log.warning("dropped", peer=client.name.hex(), code=code.value, detail=detail)
        self.clients_refused += 1
        self._drop(client)

    # --------------------------------------------------------------------------- room for all

    @property
    def _large_bytes(self) -> int:
        """Bytes of large messages that are being received, or have not been handed out."""
        return sum(client.large_bytes for client in self._clients.values())

    def _count_large(self, client: Client, size: int) -> None:
        """Count the bytes of a message, or of one that is none of ours any more (less than 0)."""
        if abs(size) > BUFFER_BYTES:
            client.large_bytes += size

    def _give_room(self) -> None:
        """Let waiting clients receive their large messages, in turn, as far as there is room."""
        full = False
        for client in list(self._wanting_room.values()):
            size = client.reader.wants_room
            if client.large_bytes + size > ALWAYS_BYTES:
                # No client overtakes one that came first and needs more.
                limit = RECEIVED_MESSAGES * self._max_message_bytes
                full = full or self._large_bytes + size > limit
                if full:
                    continue
            del self._wanting_room[client.name]
            self._count_large(client, size)
            try:
                client.reader.begin_large()
            except ProtocolError as error:
                self._refuse(client, str(error), error.code)
                continue
            client.note_start()
            self._watch(client)

    def _drop_stalled(self) -> None:
        """Drop clients whose message hardly grows, the longest first, until there is room."""
        now = time.monotonic()
        self._look_for_stalled_at = now + _LOOK_FOR_STALLED_S
        stalled = [client for client in self._clients.values() if client.has_stalled(now)]
        for client in sorted(stalled, key=lambda client: client.stalled_since):
            full = not self._acceptor.accepting
            if full or (self._wanting_room and client.large_bytes):
                come = client.reader.unfinished_bytes
                self._refuse(
                    client,
                    f"{come} bytes of a message and no more for {STALLED_S:g} s",
                    ErrorCode.LIMIT_EXCEEDED,
                )
                self._give_room()

    def _let_in(self, connection: socket.socket) -> None:
        name = next(self._names).to_bytes(8)
        try:
            prepare(connection)
            lane = self._shared_by(connection) if self._sharing is self._clients else None
            client = Client(connection, self._pool, name, self._max_message_bytes, lane)
            self._epoll.register(connection, client.watched)
        except (OSError, MemoryError, ProtocolError) as error:
            connection.close()
            self.clients_refused += 1
            self._acceptor.client_closed()
            if isinstance(error, ProtocolError):
                code = error.code.value
                log.warning("dropped", peer=name.hex(), code=code, detail=str(error))
            else:
                self._acceptor.pause_accepting()
            return
        self._clients[name] = self._by_file[connection.fileno()] = client
        # It has come to us because it has sent something.
        self._serve(client, select.EPOLLIN)

    def _shared_by(self, connection: socket.socket) -> Lane:
        """Map what a new client shares. Raises ProtocolError, and OSError."""
        if self._memory is None:
            return handed_over(connection)
        for other in list(self._sharing.values()):
            # It is not read from while its requests wait: it may have gone with some in it.
            poll = select.poll()
            poll.register(other.socket, select.POLLRDHUP)
            if poll.poll(0):
                self._drop(other)
        return self._memory.attach(connection, in_use=bool(self._sharing))

    def _watch(self, client: Client) -> None:
        reading = 0 if client.reader.wants_room else select.EPOLLIN
        unsent = client.writer.unsent
        self._watch_only(client, reading | (select.EPOLLOUT if unsent else 0))

    def _watch_only(self, client: Client, wanted: int) -> None:
        if wanted != client.watched:
            client.watched = wanted
            self._epoll.modify(client.socket, wanted)

    def _drop(self, client: Client) -> None:
        if self._clients.pop(client.name, None) is None:
            return
        self._wanting_room.pop(client.name, None)
        if client.lane is not None:
            # So that it finds its connection closed when it puts the next request, and not later.
            client.lane.sleeps(True)
        # What it has sent is of no use to it any more.
        if client in self._turns:
            self._turns.remove(client)
        client.reader.messages.clear()
        client.in_slots.clear()
        del self._by_file[client.socket.fileno()]
        # Closing takes it out of the epoll set too.
        client.socket.close()
        self._acceptor.client_closed()
        self.on_gone(client.name)
