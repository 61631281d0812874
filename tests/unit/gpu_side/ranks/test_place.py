"""Which rank a process is, and what it takes of its machine."""

from __future__ import annotations

import pytest

from gpu_side.ranks.place import Place, place_of
from gpu_side.ranks.processes import how_it_ended
from protocol.errors import SettingsError
from protocol.native import usable_cores
from tests.kit.rows import each_row

THEIRS = {
    "MASTER_ADDR": "127.0.0.1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
}


def test_the_head_is_the_first_of_all_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THEIRS:
        monkeypatch.delenv(name, raising=False)
    assert place_of(3) == Place(0, 3)


def test_torchrun_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in THEIRS.items():
        monkeypatch.setenv(name, value)
    assert place_of(8) == Place(5, 8)


@each_row(
    ("name", "value"),
    [("WORLD_SIZE", "4"), ("RANK", "-1"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "")],
)
def test_numbers_that_do_not_fit(name: str, value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for each, good in {**THEIRS, name: value}.items():
            patch.setenv(each, good)
        with pytest.raises(SettingsError, match=r"got torchrun with \w+ processes.*, all on this"):
            place_of(8)


def test_ranks_of_a_host_share_its_cores() -> None:
    assert Place(0, 1).threads == usable_cores()
    assert Place(0, 2).threads == max(1, usable_cores() // 2)
    assert Place(0, 999).threads == 1


@each_row(
    ("device", "here"), [("cpu", "cpu"), ("cuda", "cuda:5"), ("cuda:0", None), ("null", None)]
)
def test_each_rank_has_the_gpu_of_its_number(device: str, here: str | None) -> None:
    place = Place(5, 8)
    if here is not None:
        assert place.device(device) == here
        return
    with pytest.raises(SettingsError, match=f"--tensor-parallel: got --device {device}, expected"):
        place.device(device)


@each_row(
    ("status", "said"),
    [(0, "ended with 0"), (1, "ended with 1"), (-9, "killed by SIGKILL"), (-99, "by signal 99")],
)
def test_how_a_process_ended(status: int, said: str) -> None:
    assert how_it_ended(status).endswith(said)
