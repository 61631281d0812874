"""Which rank this process is, and how it finds the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.native import usable_cores

OPTION = "--tensor-parallel"


@dataclass(frozen=True)
class Place:
    """One of `ranks` processes. Rank 0 is the head.

    `on_host`: which process of this host it is, and of how many: so many share its cores, and each
    has the GPU of its number.
    """

    rank: int
    ranks: int
    on_host: tuple[int, int]

    @property
    def threads(self) -> int:
        """The process's share of the cores that it may use."""
        return max(1, usable_cores() // self.on_host[1])

    def device(self, name: str) -> str:
        """Return which device `--device` means here. Raises SettingsError."""
        if name not in ("cpu", "cuda"):
            expected = "cpu or cuda: each rank takes the GPU of its number, and all of them compute"
            raise SettingsError(OPTION, got=f"--device {name}", expected=expected)
        return name if name == "cpu" else f"{name}:{self.on_host[0]}"


def by_torchrun() -> bool:
    """Say whether torchrun, or what sets the same variables, has started this process."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def place_of(ranks: int) -> Place:
    """Return the place of this process: the head's, or the one that torchrun gives it.

    Raises SettingsError where that has started another number of processes, or says no numbers.
    """
    if not by_torchrun():
        return Place(0, ranks, (0, ranks))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = [os.environ.get(name, "") for name in names]
    if not all(text.isdecimal() for text in given) or int(given[1]) != ranks:
        got = f"torchrun with WORLD_SIZE {given[1][:20] or 'unset'}"
        raise SettingsError(OPTION, got=got, expected=f"{ranks}, as many as there are ranks")
    rank, _, local_rank, local_ranks = map(int, given)
    return Place(rank, ranks, (local_rank, local_ranks))
