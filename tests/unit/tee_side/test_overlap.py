"""Coroutines that wait for replies take turns; what one of them leaves behind is cleaned up."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import cast

import pytest
import torch

from protocol.channel import Channel, Exchange
from protocol.errors import DeadlineExceededError, ResumedError
from protocol.messages import LMHeadRequest, TensorReply
from protocol.prepared import PreparedRequest
from protocol.tensors import WireTensor
from tee_side.protect.resumption import ResumeWatch
from tee_side.remote import overlap
from tee_side.remote.overlap import ask, run, run_overlapped, turn
from tests.tools.kernel_log import PLUGGED, RESUMED, KernelLog

SENT = torch.zeros(1)
ASKED = PreparedRequest(
    LMHeadRequest(hidden_states=WireTensor("float32", (1,), b"")), (1,), "float32"
)
LOST = DeadlineExceededError("it", got="no reply", expected="one")


class Recorder:
    """A channel that notes what is done with requests; reply number n is as long as n."""

    def __init__(self, name: str = "it", order: list[str] | None = None) -> None:
        self.name = name
        self.order: list[str] = [] if order is None else order
        self.open: set[int] = set()
        self.losing: set[int] = set()
        self.unsendable: set[int] = set()
        self.refusing: BaseException = LOST
        self._count = 0

    def start(self, _: object, payload: torch.Tensor, timeout_s: float | None) -> int:
        assert payload is SENT
        assert timeout_s == 7.0
        self._count += 1
        if self._count in self.unsendable:
            raise LOST
        self.open.add(self._count)
        self.order.append(f"submit {self.name}{self._count}")
        return self._count

    def wait(self, request_id: int) -> Exchange:
        self.order.append(f"wait {self.name}{request_id}")
        self.open.remove(request_id)
        if request_id in self.losing:
            raise self.refusing
        reply = TensorReply(output=WireTensor("float32", (1,), bytes(4)))
        return Exchange(reply, request_id, 0, 0, 0, 0, None, 0, "tcp://h:1")

    def abandon(self, request_id: int) -> None:
        """As in `Channel`: nothing for a request that is not under way."""
        if request_id in self.open:
            self.open.remove(request_id)
            self.order.append(f"abandon {self.name}{request_id}")


async def _ask(*channels: Recorder) -> list[Exchange]:
    return await ask(cast("list[Channel]", channels), ASKED, [SENT] * len(channels), 7.0)


async def _asking(channel: Recorder, times: int, name: str = "") -> list[int]:
    """Ask so many times, and return the numbers of the replies."""
    got = []
    for _ in range(times):
        channel.order.append(f"compute {name}")
        (exchange,) = await _ask(channel)
        got.append(exchange.bytes_sent)
    channel.order.append(f"end {name}")
    return got


def test_one_coroutine_gets_its_replies_and_returns_its_result() -> None:
    channel = Recorder()
    assert run(_asking(channel, 3)) == [1, 2, 3]
    assert not channel.open


def test_nothing_is_sent_after_the_vm_was_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with KernelLog() as log:
        watched = ResumeWatch(log.reader)
        monkeypatch.setattr(overlap, "watch", lambda: watched)
        channel = Recorder()
        log.say(PLUGGED)
        assert run(_asking(channel, 2)) == [1, 2]
        channel.order.clear()
        asking = _asking(channel, 2)
        asking.send(None)  # it has asked once when the snapshot is taken
        log.say(RESUMED)
        for one in (asking, _asking(channel, 1)):
            with pytest.raises(ResumedError):
                one.send(None)
    assert channel.order == ["compute ", "submit it3", "wait it3", "compute ", "compute "]


def test_a_coroutine_that_waits_for_nothing_ends_at_once() -> None:
    async def seven() -> int:
        return 7

    assert run(seven()) == 7
    assert run_overlapped([seven(), seven()]) == [7, 7]
    assert run_overlapped(cast("list[Coroutine[None, None, int]]", [])) == []


def test_the_second_begins_behind_the_second_turn_of_the_first_and_then_they_alternate() -> None:
    """The order of turns, to the last event."""
    channel = Recorder()
    found = run_overlapped([_asking(channel, 3, "a"), _asking(channel, 3, "b")])
    assert found == [[1, 2, 4], [3, 5, 6]]
    assert channel.order == [
        "compute a",
        "submit it1",
        "wait it1",
        "compute a",
        "submit it2",
        "compute b",
        "submit it3",
        "wait it2",
        "compute a",
        "submit it4",
        "wait it3",
        "compute b",
        "submit it5",
        "wait it4",
        "end a",
        "wait it5",
        "compute b",
        "submit it6",
        "wait it6",
        "end b",
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_stays_one_or_two_turns_behind_the_one_before_it(count: int) -> None:
    channel = Recorder()
    turns = 12
    at = [0] * count

    async def layers(index: int) -> int:
        for at_turn in range(1, turns + 1):
            at[index] = at_turn
            if index:
                assert at[index - 1] == min(at_turn + 1, turns)
            await (_ask(channel) if at_turn % 2 else turn())
        return index

    assert run_overlapped([layers(index) for index in range(count)]) == list(range(count))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_once_they_have_begun_each_has_a_request_under_way(count: int) -> None:
    channel = Recorder()
    under_way = []

    async def layers(index: int) -> None:
        for _ in range(20):
            if index == 0:
                under_way.append(len(channel.open))
            await _ask(channel)

    run_overlapped([layers(index) for index in range(count)])
    # Of the first turns, one more has begun at each; the first's own reply has just come.
    assert under_way[count:] == [count - 1] * (20 - count)


def test_results_stand_in_order_however_early_one_ends() -> None:
    channel = Recorder()
    lengths = [4, 0, 2, 1]
    found = run_overlapped([_asking(channel, times) for times in lengths])
    assert [len(got) for got in found] == lengths
    assert sorted(number for got in found for number in got) == list(range(1, 8))
    assert not channel.open


def test_requests_side_by_side_are_waited_for_together_and_in_order() -> None:
    order: list[str] = []
    one, two = Recorder("one-", order), Recorder("two-", order)
    two.start(ASKED, SENT, 7.0)  # so that the numbers differ
    order.clear()

    async def both() -> list[int]:
        return [exchange.bytes_sent for exchange in await _ask(one, two)]

    assert run(both()) == [1, 2]
    assert order == ["submit one-1", "submit two-2", "wait one-1", "wait two-2"]


def test_waiting_for_nothing_lets_the_others_have_their_turn() -> None:
    order: list[str] = []

    async def turns(name: str) -> None:
        for number in range(3):
            order.append(f"{name}{number}")
            await turn()

    run_overlapped([turns("a"), turns("b")])
    assert order == ["a0", "a1", "b0", "a2", "b1", "b2"]


# ------------------------------------------------------------------------------------- errors


def test_an_error_of_waiting_is_raised_where_the_coroutine_waits() -> None:
    channel = Recorder()
    channel.losing = {1}

    async def again() -> int:
        with pytest.raises(DeadlineExceededError) as caught:
            await _ask(channel)
        assert caught.value is LOST
        (exchange,) = await _ask(channel)
        return exchange.bytes_sent

    assert run(again()) == 2
    assert not channel.open


def test_a_coroutine_that_handles_an_error_does_not_disturb_the_others() -> None:
    channel = Recorder()
    channel.losing = {1}

    async def trying() -> str:
        try:
            await _ask(channel)
        except DeadlineExceededError:
            return "lost"
        return "found"

    assert run_overlapped([trying(), trying(), trying()]) == ["lost", "found", "found"]
    assert channel.order.count("wait it1") == 1
    assert not any(event.startswith("abandon") for event in channel.order)


def test_where_one_of_two_replies_is_lost_the_other_is_not_waited_for() -> None:
    order: list[str] = []
    one, two = Recorder("one-", order), Recorder("two-", order)
    one.losing = {1}

    async def both() -> None:
        await _ask(one, two)

    with pytest.raises(DeadlineExceededError):
        run(both())
    assert order == ["submit one-1", "submit two-1", "wait one-1", "abandon two-1"]


def test_where_one_of_two_cannot_be_sent_to_the_other_is_not_waited_for() -> None:
    order: list[str] = []
    one, two = Recorder("one-", order), Recorder("two-", order)
    two.unsendable = {1}
    with pytest.raises(DeadlineExceededError):
        run(_ask(one, two))
    assert order == ["submit one-1", "abandon one-1"]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_error_ends_all_and_abandons_exactly_what_is_under_way(failing: int, at: int) -> None:
    channel, closed = Recorder(), []

    async def part(index: int) -> None:
        try:
            for now in range(4):
                if (index, now) == (failing, at):
                    raise ValueError(f"{index} at {now}")
                await _ask(channel)
        finally:
            closed.append(index)

    parts = [part(index) for index in range(3)]
    with pytest.raises(ValueError, match=f"{failing} at {at}"):
        run_overlapped(parts)
    # Each is one turn behind the one before it, which has had its turn before.
    asked = [max(0, at + failing - index + (index < failing)) for index in range(3)]
    waited = [event for event in channel.order if event.startswith("wait")]
    abandoned = [event for event in channel.order if event.startswith("abandon")]
    assert len(waited) + len(abandoned) == sum(min(4, times) for times in asked)
    assert not channel.open
    # Those that had begun ran their `finally`; none can be resumed.
    assert set(closed) == {i for i in range(3) if asked[i] or i == failing}
    for coroutine in parts:
        with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
            coroutine.send(None)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_waiting_that_nobody_handles_ends_all(failing: int) -> None:
    channel = Recorder()
    channel.losing = {3 + failing}
    with pytest.raises(DeadlineExceededError) as caught:
        run_overlapped([_asking(channel, 5), _asking(channel, 5)])
    assert caught.value is LOST
    assert channel.order[-2:] == [f"wait it{3 + failing}", f"abandon it{4 + failing}"]
    assert not channel.open


def test_an_interrupt_while_waiting_leaves_no_request_behind() -> None:
    channel = Recorder()
    channel.losing, channel.refusing = {1}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_overlapped([_asking(channel, 2), _asking(channel, 2)])
    assert not channel.open
    assert channel.order == ["compute ", "submit it1", "wait it1"]


def test_an_interrupt_while_both_wait_leaves_no_request_behind() -> None:
    channel = Recorder()
    channel.losing, channel.refusing = {2}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run_overlapped([_asking(channel, 2), _asking(channel, 2)])
    assert not channel.open
    assert channel.order[-1] == "abandon it3"


def test_an_error_before_the_others_have_begun_leaves_none_of_them_waiting() -> None:
    """A coroutine that is dropped without a start would be a warning, which is an error here."""

    async def broken() -> list[int]:
        raise LookupError

    channel = Recorder()
    with pytest.raises(LookupError):
        run_overlapped([broken(), _asking(channel, 1)])
    assert channel.order == []
