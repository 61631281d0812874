"""Matchers find what stays of a row; searches keep to their budget, and know when they are lost."""

from __future__ import annotations

import pytest
import torch

from tests.kit.leaks import VOCABULARY, linear, planted, truth_of, view_of
from tests.kit.model import token_ids
from tests.kit.rows import each_row
from tsqp.lab.leak import matching
from tsqp.lab.leak.attack import TOP, Work
from tsqp.lab.leak.matching import (
    FIRST,
    FeatureMatcher,
    Matcher,
    Observed,
    Present,
    Squares,
    apart,
    best,
    look_up,
    nearest,
    observe,
    search,
)
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.score import score
from tsqp.lab.leak.trace import Trace, Where

DEEP: Where = (1, "gate_up_proj")
IDS = token_ids(20, vocab_size=VOCABULARY)


def text(count: int, seed: int) -> list[int]:
    return token_ids(count, seed, VOCABULARY)


def observed(rows_RI: torch.Tensor, tokens: int | None = None, where: Where = FIRST) -> Observed:
    return Observed(where, rows_RI, 0, len(rows_RI) if tokens is None else tokens, 1e-3)


class Worst(Matcher):
    """Sees no difference between any two rows, but for the token that is expected least."""

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        distances_N = torch.ones(len(states_NI))
        distances_N[-1] = 0.9
        return distances_N


class Planned(Matcher):
    """Says what it is told of each token of the vocabulary, known by its first layer's input."""

    def __init__(self, public: PublicModel, distances_V: torch.Tensor) -> None:
        self._table_VD, self._distances_V = public.dictionary_VD, distances_V
        self.taken: list[int] = []

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        return self._distances_V[self._ids(states_NI)]

    def found(self, observed: Observed, token: int, state_I: torch.Tensor) -> None:
        self.taken += self._ids(state_I[None]).tolist()

    def _ids(self, states_NI: torch.Tensor) -> torch.Tensor:
        return torch.cdist(states_NI, self._table_VD).argmin(1)


# ------------------------------------------------------------------------------------ distances


def test_the_nearest_come_first_and_what_is_no_number_last() -> None:
    distances, ids = torch.tensor([float("nan"), 3.0, 1.0, float("inf"), 2.0]), torch.arange(5)
    assert best(distances, ids)[:3] == (2, 4, 1)
    assert best(distances[[0, 3]], ids[:2]) == ()
    assert len(best(torch.rand(50), torch.arange(50))) == TOP


@each_row(("rows", "candidates", "features"), [(1, 400, 2048), (40, 7, 3), (5, 20, 48)])
def test_distances_are_euclidean(rows: int, candidates: int, features: int) -> None:
    """A candidate's from itself is below what only the right one comes below."""
    table_NX, rows_RX = 30 * torch.randn(candidates, features), torch.randn(rows, features)
    exact_RN = torch.cdist(rows_RX.double(), table_NX.double())
    found_RN = apart(rows_RX, table_NX, Squares().of(table_NX))
    assert torch.allclose(found_RN.double(), exact_RN, rtol=1e-5)
    same_NN = FeatureMatcher().pairwise(table_NX, table_NX)
    assert same_NN.diagonal().max() == 0
    assert (same_NN + torch.eye(candidates)).min() > 0.01


def test_distances_are_relative_to_the_tokens_own_row_or_to_all_that_are_left() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    candidates = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 9.0]])
    ordered = FeatureMatcher()
    assert ordered.distances(observed(rows), 0, candidates).tolist() == pytest.approx([0, 1, 1])
    assert ordered.distances(observed(rows), 1, candidates)[1] == pytest.approx(1)
    # With more rows than tokens a mask has put some among them: they stand in no order.
    for matcher, tokens in ((ordered, 2), (FeatureMatcher(ordered=False), 3)):
        found = matcher.distances(observed(torch.eye(3), tokens), 0, torch.eye(3))
        assert found.tolist() == pytest.approx([0, 0, 0])
    # Of another dictionary as large, and of the first one again.
    for table in (torch.eye(2), 2 * torch.eye(2), torch.eye(2)):
        found = ordered.distances(observed(torch.eye(2)), 0, table)
        assert found[0] == pytest.approx(float(table[0, 0]) - 1)


def test_a_row_is_used_once() -> None:
    matcher, rows, seen = FeatureMatcher(ordered=False), torch.eye(3), observed(torch.eye(3))
    matcher.found(seen, 0, rows[1])
    assert seen.used == {1}
    assert matcher.distances(seen, 1, rows).tolist() == pytest.approx([0, 2**0.5, 0])
    # Of two that are equal each is used; of none that is left all are far.
    matcher.found(seen, 1, rows[1])
    matcher.found(seen, 2, rows[1])
    assert seen.used == {0, 1, 2}
    assert torch.isinf(matcher.distances(seen, 2, rows)).all()


@each_row(("ordered", "added"), [(True, 0), (True, 2), (False, 0), (False, 2)])
def test_looking_all_up_equals_one_by_one(ordered: bool, added: int) -> None:
    rows, dictionary = torch.randn(5 + added, 8), torch.randn(30, 8)
    matcher, seen = FeatureMatcher(ordered=ordered), observed(rows, tokens=5)
    each = torch.stack([matcher.distances(seen, token, dictionary) for token in range(5)])
    assert torch.allclose(matcher.look_up(seen, dictionary), each, atol=1e-5)


@each_row(
    ("dtype", "certain"),
    [(torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 2e-2), (torch.int32, 2e-2)],
)
def test_how_sure_a_match_is_depends_on_the_digits_that_crossed(
    public: PublicModel, dtype: torch.dtype, certain: float
) -> None:
    """Integers are floats by the public scales."""
    plain_TD = public.dictionary_VD[IDS[:4]]
    rows = public.encode((0, "qkv_proj"), plain_TD) if dtype == torch.int32 else plain_TD.to(dtype)
    step = Trace((linear(FIRST, rows), linear(FIRST, rows[:1]))).steps[0]
    found = observe(view_of(public), step, FIRST)
    assert found is not None
    assert (found.where, found.first, found.tokens, found.certain) == (FIRST, 0, 4, certain)
    assert found.rows_RI.dtype == torch.float32
    scale = public.input_scale((0, "qkv_proj")) if dtype == torch.int32 else 1.0
    assert torch.equal(found.rows_RI, rows.float() * scale)
    assert observe(view_of(public), step, DEEP) is None


# ------------------------------------------------------------------------------ the first layer


def test_looking_up_names_rows_that_say_whose_they_are(public: PublicModel) -> None:
    """Rows in no order are left to a search, but a row alone is not: as a set none is tried."""
    ticks: list[None] = []
    view = view_of(public, *(planted(public, IDS[:7], 5, [FIRST]) for _ in range(3)))
    work = Work(tick=lambda: ticks.append(None))
    readings = list(look_up(view, FeatureMatcher(), work))
    assert (work.compared, work.modelled, len(ticks)) == (3 * 7 * VOCABULARY, 0, 3)
    assert [(one.session, one.tokens) for one in readings] == [(s, range(7)) for s in range(3)]
    (reading, *_) = look_up(view, FeatureMatcher(ordered=False), Work())
    assert reading.tokens == range(5, 7)
    assert {index: guess[0] for index, guess in reading.guesses.items()} == {5: IDS[5], 6: IDS[6]}
    deeper = view_of(public, planted(public, IDS[:7], 5, [DEEP]))
    assert list(look_up(deeper, FeatureMatcher(), Work())) == []
    present = Present(deeper, FeatureMatcher())
    assert present.among(0, deeper.traces[0].steps[0], Work()) is None


@each_row("noise", [0.0, 0.01])
def test_tokens_that_are_there_are_said_to_be(public: PublicModel, noise: float) -> None:
    """By the set of rows of each step, looked up once; of rounded rows the nearest are there."""

    def changed(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return rows_RI.flip(0) + noise * torch.randn_like(rows_RI)

    view = view_of(public, *(planted(public, text(7, s), 5, [FIRST], changed) for s in (0, 1)))
    present, work = Present(view, FeatureMatcher(ordered=False)), Work()
    for _ in range(2):
        for session, trace in enumerate(view.traces):
            ids, first = text(7, session), 0
            for step in trace.steps:
                found = present.among(session, step, work)
                assert found is not None
                assert set(found.tolist()) == set(ids[first : first + step.tokens])
                first += step.tokens
    assert work.compared == 6 * VOCABULARY


# ---------------------------------------------------------------------------------------- deeper


@each_row(("sessions", "tokens"), [(1, 1), (2, 4), (3, 9), (2, 50)])
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


@each_row("place", [3, 7])
def test_a_search_reads_up_to_what_is_noise_and_goes_on_with_the_next_session(
    public: PublicModel, place: int
) -> None:
    """Behind it the prefix is wrong."""

    def noisy(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return torch.cat([rows_RI[:place], torch.randn_like(rows_RI[place:])])

    traces = [planted(public, IDS, 15, [DEEP], noisy), planted(public, text(12, 1), 10, [DEEP])]
    first, second = search(view_of(public, *traces), FeatureMatcher(), DEEP, Work())
    right = [first.guesses.get(token, (None,))[0] == IDS[token] for token in range(20)]
    assert right[: place + 1] == [True] * place + [False]
    assert first.tokens == range(20)
    assert len(first.guesses) < 20
    assert [second.guesses[token][0] for token in range(12)] == text(12, 1)


def test_a_prompt_that_stayed_is_not_searched(public: PublicModel) -> None:
    """What came before is not known; nor where a place has nothing."""
    for trace in (planted(public, IDS[:6], 1, [DEEP]), planted(public, IDS[:6], 4, [FIRST])):
        view = view_of(public, trace, Trace(()))
        assert list(search(view, FeatureMatcher(), DEEP, Work())) == []


def test_where_nothing_stands_out_the_search_gives_up(public: PublicModel) -> None:
    """After three tokens, in which it names one; and begins anew with the next session."""
    traces = [planted(public, text(10, seed), 8, [DEEP]) for seed in range(3)]
    work = Work()
    readings = list(search(view_of(public, *traces, sessions=2), Worst(), DEEP, work))
    assert [list(one.guesses) for one in readings] == [[0, 1, 2]] * 2
    assert work.modelled == 6 * VOCABULARY
    (found,) = score(readings, [truth_of(text(10, seed), 8) for seed in range(3)])
    assert (found.guessed, found.top1.n, found.gave_up) == (6, 20, True)


def test_noise_that_hides_what_stands_out_does_not_end_a_search_that_reads(
    public: PublicModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest is the right one, hardly nearer than the next, and what the model expects."""
    prefix, ids = public.nothing(), [0]
    for _ in range(15):
        prefix = public.extend(prefix, ids[-1])
        ids.append(int(public.likely(prefix)[0]))

    def noisy(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return rows_RI + 0.9 * rows_RI.std() * torch.randn_like(rows_RI)

    view = view_of(public, planted(public, ids, 12, [DEEP], noisy))
    (read,) = score(search(view, FeatureMatcher(), DEEP, Work()), [truth_of(ids, 12)])
    assert read.top1.hits >= 14
    monkeypatch.setattr(matching, "_EXPECTED", 0)
    (lost,) = score(search(view, FeatureMatcher(), DEEP, Work()), [truth_of(ids, 12)])
    assert (read.gave_up, lost.gave_up) == (False, True)


def test_candidates_are_those_that_the_first_layer_says_are_there(public: PublicModel) -> None:
    """So a search among sets models few; the set of the first layer is looked up once a step."""
    order = torch.tensor([3, 0, 4, 1, 2])

    def shuffled(rows_RI: torch.Tensor, _where: Where) -> torch.Tensor:
        return rows_RI[order] if len(rows_RI) == 5 else rows_RI

    ids, work = [9, 9, 100, 17, 9, 44], Work()
    view = view_of(public, planted(public, ids, 5, [FIRST, DEEP], shuffled))
    present = Present(view, FeatureMatcher(ordered=False))
    readings = search(view, FeatureMatcher(ordered=False), DEEP, work, present)
    (found,) = score(readings, [truth_of(ids, 5)])
    assert (found.top1.hits, found.top1.n) == (6, 6)
    assert work.modelled <= 5 * 5 + 1
    assert work.compared == work.modelled + 2 * VOCABULARY


# ------------------------------------------------------------------------------------- a choice


@each_row(
    ("distances", "ids", "guess", "stands_out", "modelled"),
    [
        # Without a certain one the nearest is first, and then the next.
        ({7: 0.5}, range(40), (7,), True, 40),
        ({7: 0.7, 3: 0.8}, range(40), (7, 3), False, 40),
        ({7: float("nan"), 3: 0.5}, range(40), (3,), True, 40),
        ({7: 0.9}, [7], (7,), False, 1),
        # A certain one ends the search with its block, the first of which has 32.
        ({20: 0.0}, range(120), (20,), True, 32),
        ({100: 5e-4}, range(120), (100,), True, 120),
        # Of several that are certain the most expected is first.
        ({4: 0.0, 20: 9e-4}, list(reversed(range(30))), (20, 4), True, 30),
    ],
    ids=lambda row: f"{row[0]} of {len(row[1])}",
)
def test_a_candidate_is_chosen_by_distance_and_expectation(
    public: PublicModel,
    distances: dict[int, float],
    ids: list[int],
    guess: tuple[int, ...],
    stands_out: bool,
    modelled: int,
) -> None:
    distances_V = torch.full((VOCABULARY,), 0.9)
    distances_V[list(distances)] = torch.tensor(list(distances.values()))
    matcher, work = Planned(public, distances_V), Work()
    prefix = public.extend(public.nothing(), IDS[0])
    seen, candidates = observed(public.dictionary_VD[:1]), torch.as_tensor(ids)
    found, ratio = nearest(view_of(public), matcher, prefix, seen, 0, candidates, work)
    assert (found[: len(guess)], matcher.taken) == (guess, [guess[0]])
    assert len(set(found)) == len(found) == min(TOP, len(ids))
    assert (ratio < 0.7, work.modelled, work.compared) == (stands_out, modelled, modelled)


def test_a_token_is_not_taken_for_its_own_repetition(public: PublicModel) -> None:
    """Behind itself alone it attends to itself alone, and has the state that crossed already."""
    distances_V = torch.full((VOCABULARY,), 0.9)
    distances_V[[5, 9]] = 1e-4
    prefix = public.extend(public.nothing(), 5)
    seen, matcher = observed(public.dictionary_VD[:1]), Planned(public, distances_V)
    found, _ = nearest(view_of(public), matcher, prefix, seen, 0, torch.arange(20), Work())
    assert found[0] == 9
