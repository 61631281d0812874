"""Matchers find what stays of a row; searches keep to their budget, and know when they are lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from protocol.messages import RingLinearRequest
from protocol.tensors import from_torch
from tests.kit.model import token_ids
from tests.unit.tsqp.leak.leaks import (
    Models,
    inputs_of,
    linear,
    message,
    planted,
    scores_of,
    share,
    tiny,
    truth_of,
    view_of,
)
from tsqp.lab.leak import matching
from tsqp.lab.leak.attack import TOP, Reading, Work
from tsqp.lab.leak.attacks.vocabulary import PlainMatching
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
    place_name,
    search,
)
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.score import score
from tsqp.lab.leak.trace import Trace, Where

DEEP: Where = (1, "gate_up_proj")
IDS = token_ids(20)


@pytest.fixture
def public(saved_model: Models) -> PublicModel:
    return PublicModel(tiny(saved_model).directory)


class Blind(Matcher):
    """Sees no difference between any two rows."""

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(states_NI))


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


def observed(rows_RI: torch.Tensor, tokens: int | None = None, where: Where = FIRST) -> Observed:
    return Observed(where, rows_RI, 0, len(rows_RI) if tokens is None else tokens, 1e-3)


def spoiled(rows_RI: torch.Tensor, every: int) -> torch.Tensor:
    """Replace rows in regular places by noise of their size."""
    noise = torch.randn(rows_RI.shape, generator=torch.Generator().manual_seed(1))
    changed = rows_RI.clone()
    changed[every - 1 :: every] = noise[every - 1 :: every] * rows_RI.std()
    return changed


# --------------------------------------------------------------------------------- small pieces


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (FIRST, "layer 0 qkv_proj"),
        ((31, "o_proj"), "layer 31 o_proj"),
        ((None, "lm_head"), "lm_head"),
    ],
)
def test_places_have_names(where: Where, name: str) -> None:
    assert place_name(where) == name


def test_the_nearest_come_first_and_what_is_no_number_last() -> None:
    distances = torch.tensor([float("nan"), 3.0, 1.0, float("inf"), 2.0])
    ids = torch.tensor([10, 11, 12, 13, 14])
    assert best(distances, ids)[:3] == (12, 14, 11)
    assert set(best(distances, ids)[3:]) == {10, 13}
    assert best(distances[1:3], ids[1:3]) == (12, 11)
    assert len(best(torch.rand(50), torch.arange(50))) == TOP


@pytest.mark.parametrize(
    ("rows", "candidates", "features"), [(1, 400, 2048), (40, 7, 3), (30, 1024, 192), (5, 20, 48)]
)
def test_distances_are_euclidean(rows: int, candidates: int, features: int) -> None:
    """A candidate's from itself is below what only the right one comes below."""
    generator = torch.Generator().manual_seed(0)
    table_NX = 30 * torch.randn(candidates, features, generator=generator)
    rows_RX = torch.randn(rows, features, generator=generator)
    squares = Squares()
    exact_RN = torch.cdist(rows_RX.double(), table_NX.double())
    found_RN = apart(rows_RX, table_NX, squares.of(table_NX))
    assert torch.allclose(found_RN.double(), exact_RN, rtol=1e-5)
    same_NN = FeatureMatcher().pairwise(table_NX, table_NX)
    assert same_NN.diagonal().max() == 0
    assert (same_NN + torch.eye(candidates)).min() > 0.01


def test_lengths_are_those_of_the_candidates_asked_about() -> None:
    """Of a dictionary once; another one has others, though it is as large."""
    one_NX, other_NX, squares = torch.eye(3), 2 * torch.eye(3), Squares()
    known = squares.of(one_NX)
    assert squares.of(one_NX) is known
    assert squares.of(other_NX).tolist() == [4.0, 4.0, 4.0]
    assert squares.of(one_NX).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "certain"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)]
)
def test_how_sure_a_match_is_depends_on_the_digits_that_crossed(
    public: PublicModel, dtype: torch.dtype, certain: float
) -> None:
    rows = torch.randn(3, 48).to(dtype)
    step = Trace((linear(FIRST, rows), linear(FIRST, rows[:1]))).steps[0]
    found = observe(view_of(public), step, FIRST)
    assert found is not None
    assert (found.where, found.first, found.tokens, found.certain) == (FIRST, 0, 3, certain)
    assert found.rows_RI.dtype == torch.float32
    assert torch.equal(found.rows_RI, rows.float())
    assert observe(view_of(public), step, DEEP) is None


def test_integers_are_floats_by_the_public_scales(saved_model: Models) -> None:
    model = tiny(saved_model)
    public = PublicModel(model.directory, model.calibration)
    plain_TD = public.dictionary_VD[IDS[:4]]
    request = RingLinearRequest(
        layer_idx=0, module_names=("q_proj",), elements=from_torch(public.encode(FIRST, plain_TD))
    )
    step = Trace((message(request),)).steps[0]
    found = observe(view_of(public, policy="quantized-clear"), step, FIRST)
    assert found is not None
    assert found.certain == 2e-2
    assert (found.rows_RI - plain_TD).abs().max() <= 0.51 * public.input_scale(FIRST)


# ------------------------------------------------------------------------------------ distances


def test_distances_are_relative_to_what_was_observed() -> None:
    matcher, rows = FeatureMatcher(), torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    candidates = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 9.0]])
    assert matcher.distances(observed(rows), 0, candidates).tolist() == pytest.approx([0, 1, 1])
    assert matcher.distances(observed(rows), 1, candidates)[1] == pytest.approx(1)


def test_rows_in_no_order_are_compared_all() -> None:
    matcher, rows = FeatureMatcher(ordered=False), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    candidates = torch.tensor([[0.0, 2.0], [3.0, 4.0], [0.0, 4.0]])
    for token in (0, 1):
        found = matcher.distances(observed(rows), token, candidates)
        assert found.tolist() == pytest.approx([0, 0, 0.6])


def test_more_rows_than_tokens_are_in_no_order() -> None:
    """A mask has put some among them."""
    rows = torch.eye(3)
    found = FeatureMatcher().distances(observed(rows, tokens=2), 0, rows)
    assert found.tolist() == pytest.approx([0, 0, 0])


def test_a_row_is_used_once() -> None:
    matcher, rows = FeatureMatcher(ordered=False), torch.eye(3)
    seen = observed(rows)
    matcher.found(seen, 0, rows[1])
    assert seen.used == {1}
    assert matcher.distances(seen, 1, rows).tolist() == pytest.approx([0, 2**0.5, 0])
    # Of two that are equal each is used.
    matcher.found(seen, 1, rows[1])
    matcher.found(seen, 2, rows[1])
    assert seen.used == {0, 1, 2}
    assert torch.isinf(matcher.distances(seen, 3, rows)).all()
    matcher.found(seen, 3, rows[1])


def test_rows_in_order_are_not_used_up() -> None:
    seen = observed(torch.eye(2))
    FeatureMatcher().found(seen, 0, torch.eye(2)[0])
    assert seen.used == set()


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("added", [0, 2])
def test_looking_all_up_equals_one_by_one(ordered: bool, added: int) -> None:
    rows, table = torch.randn(5 + added, 8), torch.randn(30, 8)
    matcher, seen = FeatureMatcher(ordered=ordered), observed(rows, tokens=5)
    each = torch.stack([matcher.distances(seen, token, table) for token in range(5)])
    assert torch.allclose(matcher.look_up(seen, table), each, atol=1e-5)


def test_candidates_are_not_taken_for_those_of_the_last_call() -> None:
    matcher, rows = FeatureMatcher(), torch.eye(2)
    for table in (torch.eye(2), 2 * torch.eye(2), torch.eye(2)):
        found = matcher.distances(observed(rows), 0, table)
        assert found[0] == pytest.approx(float(table[0, 0]) - 1)


# ------------------------------------------------------------------------------ the first layer


@pytest.mark.parametrize("every", [2, 3, 4, 10])
def test_what_is_replaced_by_noise_is_what_is_not_read(public: PublicModel, every: int) -> None:
    """The share of a planted leak, to the token: of 60 tokens that cross in one step."""
    ids = token_ids(60, seed=2)
    trace = Trace(
        (
            linear(FIRST, spoiled(public.dictionary_VD[ids], every)),
            linear(FIRST, public.dictionary_VD[[5]]),
        )
    )
    (found,) = score(
        look_up(view_of(public, trace), FeatureMatcher(), Work()), [truth_of([*ids, 5], 60)]
    )
    assert (found.where, found.top1.n) == ("layer 0 qkv_proj", 61)
    assert found.top1.hits == 61 - 60 // every
    assert (found.prompt.hits, found.answer.hits) == (60 - 60 // every, 1)


def test_looking_up_counts_what_it_compares_and_ticks(public: PublicModel) -> None:
    ticks: list[None] = []
    work = Work(tick=lambda: ticks.append(None))
    view = view_of(public, *(planted(public, IDS[:7], 5, places=[FIRST]) for _ in range(3)))
    readings = list(look_up(view, FeatureMatcher(), work))
    assert work.compared == 3 * 7 * public.vocab_size
    assert work.modelled == 0
    assert len(ticks) == 3
    assert [(one.session, one.tokens) for one in readings] == [(s, range(7)) for s in range(3)]


def test_rows_in_no_order_are_left_to_a_search_but_a_row_alone_is_not(public: PublicModel) -> None:
    view = view_of(public, planted(public, IDS[:7], 5, places=[FIRST]))
    (reading,) = look_up(view, FeatureMatcher(ordered=False), Work())
    assert {index: guess[0] for index, guess in reading.guesses.items()} == {5: IDS[5], 6: IDS[6]}
    # The others are not tried: as a set they are not scored.
    assert reading.tokens == range(5, 7)


def test_a_session_in_which_the_first_layer_stays_has_no_reading(public: PublicModel) -> None:
    view = view_of(public, planted(public, IDS[:7], 5, places=[DEEP]))
    assert list(look_up(view, FeatureMatcher(), Work())) == []
    present = Present(view, FeatureMatcher())
    assert present.among(0, view.traces[0].steps[0], Work()) is None


def test_tokens_that_are_there_are_said_to_be(public: PublicModel) -> None:
    """By the set of rows of each step; each is looked up once."""
    view = view_of(public, planted(public, IDS[:7], 5, lambda rows: rows.flip(0), [FIRST]))
    present, work = Present(view, FeatureMatcher(ordered=False)), Work()
    steps = view.traces[0].steps
    for _ in range(2):
        found = [present.among(0, step, work) for step in steps]
        assert [set(ids.tolist()) for ids in found if ids is not None] == [
            set(IDS[:5]),
            {IDS[5]},
            {IDS[6]},
        ]
    assert work.compared == 3 * public.vocab_size


def test_sets_of_two_sessions_are_two(public: PublicModel) -> None:
    texts = [token_ids(6, seed) for seed in range(2)]
    view = view_of(public, *(planted(public, ids, 6, places=[FIRST]) for ids in texts))
    present = Present(view, FeatureMatcher(ordered=False))
    for session, ids in enumerate(texts):
        # A step alone, whose rows are taken for what a mask adds.
        found = present.among(session, view.traces[session].steps[0], Work())
        assert found is not None
        assert set(found.tolist()) == set(ids)


def test_where_none_is_certain_the_nearest_are_there(public: PublicModel) -> None:
    def noisy(rows_RI: torch.Tensor) -> torch.Tensor:
        return rows_RI + 0.02 * torch.randn(rows_RI.shape)

    view = view_of(public, planted(public, IDS[:6], 1, noisy, [FIRST]))
    present = Present(view, FeatureMatcher(ordered=False))
    for token, step in enumerate(view.traces[0].steps):
        found = present.among(0, step, Work())
        assert found is not None
        assert found.tolist() == [IDS[token]]


# ---------------------------------------------------------------------------------------- deeper


def test_a_search_reads_every_place(public: PublicModel) -> None:
    view = view_of(public, planted(public, IDS, 15))
    for where in view.linear_places()[1:]:
        work = Work()
        (found,) = score(search(view, FeatureMatcher(), where, work), [truth_of(IDS, 15)])
        assert (found.where, found.top1.hits, found.top1.n) == (place_name(where), 20, 20)
        # Most are among the first block of those that the model expects, were it a trained one.
        assert work.modelled <= 20 * public.vocab_size
        assert work.compared == work.modelled


@pytest.mark.parametrize("place", [3, 7, 12])
def test_a_search_reads_up_to_what_is_noise(public: PublicModel, place: int) -> None:
    """Behind it the prefix is wrong."""

    def noisy(rows_RI: torch.Tensor) -> torch.Tensor:
        changed = rows_RI.clone()
        changed[place : place + 1] = torch.randn_like(changed[place : place + 1])
        return changed

    view = view_of(public, planted(public, IDS, 15, noisy, [DEEP]))
    (reading,) = search(view, FeatureMatcher(), DEEP, Work())
    right = [reading.guesses.get(token, (None,))[0] == IDS[token] for token in range(20)]
    assert right[: place + 1] == [True] * place + [False]
    assert reading.tokens == range(20)


@pytest.mark.parametrize("sessions", [1, 2, 3])
@pytest.mark.parametrize("tokens", [1, 4, 12, 50])
def test_a_search_keeps_to_its_budget(public: PublicModel, sessions: int, tokens: int) -> None:
    """In sessions and in tokens, within a prompt and behind it."""
    texts = [token_ids(10, seed) for seed in range(3)]
    traces = [planted(public, ids, 8, places=[DEEP]) for ids in texts]
    view = view_of(public, *traces, sessions=sessions, tokens=tokens)
    work = Work()
    readings = list(search(view, FeatureMatcher(), DEEP, work))
    assert [one.session for one in readings] == list(range(sessions))
    limit = min(tokens, 10)
    assert {one.tokens for one in readings} == {range(limit)}
    for one in readings:
        assert [one.guesses[token][0] for token in one.tokens] == texts[one.session][:limit]
    assert work.modelled <= sessions * limit * public.vocab_size


def test_a_prompt_that_stayed_is_not_searched(public: PublicModel) -> None:
    """What came before is not known; nor where a place has nothing."""
    view = view_of(public, planted(public, IDS[:6], 1, places=[DEEP]))
    assert list(search(view, FeatureMatcher(), DEEP, Work())) == []
    view = view_of(public, planted(public, IDS[:6], 4, places=[FIRST]), Trace(()))
    assert list(search(view, FeatureMatcher(), DEEP, Work())) == []


def test_where_nothing_stands_out_the_search_gives_up(public: PublicModel) -> None:
    """After three tokens, in which it names somebody; and begins anew with the next session."""
    traces = [planted(public, token_ids(10, seed), 8, places=[DEEP]) for seed in range(4)]
    view = view_of(public, *traces, sessions=2)
    work = Work()
    readings = list(search(view, Worst(), DEEP, work))
    assert [one.session for one in readings] == [0, 1]
    assert {one.tokens for one in readings} == {range(10)}
    assert [list(one.guesses) for one in readings] == [[0, 1, 2]] * 2
    assert work.modelled == 6 * public.vocab_size
    (found,) = score(readings, [truth_of(token_ids(10, seed), 8) for seed in range(4)])
    assert (found.guessed, found.top1.n, found.gave_up) == (6, 20, True)


def test_noise_that_hides_what_stands_out_does_not_end_a_search_that_reads(
    public: PublicModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest is the right one, hardly nearer than the next, and what the model expects."""
    prefix = public.nothing()
    ids = [5]
    for _ in range(15):
        prefix = public.extend(prefix, ids[-1])
        ids.append(int(public.likely(prefix)[0]))

    def noisy(rows_RI: torch.Tensor) -> torch.Tensor:
        return rows_RI + 0.65 * rows_RI.std() * torch.randn(rows_RI.shape)

    torch.manual_seed(2)
    view = view_of(public, planted(public, ids, 12, noisy, [DEEP]))
    (read,) = score(search(view, FeatureMatcher(), DEEP, Work()), [truth_of(ids, 12)])
    assert read.top1.hits >= 14
    assert not read.gave_up
    monkeypatch.setattr(matching, "_EXPECTED", 0)
    (lost,) = score(search(view, FeatureMatcher(), DEEP, Work()), [truth_of(ids, 12)])
    assert lost.gave_up


def test_rows_that_are_nothing_but_noise_end_a_search_soon(public: PublicModel) -> None:
    """A large one is as near to all candidates; the longest is named again and again.

    That the model expects it behind such a prefix is no reason to believe it.
    """

    def uniform(rows_RI: torch.Tensor) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, rows_RI.shape) * 1e-4

    torch.manual_seed(0)
    traces = [planted(public, token_ids(40, seed), 30, uniform, [DEEP]) for seed in range(4)]
    readings = list(search(view_of(public, *traces), FeatureMatcher(), DEEP, Work()))
    assert all(len(one.guesses) <= 6 for one in readings)
    assert sum(len(one.guesses) for one in readings) <= 16


def test_who_is_lost_later_goes_on_with_the_next_session(public: PublicModel) -> None:
    """The beginning was read: so may that of others be."""

    def noisy_end(rows_RI: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows_RI[:4], torch.randn_like(rows_RI[4:])])

    texts = [token_ids(12, seed) for seed in range(2)]
    traces = [planted(public, texts[0], 10, noisy_end, [DEEP])]
    traces += [planted(public, texts[1], 10, places=[DEEP])]
    first, second = search(view_of(public, *traces), FeatureMatcher(), DEEP, Work())
    assert [first.guesses[token][0] for token in range(4)] == texts[0][:4]
    assert len(first.guesses) < 12
    assert [second.guesses[token][0] for token in range(12)] == texts[1]


def test_candidates_are_those_that_the_first_layer_says_are_there(public: PublicModel) -> None:
    """So a search among sets models few."""
    order = torch.tensor([3, 0, 4, 1, 2])

    def shuffled(rows_RI: torch.Tensor) -> torch.Tensor:
        return rows_RI[order] if len(rows_RI) == 5 else rows_RI

    ids = [9, 9, 200, 17, 9, 44]
    view = view_of(public, planted(public, ids, 5, shuffled))
    matcher, work = FeatureMatcher(ordered=False), Work()
    present = Present(view, FeatureMatcher(ordered=False))
    (found,) = score(search(view, matcher, DEEP, work, present), [truth_of(ids, 5)])
    assert (found.top1.hits, found.top1.n) == (6, 6)
    assert work.modelled <= 5 * 5 + 1
    # The set of the first layer is looked up once a step.
    assert work.compared == work.modelled + 2 * public.vocab_size


# ------------------------------------------------------------------------------------- a choice


def pick(
    public: PublicModel, matcher: Matcher, ids: Sequence[int] | torch.Tensor, before: int = 1
) -> tuple[tuple[int, ...], bool, Work]:
    """Choose among candidates in an order of expectation, behind some tokens.

    The second: whether the first one is much nearer than the next.
    """
    prefix, work = public.nothing(), Work()
    for token_id in IDS[:before]:
        prefix = public.extend(prefix, token_id)
    seen = observed(public.dictionary_VD[:1])
    guess, ratio = nearest(view_of(public), matcher, prefix, seen, 0, torch.as_tensor(ids), work)
    return guess, ratio < 0.7, work


def test_the_nearest_is_first_and_then_the_next(public: PublicModel) -> None:
    matcher = Planned(public, torch.linspace(0.5, 1, public.vocab_size))
    guess, _, _ = pick(public, matcher, range(40))
    assert guess == (0, 1, 2, 3, 4)
    assert matcher.taken == [0]


def test_who_is_certain_ends_the_search_with_its_block(public: PublicModel) -> None:
    """The first block has 32; candidates behind it are not run."""
    distances_V = torch.full((public.vocab_size,), 0.9)
    distances_V[20] = 0.0
    guess, sure, work = pick(public, Planned(public, distances_V), range(300))
    assert (guess[0], sure, work.modelled, work.compared) == (20, True, 32, 32)
    distances_V[20], distances_V[100] = 0.9, 5e-4
    guess, sure, work = pick(public, Planned(public, distances_V), range(320))
    assert (guess[0], sure, work.modelled) == (100, True, 288)


def test_of_several_that_are_certain_the_most_expected_is_first(public: PublicModel) -> None:
    distances_V = torch.full((public.vocab_size,), 0.9)
    distances_V[[4, 20]] = torch.tensor([0.0, 9e-4])
    matcher = Planned(public, distances_V)
    guess, sure, _ = pick(public, matcher, list(reversed(range(30))))
    assert guess[:2] == (20, 4)
    assert len(set(guess)) == len(guess) == TOP
    assert sure
    assert matcher.taken == [20]


@pytest.mark.parametrize(("second", "sure"), [(1.0, True), (0.8, True), (0.55, False)])
def test_a_candidate_stands_out_from_the_next(
    public: PublicModel, second: float, sure: bool
) -> None:
    distances_V = torch.full((public.vocab_size,), second)
    distances_V[7] = 0.5
    guess, found, _ = pick(public, Planned(public, distances_V), range(40))
    assert guess[0] == 7
    assert found is sure


def test_what_is_no_number_is_far(public: PublicModel) -> None:
    distances_V = torch.full((public.vocab_size,), float("nan"))
    distances_V[7] = 3.0
    guess, _, _ = pick(public, Planned(public, distances_V), range(40))
    assert guess[0] == 7


def test_one_candidate_alone_is_taken(public: PublicModel) -> None:
    guess, sure, _ = pick(public, Blind(), [7])
    assert guess == (7,)
    assert not sure


def test_readings_are_scored_as_they_are(public: PublicModel) -> None:
    """Through a whole attack: the first layer by look-up, one deeper by search."""
    view = view_of(public, planted(public, IDS, 15, places=[FIRST, DEEP]), tokens=6)
    found = scores_of(PlainMatching(), view, [truth_of(IDS, 15)])
    assert {where: one.top1.n for where, one in found.items()} == {
        "layer 0 qkv_proj": 20,
        "layer 1 gate_up_proj": 6,
    }
    assert all(share(one) == 1 for one in found.values())
    assert all(isinstance(one, Reading) for one in PlainMatching().read(view, Work()))


def test_planted_inputs_are_those_of_one_pass(public: PublicModel) -> None:
    """What these tests plant is what the model computes."""
    inputs = inputs_of(public, IDS[:3])
    assert torch.equal(inputs[FIRST], public.dictionary_VD[IDS[:3]])
    assert {len(rows) for rows in inputs.values()} == {3}
