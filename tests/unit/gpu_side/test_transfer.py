"""Tests of the copies to and from a device, with a stand-in for CUDA's pinned memory."""

from __future__ import annotations

import time

import pytest
import torch

from gpu_side import transfer
from gpu_side.transfer import InPlace, PinnedStaging, Queued, transfer_to


class Pinned:
    """Stands in for pinned memory, and for a device that is done when the test says so."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.done = False
        self.events = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.empty(shape, dtype=dtype))
        return self.made[-1]

    def record(self, device: torch.device) -> Pinned:
        assert device.type == "cpu"
        self.events += 1
        return self

    def query(self) -> bool:
        return self.done


def _staging(pinned: Pinned) -> PinnedStaging:
    return PinnedStaging(torch.device("cpu"), empty=pinned.empty, record=pinned.record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_goes_to_the_device_is_staged_as_it_was_sent(dtype: torch.dtype) -> None:
    pinned, sent = Pinned(), torch.randn(3, 4)
    there = _staging(pinned).to_device(sent, dtype)
    assert torch.equal(there, sent.to(dtype))
    assert there.dtype == dtype
    (staged,) = pinned.made
    assert staged.dtype == sent.dtype
    assert torch.equal(staged, sent)
    assert pinned.events == 0


def test_what_is_on_its_way_does_not_alias_the_request() -> None:
    sent = torch.ones(4)
    pinned = Pinned()
    _staging(pinned).to_device(sent, torch.float32)
    sent.zero_()
    assert torch.equal(pinned.made[0], torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_is_pinned_and_converted(dtype: torch.dtype) -> None:
    pinned, output = Pinned(), torch.randn(3, 4)
    here, _ = _staging(pinned).to_host(output, dtype)
    (made,) = pinned.made
    assert here.data_ptr() == made.data_ptr()
    assert torch.equal(here, output.to(dtype))
    assert pinned.events == 1


def test_the_host_is_told_when_the_device_is_done() -> None:
    pinned = Pinned()
    _, work = _staging(pinned).to_host(torch.ones(2), torch.float32)
    assert work is not None
    for _ in range(2):
        now_ns = time.perf_counter_ns()
        assert work.ends_ns() > now_ns  # ask again then
    pinned.done = True
    before_ns = time.perf_counter_ns()
    ended_ns = work.ends_ns()
    assert before_ns <= ended_ns <= time.perf_counter_ns()
    pinned.done = False  # nobody asks the device any more
    assert work.ends_ns() == ended_ns


def test_a_device_is_asked_without_a_pause_while_spinning_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 0

        def perf_counter_ns(self) -> int:
            return self.now

    clock, pinned, ended = Clock(), Pinned(), list[int]()
    monkeypatch.setattr(transfer, "time", clock)
    clock.now = 1_000
    work = Queued(pinned, 300.0, lambda: ended.append(clock.now))
    for taken_ns, again_ns in ((0, 1), (299_999, 1), (300_000, 50_000), (8_000_000, 1_000_000)):
        clock.now = 1_000 + taken_ns
        assert work.ends_ns() == clock.now + again_ns
    assert not ended
    pinned.done = True
    clock.now = 9_000_000
    assert (work.ends_ns(), work.ends_ns()) == (9_000_000, 9_000_000)
    assert ended == [9_000_000]


def test_every_reply_has_memory_of_its_own() -> None:
    pinned = Pinned()
    staging = _staging(pinned)
    first, _ = staging.to_host(torch.ones(4), torch.float32)
    staging.to_host(torch.zeros(4), torch.float32)
    assert torch.equal(first, torch.ones(4))


def test_on_the_cpu_nothing_is_copied_without_need() -> None:
    transfer, tensor = InPlace(), torch.randn(3)
    assert transfer.to_device(tensor, torch.float32) is tensor
    here, work = transfer.to_host(tensor, torch.float32)
    assert here is tensor
    assert work is None
    assert transfer.to_device(tensor, torch.bfloat16).dtype == torch.bfloat16
    assert transfer.to_host(tensor, torch.float16)[0].dtype == torch.float16


def test_cuda_is_staged_and_the_cpu_is_not() -> None:
    assert isinstance(transfer_to(torch.device("cpu")), InPlace)
    assert isinstance(transfer_to(torch.device("cuda", 0)), PinnedStaging)
