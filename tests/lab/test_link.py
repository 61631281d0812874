"""Tests of the modelled link, over a channel that answers at once and on a clock of the test's."""

import math
import time
from typing import Any
from unittest import mock

import pytest
import torch

from protocol.channel import Channel
from protocol.errors import DeadlineExceededError, SettingsError
from protocol.messages import LMHeadRequest, TensorReply, Timing
from protocol.prepared import Exchange, PreparedRequest, Traffic
from protocol.tensors import from_torch
from tests.kit.rows import each_row
from tsqp import link as link_module
from tsqp.link import Link, ModelledLink

REPLY = TensorReply(output=from_torch(torch.ones(1)))
ROWS = torch.zeros(250_000)
MEGABYTE = PreparedRequest(LMHeadRequest(hidden_states=from_torch(ROWS)), (1,), "float32")


class Clock:
    """Time that passes only where somebody sleeps, or the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1_000_000_000
        monkeypatch.setattr(time, "perf_counter_ns", self.read)
        monkeypatch.setattr(link_module, "wait_until", self.wait_until)

    def read(self) -> int:
        self.now_ns += 1  # so that looking at it often enough ends
        return self.now_ns

    def wait_until(self, deadline_ns: int) -> None:
        self.now_ns = max(self.now_ns, deadline_ns)


def instant(timing: Timing | None = None, elapsed_ns: int = 1000) -> Any:
    """Return a channel whose replies are there at once. A request's number is when it was sent."""
    made = mock.create_autospec(Channel, instance=True, endpoint="instant", traffic=Traffic())
    made.start.side_effect = lambda _prepared, _rows, _timeout_s: time.perf_counter_ns()
    made.wait.side_effect = lambda sent_ns: Exchange(
        REPLY, 10, 1000, 1, elapsed_ns, 3, timing, sent_ns, "instant"
    )
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@each_row(("gbps", "rtt_us"), [(0.0, 1.0), (math.nan, 1.0), (None, -1.0), (None, math.inf)])
def test_impossible_links_are_refused(gbps: float | None, rtt_us: float) -> None:
    with pytest.raises(SettingsError, match="link"):
        Link(gbps, rtt_us)


@pytest.mark.parametrize(
    ("link", "timing", "elapsed_ns", "expected_ns"),
    [
        (Link(None, 0.0), None, 1000, 1000),  # the real transport's own time remains
        (Link(8.0, 200.0), None, 1000, MEGABYTE.request_bytes + 1000 + 200_000),
        (Link(None, 200.0), Timing(queue_us=30, compute_us=40), 90_000, 270_000),
        # It cannot have taken longer than until the reply was really there.
        (Link(None, 200.0), Timing(queue_us=10**9, compute_us=40), 90_000, 290_000),
    ],
)
def test_a_reply_comes_when_the_link_has_carried_it(
    clock: Clock, link: Link, timing: Timing | None, elapsed_ns: int, expected_ns: int
) -> None:
    real = instant(timing, elapsed_ns)
    channel = ModelledLink(real, link)
    exchange = channel.wait(channel.start(MEGABYTE, ROWS))
    real.start.assert_called_once_with(MEGABYTE, ROWS, 30.0)
    real.wait.assert_called_once_with(exchange.sent_ns)
    assert expected_ns <= exchange.elapsed_ns < expected_ns + 100
    assert clock.now_ns >= exchange.sent_ns + expected_ns * (link.gbps is not None)
    assert exchange.response is REPLY
    assert (exchange.bytes_sent, exchange.bytes_received) == (10, 1000)


def test_requests_and_replies_queue_behind_each_other(clock: Clock) -> None:
    channel = ModelledLink(instant(), Link(8.0, 100.0))
    size = MEGABYTE.request_bytes
    first, second = (channel.start(MEGABYTE, ROWS) for _ in range(2))
    began_ns = channel.wait(first).sent_ns
    assert began_ns + size + 1000 + 100_000 <= clock.now_ns
    channel.wait(second)
    assert 2 * size + 1000 + 100_000 <= clock.now_ns - began_ns < 2 * size + 1000 + 102_000


def test_deadline_holds_over_the_link(clock: Clock) -> None:
    real = instant()
    channel = ModelledLink(real, Link(None, 3e6), timeout_s=1.0)
    began_ns = clock.now_ns
    with pytest.raises(DeadlineExceededError, match="reply to LMHead within 1 s over a modelled"):
        channel.wait(channel.start(MEGABYTE, ROWS))
    assert 10**9 <= clock.now_ns - began_ns < 1.001e9
    channel.wait(channel.start(MEGABYTE, ROWS, 4.0))
    assert [found.args[2] for found in real.start.call_args_list] == [1.0, 4.0]
