"""Lengths are visible under every mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.assembly import MaskSettings
from tee_side.policy.placement import builtin_policies, load_policy
from tests.kit.model import token_ids
from tests.unit.tsqp.leak.leaks import Models, linear, tiny, truth_of
from tsqp.lab.leak.model import Rate
from tsqp.lab.leak.record_session import PlaySettings, Session, play
from tsqp.lab.leak.side_information import lengths, read_lengths
from tsqp.lab.leak.trace import Trace

SEND = [name for name in builtin_policies() if load_policy(name).services]


def trace(*rows: int) -> Trace:
    return Trace(tuple(linear((0, "down_proj"), torch.ones(count, 8)) for count in rows))


@pytest.mark.parametrize(
    ("rows", "prompt", "answer"),
    [
        ((7, 1, 1), 7, 3),
        ((512, 88, 1), 600, 2),
        # Each has three more, which a mask has added.
        ((10, 4, 4), 7, 3),
        ((1, 1, 1), None, 4),
        ((), None, 1),
    ],
)
def test_lengths_follow_from_rows(rows: tuple[int, ...], prompt: int | None, answer: int) -> None:
    assert read_lengths(trace(*rows)) == (prompt, answer)


def test_lengths_are_compared_with_the_truth() -> None:
    ids = token_ids(6)
    right = Session((trace(4, 1, 1), trace(9, 9)), truth_of(ids, 4))
    longer = Session((trace(5, 1),), truth_of(ids, 4))
    hidden = Session((trace(1, 1),), truth_of(ids, 4))
    found = lengths([right, longer, hidden])
    assert found.prompt == Rate(hits=1, n=2)
    assert found.answer == Rate(hits=2, n=3)
    assert lengths([hidden]).prompt is None


@pytest.mark.parametrize("name", SEND)
def test_every_policy_shows_them(saved_model: Models, tmp_path: Path, name: str) -> None:
    model, policy = tiny(saved_model), load_policy(name)
    masks = MaskSettings(calibration=model.calibration if policy.arithmetic == "int8" else None)
    prompts = [token_ids(5), token_ids(9, seed=1)]
    recording = play(policy, prompts, PlaySettings(model.directory, tmp_path, 4, masks=masks))
    found = lengths(recording.sessions)
    assert found.prompt == (None if name == "shielded" else Rate(hits=2, n=2))
    assert found.answer == Rate(hits=2, n=2)
