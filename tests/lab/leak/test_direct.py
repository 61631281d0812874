"""Token ids, logits and embeddings are read where they cross, and as far as they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocol.messages import SegmentRequest
from protocol.tensors import from_torch
from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    embedding,
    first_view,
    linear,
    lm_head,
    message,
    policy_of,
    recorded,
    scores_of,
    truth_of,
    view_of,
)
from tests.kit.model import SavedModel, token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import TOP, Work
from tsqp.lab.leak.attacks.direct import Logits, NearestEmbedding, TokenIds
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.replay import vocabulary
from tsqp.lab.leak.trace import Trace

IDS = token_ids(9, vocab_size=VOCABULARY)


@pytest.fixture
def tops(public: PublicModel) -> list[int]:
    """Return tokens whose own rows of the LM head they are the top of."""
    own_V = (public.lm_head_VD @ public.lm_head_VD.T).argmax(-1)
    ids: list[int] = (own_V == torch.arange(public.vocab_size)).nonzero()[:, 0].tolist()
    return ids[:4]


def test_token_ids_among_others_are_a_set(public: PublicModel) -> None:
    """At decode, one of a few: the first of them by luck, and among five for sure."""
    dummies = [111, 112, 113, 114]
    messages = [embedding([*dummies, *IDS[:6]])]
    messages += [
        embedding([*dummies[:place], one, *dummies[place:]]) for place, one in enumerate(IDS[6:])
    ]
    view = view_of(public, Trace(tuple(messages)))
    (reading,) = TokenIds().read(view, Work())
    assert reading.tokens == range(9)
    assert [IDS[6 + token] in reading.guesses[6 + token] for token in range(3)] == [True] * 3
    assert {len(reading.guesses[token]) for token in range(9)} == {TOP}
    (found,) = scores_of(TokenIds(), view, [truth_of(IDS, 6)]).values()
    assert (found.answer.hits, found.answer.n) == (1, 3)


@each_row("factor", [1.0, -3.0, 0.01])
def test_logits_name_the_token_that_comes_next(
    public: PublicModel, tops: list[int], factor: float
) -> None:
    """Scaled, and of either sign where a mask changes it; of each step the last token's."""
    messages = []
    for ids, following in zip([IDS[:6], *([one] for one in tops[:3])], tops, strict=True):
        messages += [embedding(ids), lm_head(factor * public.lm_head_VD[[following]])]
    view = view_of(public, Trace(tuple(messages)), policy="row-mix" if factor < 0 else "tsqp")
    truth = truth_of([*IDS[:6], *tops[:3]], 6, last=tops[3])
    (found,) = scores_of(Logits(), view, [truth]).values()
    assert (found.top1.hits, found.top1.n, found.prompt.n) == (4, 4, 0)


def test_of_several_rows_the_surest_counts_and_a_step_without_has_no_guess(
    public: PublicModel, tops: list[int]
) -> None:
    noise = 0.05 * torch.randn(4, 48)
    rows = torch.cat([noise[:2], public.lm_head_VD[tops[:1]], noise[2:]])
    last = lm_head(public.lm_head_VD[tops[1:2]])
    trace = Trace((embedding(IDS[:6]), lm_head(rows), embedding([1]), embedding([2]), last))
    (reading,) = Logits().read(view_of(public, trace), Work())
    assert reading.tokens == range(6, 9)
    assert {index: guess[0] for index, guess in reading.guesses.items()} == {6: tops[0], 8: tops[1]}


@each_row(("phase", "answers"), [(None, 8), ("decode", 6)])
def test_logits_alone_are_about_answers(
    model: SavedModel, public: PublicModel, tmp_path: Path, phase: str | None, answers: int
) -> None:
    """No other request tells how long the prompt is; in prefill, too, one row crosses."""
    policy = policy_of("lm_head", phase=phase)
    played = recorded(model, policy, tmp_path, begun(9, 6))
    truths = [session.truth for session in played.sessions]
    (one,) = scores_of(Logits(), first_view(public, played), truths).values()
    assert (one.prompt.n, one.answer.hits, one.answer.n) == (0, answers, answers)


def test_rows_of_a_permuted_head_tell_which_token_each_logit_is_of(
    model: SavedModel, tmp_path: Path
) -> None:
    played = recorded(model, "stip-segment", tmp_path, begun(5))
    public = PublicModel(model.directory)
    view = first_view(public, played)
    ids_V, everything = vocabulary(view), torch.arange(VOCABULARY)
    assert torch.equal(ids_V.sort().values, everything)
    assert int((ids_V == everything).sum()) < 20
    # Of a row that is none of the public model's nothing tells.
    public.__dict__["lm_head_VD"] = public.lm_head_VD.clone()
    public.lm_head_VD[7] += 1
    assert torch.equal(vocabulary(view) == -1, ids_V == 7)


@each_row("head", [True, False])
def test_a_segment_without_logits_has_no_guess(public: PublicModel, head: bool) -> None:
    request = SegmentRequest(
        first_layer=0,
        last_layer=1,
        hidden_states=from_torch(public.embedding_VD[[5, 6, 7]]),
        parts=from_torch(torch.tensor([[7, 1, 0, 3, 3, 0, 0]])),
        outputs=from_torch(torch.tensor([2])),
        lm_head=head,
        sinks=0,
        recent=0,
    )
    view = view_of(public, Trace((message(request),)), policy="clear-segment")
    readings = list(Logits().read(view, Work()))
    assert [reading.tokens for reading in readings] == [range(3, 4)] * head


@each_row("other", [0, 10, 25, 50])
def test_rows_are_read_at_any_scale_and_sign_to_the_share_that_is_there(
    public: PublicModel, other: int
) -> None:
    ids = token_ids(50, seed=3, vocab_size=VOCABULARY)
    crossed = [(one + 1) % VOCABULARY for one in ids[:other]] + ids[other:]
    rows = public.dictionary_VD[crossed] * torch.linspace(-2, 3, 50)[:, None]
    trace = Trace((linear(FIRST, rows), linear(FIRST, public.dictionary_VD[[7]])))
    truth = truth_of([*ids, 7], 50)
    one = scores_of(NearestEmbedding(), view_of(public, trace), [truth])[FIRST_PLACE]
    assert (one.top1.hits, one.top1.n, one.prompt.hits) == (51 - other, 51, 50 - other)
