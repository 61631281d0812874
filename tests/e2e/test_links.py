"""Real processes say the same over every link: a socket, a device's memory, HTTP behind a proxy."""

import json
import os
from pathlib import Path

import pytest

from protocol import native
from tests.kit.http_proxy import http_proxy
from tests.kit.service import call, running_service

PROMPT = ("--prompt", "Once upon a time", "--max-new-tokens", "8")


def _generated(endpoint: str, *more: str) -> list[int]:
    given = ("generate", "demo", "--policy", "shielded", "--json", *PROMPT, "--gpu", endpoint)
    found = call("tee-runner", *given, *more)
    assert found.returncode == 0, found.stderr
    ids: list[int] = json.loads(found.stdout)["token_ids"]
    return ids


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    endpoint = f"unix://{tmp_path_factory.mktemp('s')}/s"
    with running_service("demo", endpoint, "--threads", "1"):
        found = _generated(endpoint)
    assert len(found) == 8
    return found


@pytest.mark.skipif(native.library is None, reason="needs compiled kernels")
def test_a_devices_memory_changes_no_token(tmp_path: Path, expected: list[int]) -> None:
    memory = tmp_path / "memory"
    memory.touch()
    os.truncate(memory, 2**22)
    bind = f"ivshmem://{memory},{tmp_path}/vm.sock_5000"
    with running_service("demo", bind, "--threads", "1") as service:
        assert service.endpoint == bind
        for _ in range(2):  # the second client finds what the first has left there
            assert _generated(bind) == expected
        assert service.stop() == 0
    # It was there that they went: the number of replies in the first slot's line.
    assert int.from_bytes(memory.read_bytes()[192 + 8 * 64 :][7 * 64 : 7 * 64 + 4], "little") > 8


def test_a_buffering_proxy_changes_no_token(tmp_path: Path, expected: list[int]) -> None:
    made = call("tsqp", "api-key", "first", "--digest", "--to", str(tmp_path / "first"))
    assert made.returncode == 0, made.stderr
    (tmp_path / "tokens").write_text(made.stdout)
    let_in = ("--http-tokens", str(tmp_path / "tokens"))
    with (
        running_service("demo", "http://127.0.0.1:*", *let_in) as service,
        http_proxy(int(service.endpoint.rpartition(":")[2])) as proxy,
    ):
        assert _generated(proxy.url, "--http-token", str(tmp_path / "first")) == expected
        assert len(proxy.requests) > 20
