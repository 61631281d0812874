"""Nothing of a prompt, of an activation or of a key leaves the runner but as masked tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak.canaries import FAULTS, POLICIES, Canaries
from tests.soak.secrets import find_leaks, make_place


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run said that generated from a block of prompts under every kind of policy."""
    folder = tmp_path_factory.mktemp("secrets")
    make_place(folder, bank_tokens=512)
    return {**find_leaks(folder, 20 * len(POLICIES), seed=7, block=20), "folder": folder}


def test_no_secret_is_anywhere(found: dict[str, Any]) -> None:
    assert found["hits"] == {}


def test_a_secret_that_is_put_somewhere_is_found_there(found: dict[str, Any]) -> None:
    """The control: for every place that is searched."""
    planted = found["planted"]
    assert {"runner log", "service log", "errors", "disk"} <= set(planted)
    assert all(planted.values()), planted


def test_every_fault_came_about_and_everything_was_searched_for(found: dict[str, Any]) -> None:
    assert set(found["faults"]) == set(FAULTS)
    assert set(found["kinds"]) >= {"prompt", "token ids", "activation", "key"}
    assert found["ended"]["right"] > 0
    assert found["ended"].keys() - {"right"}


def test_the_logs_were_written(found: dict[str, Any]) -> None:
    """Or there would have been nothing to search."""
    logs: Path = found["folder"] / "logs"
    assert "failed" in (logs / "runner.log").read_text(encoding="utf-8")
    for path in logs.glob("service-*.log"):
        assert "refused" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"the answer: qvxzkjwphm!", "prompt"),
        (b"x=" + b"qvxzkjwphm".hex().encode(), "prompt"),
        (b"tensor([ 9, 14, 15, 16,\n 17, 18, 19, 20])", "token ids"),
        (b"\0\0" + b"".join(n.to_bytes(8, "little") for n in range(11, 22)), "token ids"),
        (b"[0.5000, 1.2500,  -3.0000, 4.0000]", "activation"),
        (b"key " + b"\x00\x01\x02\x03" * 8, "key"),
    ],
)
def test_the_search_finds(content: bytes, kind: str) -> None:
    canaries = Canaries()
    canaries.add_prompt(["qvxzkjwphm"], list(range(11, 23)))
    canaries.add_activation(torch.tensor([0.5, 1.25, -3.0, 4.0, 7.0]))
    canaries.add_secret(b"\x00\x01\x02\x03" * 8)
    assert kind in canaries.found_in(content)
    assert not canaries.found_in(b"nothing of it 1, 2, 3, 0.5, 1.25")
