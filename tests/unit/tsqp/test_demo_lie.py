"""The liar of the demo's last act, and when its lie counts as refused."""

from __future__ import annotations

import pytest
import torch

from gpu_side.encoding import Form, encode_reply
from protocol.encoding import decode_reply
from protocol.errors import ErrorCode
from protocol.messages import TensorReply, Timing
from protocol.tensors import from_torch, to_torch
from tsqp.demo.intercepting_proxy import Seen
from tsqp.demo.lie import Liar, Lie
from tsqp.demo.verdict import check_refusal

ASKED = Seen("down_proj", 3, (torch.zeros(1, 2),))
REFUSAL = "tee-runner: error: down_proj in layer 3 at tcp://x:1: got a wrong result, expected x W"


def reply(numbers: torch.Tensor) -> list[bytes]:
    timing = Timing(queue_us=1, compute_us=2)
    answer = TensorReply(output=from_torch(numbers))
    return [bytes(frame) for frame in encode_reply(Form.FRAMED, 7, "RingLinear", answer, timing)]


def numbers_in(frames: list[bytes]) -> torch.Tensor:
    response = decode_reply([memoryview(bytearray(frame)) for frame in frames]).response
    assert isinstance(response, TensorReply)
    return to_torch(response.output)


def test_one_number_of_one_reply_is_changed_by_one_and_no_other() -> None:
    liar, honest = Liar(at=2), torch.tensor([[4, 5, 2**31 - 1, 7, 8]], dtype=torch.int32)
    told = []
    for _ in range(4):
        liar.hear(ASKED)
        told.append(numbers_in(liar.answer(reply(honest))))
    assert [torch.equal(numbers, honest) for numbers in told] == [True, False, True, True]
    # The ring wraps.
    assert told[1].tolist() == [[4, 5, -(2**31), 7, 8]]
    assert liar.lie == Lie(ASKED, 2, 5, 2**31 - 1, -(2**31))
    assert liar.lie.what == "down_proj in layer 3"


@pytest.mark.parametrize(
    "frames",
    [
        [b"garbage"],
        [bytes(frame) for frame in encode_reply(Form.FRAMED, 7, "", ErrorCode.INTERNAL)],
        reply(torch.tensor([[1.0, 2.0]])),
    ],
)
def test_what_holds_no_integers_passes(frames: list[bytes]) -> None:
    liar = Liar(at=1)
    liar.hear(ASKED)
    assert liar.answer(frames) == frames
    assert liar.lie is None


def test_nobody_is_lied_to_who_has_asked_nothing() -> None:
    frames = reply(torch.ones(1, 2, dtype=torch.int32))
    assert Liar(at=0).answer(frames) == frames


@pytest.mark.parametrize(
    ("status", "complaint", "story", "passed", "finding"),
    [
        (1, REFUSAL, " was a lamp", True, "no token came of it"),
        (0, REFUSAL, " was a lamp", False, "NOT noticed"),
        (1, "tee-runner: error: tcp://x:1: got a lost connection", " was", False, "NOT noticed"),
        (1, REFUSAL, " was a lamb", False, "NOT the honest story's beginning"),
    ],
)
def test_a_lie_counts_as_refused_only_if_nothing_came_of_it(
    status: int, complaint: str, story: str, passed: bool, finding: str
) -> None:
    lie = Lie(ASKED, 2, 5, 1, 2)
    check = check_refusal("shielded", lie, status, complaint, story, " was a lamp. It shone.")
    assert check.passed is passed
    assert finding in check.finding
