"""Requests as a CUDA device answers them: graphs, slots in place, tiles; on a stand-in for it.

The kernels themselves are in test_ring: here a stand-in computes their products.
"""

import ctypes
import gc
import math
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gpu_side.cuda
from gpu_side import kernels
from gpu_side.cuda import products
from gpu_side.cuda.device import GRAPH_ROWS, InPlaceJob, Tile
from gpu_side.cuda.products import CudaKernels, DeviceProducts, Product, check_ring
from gpu_side.encoding import encode_reply
from gpu_side.handler import RequestHandler
from gpu_side.kernels import PinnedStaging, exact_product, queued
from gpu_side.transport.listener import Incoming
from gpu_side.transport.stream_client import adopt
from gpu_side.weights import ServiceWeights, load_weights
from protocol.errors import KernelError
from protocol.messages import Timing
from protocol.shared_memory import SlotMemory, create
from protocol.stream_wire import layout
from protocol.tensors import to_torch
from tests.kit import ask
from tests.kit.model import Models
from tests.kit.rows import each_row

CPU = torch.device("cpu")
K, N = 5, 3
WEIGHT = torch.arange(15.0).view(N, K)


class Graph:
    """Does again what was captured, over the same memory."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


class Device:
    """Has the methods of `CudaDevice`. Work is done at once, `done` says when it is seen.

    `later`: what it does once it is done with what it was given. `reached`: addresses and sizes of
    host memory that it reaches.
    """

    def __init__(self, *, captures: bool = True, registers: bool = True) -> None:
        self.done = True
        self.graphs: list[Graph] = []
        self.attempts = self.waits = self.copies_in = self.registrations = 0
        self.later: list[Callable[[], None]] = []
        self.reached: dict[int, int] = {}
        self._captures, self._registers = captures, registers

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.reaches(tensor)
        self.copies_in += 1
        return tensor.clone()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = self.zeros(shape, dtype)
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

    def event(self) -> Any:
        return SimpleNamespace(record=lambda: None, query=lambda: self.done)

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

    def products(self) -> DeviceProducts:
        stand_in: Any = self
        return DeviceProducts(stand_in, (K * 4, N * 4))


def _product(rows: torch.Tensor) -> torch.Tensor:
    return rows @ WEIGHT.t()


class InPlace:
    """A product that does jobs, as kernels would: when the device comes to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.jobs = 0

    def product(self) -> Product:
        return Product(_product, self.in_place)

    def in_place(self, job: InPlaceJob, rows: int) -> None:
        self.jobs += 1
        source, target, count = job.table.tolist()
        assert count <= rows
        for address, width in ((source, K), (target, N)):
            assert self._device.reaches_address(address, count * width * 4)
        given = _at(source, torch.float32, count, K)
        self._device.later.append(lambda: _store(target, _product(given), job))
        self._device.go_on()


def _at(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _store(address: int, result: torch.Tensor, job: InPlaceJob) -> None:
    _at(address, result.dtype, *result.shape).copy_(result)
    job.flag[0] = 1


def _ask(made: DeviceProducts, rows: int = 1, place: str = "o_proj") -> None:
    given, result = torch.randn(rows, K), torch.empty(rows, N)
    work = made.submit(place, Product(_product), given, result)
    assert work() <= time.perf_counter_ns()
    torch.testing.assert_close(result, _product(given))


def test_what_comes_again_is_captured_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    made = device.products()
    for attempts in (0, 1, 1, 1):
        _ask(made)
        assert device.attempts == attempts
    assert device.graphs[0].replays == 3
    # Each place and bucket has a graph of its own, here of 1, 4 and 8 rows; many rows have none.
    for place in ("o_proj", "down_proj"):
        for rows in (3, 4, 5, 8, 1, GRAPH_ROWS[-1] + 1):
            for _ in range(2):
                _ask(made, rows, place)
    assert device.attempts == 6
    # Where capture fails the pieces are given one by one.
    device = Device(captures=False)
    made = device.products()
    for _ in range(4):
        _ask(made)
    assert (device.attempts, device.copies_in) == (1, 4)
    # The number of graphs is bounded, and the device is waited for before they are given up.
    monkeypatch.setattr(products, "MAX_GRAPHS", 3)
    device = Device()
    made = device.products()
    for place in "aabbccddda":
        _ask(made, place=place)
    assert (device.attempts, device.waits) == (4, 1)
    _ask(made, place="a")
    for number in range(9):
        _ask(made, place=f"once {number}")
    assert device.attempts == 5


def test_a_failure_fails_one_request_and_leaves_nothing_that_uses_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    product = Product(_product, Mock(side_effect=RuntimeError("canary")))
    made = device.products()
    _ask(made)
    before = dict(device.reached)
    with pytest.raises(RuntimeError, match="canary"):
        made.submit("down_proj", product, torch.ones(1, K), torch.empty(1, N))
    assert device.waits == 1
    _ask(made)
    assert device.reached == before
    # So does a device that ends without a result.
    monkeypatch.setattr(products, "_ASK_AFTER_NS", 0)
    slot, given, result = _slot()
    device.done = False
    work = made.submit("o_proj", InPlace(device).product(), given, result, slot)
    device.later.clear()
    work()
    device.done = True
    with pytest.raises(RuntimeError, match="left no result"):
        work()


def _slot(rows: int = 4) -> tuple[SlotMemory, torch.Tensor, torch.Tensor]:
    """Return a slot with room for so many rows and their result, and both."""
    memory = torch.zeros(rows * (K + N))
    # A client's memory, which goes with it.
    slot = SlotMemory(Mock(), memory.data_ptr(), memory.nbytes, memoryview(b""))
    return slot, memory[: rows * K].view(rows, K), memory[rows * K :].view(rows, N)


@each_row(("rows", "at_once"), [(1, 1), (3, 1), (4, 1), (4, 2)])
def test_a_slot_is_used_in_place(rows: int, at_once: int) -> None:
    device = Device()
    made, product, slots = device.products(), InPlace(device), [_slot(), _slot()]
    for turn in range(0, 8, at_once):
        works, device.done = [], False
        used = [slots[(turn + n) % 2] for n in range(at_once)]
        for slot, given, result in used:
            assert made.reach(slot)
            given.normal_()
            result.fill_(-1)
            works.append(
                made.submit("o_proj", product.product(), given[:rows], result[:rows], slot)
            )
            now_ns = time.perf_counter_ns()
            assert works[-1]() > now_ns
            assert (result == -1).all()
        device.done = True
        device.go_on()
        for work, (_, given, result) in zip(works, used, strict=True):
            # Written by the device, before we have looked; and not a row more.
            assert torch.equal(result[:rows], _product(given[:rows]))
            assert (result[rows:] == -1).all()
            assert work() <= time.perf_counter_ns()
    # One graph serves all slots, but each request under way has its own.
    assert (device.attempts, device.copies_in, product.jobs) == (at_once, 0, 8)


@each_row(
    ("rows", "reached", "elsewhere"),
    [
        # What lies in no slot, or in one that the device does not reach, goes through our memory.
        (3, True, "rows"),
        (3, True, "result"),
        (4, False, ""),
        (40, False, ""),
        # Many rows are copied straight to and from the device.
        (40, True, ""),
    ],
)
def test_what_is_not_used_in_place_is_copied(rows: int, reached: bool, elsewhere: str) -> None:
    device = Device(registers=reached)
    made, product = device.products(), InPlace(device)
    slot, given, result = _slot(rows)
    assert made.reach(slot) == reached
    given = torch.empty(rows, K) if elsewhere == "rows" else given
    result = torch.empty(rows, N) if elsewhere == "result" else result
    for _ in range(3):
        given.normal_()
        # The stand-in's copies and jobs ask whether they reach what they are given.
        made.submit("o_proj", product.product(), given, result, slot)()
        assert torch.equal(result, _product(given))
    assert (product.jobs, device.copies_in) == ((0, 3) if rows == 40 else (3, 0))


def test_slots_are_reached_up_to_bounds_and_taken_back_when_their_memory_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    made = device.products()
    slot, given, _ = _slot(8)
    of_one = [slot._replace(address=slot.address + given[n].nbytes * n, size=8) for n in range(4)]
    assert [made.reach(one) for one in of_one] == [True, True, False, False]
    assert not made.reach(None)
    (first, *_), (second, *_) = _slot(), _slot()
    monkeypatch.setattr(products, "MAX_REACHED_BYTES", 16 + first.size + second.size - 1)
    assert made.reach(first)
    assert not made.reach(second)
    address, size = first.address, first.size
    assert device.reaches_address(address, size)
    del first
    assert not device.reaches_address(address, size)
    # The device may have been at it.
    assert device.waits == 1
    # There is room again.
    assert made.reach(second)
    assert made._reached_bytes == 16 + second.size
    # What the driver refuses is not asked for again.
    caplog.clear()
    refusing = Device(registers=False)
    made = refusing.products()
    assert [made.reach(second), made.reach(second)] == [False, False]
    assert (refusing.registrations, caplog.messages) == (1, ["not_registered"])


def _do_job(job: InPlaceJob, rows: int, weight: torch.Tensor, tile: object) -> None:
    source, target, count = job.table.tolist()
    given = _at(source, torch.int32, count, weight.shape[1])
    _store(target, exact_product(given, weight), job)


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for `gpu_side.cuda.ring`, which needs Triton."""
    made = SimpleNamespace(
        ring_product=lambda elements, weight, tile: exact_product(elements, weight),
        every_tile=exact_product,
        fetched_rows=lambda job, rows, weight: job.fetched[: rows * weight.shape[1]].view(rows, -1),
        do_job=_do_job,
    )
    monkeypatch.setitem(sys.modules, "gpu_side.cuda.ring", made)
    monkeypatch.setattr(gpu_side.cuda, "ring", made, raising=False)
    return made


@pytest.fixture(scope="module")
def weights(saved_model: Models) -> ServiceWeights:
    return load_weights(saved_model().directory, device=CPU, dtype=torch.float32)


def _on_cuda(weights: ServiceWeights, device: Device) -> Any:
    stand_in: Any = device
    handler = RequestHandler(weights, 2**24)
    handler._prepare = CudaKernels(weights, device=stand_in).prepare
    gc.collect()
    # Of what it has tried at the start.
    device.copies_in = device.waits = device.registrations = device.attempts = 0
    return handler


@each_row(("rows", "reached"), [(1, True), (33, True), (33, False)])
def test_a_slot_of_shared_memory_is_read_and_written_by_the_device(
    rows: int, reached: bool, weights: ServiceWeights
) -> None:
    device, here = Device(registers=reached), RequestHandler(weights, 2**24)
    there = _on_cuda(weights, device)
    _, file = create(2**18, 2**18)
    slot = adopt(file, os.geteuid()).memory(3)
    os.close(file)
    ids = ask.embedding(torch.arange(rows))
    assert torch.equal(ask.answer(there, ids), ask.answer(here, ids))
    for request in ask.one_of_each(rows, weights.config.hidden_size):
        incoming = Incoming((b"client",), [], 0, slot=slot)
        reply, work = there.prepare(request)(request, incoming)
        assert work is not None
        work()
        output = reply.output
        torch.testing.assert_close(to_torch(output), ask.answer(here, request))
        # Elements in any number of rows, floats in many; where the reply will lie in the slot.
        integer = output.dtype == "int32"
        in_place = reached and (integer or rows == 33)
        data = memoryview(output.data)
        assert (data.obj is slot.reply.obj) == in_place, request.method
        if in_place:
            timing = Timing(queue_us=1, compute_us=2)
            frames = encode_reply("framed", 1, request.method, reply, timing)
            (_, place), _, _ = layout(tuple(map(len, frames)))
            start = torch.frombuffer(slot.reply, dtype=torch.uint8).data_ptr()
            assert to_torch(output).data_ptr() - start == place.start, request.method
    assert device.registrations == 1


def test_a_device_that_does_not_reach_shared_memory_is_found_at_the_start(
    weights: ServiceWeights, ring: Any
) -> None:
    kept = []

    def elsewhere(job: InPlaceJob, rows: int, weight: torch.Tensor, tile: Tile) -> None:
        kept.append(torch.empty(rows, len(weight), dtype=torch.int32))
        job.table[1] = kept[-1].data_ptr()
        _do_job(job, rows, weight, tile)

    ring.do_job = elsewhere
    with pytest.raises(KernelError, match="got other numbers for"):
        _on_cuda(weights, Device())


@each_row(
    ("every_tile", "said"),
    [
        (None, "int8 products on cpu: got no Triton, expected it inst"),
        (Mock(side_effect=OSError("canary")), "got OSError from Triton"),
        (lambda given, weight: exact_product(given, 0 * weight), "got wrong numbers for"),
    ],
)
def test_kernels_that_are_not_to_be_relied_on_are_refused(every_tile: Any, said: str) -> None:
    ring: Any = every_tile and SimpleNamespace(every_tile=every_tile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gpu_side.cuda.ring", ring)
        with pytest.raises(KernelError, match=said):
            check_ring(CPU)


class Pinned(PinnedStaging):
    """Stands in for pinned memory, and for a device that is done when the test says so."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.made: list[torch.Tensor] = []
        self.done = False
        self.events = 0

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.empty(shape, dtype=dtype))
        return self.made[-1]

    def _record(self) -> Callable[[], bool]:
        self.events += 1
        return self.query

    def query(self) -> bool:
        return self.done


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_what_goes_to_the_device_and_back_is_pinned_and_of_its_own(dtype: torch.dtype) -> None:
    pinned, sent = Pinned(), torch.randn(3, 4)
    expected = sent.clone()
    there = pinned.to_device(sent, dtype)
    sent.zero_()  # its memory is another request's by then
    (staged,) = pinned.made
    assert (there.dtype, staged.dtype) == (dtype, torch.float32)
    assert torch.equal(there, expected.to(dtype))
    assert torch.equal(staged, expected)
    assert pinned.events == 0
    pinned, output = Pinned(), torch.randn(3, 4)
    here, work = pinned.to_host(output, dtype)
    pinned.to_host(torch.zeros(3, 4), dtype)
    assert here.data_ptr() == pinned.made[0].data_ptr()
    assert torch.equal(here, output.to(dtype))
    assert pinned.events == 2
    assert work is not None
    now_ns = time.perf_counter_ns()
    assert work() > now_ns  # ask again then
    pinned.done = True
    assert work() <= time.perf_counter_ns()


def test_a_device_is_asked_without_a_pause_while_spinning_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pinned, ended = 1_000, Pinned(), list[int]()
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    work = queued(pinned.query, 300.0, lambda: ended.append(now))
    for taken_ns, again_ns in ((0, 1), (299_999, 1), (300_000, 50_000), (8_000_000, 1_000_000)):
        now = 1_000 + taken_ns
        assert work() == now + again_ns
    assert not ended
    pinned.done, now = True, 9_000_000
    assert work() == 9_000_000
    # It is not asked any more.
    pinned.done, now = False, 10_000_000
    assert work() == 9_000_000
    assert ended == [9_000_000]
