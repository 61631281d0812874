"""Services without sockets, on a clock that stands still."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.fakes import World, stopped_clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stopped_clock(monkeypatch)


@pytest.fixture
def world(clock: Any) -> Iterator[World]:
    made = World()
    yield made
    for services in made.made:
        services.close()
    assert all(connection.closed for connection in made.opened)
