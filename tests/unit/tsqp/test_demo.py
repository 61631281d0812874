"""What the demo shows was measured on the wire, and its verdict can be negative."""

import torch

from tee_side.engine.tokenizer import Tokenizer
from tee_side.serve.answers import TokenBytes
from tests.kit.rows import each_row
from tsqp.demo import verdict
from tsqp.demo.programs import Lie, Tokens
from tsqp.page.seen import Seen
from tsqp.run.settings import model_directory

ASKED = Seen("down_proj", 3, (torch.zeros(1, 2),))
REFUSAL = "tee-runner: error: down_proj in layer 3 at tcp://x:1: got a wrong result, expected x W"


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
    check = verdict.check_refusal(
        "shielded", lie, status, complaint, story, " was a lamp. It shone."
    )
    assert (check.passed, finding in check.finding) == ("NOT" not in finding, True)


def test_other_tokens_fail_and_other_logits_of_integers() -> None:
    token_bytes = TokenBytes(Tokenizer(model_directory("demo")))
    clear = Tokens("clear", [5, 6, 7], torch.ones(3, 4))
    for last, by, passed in ((7, 1, [1, 1, 1]), (7, 1.001, [1, 0, 1]), (9, 1, [0, 0, 0])):
        ours = Tokens("p", [5, 6, last], clear.logits * by)
        found = [verdict.compare_floats(ours, clear), verdict.compare_integers(ours, clear, clear)]
        found.append(verdict.compare_served("p", list(map(token_bytes, ours.ids)), clear))
        assert [check.passed for check in found] == passed
