"""What the sessions of the row `load` are told differs, and who is told another's is counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gpu_side.encoding import Form, encode_reply
from protocol.messages import LMHeadRequest, TensorReply
from protocol.pending import PendingChannel, Received
from protocol.tensors import Buffer, from_torch
from tests.soak import load
from tests.soak.crowd import FROM_SERVICE, Crowd, counted_replies, unlike_prompts
from tests.soak.sessions import expected, prompts

NEW_TOKENS = 3


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], tuple[int, ...]]:
    return unlike_prompts(12, 6, NEW_TOKENS)


def test_no_two_sessions_are_told_the_same_anywhere(
    answers: dict[tuple[int, ...], tuple[int, ...]],
) -> None:
    assert len(answers) == 12
    for place in range(FROM_SERVICE, NEW_TOKENS):
        assert len({answer[place] for answer in answers.values()}) == 12
    ids, answer = list(answers.items())[-1]
    assert answer == expected(ids, NEW_TOKENS)


def test_too_few_unlike_prompts_are_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    one = prompts(1, 6)
    monkeypatch.setattr("tests.soak.crowd.prompts", lambda count, length: one * count)
    with pytest.raises(RuntimeError, match="got 1, expected 2"):
        unlike_prompts(2, 6, NEW_TOKENS)


def test_an_answer_or_a_token_of_another_session_is_counted(
    answers: dict[tuple[int, ...], tuple[int, ...]],
) -> None:
    first, second, *_ = said = list(answers.values())
    found = Crowd()
    for answer in said:
        found.judge(answer, answer, said)
    assert (found.crossed, found.lost, found.wrong) == (0, 0, 0)
    found.judge(second, first, said)
    found.judge(first, second, said)
    assert (found.crossed, found.lost, found.wrong) == (2, 0, 2)
    for place in range(FROM_SERVICE, NEW_TOKENS):
        found.judge((*first[:place], second[place], *first[place + 1 :]), first, said)
    assert (found.crossed, found.lost, found.wrong) == (4, 0, 4)


def test_other_and_missing_tokens_are_not_crossed() -> None:
    found, said = Crowd(), [(1, 2, 3), (4, 5, 6)]
    found.judge((1, 2, 9), (1, 2, 3), said)
    assert (found.crossed, found.lost, found.wrong) == (0, 0, 1)
    found.judge((1, 2), (1, 2, 3), said)
    assert (found.crossed, found.lost, found.wrong) == (0, 1, 2)


class RepeatingChannel(PendingChannel):
    """Its service replies to each request so many times."""

    def __init__(self, times: int) -> None:
        super().__init__("repeating", timeout_s=5.0, max_message_bytes=10_000)
        self._times = times
        self._replies: list[list[Buffer]] = []

    def _send(self, method: str, frames: Sequence[Buffer], size: int, timeout_s: float) -> int:
        output = TensorReply(output=from_torch(torch.zeros(4)))
        self._replies += [encode_reply(Form.FRAMED, self._last_id, method, output)] * self._times
        return 0

    def _receive(self, deadline: float) -> Received | None:
        return [memoryview(bytearray(frame)) for frame in self._replies.pop(0)], 1

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("times", "duplicated"), [(1, 0), (2, 2)])
def test_a_reply_that_comes_a_second_time_is_counted(times: int, duplicated: int) -> None:
    found = Crowd()
    with counted_replies(found):
        channel = RepeatingChannel(times)
        for _ in range(3):  # What came after the last one has nobody looked at.
            channel.call(LMHeadRequest(hidden_states=from_torch(torch.ones(4))))
    assert found.duplicated == duplicated


@pytest.mark.parametrize(
    ("asked", "answered", "passes"),
    [(80, 80, True), (0, 0, False), (79, 79, False), (80, 79, False)],
)
def test_a_load_that_asked_for_too_little_fails(asked: int, answered: int, passes: bool) -> None:
    # Two generations, each of two tokens behind the prompt, five layers and four operators.
    found = Crowd(requests=2, round_trips=asked)
    counted = {("OK", "RingLinear"): answered, ("OK", "Init"): 7}
    result = load._judged(2, [found], counted, [(0.0, 2**20)], 1.0)
    assert result.passed is passes
