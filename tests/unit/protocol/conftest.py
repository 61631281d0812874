"""Both ends of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol import memory_pool
from protocol.stream import StreamChannel
from protocol.stream_listener import StreamListener


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/s"


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
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 64 MiB at a time for messages."""
    real = memory_pool.numpy.empty

    def empty(size: int, dtype: type) -> object:
        if size > 2**26:
            raise MemoryError
        return real(size, dtype)

    monkeypatch.setattr(memory_pool.numpy, "empty", empty)
