"""What the demo shows was measured on the wire, and its verdict can be negative."""

from __future__ import annotations

import torch

from tests.kit.rows import each_row
from tsqp.demo.intercepting_proxy import Seen
from tsqp.demo.lie import Lie
from tsqp.demo.verdict import check_refusal

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
    check = check_refusal("shielded", lie, status, complaint, story, " was a lamp. It shone.")
    assert (check.passed, finding in check.finding) == ("NOT" not in finding, True)
