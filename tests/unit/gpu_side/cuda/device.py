"""A stand-in for a CUDA device: computes on the CPU, and is done when the test says so."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self._device.done


class Graph:
    """Does again what was captured, over the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class Device:
    """Has the methods of `CudaDevice`. Work is done at once, `done` says when it is seen."""

    def __init__(self, *, captures: bool = True, registers: bool = True) -> None:
        self.done = True
        self.graphs: list[Graph] = []
        self.attempts = self.waits = self.copies_in = self.registrations = 0
        # What it does once it is done with what it was given.
        self.later: list[Callable[[], None]] = []
        self._captures, self._registers = captures, registers
        # Addresses and sizes of host memory that it reaches.
        self.reached: dict[int, int] = {}

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.reaches(tensor)
        self.copies_in += 1
        return tensor.clone()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.zeros(shape, dtype=dtype)
        self.reached[memory.data_ptr()] = memory.nbytes
        return memory

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def is_idle(self) -> bool:
        return self.done

    def reaches(self, tensor: torch.Tensor) -> bool:
        return self.reaches_address(tensor.data_ptr(), tensor.nbytes)

    def reaches_address(self, start: int, length: int) -> bool:
        return any(at <= start and start + length <= at + size for at, size in self.reached.items())

    def go_on(self) -> None:
        while self.done and self.later:
            self.later.pop(0)()

    def event(self) -> Event:
        return Event(self)

    def capture(self, work: Callable[[], None]) -> Graph | None:
        self.attempts += 1
        if not self._captures:
            return None
        self.graphs.append(Graph(work))
        return self.graphs[-1]

    def synchronize(self) -> None:
        self.waits += 1

    def time_us(self, work: Callable[[], object]) -> float:
        work()
        return 1.0

    def register(self, address: int, size: int) -> bool:
        self.registrations += 1
        if self._registers:
            self.reached[address] = size
        return self._registers

    def unregister(self, address: int) -> None:
        del self.reached[address]
