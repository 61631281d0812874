"""Coroutines that wait for replies take turns; what one of them leaves behind is cleaned up."""

from typing import Any

import pytest
import torch

from protocol.errors import DeadlineExceededError, ResumedError
from protocol.messages import LMHeadRequest, TensorReply
from protocol.prepared import Exchange, PreparedRequest
from protocol.tensors import WireTensor
from tee_side.protect.resumption import ResumeWatch
from tee_side.remote.call import ask, run, run_overlapped
from tests.kit.kernel_log import PLUGGED, RESUMED, KernelLog
from tests.kit.rows import each_row

SENT = torch.zeros(1)
ASKED = PreparedRequest(
    LMHeadRequest(hidden_states=WireTensor("float32", (1,), b"")), (1,), "float32"
)
LOST = DeadlineExceededError("it", got="no reply", expected="one")


class Recorder:
    """A channel that notes what is done with requests; reply number n is as long as n.

    `losing`: what waiting for a reply raises, by number; `unsendable`: numbers.
    """

    def __init__(self, name: str = "", order: list[str] | None = None) -> None:
        self.name = name
        self.order: list[str] = [] if order is None else order
        self.open: set[int] = set()
        self.losing: dict[int, BaseException] = {}
        self.unsendable: set[int] = set()
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
            raise self.losing[request_id]
        reply = TensorReply(output=WireTensor("float32", (1,), bytes(4)))
        return Exchange(reply, request_id, 0, 0, 0, 0, None, 0, "tcp://h:1")

    def abandon(self, request_id: int) -> None:
        """As in `Channel`: nothing for a request that is not under way."""
        if request_id in self.open:
            self.open.remove(request_id)
            self.order.append(f"abandon {self.name}{request_id}")


async def _ask(*channels: Any) -> list[int]:
    found = await ask(channels, ASKED, [SENT] * len(channels), 7.0)
    return [exchange.bytes_sent for exchange in found]


async def _asking(channel: Recorder, times: int, name: str = "") -> list[int]:
    got: list[int] = []
    for _ in range(times):
        channel.order.append(f"compute {name}")
        got += await _ask(channel)
    channel.order.append(f"end {name}")
    return got


def test_nothing_is_sent_after_the_vm_was_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    with KernelLog() as log:
        watched = ResumeWatch(log.reader)
        monkeypatch.setattr("tee_side.remote.call.watch", lambda: watched)
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
    assert channel.order == ["compute ", "submit 3", "wait 3", "compute ", "compute "]


def test_the_second_begins_behind_the_second_turn_of_the_first_and_then_they_alternate() -> None:
    channel = Recorder()
    found = run_overlapped([_asking(channel, 3, "a"), _asking(channel, 3, "b")])
    assert found == [[1, 2, 4], [3, 5, 6]]
    assert "; ".join(channel.order) == (
        "compute a; submit 1; wait 1; compute a; submit 2; compute b; submit 3; wait 2;"
        " compute a; submit 4; wait 3; compute b; submit 5; wait 4; end a; wait 5; compute b;"
        " submit 6; wait 6; end b"
    )
    empty: list[Any] = []
    assert run_overlapped(empty) == []


def test_requests_side_by_side_are_waited_for_together_and_in_order() -> None:
    order: list[str] = []
    one, two = Recorder("a", order), Recorder("b", order)
    two.start(ASKED, SENT, 7.0)  # so that the numbers differ
    order.clear()
    asking = _ask(one, two)
    asking.send(None)  # both are asked in one turn
    assert order == ["submit a1", "submit b2"]
    with pytest.raises(StopIteration) as ended:
        asking.send(None)
    assert ended.value.value == [1, 2]
    assert order[2:] == ["wait a1", "wait b2"]
    # Where one fails the other is not waited for.
    one.losing, two.unsendable = {2: LOST}, {4}
    for expected in (
        ["submit a2", "submit b3", "wait a2", "abandon b3"],
        ["submit a3", "abandon a3"],
    ):
        order.clear()
        with pytest.raises(DeadlineExceededError):
            run(_ask(one, two))
        assert order == expected


@each_row(
    ("number", "error", "last"),
    [
        (3, LOST, ["wait 3", "abandon 4"]),
        (4, LOST, ["wait 4", "abandon 5"]),
        (1, KeyboardInterrupt(), ["submit 1", "wait 1"]),
        (2, KeyboardInterrupt(), ["wait 2", "abandon 3"]),
    ],
)
def test_an_error_or_interrupt_while_waiting_leaves_no_request_behind(
    number: int, error: BaseException, last: list[str]
) -> None:
    channel = Recorder()
    channel.losing = {number: error}
    with pytest.raises(type(error)) as caught:
        run_overlapped([_asking(channel, 5), _asking(channel, 5)])
    assert caught.value is error
    assert channel.order[-2:] == last
    assert not channel.open
