"""A proxy for TCP and Unix sockets, in a thread of its own, whose faults are switched meanwhile.

A kernel that stops answering cannot be had without privileges: `half_open` is as close as it gets,
a connection that stays open, whose bytes are not read and whose other end has gone.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.kit.service import Closing

T = TypeVar("T")
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Fault:
    """What happens to bytes, in both directions.

    `bytes_per_s`: None for as many as come; `slice_bytes`: written in pieces of this size, each on
    its own; `holds`: kept until it is switched back, as TCP does when packets are lost for a while.
    """

    bytes_per_s: float | None = None
    slice_bytes: int = _CHUNK_BYTES
    holds: bool = False


CLEAN = Fault()
HOLD = Fault(holds=True)


class Proxy(Closing):
    """A proxy in front of a service, of the same kind as that is; use as a context manager.

    `endpoint`: where clients connect to; of a Unix socket it lies beside the service's.
    """

    def __init__(self, target: str) -> None:
        self._address = target.partition("://")[2]
        self._is_tcp = target.startswith("tcp:")
        self._fault = CLEAN
        self._flows = asyncio.Event()
        self._flows.set()
        # The ends of each connection (the client's first), by the task that carries its bytes.
        self._open: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._orphans: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.endpoint = self._do(self._listen())

    def _do(self, what: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    def set(self, fault: Fault = CLEAN) -> None:
        async def switch() -> None:
            self._fault = fault
            (self._flows.clear if fault.holds else self._flows.set)()

        self._do(switch())

    def half_open(self) -> None:
        """Leave every client with a connection that is open and whose other end has gone.

        The service sees its clients hang up. New connections work.
        """

        async def abandon() -> None:
            for task, (client, service) in self._open.items():
                task.cancel()
                # What the client sends is not read any more: its buffers fill up, as they would.
                client.transport.pause_reading()  # type: ignore[attr-defined]
                service.transport.abort()
                self._orphans.append(client)
            self._open.clear()

        self._do(abandon())

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> str:
        if not self._is_tcp:
            path = f"{self._address}.proxy"
            self._server = await asyncio.start_unix_server(self._accept, path)
            return f"unix://{path}"
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        self._server.close()
        if not self._is_tcp:
            Path(f"{self._address}.proxy").unlink(missing_ok=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in self._orphans:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if self._is_tcp:
                service = await asyncio.open_connection(*self._address.split(":"))
            else:
                service = await asyncio.open_unix_connection(self._address)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self._open[task] = writer, service[1]
        # An end was reset: so is the other one. Or the proxy ends, or abandons the client.
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._carry(reader, service[1]), self._carry(service[0], writer))
        if self._open.pop(task, None):
            for end in (writer, service[1]):
                end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes until an end closes; then close the other end for them."""
        while data := await reader.read(_CHUNK_BYTES):
            while data:
                await self._flows.wait()
                fault, size = self._fault, self._fault.slice_bytes
                if fault.bytes_per_s is not None:
                    # In pieces of a twentieth of a second, so that a slow link trickles.
                    size = max(1, int(fault.bytes_per_s / 20))
                part, data = data[:size], data[size:]
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(len(part) / fault.bytes_per_s if fault.bytes_per_s else 0)
        # While it holds bytes back, the end of them does not get through either.
        await self._flows.wait()
        with suppress(OSError):
            writer.write_eof()
