"""Matchers and searches find what stays of a row; noise and pads hide the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from protocol.messages import FUSED_MODULES
from tests.kit.leaks import (
    FIRST_PLACE,
    VOCABULARY,
    begun,
    linear,
    make_begun_model,
    planted,
    policy_with,
    scores_of,
    truth_of,
    view_of,
)
from tests.kit.model import token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import TOP, Attack, Trace, Where, Work
from tsqp.lab.leak.attacks.beam_search import NoiseAveraging
from tsqp.lab.leak.attacks.first_layer import LowDimensionalPads, PadReuse
from tsqp.lab.leak.matching import FIRST, FeatureMatcher, Observed, search
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.score import score

DEEP: Where = (1, "gate_up_proj")


def text(count: int, seed: int = 0) -> list[int]:
    return token_ids(count, seed, VOCABULARY)


def observed(rows_RI: torch.Tensor, tokens: int | None = None) -> Observed:
    count = len(rows_RI)
    return Observed(FIRST, rows_RI, tokens or count, 1e-3, list(range(count)))


class Planned(FeatureMatcher):
    """Says what it is told of each token of the vocabulary, known by its first layer's input."""

    def __init__(self, public: PublicModel, distances_V: torch.Tensor) -> None:
        super().__init__()
        self._table_VD, self._distances_V = public.dictionary_VD, distances_V

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        return self._distances_V[torch.cdist(states_NI, self._table_VD).argmin(1)]


def test_a_row_is_its_tokens_own_or_any_that_is_left() -> None:
    rows = torch.eye(3)
    ordered, matcher, seen = FeatureMatcher(), FeatureMatcher(ordered=False), observed(rows)
    for token in range(3):
        found = ordered.distances(seen, token, rows)
        assert found.tolist() == pytest.approx([2**0.5 * (row != token) for row in range(3)])
    # With more rows than tokens a mask has put some among them: they stand in no order.
    assert ordered.distances(observed(rows, tokens=2), 0, rows).tolist() == [0, 0, 0]
    matcher.found(seen, rows[1])
    assert matcher.distances(seen, 1, rows).tolist() == pytest.approx([0, 2**0.5, 0])
    # Of two that are equal each is used; of none that is left all are far.
    matcher.found(seen, rows[1])
    matcher.found(seen, rows[1])
    assert (seen.left, *matcher.distances(seen, 2, rows)) == ([], *[torch.inf] * 3)


@each_row("ordered", [True, False])
def test_integers_are_compared_whatever_the_scales_of_their_rows_are(ordered: bool) -> None:
    """In the look-up of a dictionary, in a search, and where a row that was taken is used up."""
    states = torch.tensor([[1.0, 2.0, 4.0], [40.0, 20.0, 10.0], [0.1, -0.4, 0.2]])
    scaled = normalize(states * torch.tensor([[300.0], [7.0], [2e4]]), dim=-1)
    seen = Observed(FIRST, scaled, 3, 1e-3, [0, 1, 2], integers=True)
    matcher = FeatureMatcher(ordered=ordered)
    for token in range(3):
        distances = matcher.distances(seen, token, states)
        near = {token} if ordered else set(seen.left)
        assert {*(distances < 1e-6).nonzero()[:, 0].tolist()} == near
        if ordered:
            assert torch.allclose(matcher.look_up(seen, states)[token], distances, atol=1e-5)
        matcher.found(seen, states[token])
    assert seen.left == ([0, 1, 2] if ordered else [])


@each_row(("sessions", "tokens"), [(1, 1), (2, 4), (3, 50)])
def test_a_search_keeps_to_its_budget(public: PublicModel, sessions: int, tokens: int) -> None:
    """In sessions and in tokens, within a prompt and behind it."""
    texts = [text(10, seed) for seed in range(3)]
    traces = [planted(public, ids, 8, [DEEP]) for ids in texts]
    view = view_of(public, *traces, sessions=sessions, tokens=tokens)
    work, limit = Work(), min(tokens, 10)
    readings = list(search(view, FeatureMatcher(), DEEP, work))
    assert [(one.session, one.tokens) for one in readings] == [
        (session, range(limit)) for session in range(sessions)
    ]
    for one in readings:
        assert [one.guesses[token][0] for token in one.tokens] == texts[one.session][:limit]
    assert work.modelled == work.compared <= sessions * limit * VOCABULARY


def test_a_search_reads_up_to_what_is_noise_and_goes_on_with_the_next_session(
    public: PublicModel,
) -> None:
    """Behind it the prefix is wrong; a prompt that stayed is not searched."""

    def noisy(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return torch.cat([rows_RI[:7], torch.randn_like(rows_RI[7:])])

    traces = [planted(public, text(20), 15, [DEEP], noisy), planted(public, text(9, 1), 8, [DEEP])]
    traces.append(planted(public, text(6), 1, [DEEP]))
    first, second = search(view_of(public, *traces), FeatureMatcher(), DEEP, Work())
    right = [first.guesses.get(token, (None,))[0] == text(20)[token] for token in range(20)]
    assert right[:8] == [True] * 7 + [False]
    assert first.tokens == range(20)
    assert len(first.guesses) < 20
    assert [second.guesses[token][0] for token in range(9)] == text(9, 1)


def test_where_nothing_stands_out_the_search_gives_up(public: PublicModel) -> None:
    """After three tokens, in which it names one; and begins anew with the next session."""
    matcher, work = Planned(public, torch.linspace(1, 0.99, VOCABULARY)), Work()
    traces = [planted(public, text(10, seed), 8, [DEEP]) for seed in range(3)]
    readings = list(search(view_of(public, *traces, sessions=2), matcher, DEEP, work))
    assert [list(one.guesses) for one in readings] == [[0, 1, 2]] * 2
    assert work.modelled == 6 * VOCABULARY
    (found,) = score(readings, [truth_of(text(10, seed), 8) for seed in range(3)])
    assert (found.guessed, found.top1.n, found.gave_up) == (6, 20, True)


@each_row("attack", [PadReuse(), LowDimensionalPads()], ids=lambda attack: str(attack.name))
def test_fresh_pads_are_read_as_often_as_chance_has_it(public: PublicModel, attack: Attack) -> None:
    # A prompt's rows, then one by one.
    rows_STI = torch.randint(-(2**31), 2**31, (30, 40, 48)).to(torch.int32)
    steps = [[rows_TI[:4], *rows_TI[4:].split(1)] for rows_TI in rows_STI]
    traces = [Trace(tuple(linear(FIRST, rows_TI) for rows_TI in one)) for one in steps]
    view = view_of(public, *traces, policy="shielded-prefill")
    assert attack.refuses(view) is None
    guesses = [guess for one in attack.read(view, Work()) for guess in one.guesses.values()]
    assert ({*map(len, guesses)}, len(guesses) >= 30 * 39) == ({TOP}, True)
    # No token is guessed for so many rows that its own frequency would count as a success.
    first = [guess[0] for guess in guesses]
    assert max(map(first.count, set(first))) < 0.03 * len(first)
    # Chance is 1 of 128. Five standard errors of 1,170 tokens are 1.3 % more.
    ids = torch.randint(VOCABULARY, (len(first),)).tolist()
    assert sum(map(int.__eq__, first, ids)) < 0.021 * len(first)


TOKENS, PROMPT, ALL = 16, 8, "all places"
PLACES: list[Where] = [(layer, operator) for layer in (0, 1) for operator in FUSED_MODULES]


@each_row(
    ("sigma", "first", "everything"),
    [(0.3, (32, 32), (32, 32)), (2.0, (0, 20), (31, 32)), (1000.0, (0, 2), (0, 4))],
)
def test_what_one_row_does_not_tell_all_places_together_do(
    public: PublicModel, sigma: float, first: tuple[int, int], everything: tuple[int, int]
) -> None:
    """Under noise that drowns everything the token in front alone is known."""

    def noisy(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return rows_RI + sigma * torch.randn_like(rows_RI)

    texts = begun(TOKENS, TOKENS)
    traces = [planted(public, ids, PROMPT, PLACES, noisy) for ids in texts]
    mask = {"name": "float-noise", "sigma": sigma}
    sent = {"place": "gpu", "mask": mask, "verify": "none"}
    view = view_of(public, *traces, policy=policy_with(**dict.fromkeys(FUSED_MODULES, sent)))
    found = scores_of(NoiseAveraging(), view, [truth_of(ids, PROMPT) for ids in texts])
    assert first[0] <= found[FIRST_PLACE].top1.hits <= first[1]
    assert everything[0] <= found[ALL].top1.hits <= everything[1]


# Windows that are shorter than the text; layers of both kinds; biases everywhere.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    ("qwen3", {}),
]


@each_row(("kind", "sizes"), KINDS, ids=lambda row: str(row[0]))
def test_token_by_token_it_says_what_the_model_says(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    """For candidates side by side, too; the embedding stays as it is."""
    folder = tmp_path / kind
    folder.mkdir()
    model, ids = make_begun_model(folder, kind, **sizes), token_ids(9, vocab_size=VOCABULARY)
    public = PublicModel(folder)
    embedding_VD, prefix = public.embedding_VD.clone(), public.nothing()
    for read, token_id in enumerate(ids):
        states = public.states(prefix, [7, token_id])
        prefix = public.extend(prefix, token_id)
        logits_V = model.logits(ids[: read + 1])[-1]
        assert prefix.logits_V is not None
        assert torch.allclose(prefix.logits_V, logits_V, atol=5e-4)
        assert torch.allclose(public.logits(states.hidden_ND)[1], logits_V, atol=5e-4)
        assert torch.equal(public.likely(prefix), prefix.logits_V.argsort(descending=True))
    assert prefix.token_ids == tuple(ids)
    assert torch.equal(public.embedding_VD, embedding_VD)
