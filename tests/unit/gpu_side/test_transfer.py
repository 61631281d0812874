"""Copies to and from a device, with a stand-in for CUDA's pinned memory, and waiting for it."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from gpu_side import transfer
from gpu_side.transfer import PinnedStaging, Queued
from tests.kit.rows import each_row

DTYPES = [torch.float32, torch.bfloat16]


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

    def staging(self) -> PinnedStaging:
        return PinnedStaging(torch.device("cpu"), empty=self.empty, record=self.record)


@each_row("dtype", DTYPES)
def test_what_goes_to_the_device_is_staged_as_it_was_sent(dtype: torch.dtype) -> None:
    pinned, sent = Pinned(), torch.randn(3, 4)
    expected = sent.clone()
    there = pinned.staging().to_device(sent, dtype)
    sent.zero_()  # its memory is another request's by then
    (staged,) = pinned.made
    assert (there.dtype, staged.dtype) == (dtype, torch.float32)
    assert torch.equal(there, expected.to(dtype))
    assert torch.equal(staged, expected)
    assert pinned.events == 0


@each_row("dtype", DTYPES)
def test_what_comes_back_is_pinned_converted_and_of_its_own(dtype: torch.dtype) -> None:
    pinned, output = Pinned(), torch.randn(3, 4)
    staging = pinned.staging()
    here, work = staging.to_host(output, dtype)
    staging.to_host(torch.zeros(3, 4), dtype)
    assert here.data_ptr() == pinned.made[0].data_ptr()
    assert torch.equal(here, output.to(dtype))
    assert pinned.events == 2
    assert work is not None
    now_ns = time.perf_counter_ns()
    assert work.ends_ns() > now_ns  # ask again then


def test_a_device_is_asked_without_a_pause_while_spinning_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, pinned, ended = 1_000, Pinned(), list[int]()
    monkeypatch.setattr(transfer, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    work = Queued(pinned, 300.0, lambda: ended.append(now))
    for taken_ns, again_ns in ((0, 1), (299_999, 1), (300_000, 50_000), (8_000_000, 1_000_000)):
        now = 1_000 + taken_ns
        assert work.ends_ns() == now + again_ns
    assert not ended
    pinned.done, now = True, 9_000_000
    assert work.ends_ns() == 9_000_000
    # It is not asked any more.
    pinned.done, now = False, 10_000_000
    assert work.ends_ns() == 9_000_000
    assert ended == [9_000_000]
