"""A real `tee-runner serve`, and a client of it that costs little beside it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kit.service import ENVIRONMENT, START_S, Forked

# No answer of these rows takes as long, unless it never comes.
HANGS_S = 90.0
_READY = re.compile(rb" ready: http://(\S+)/v1\n")
_SAMPLE = re.compile(r'^(?:vllm|tsqp):(\w+?)(?:_total)?\{model_name="[^"]*"\} (\S+)$', re.MULTILINE)
_ENDED = re.compile(
    r'^vllm:request_success_total\{finished_reason="(\w+)",.*\} (\S+)$', re.MULTILINE
)
_LOOK_S = 0.01


@dataclass(frozen=True)
class Server:
    """A server that runs.

    `address`: host:port. `log`: descriptor of what it says on stderr. `headers`: by which it lets
    us see its metrics.
    """

    process: Forked
    address: str
    log: int
    headers: Mapping[str, str] = field(default_factory=dict)

    async def metrics(self) -> dict[str, float]:
        """Return gauges and counters by name, and of requests that ended `ended_HOW`."""
        page = (await ask(self.address, "/metrics", headers=self.headers)).body.decode()
        found = {name: float(value) for name, value in _SAMPLE.findall(page)}
        return found | {f"ended_{how}": float(value) for how, value in _ENDED.findall(page)}

    def logged(self, event: str) -> int:
        """Return how often it has logged an event."""
        return os.pread(self.log, 2**26, 0).count(f" {event} ".encode())

    async def until(self, holds: Callable[[dict[str, float]], bool]) -> float:
        """Return after how many seconds something holds of the metrics. Raises TimeoutError."""
        began = time.monotonic()
        while not holds(await self.metrics()):
            if time.monotonic() > began + HANGS_S:
                raise TimeoutError("metrics: got no such numbers, expected them by now")
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began


def is_idle(metrics: Mapping[str, float]) -> bool:
    """Say whether nothing runs, waits or has memory."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metrics[name] for name in gauges)


@contextmanager
def server(
    gpu: Sequence[str], *options: str, headers: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `tee-runner serve demo` on loopback until the block ends. Raises RuntimeError."""
    arguments = ["serve", "demo", "--port", "0", "--threads", "1", *options]
    arguments += [f"--gpu={endpoint}" for endpoint in gpu]
    with tempfile.TemporaryFile("ab+") as log:
        process = Forked("tee-runner", arguments, ENVIRONMENT, stderr=log.fileno())
        try:
            until = time.monotonic() + START_S
            while (ready := _READY.search(os.pread(log.fileno(), 2**20, 0))) is None:
                if process.poll() is not None or time.monotonic() > until:
                    said = os.pread(log.fileno(), 2**20, 0).decode()
                    raise RuntimeError(f"tee-runner serve: got none, expected it ready\n{said}")
                time.sleep(0.005)
            yield Server(process, ready[1].decode(), log.fileno(), headers or {})
        finally:
            process.kill()


# -------------------------------------------------------------------------------------- a client


@dataclass(frozen=True)
class Leave:
    """When a client closes its connection: `after_s` the request, or behind so many events."""

    after_s: float | None = None
    events: int | None = None


@dataclass
class Reply:
    """What came. `times`: of its events, after the request. `left`: by the client, before its end.

    `status`: 0 where the connection ended without one.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    times: list[float] = field(default_factory=list)
    left: bool = False

    @property
    def events(self) -> list[str]:
        """What stands behind `data: `, of a stream."""
        return [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]


async def ask(
    address: str,
    path: str,
    fields: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave: Leave | None = None,
    on_events: Callable[[], object] = lambda: None,
) -> Reply:
    """Post a body, or get a path without one. Raises TimeoutError for what hangs, and OSError.

    `on_events`: called when some of them have come.
    """
    reply, leave = Reply(), leave or Leave()
    limit_s = HANGS_S if leave.after_s is None else leave.after_s
    reader, writer = await asyncio.open_connection(*address.split(":"), limit=2**20)
    try:
        async with asyncio.timeout(limit_s):
            writer.write(_request(address, path, fields, headers or {}))
            await writer.drain()
            reply.left = await _read(reader, reply, leave.events, on_events)
    except TimeoutError:
        if leave.after_s is None:
            raise
        reply.left = True
    finally:
        writer.transport.abort()
    return reply


def _request(
    address: str, path: str, fields: Mapping[str, Any] | None, headers: Mapping[str, str]
) -> bytes:
    body = b"" if fields is None else json.dumps(fields).encode()
    lines = [f"{'GET' if fields is None else 'POST'} {path} HTTP/1.1", f"host: {address}"]
    lines += ["connection: close", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", *(f"{n}: {value}" for n, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _read(
    reader: asyncio.StreamReader, reply: Reply, most: int | None, on_events: Callable[[], object]
) -> bool:
    """Read to the end, or so many events; return whether it is not the end."""
    began, raw = time.monotonic(), []
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError:
        return False
    reply.status = int(head[0].split()[1])
    reply.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    while block := await reader.read(2**16):
        raw.append(block)
        if events := block.count(b"data: {"):
            reply.times += [time.monotonic() - began] * events
            on_events()
        if most is not None and len(reply.times) >= most:
            return True
    whole = b"".join(raw)
    chunked = reply.headers.get("transfer-encoding") == "chunked"
    reply.body = b"".join(_chunks(whole)) if chunked else whole
    return False


def _chunks(raw: bytes) -> Iterator[bytes]:
    """Yield what is in each chunk of a body; of one that was broken off, what there is."""
    at = 0
    while (end := raw.find(b"\r\n", at)) > at:
        size = int(raw[at:end], 16)
        yield raw[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
