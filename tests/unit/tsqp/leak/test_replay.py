"""What a service answers to a segment with an LM head is the next token, whatever order it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.messages import SegmentRequest
from protocol.tensors import from_torch
from tee_side.policy.placement import load_policy
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row
from tests.unit.tsqp.leak.leaks import message, scores_of, view_of
from tests.unit.tsqp.leak.test_attack_static_cloak import view_of as recorded_view
from tsqp.lab.leak.attack import View, Work
from tsqp.lab.leak.attacks.direct import Logits
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, Recording, play
from tsqp.lab.leak.replay import has_head, vocabulary
from tsqp.lab.leak.trace import Trace

PROMPTS = [token_ids(7, seed) for seed in range(3)]


def played(model: SavedModel, name: str, folder: Path) -> tuple[Recording, View]:
    folder.mkdir()
    settings = PlaySettings(model.directory, folder, new_tokens=5)
    recording = play(load_policy(name), PROMPTS, settings)
    return recording, recorded_view(PublicModel(model.directory), recording)


@each_row("name", ["clear-segment", "attested-segment", "stip-segment"])
def test_greedy_answers_are_read_to_the_last_token(
    model: SavedModel, tmp_path: Path, name: str
) -> None:
    """The one that was sampled last goes through no model: nothing else tells it."""
    recording, view = played(model, name, tmp_path / name)
    found = scores_of(Logits(), view, [session.truth for session in recording.sessions])
    one = found["lm_head"]
    assert (one.top1.hits, one.top1.n, one.prompt.n) == (15, 15, 0)
    readings = list(Logits().read(view, Work()))
    assert [reading.tokens for reading in readings] == [range(7, 12)] * 3
    assert {len(guess) for reading in readings for guess in reading.guesses.values()} == {5}


def test_rows_of_a_permuted_head_tell_which_token_each_logit_is_of(
    model: SavedModel, tmp_path: Path
) -> None:
    _, view = played(model, "stip-segment", tmp_path / "stip")
    ids_V = vocabulary(view)
    everything = torch.arange(view.public.vocab_size)
    assert torch.equal(ids_V.sort().values, everything)
    assert int((ids_V == everything).sum()) < 20
    # Of rows that are none of the public model's nothing tells.
    view.public.__dict__["lm_head_VD"] = view.public.lm_head_VD.clone()
    view.public.lm_head_VD[7] += 1
    assert torch.equal(vocabulary(view) == -1, ids_V == 7)


def test_a_head_that_stays_is_refused(model: SavedModel, tmp_path: Path) -> None:
    _, view = played(model, "cloak-segment", tmp_path / "cloak")
    assert not has_head(view)
    assert Logits().refuses(view) == "lm_head stays"
    # So is one of which no request came.
    nothing = view_of(PublicModel(model.directory), Trace(()), policy="clear-segment")
    assert Logits().refuses(nothing) == "lm_head stays"


@pytest.mark.parametrize("lm_head", [True, False])
def test_a_request_without_logits_has_no_guess(model: SavedModel, lm_head: bool) -> None:
    public = PublicModel(model.directory)
    parts = torch.tensor([[7, 1, 0, 3, 3, 0, 0]])
    request = SegmentRequest(
        first_layer=0,
        last_layer=1,
        hidden_states=from_torch(public.embedding_VD[[5, 6, 7]]),
        parts=from_torch(parts),
        outputs=from_torch(torch.tensor([2])),
        lm_head=lm_head,
        sinks=0,
        recent=0,
    )
    view = view_of(public, Trace((message(request),)), policy="clear-segment")
    readings = list(Logits().read(view, Work()))
    assert [reading.tokens for reading in readings] == [range(3, 4)] * lm_head
