"""Connections of the HTTP library, made by asyncio alone: one that is given up leaves nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any

import httpcore2


class Stream(httpcore2.AsyncNetworkStream):
    """One connection, over TLS where its backend makes such."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive some bytes, none at the end. Raises httpcore2.ReadError."""
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore2.ReadError from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send. Raises httpcore2.WriteError."""
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore2.WriteError from error

    async def aclose(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Do nothing: TLS was begun with the connection."""
        return self

    def get_extra_info(self, info: str) -> Any:
        """Say whether an idle connection has ended (`is_readable`); of nothing else."""
        if info == "is_readable":
            return self._reader.at_eof() or self._writer.is_closing()
        return None


class Backend(httpcore2.AsyncNetworkBackend):
    """Connects. `context`: what verifies the peer, None: without TLS."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect. Raises httpcore2.ConnectError, whose cause says why."""
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=self._context)
            for option in socket_options or ():
                writer.get_extra_info("socket").setsockopt(*option)
        except (OSError, UnicodeError) as error:  # the second: a name that is no host's
            raise httpcore2.ConnectError from error
        return Stream(reader, writer)
