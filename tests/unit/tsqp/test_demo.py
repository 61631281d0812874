"""What the demo shows was measured on the wire, and its verdict can be negative."""

from __future__ import annotations

import torch

from gpu_side.encoding import Form, encode_reply
from protocol.encoding import decode_reply
from protocol.errors import ErrorCode
from protocol.messages import TensorReply, Timing
from protocol.tensors import from_torch, to_torch
from tests.kit.rows import each_row
from tsqp.cli.program import model_directory
from tsqp.demo.intercepting_proxy import Seen
from tsqp.demo.lie import Liar, Lie
from tsqp.demo.verdict import Tokens, check_refusal, compare_floats, compare_integers

DEMO = model_directory("demo")
ASKED = Seen("down_proj", 3, (torch.zeros(1, 2),))
REFUSAL = "tee-runner: error: down_proj in layer 3 at tcp://x:1: got a wrong result, expected x W"


def test_one_number_of_one_reply_is_changed_by_one_and_no_other() -> None:
    liar, honest = Liar(at=2), torch.tensor([[4, 5, 2**31 - 1, 7, 8]], dtype=torch.int32)
    answer = TensorReply(output=from_torch(honest))
    reply = encode_reply(Form.FRAMED, 7, "RingLinear", answer, Timing(queue_us=1, compute_us=2))
    told = []
    for _ in range(3):
        liar.hear(ASKED)
        frames = [memoryview(bytearray(one)) for one in liar.answer([bytes(f) for f in reply])]
        response = decode_reply(frames).response
        assert isinstance(response, TensorReply)
        told.append(to_torch(response.output).tolist()[0])
    assert told == [honest.tolist()[0], [4, 5, -(2**31), 7, 8], honest.tolist()[0]]
    assert liar.lie == Lie(ASKED, 2, 5, 2**31 - 1, -(2**31))
    for other in ([b"garbage"], encode_reply(Form.FRAMED, 7, "", ErrorCode.INTERNAL)):
        liar = Liar(at=1)
        liar.hear(ASKED)
        passed = [bytes(frame) for frame in other]
        assert (liar.answer(passed), liar.lie) == (passed, None)


@each_row(
    ("status", "complaint", "story", "finding"),
    [
        (1, REFUSAL, " was a lamp", "no token came of it"),
        (0, REFUSAL, " was a lamp", "NOT noticed"),
        (1, "tee-runner: error: tcp://x:1: got a lost connection", " was", "NOT noticed"),
        (1, REFUSAL, " was a lamb", "NOT the honest story's beginning"),
    ],
)
def test_a_lie_counts_as_refused_only_if_nothing_came_of_it(
    status: int, complaint: str, story: str, finding: str
) -> None:
    lie = Lie(ASKED, 2, 5, 1, 2)
    check = check_refusal("shielded", lie, status, complaint, story, " was a lamp. It shone.")
    assert (check.passed, finding in check.finding) == ("NOT" not in finding, True)


def test_floats_may_differ_by_rounding_and_integers_by_no_bit() -> None:
    logits_TV = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    reference = Tokens("reference", [5, 6, 7], logits_TV)
    near = logits_TV.clone()
    near[2, 3] = torch.nextafter(near[2, 3], torch.tensor(100.0))
    for ids, logits, floats, integers in (
        ([5, 6, 7], logits_TV.clone(), True, True),
        ([5, 6, 7], near, True, False),
        ([5, 6, 9], logits_TV, False, False),
        ([5, 6], logits_TV[:2], False, False),
    ):
        ours = Tokens("p", ids, logits)
        assert compare_floats(ours, reference).passed == floats
        assert compare_integers(ours, reference, reference).passed == integers
