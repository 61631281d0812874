"""A weight's output columns over several accelerators: what a request costs then.

The ranks of one service get the input from its head, multiply by their columns and hand their part
back (`gpu-service --tensor-parallel`). The input goes to the ranks from host memory to host memory
(gloo), at what was measured; their parts come back at the profile's rate to the host, and kernels
run at its peak rates: lower bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from gpu_side.devices import DeviceProfile
from gpu_side.kernels import request_us
from gpu_side.tasks import LinearWork, Task
from tsqp.lab.plan.model import Crossover, Rpc

# A request's way to the other ranks: one message over gloo, and the rate of all of them together.
# Measured on 2 EPYC cores over loopback: 8 KiB out and 16 KiB back take 264 us, 8 MiB out and 64
# MiB back 57 ms. Results of ranks without a GPU go that way, too; a profile is of an accelerator.
GLOO_US = 120.0
GLOO_GB_PER_S = 1.3

# No weight of a known model has so many columns.
_MOST_COLUMNS = 2**24


class Parted(NamedTuple):
    """Over how many accelerators a weight is spread: the ranks of each service."""

    ranks: int = 1

    def gpu_us(self, profile: DeviceProfile, task: Task, itemsize: int) -> float:
        """Return how long a service takes for a request."""
        whole_us, work = request_us(profile, task, itemsize), task.work
        if self.ranks == 1 or not isinstance(work, LinearWork):
            return whole_us
        own, all_of_it = (
            profile.linear_us(work.rows, work.in_features, columns, itemsize, work.integer)
            for columns in (ceil(work.out_features / self.ranks), work.out_features)
        )
        sent_us = GLOO_US + task.input_bytes * (self.ranks - 1) / (GLOO_GB_PER_S * 1e3)
        others = task.output_bytes * (self.ranks - 1) // self.ranks
        return whole_us - all_of_it + own + sent_us + profile.transfer_us(others)

    def total_us(self, profile: DeviceProfile, rpc: Rpc, itemsize: int) -> float:
        """Return what a product takes of accelerators and the TEE, without the link."""
        tee_us = rpc.encode_us + rpc.send_us + rpc.receive_us + rpc.decode_us
        return tee_us + self.gpu_us(profile, rpc.asked.plan(), itemsize)

    def crossover(
        self, profile: DeviceProfile, rpcs: Iterable[Rpc], itemsize: int
    ) -> Crossover | None:
        """Return from which size of a weight on this pays, for rows and inputs of the largest.

        None where no request multiplies by a weight.
        """
        works = [(one.asked.work, one) for one in rpcs]
        linear = [(work, one) for work, one in works if isinstance(work, LinearWork)]
        if not linear:
            return None
        work, rpc = max(linear, key=lambda one: one[0].in_features * one[0].out_features)
        row_bytes = work.in_features * (1 if work.integer else itemsize)

        def pays(columns: int) -> bool:
            task = _with_columns(rpc.asked.plan(), columns)
            asked = rpc.asked.model_copy(update={"shape": task.shape, "work": task.work})
            one = rpc.model_copy(update={"asked": asked})
            alone_us = ALONE.total_us(profile, one, itemsize)
            return self.total_us(profile, one, itemsize) < alone_us

        least = bisect_left(range(_MOST_COLUMNS), True, lo=1, key=pays)
        return Crossover(
            weight_bytes=None if least == _MOST_COLUMNS else least * row_bytes,
            largest_bytes=work.out_features * row_bytes,
        )


ALONE = Parted()


def _with_columns(task: Task, columns: int) -> Task:
    if not isinstance(task.work, LinearWork):
        raise TypeError(f"columns of {type(task.work).__name__}")
    work = replace(task.work, out_features=columns)
    return replace(task, shape=(*task.shape[:-1], columns), work=work)
