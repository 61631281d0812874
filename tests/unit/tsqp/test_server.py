"""What the server says of its own mistakes, and before it is ready."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import http.client
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tee_side.policy.placement import load_policy
from tsqp import server
from tsqp.server import note_failure, opened_parts

SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("tls_certificate", "tls_key", "api_keys")),
    **dict.fromkeys(("audit_log", "audit_key", "audit_key_fd")),
    "host": "127.0.0.1",
    "port": 0,
}
SECRET = "what the client said"


def _in_a_callback() -> None:
    def fail() -> None:
        raise ValueError(SECRET)

    asyncio.get_running_loop().call_soon(fail)


def _in_a_task() -> None:
    async def fail() -> None:
        raise ValueError(SECRET)

    asyncio.create_task(fail())  # noqa: RUF006 - that nobody waits for it is the case


def test_while_the_model_is_loaded_every_path_is_503_and_then_who_connects_waits() -> None:
    with opened_parts(SETTINGS, None) as parts:
        address = parts.listening.getsockname()
        for path in ("/health", "/v1/models", "/metrics"):
            connection = http.client.HTTPConnection(*address, timeout=30)
            connection.request("GET", path)
            reply = connection.getresponse()
            error = json.loads(reply.read())["error"]
            assert (reply.status, error["code"]) == (503, "starting")
            assert reply.headers["retry-after"] == "5"
            connection.close()
        parts.starting.close()
        # The address is still ours: nobody is refused until the server itself is there.
        waiting = socket.create_connection(address, timeout=30)
        accepted, _ = parts.listening.accept()
        accepted.close()
        waiting.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=30)


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


def test_the_fingerprint_is_another_where_the_bits_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "calibration"
    file.write_bytes(b"scales")
    given = {
        "model_digest": "a",
        "policy": load_policy("shielded"),
        "dtype": torch.float32,
        "model_directory": tmp_path,
    }

    def of(**changes: Any) -> str:
        runner: Any = SimpleNamespace(**(given | changes))
        return server._fingerprint(runner, file)

    first = of()
    others = [
        of(model_digest="b"),
        of(dtype=torch.bfloat16),
        of(policy=load_policy("quantized-clear")),
    ]
    assert of() == first
    file.write_bytes(b"other scales")
    others.append(of())
    file.write_bytes(b"scales")
    # What samples, and says log-probabilities: torch, by the instructions that it has chosen.
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    others.append(of())
    assert len({first, *others}) == 6


def test_what_is_done_every_few_seconds_is_done_again_and_again() -> None:
    async def run() -> None:
        calls: list[int] = []
        chore = asyncio.create_task(server._every(0.0, lambda: calls.append(1)))
        while len(calls) < 3:
            await asyncio.sleep(0)
        chore.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_trimming_gives_back_the_pages_between_what_is_in_use() -> None:
    # Small ones are on the heap; those that stay keep its end where it is.
    blocks = [ctypes.create_string_buffer(4000) for _ in range(10_000)]
    kept = blocks[::100]
    del blocks
    before = _resident_bytes()
    server._memory_trimmer()()
    assert before - _resident_bytes() > 20e6
    assert len(kept) == 100


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
