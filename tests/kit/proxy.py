"""A proxy for TCP and Unix sockets whose faults can be switched while it runs.

It sits between a client and a service and runs in a thread of its own. Both directions carry bytes
as they come until a `Fault` says otherwise:

    with Proxy(service.endpoint) as proxy:
        connect(proxy.endpoint)
        proxy.set(to_service=Fault(latency_s=0.1), to_client=Fault(slice_bytes=1))
        proxy.when("to_client", proxy.reset, messages=3)
        proxy.set(to_service=HOLD, to_client=HOLD)      # a black hole; what it holds comes later
        proxy.set()                                     # heals

A kernel that stops answering cannot be had without privileges: `half_open` is as close as it gets,
a connection that stays open, whose bytes nobody reads and whose other end has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tests.kit.service import Closing

Way: TypeAlias = Literal["to_service", "to_client"]
WAYS: tuple[Way, Way] = ("to_service", "to_client")

_CHUNK_BYTES = 64 * 1024
# Held between reading and writing, in chunks: about what a kernel's own buffers hold.
_QUEUED_CHUNKS = 16
_ADDRESS = re.compile(r"tcp://(?P<host>[^:\[\]]+):(?P<port>\d+)|unix://(?P<path>/.+)")
# Of TCP, host and port; of a Unix socket, its path.
_Address: TypeAlias = tuple[str, int] | str
# l_onoff = 1, l_linger = 0: closing sends RST instead of FIN.
_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True)
class Fault:
    """What happens to the bytes of one direction.

    `latency_s`: each byte comes so much later, without being fewer a second. `bytes_per_s`: None
    for as many as come. `slice_bytes`: written in pieces of this size, each on its own. `mode`:
    "hold" keeps bytes until it is switched back, as TCP does when packets are lost for a while;
    "swallow" takes them and forwards none, ever.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    slice_bytes: int | None = None
    mode: Literal["forward", "hold", "swallow"] = "forward"


CLEAN = Fault()
HOLD = Fault(mode="hold")
SWALLOW = Fault(mode="swallow")


class MessageCounter:
    """Counts whole ZeroMQ messages in a stream of ZMTP 3 bytes; of other bytes it says nothing.

    Without CURVE these are messages of one or more frames, and no commands. Under CURVE a frame
    does not say what is in it: each one is counted, heartbeats too, and those of the handshake not.
    """

    _GREETING_BYTES = 64
    _MORE, _LONG, _COMMAND = 1, 2, 4
    _ENCRYPTED = b"\x07MESSAGE"

    def __init__(self) -> None:
        self.count = 0
        self._skip = self._GREETING_BYTES
        self._head = b""
        self._ends_message = False

    def feed(self, data: bytes) -> int | None:
        """Take bytes; return the place after the first message that ends in them, or None.

        What comes after that place was not taken: feed it again.
        """
        place = 0
        while place < len(data):
            if self._skip:
                taken = min(self._skip, len(data) - place)
                self._skip -= taken
                place += taken
                if self._skip == 0 and self._ends_message:
                    self._ends_message = False
                    self.count += 1
                    return place
                continue
            self._head += data[place : place + 1]
            place += 1
            if self._read_head():
                self._head = b""
                if self._skip == 0 and self._ends_message:  # an empty last frame
                    self._ends_message = False
                    self.count += 1
                    return place
        return None

    def _read_head(self) -> bool:
        """Read flags and size, and of a command the name; False while bytes are missing."""
        flags = self._head[0]
        sized = 9 if flags & self._LONG else 2
        if len(self._head) < sized:
            return False
        size = int.from_bytes(self._head[1:sized], "big")
        name = self._head[sized:]
        if flags & self._COMMAND:
            if len(name) < min(size, len(self._ENCRYPTED)):
                return False
            self._ends_message = name == self._ENCRYPTED
        else:
            self._ends_message = not flags & self._MORE
        self._skip = size - len(name)
        return True


@dataclass
class _Trigger:
    action: Callable[[], None]
    left_bytes: int | None
    left_messages: int | None


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self,
        proxy: Proxy,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._way: Way = way
        self._reader = reader
        self._writer = writer
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)
        self._counter = MessageCounter()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Carry bytes until an end closes; then close the other end for them."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        while True:
            data = await self._reader.read(_CHUNK_BYTES)
            due = self._loop.time() + self._proxy.fault(self._way).latency_s
            await self._queue.put((due, data))
            if not data:
                return

    async def _write(self) -> None:
        while True:
            due, data = await self._queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if not data:
                # While it holds bytes back, the end of them does not get through either.
                await self._proxy.forwarding(self._way)
                with contextlib.suppress(OSError):
                    self._writer.write_eof()
                return
            while data:
                place = self._counter.feed(data)
                part, data = (data, b"") if place is None else (data[:place], data[place:])
                await self._forward(part)
                if place is not None:
                    self._proxy.count_message(self._way)

    async def _forward(self, data: bytes) -> None:
        while data:
            await self._proxy.forwarding(self._way)
            if self._writer.is_closing():
                return
            fault = self._proxy.fault(self._way)
            sizes = [len(data), fault.slice_bytes, self._proxy.bytes_until_trigger(self._way)]
            if fault.bytes_per_s is not None:
                # In pieces of a twentieth of a second, so that a slow link trickles.
                sizes.append(max(1, int(fault.bytes_per_s / 20)))
            size = min(size for size in sizes if size)
            part, data = data[:size], data[size:]
            # Before: whoever receives it may look.
            self._proxy.bytes[self._way] += size
            if fault.mode == "forward":
                self._writer.write(part)
                await self._writer.drain()
            if fault.bytes_per_s is not None:
                await asyncio.sleep(len(part) / fault.bytes_per_s)
            elif fault.slice_bytes is not None:
                await asyncio.sleep(0)
            self._proxy.has_passed(self._way, size)


class _Connection:
    """A client, and the connection to the service that was made for it."""

    def __init__(self, proxy: Proxy, client: _Ends, service: _Ends) -> None:
        self.client, self.service = client, service
        self._pipes = (
            _Pipe(proxy, "to_service", client[0], service[1]),
            _Pipe(proxy, "to_client", service[0], client[1]),
        )
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for pipe in self._pipes:
                    group.create_task(pipe.run())
        except* OSError:
            # An end was reset: so is the other one.
            for ends in (self.client, self.service):
                _abort(ends[1])
        for ends in (self.client, self.service):
            ends[1].close()


_Ends: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy(Closing):
    """A proxy in front of a service, of the same kind as that is; use as a context manager.

    `endpoint`: where clients connect to; of a Unix socket it lies beside the service's. `port`: of
    TCP, 0 for any. `connections`, `bytes`, `messages`: what has passed so
    far, the last two by direction.
    """

    def __init__(self, target: str, *, port: int = 0) -> None:
        self.connections = 0
        self.bytes: dict[Way, int] = dict.fromkeys(WAYS, 0)
        self.messages: dict[Way, int] = dict.fromkeys(WAYS, 0)
        self._target = _address(target)
        self._port = port
        self._faults: dict[Way, Fault] = dict.fromkeys(WAYS, CLEAN)
        self._changed: dict[Way, asyncio.Event] = {}
        self._triggers: dict[Way, list[_Trigger]] = {way: [] for way in WAYS}
        self._open: list[_Connection] = []
        self._orphans: list[_Connection] = []
        self._refusing = False
        self._ready: Future[str] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self.endpoint = self._ready.result(10)

    def close(self) -> None:
        """Close every connection and stop."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    # ------------------------------------------------------------------ switches, for any thread

    def set(self, to_service: Fault = CLEAN, to_client: Fault = CLEAN) -> None:
        """Switch the faults of both directions; no argument: none."""

        def switch() -> None:
            self._faults = {"to_service": to_service, "to_client": to_client}
            for event in self._changed.values():
                event.set()

        self._do(switch)

    def when(
        self,
        way: Way,
        action: Callable[[], None],
        *,
        bytes: int | None = None,  # noqa: A002
        messages: int | None = None,
    ) -> None:
        """Do something once, as soon as so many further bytes, or messages, have passed.

        `action` is one of this proxy's own methods, or anything else that does not block.
        """
        self._do(lambda: self._triggers[way].append(_Trigger(action, bytes, messages)))

    def reset(self) -> None:
        """Reset every connection: both ends get RST."""
        self._do(self._reset)

    def half_open(self) -> None:
        """Leave every client with a connection that is open and whose other end has gone.

        The service sees its clients hang up. New connections work.
        """
        self._do(self._abandon)

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections from now on, or take them again."""

        def switch() -> None:
            self._refusing = refusing

        self._do(switch)

    def retarget(self, target: str) -> None:
        """Lead new connections to another service."""

        def switch() -> None:
            self._target = _address(target)

        self._do(switch)

    def _do(self, action: Callable[[], None]) -> None:
        """Run something in the proxy's thread, and wait until it is done."""
        if threading.current_thread() is self._thread:
            action()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        done.result(10)

    # ----------------------------------------------------------------------- the proxy's own thread

    def fault(self, way: Way) -> Fault:
        """Return what is wrong with a direction at this moment."""
        return self._faults[way]

    async def forwarding(self, way: Way) -> None:
        """Wait until a direction does not hold its bytes back."""
        while self._faults[way].mode == "hold":
            event = self._changed[way]
            event.clear()
            await event.wait()

    def bytes_until_trigger(self, way: Way) -> int | None:
        """Return how many bytes may pass before the next trigger; None if none counts bytes."""
        left = [t.left_bytes for t in self._triggers[way] if t.left_bytes is not None]
        return max(1, min(left)) if left else None

    def has_passed(self, way: Way, count: int) -> None:
        """Pull what bytes trigger that have passed."""
        for trigger in self._triggers[way]:
            if trigger.left_bytes is not None:
                trigger.left_bytes -= count
        self._pull(way)

    def count_message(self, way: Way) -> None:
        """Count a message that has passed, and pull what it triggers."""
        self.messages[way] += 1
        for trigger in self._triggers[way]:
            if trigger.left_messages is not None:
                trigger.left_messages -= 1
        self._pull(way)

    def _pull(self, way: Way) -> None:
        def is_due(trigger: _Trigger) -> bool:
            return any(
                left is not None and left <= 0
                for left in (trigger.left_bytes, trigger.left_messages)
            )

        due = [trigger for trigger in self._triggers[way] if is_due(trigger)]
        self._triggers[way] = [t for t in self._triggers[way] if not is_due(t)]
        for trigger in due:
            trigger.action()

    def _reset(self) -> None:
        for connection in self._open:
            for _, writer in (connection.client, connection.service):
                _abort(writer)
        self._open.clear()

    def _abandon(self) -> None:
        for connection in self._open:
            connection.task.cancel()
            # Nobody reads it any more: a sender's buffers fill up, as they would.
            transport = connection.client[1].transport
            if isinstance(transport, asyncio.ReadTransport):
                transport.pause_reading()
            _abort(connection.service[1])
        self._orphans += self._open
        self._open.clear()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._changed = {way: asyncio.Event() for way in WAYS}
        try:
            server = await self._listen()
        except OSError as error:
            self._ready.set_exception(error)
            return
        name = server.sockets[0].getsockname()
        is_path = isinstance(name, str)
        self._ready.set_result(f"unix://{name}" if is_path else f"tcp://127.0.0.1:{name[1]}")
        await self._stop.wait()
        server.close()
        if is_path:
            Path(name).unlink(missing_ok=True)
        connections = self._open + self._orphans
        for connection in connections:
            for _, writer in (connection.client, connection.service):
                _abort(writer)
            connection.task.cancel()
        await asyncio.gather(*(c.task for c in connections), return_exceptions=True)
        # What `_accept` still waits for.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self) -> asyncio.Server:
        if isinstance(self._target, str):
            return await asyncio.start_unix_server(self._accept, f"{self._target}.proxy")
        return await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            _abort(writer)
            return
        try:
            service = await _connected(self._target)
        except OSError:
            _abort(writer)
            return
        for one in (writer, service[1]):
            if _socket(one).family != socket.AF_UNIX:
                _socket(one).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections += 1
        connection = _Connection(self, (reader, writer), service)
        self._open.append(connection)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([connection.task])
        if connection in self._open:
            self._open.remove(connection)


def _address(endpoint: str) -> _Address:
    match = _ADDRESS.fullmatch(endpoint)
    if match is None:
        raise ValueError(
            f"a proxy's target: got {endpoint!r}, expected tcp://HOST:PORT or unix:///PATH"
        )
    path: str | None = match["path"]
    return (match["host"], int(match["port"])) if path is None else path


async def _connected(address: _Address) -> _Ends:
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address)


def _socket(writer: asyncio.StreamWriter) -> socket.socket:
    found: socket.socket = writer.get_extra_info("socket")
    return found


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close with RST; a Unix socket only closes."""
    with contextlib.suppress(OSError):
        _socket(writer).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
