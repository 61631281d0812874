"""Which rank this process is, and how it finds the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.native import usable_cores

OPTION = "--tensor-parallel"


@dataclass(frozen=True)
class Place:
    """One of `ranks` processes of a host, each with the GPU of its number. Rank 0 is the head."""

    rank: int
    ranks: int

    @property
    def threads(self) -> int:
        """The process's share of the cores that it may use."""
        return max(1, usable_cores() // self.ranks)

    def device(self, name: str) -> str:
        """Return which device `--device` means here. Raises SettingsError."""
        if name not in ("cpu", "cuda"):
            expected = "cpu or cuda: each rank takes the GPU of its number, and all of them compute"
            raise SettingsError(OPTION, got=f"--device {name}", expected=expected)
        return name if name == "cpu" else f"{name}:{self.rank}"


def by_torchrun() -> bool:
    """Say whether torchrun, or what sets the same variables, has started this process."""
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ


def place_of(ranks: int) -> Place:
    """Return the place of this process: the head's, or the one that torchrun gives it.

    Raises SettingsError where that has started another number of processes, or says no numbers; and
    where some are on another host: rows and results would cross a network in the clear.
    """
    if not by_torchrun():
        return Place(0, ranks)
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, world, here = (os.environ.get(name, "") for name in names)
    if not rank.isdecimal() or (world, here) != (str(ranks), str(ranks)):
        got = f"torchrun with {world[:20] or 'no'} processes, {here[:20] or 'none'} of them here"
        expected = f"{ranks}, all on this host (--layers spreads a model over several)"
        raise SettingsError(OPTION, got=got, expected=expected)
    return Place(int(rank), ranks)
