"""Memory of a VM's device between real processes: what is said over it is what unix:// says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from protocol import native
from tests.kit.service import run, running_service

RUN = ("generate", "demo", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--json")


@pytest.mark.skipif(native.library is None, reason="needs compiled kernels")
def test_a_shielded_run_says_the_same(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.touch()
    os.truncate(memory, 2**22)
    said = []
    for bind in (f"unix://{tmp_path}/plain", f"ivshmem://{memory},{tmp_path}/vm.sock_5000"):
        with running_service("demo", bind, "--arithmetic", "both", "--threads", "1") as service:
            assert service.endpoint == bind
            for _ in range(2):  # the second client finds what the first has left there
                done = run("tee-runner", *RUN, "--policy", "shielded", "--gpu", bind)
                assert done.returncode == 0, done.stderr
                said.append(json.loads(done.stdout)["token_ids"])
            assert service.stop() == 0
    assert len(said[0]) == 8
    assert said == said[:1] * 4
    # It was there that they went: the number of replies in the first slot's line.
    assert int.from_bytes(memory.read_bytes()[192 + 8 * 64 :][7 * 64 : 7 * 64 + 4], "little") > 8
