"""Both ends of a stream."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_side.transport.stream_listener import StreamListener
from protocol import stream_wire
from protocol.stream import StreamChannel


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


@pytest.fixture
def listening(endpoint: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(endpoint.removeprefix("unix://"))
        made.listen(100)
        made.setblocking(False)
        yield made


@pytest.fixture
def listener(endpoint: str) -> Iterator[StreamListener]:
    made = StreamListener(endpoint)
    yield made
    made.close()


@pytest.fixture
def channel(endpoint: str) -> Iterator[StreamChannel]:
    with StreamChannel(endpoint, timeout_s=20) as made:
        yield made


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that hold little of what is sent."""
    monkeypatch.setattr(stream_wire, "SOCKET_BUFFER_BYTES", 4096)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 64 MiB at a time for messages."""
    real = stream_wire.numpy.empty

    def empty(size: int, dtype: type) -> object:
        if size > 2**26:
            raise MemoryError
        return real(size, dtype)

    monkeypatch.setattr(stream_wire.numpy, "empty", empty)
