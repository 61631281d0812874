"""What the server says of its own mistakes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from tsqp.server import note_failure

SECRET = "what the client said"


def _in_a_callback() -> None:
    def fail() -> None:
        raise ValueError(SECRET)

    asyncio.get_running_loop().call_soon(fail)


def _in_a_task() -> None:
    async def fail() -> None:
        raise ValueError(SECRET)

    asyncio.create_task(fail())  # noqa: RUF006 - that nobody waits for it is the case


@pytest.mark.parametrize("begin", [_in_a_callback, _in_a_task])
def test_what_fails_on_the_loop_is_logged_without_its_words(
    begin: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(note_failure)
        begin()
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    asyncio.run(run())
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("callback_failed", None)
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["error"] == "ValueError"
    assert "test_server.py:" in fields["at"]
    assert SECRET not in str(vars(record))


def test_a_failure_without_an_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        note_failure(runner.get_loop(), {"message": SECRET})
    (record,) = caplog.records
    assert SECRET not in str(vars(record))
