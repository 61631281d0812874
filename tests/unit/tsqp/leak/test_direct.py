"""Token ids, logits and embeddings are read where they cross, and as far as they do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import Policy, load_policy
from tests.kit.model import SavedModel, token_ids
from tests.unit.tsqp.leak.leaks import (
    embedding,
    inputs_of,
    linear,
    lm_head,
    planted,
    policy_of,
    recorded_scores,
    scores_of,
    share,
    truth_of,
    view_of,
)
from tsqp.lab.leak.attack import TOP, Work
from tsqp.lab.leak.attacks.direct import Logits, NearestEmbedding, TokenIds
from tsqp.lab.leak.matching import FIRST
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, play
from tsqp.lab.leak.trace import Trace

IDS = token_ids(9)
PROMPT = 6


@pytest.fixture
def public(model: SavedModel) -> PublicModel:
    return PublicModel(model.directory)


def recorded(
    model: SavedModel, policy: str | Policy, folder: Path, attack: type[TokenIds] | type[Logits]
) -> object:
    chosen = load_policy(policy) if isinstance(policy, str) else policy
    prompts = [token_ids(PROMPT, seed) for seed in range(3)]
    recording = play(chosen, prompts, PlaySettings(model.directory, folder, 8))
    return recorded_scores(attack(), PublicModel(model.directory), recording)


# ------------------------------------------------------------------------------------ token ids


def test_token_ids_are_read_as_they_are(public: PublicModel) -> None:
    trace = Trace((embedding(IDS[:6]), *(embedding([one]) for one in IDS[6:])))
    (found,) = scores_of(TokenIds(), view_of(public, trace), [truth_of(IDS, 6)]).values()
    assert (found.where, found.top1.hits, found.top1.n) == ("embedding", 9, 9)
    assert found.top5.hits == 9


def test_token_ids_among_others_are_a_set(public: PublicModel) -> None:
    """At decode, one of a few: the first of them by luck, and among five for sure."""
    dummies = [311, 312, 313, 314]
    messages = [embedding([*dummies, *IDS[:6]])]
    messages += [
        embedding([*dummies[:place], one, *dummies[place:]]) for place, one in enumerate(IDS[6:])
    ]
    (reading,) = TokenIds().read(view_of(public, Trace(tuple(messages))), Work())
    assert reading.tokens == range(9)
    assert [IDS[6 + token] in reading.guesses[6 + token] for token in range(3)] == [True] * 3
    assert {len(reading.guesses[token]) for token in range(9)} == {TOP}
    (found,) = scores_of(
        TokenIds(), view_of(public, Trace(tuple(messages))), [truth_of(IDS, 6)]
    ).values()
    assert (found.answer.hits, found.answer.n) == (1, 3)
    assert found.top5.hits == 3 + sum(one in IDS[:1] for one in IDS[:6])


def test_the_published_placement_sends_every_token(model: SavedModel, tmp_path: Path) -> None:
    found = recorded(model, "tsqp", tmp_path, TokenIds)
    assert isinstance(found, dict)
    assert share(found["embedding"]) == 1
    assert found["embedding"].top1.n == 3 * (PROMPT + 7)


# --------------------------------------------------------------------------------------- logits


def hidden(public: PublicModel, ids: list[int]) -> torch.Tensor:
    """Return normed final states whose top token is each of some ids."""
    head_VD = public.lm_head_VD
    rows = torch.stack([head_VD[one] for one in ids])
    assert (rows @ head_VD.T).argmax(-1).tolist() == ids
    return rows


@pytest.fixture
def tops(public: PublicModel) -> list[int]:
    """Return tokens that are the top of something."""
    own_V = (public.lm_head_VD @ public.lm_head_VD.T).argmax(-1)
    ids: list[int] = (own_V == torch.arange(public.vocab_size)).nonzero()[:, 0].tolist()
    return ids[:4]


@pytest.mark.parametrize("factor", [1.0, -3.0, 0.01])
def test_logits_name_the_token_that_comes_next(
    public: PublicModel, tops: list[int], factor: float
) -> None:
    """Scaled, and of either sign."""
    steps = [IDS[:6], *([one] for one in tops[:3])]
    messages = []
    for ids, following in zip(steps, tops, strict=True):
        messages += [embedding(ids), lm_head(factor * hidden(public, [following]))]
    # Nothing changes signs without a mask that does.
    view = view_of(public, Trace(tuple(messages)), policy="row-mix" if factor < 0 else "tsqp")
    (reading,) = Logits().read(view, Work())
    assert reading.where == "lm_head"
    assert reading.tokens == range(6, 10)
    assert [reading.guesses[token][0] for token in reading.tokens] == tops
    truth = truth_of([*IDS[:6], *tops[:3]], 6, last=tops[3])
    (found,) = scores_of(Logits(), view, [truth]).values()
    assert (found.top1.hits, found.top1.n, found.prompt.n) == (4, 4, 0)


def test_of_several_rows_the_surest_counts(public: PublicModel, tops: list[int]) -> None:
    noise = 0.05 * torch.randn(4, 48)
    rows = torch.cat([noise[:2], hidden(public, tops[:1]), noise[2:]])
    trace = Trace((embedding(IDS[:6]), lm_head(rows), embedding([1]), lm_head(rows)))
    (reading,) = Logits().read(view_of(public, trace), Work())
    assert [guess[0] for guess in reading.guesses.values()] == [tops[0]] * 2


def test_a_step_without_logits_has_no_guess(public: PublicModel, tops: list[int]) -> None:
    trace = Trace(
        (
            embedding(IDS[:6]),
            lm_head(hidden(public, tops[:1])),
            embedding([1]),
            embedding([2]),
            lm_head(hidden(public, tops[1:2])),
        )
    )
    (reading,) = Logits().read(view_of(public, trace), Work())
    assert reading.tokens == range(6, 9)
    assert {index: guess[0] for index, guess in reading.guesses.items()} == {6: tops[0], 8: tops[1]}


def test_greedy_answers_are_the_top_of_their_logits(model: SavedModel, tmp_path: Path) -> None:
    """In the clear no sign is in doubt."""
    found = recorded(model, "tsqp", tmp_path, Logits)
    assert isinstance(found, dict)
    one = found["lm_head"]
    assert (one.answer.hits, one.answer.n, one.prompt.n) == (24, 24, 0)


def test_a_row_of_unknown_sign_is_read_in_part(model: SavedModel, tmp_path: Path) -> None:
    """The reverse of random logits is as sure as they are."""
    found = recorded(model, "row-mix", tmp_path, Logits)
    assert isinstance(found, dict)
    assert 6 <= found["lm_head"].answer.hits <= 24
    assert found["lm_head"].answer.n == 24


@pytest.mark.parametrize(
    ("policy", "answers"),
    [(policy_of("lm_head"), 24), (policy_of("lm_head", phase="decode"), 21)],
    ids=["both", "decode"],
)
def test_logits_alone_are_about_answers(
    model: SavedModel, tmp_path: Path, policy: Policy, answers: int
) -> None:
    """No other request tells how long the prompt is; in prefill, too, one row crosses."""
    found = recorded(model, policy, tmp_path, Logits)
    assert isinstance(found, dict)
    one = found["lm_head"]
    assert (one.prompt.n, one.answer.n) == (0, answers)
    assert one.answer.hits >= answers / 4


# ----------------------------------------------------------------------------- the first layer


def scaled(rows_RI: torch.Tensor) -> torch.Tensor:
    """Scale each row, of either sign."""
    return rows_RI * torch.linspace(-2, 3, len(rows_RI) + 1)[:-1, None]


@pytest.mark.parametrize("change", [lambda rows: rows, scaled])
def test_rows_of_the_first_layer_name_their_tokens(public: PublicModel, change: object) -> None:
    assert callable(change)
    trace = planted(public, IDS, PROMPT, change)
    found = scores_of(NearestEmbedding(), view_of(public, trace), [truth_of(IDS, PROMPT)])
    (one,) = found.values()
    assert (one.where, one.top1.hits, one.top1.n) == ("layer 0 qkv_proj", 9, 9)


@pytest.mark.parametrize("noisy", [0, 10, 25, 50])
def test_what_is_replaced_by_noise_is_not_read(public: PublicModel, noisy: int) -> None:
    ids = token_ids(50, seed=3)
    rows = public.dictionary_VD[ids].clone()
    rows[:noisy] = torch.randn(noisy, 48)
    trace = Trace((linear(FIRST, rows), linear(FIRST, public.dictionary_VD[[7]])))
    (one,) = scores_of(
        NearestEmbedding(), view_of(public, trace), [truth_of([*ids, 7], 50)]
    ).values()
    assert (one.top1.hits, one.top1.n) == (51 - noisy, 51)


def test_a_rotated_hidden_axis_is_not_read(public: PublicModel) -> None:
    ids = token_ids(50, seed=3)
    square_DD = torch.linalg.qr(torch.randn(48, 48))[0]
    trace = planted(public, ids, 40, lambda rows: rows @ square_DD, [FIRST])
    (one,) = scores_of(NearestEmbedding(), view_of(public, trace), [truth_of(ids, 40)]).values()
    assert (one.top1.n, one.top1.hits <= 2) == (50, True)


# ------------------------------------------------------------------------------------- refusals


def test_what_did_not_cross_is_no_work(public: PublicModel) -> None:
    rows = inputs_of(public, IDS[:1])
    deep = view_of(public, Trace((linear((1, "qkv_proj"), rows[1, "qkv_proj"]),)))
    other = view_of(public, Trace((linear((0, "o_proj"), rows[0, "o_proj"]),)))
    for view in (deep, other):
        assert TokenIds().refuses(view) == "embedding stays"
        assert Logits().refuses(view) == "lm_head stays"
        assert NearestEmbedding().refuses(view) == "layer 0 stays"
    assert TokenIds().refuses(view_of(public, Trace((embedding([1]),)))) is None
    # One session in which it crossed is enough.
    assert (
        Logits().refuses(view_of(public, Trace(()), Trace((lm_head(torch.ones(1, 48)),)))) is None
    )
    both = Trace((linear(FIRST, rows[FIRST]), linear((0, "o_proj"), rows[0, "o_proj"])))
    assert NearestEmbedding().refuses(view_of(public, both)) is None
