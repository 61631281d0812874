"""Whatever mixes rows leaves their span, until there are as many rows as dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tee_side.policy.placement import Policy, load_policy
from tests.kit.model import token_ids
from tests.unit.tsqp.leak.leaks import (
    Models,
    linear,
    planted,
    recorded_scores,
    scores_of,
    tiny,
    truth_of,
    view_of,
)
from tsqp.lab.leak.attack import Work
from tsqp.lab.leak.attacks.row_space import RowSpace, SubspaceMembership
from tsqp.lab.leak.matching import FIRST, Observed, Present
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, play
from tsqp.lab.leak.trace import Trace, Where
from tsqp.lab.research.row_rotation import RowRotation

PROMPT = 8
HIDDEN = 48
SIZES = {"qkv_proj": 48, "o_proj": 96, "gate_up_proj": 48, "down_proj": 96}


@pytest.fixture
def public(saved_model: Models) -> PublicModel:
    return PublicModel(tiny(saved_model).directory)


def text(public: PublicModel, count: int = 12, seed: int = 0) -> list[int]:
    """Return a text whose second token is the one that the model expects."""
    ids = token_ids(count, seed)
    ids[1] = int(public.likely(public.extend(public.nothing(), ids[0]))[0])
    assert ids[1] not in (ids[0], *ids[2:])
    return ids


@pytest.fixture
def ids(public: PublicModel) -> list[int]:
    return text(public)


def mixed(rows_RI: torch.Tensor) -> torch.Tensor:
    """Mix rows by a random invertible matrix."""
    return torch.randn(len(rows_RI), len(rows_RI)) @ rows_RI


def shielded(rows: int) -> object:
    """Return what mixes rows with some random ones."""

    def change(rows_RI: torch.Tensor) -> torch.Tensor:
        return mixed(torch.cat([rows_RI, torch.randn(rows, rows_RI.shape[1])]))

    return change


def with_shield(rows: int) -> Policy:
    """The policy row-rotation with a number of shield rows."""
    policy, mask = load_policy("row-rotation"), RowRotation(shield_rows=rows)
    operators = {
        operator: tuple(p.model_copy(update={"mask": mask if p.mask else None}) for p in placements)
        for operator, placements in policy.operators.items()
    }
    return policy.model_copy(update={"operators": operators})


def observed(rows_RI: torch.Tensor) -> Observed:
    return Observed(FIRST, rows_RI, 0, len(rows_RI), 1e-3)


# ------------------------------------------------------------------------------------ distances


def test_rows_of_a_call_are_in_its_span_and_others_are_not(
    public: PublicModel, ids: list[int]
) -> None:
    table_VD = public.dictionary_VD
    for change in (mixed, shielded(10)):
        assert callable(change)
        distances_V = RowSpace().distances(observed(change(table_VD[ids])), 0, table_VD)
        assert set((distances_V < 1e-3).nonzero()[:, 0].tolist()) == set(ids)
        assert distances_V.median() > 0.5


def test_a_distance_is_the_sine_of_the_angle_to_the_span() -> None:
    """Near the span, too, where most digits cancel."""
    rows = torch.eye(4)[:2]
    for angle in (1.0, 0.3, 1e-2, 1e-4):
        slope = torch.tensor(angle).tan()
        candidates = torch.tensor([[3.0, 4.0, 5.0 * slope, 0.0]])
        found = RowSpace().distances(observed(rows), 0, candidates)
        assert float(found[0]) == pytest.approx(float(torch.tensor(angle).sin()), rel=1e-3)


def test_rows_that_repeat_span_no_more(public: PublicModel) -> None:
    """By rounding they would span a dimension of their own."""
    rows = public.dictionary_VD[[5, 9, 5, 9, 5, 9, 5]]
    many = torch.randn(HIDDEN, 7) @ rows
    distances_V = RowSpace().distances(observed(many), 0, public.dictionary_VD)
    assert (distances_V < 1e-3).nonzero()[:, 0].tolist() == [5, 9]


def test_each_request_has_its_own_span() -> None:
    matcher, candidates = RowSpace(), torch.eye(4)
    for row in (0, 3, 0):
        found = matcher.distances(observed(torch.eye(4)[row : row + 1]), 0, candidates)
        assert found.argmin() == row
        assert found.tolist() == pytest.approx([float(other != row) for other in range(4)])
    other = matcher.distances(observed(torch.eye(4)[:1]), 0, 2 * torch.eye(4).flip(0))
    assert other.argmin() == 3


def test_rows_that_span_everything_say_nothing() -> None:
    found = RowSpace().distances(observed(torch.randn(8, 8)), 0, torch.randn(5, 8))
    assert torch.isinf(found).all()


# -------------------------------------------------------------------------------------- attacks


@pytest.mark.parametrize("shield", [0, 8, 30])
def test_mixed_rows_are_read(public: PublicModel, ids: list[int], shield: int) -> None:
    """At decode in the first layer, and everything deeper, while there are fewer rows than D."""
    change = shielded(shield) if shield else mixed
    assert callable(change)
    trace = planted(public, ids, PROMPT, change)
    found = scores_of(SubspaceMembership(), view_of(public, trace), [truth_of(ids, PROMPT)])
    first = found.pop("layer 0 qkv_proj")
    assert (first.answer.hits, first.answer.n, first.prompt.hits) == (4, 4, 0)
    assert len(found) == 7
    assert {(one.top1.hits, one.top1.n) for one in found.values()} == {(12, 12)}


def test_a_token_that_comes_twice_is_read_twice(public: PublicModel, ids: list[int]) -> None:
    ids = [*ids[:4], ids[2], ids[2], *ids[6:10], ids[2], ids[11]]
    trace = planted(public, ids, PROMPT, mixed)
    found = scores_of(SubspaceMembership(), view_of(public, trace), [truth_of(ids, PROMPT)])
    deep = found["layer 1 qkv_proj"]
    assert (deep.top1.hits, deep.top1.n) == (12, 12)


def test_a_token_is_not_taken_for_its_own_repetition(public: PublicModel) -> None:
    """Behind itself alone it attends to itself alone, and has the state that crossed already."""
    for seed in range(4):
        ids = token_ids(6, seed)
        view = view_of(public, planted(public, ids, 5, mixed, [FIRST, (1, "qkv_proj")]))
        found = scores_of(SubspaceMembership(), view, [truth_of(ids, 5)])
        assert found["layer 1 qkv_proj"].top1.hits == 6


def test_other_rows_are_not_read(public: PublicModel, ids: list[int]) -> None:
    """Noise in place of rows has another span."""
    trace = planted(public, ids, PROMPT, torch.randn_like)
    found = scores_of(SubspaceMembership(), view_of(public, trace), [truth_of(ids, PROMPT)])
    assert all(one.top1.hits <= 1 for one in found.values())


@pytest.mark.parametrize("place", [FIRST, (1, "qkv_proj"), (1, "down_proj")])
def test_as_many_rows_as_dimensions_give_no_guess(
    public: PublicModel, ids: list[int], place: Where
) -> None:
    """All candidates are in the span, and none is more likely than another."""
    change = shielded(SIZES[place[1]])
    assert callable(change)
    trace = planted(public, ids, PROMPT, change, [place])
    readings = list(SubspaceMembership().read(view_of(public, trace), Work()))
    assert [guess for one in readings for guess in one.guesses.values()] == []


def test_a_set_that_spans_everything_says_nothing_of_who_is_there(
    public: PublicModel, ids: list[int]
) -> None:
    """So that a search at a wider place is not narrowed to some tokens by their number."""
    change = shielded(HIDDEN)
    assert callable(change)
    places = [FIRST, (1, "down_proj")]
    view = view_of(public, planted(public, ids, PROMPT, change, places))
    among = Present(view, RowSpace()).among(0, view.traces[0].steps[0], Work())
    assert among is None or len(among) == public.vocab_size


def test_a_prompt_too_long_is_read_where_there_is_more_room(public: PublicModel) -> None:
    """50 rows fill 48 dimensions and do not fill 96."""
    ids = text(public, 54, seed=4)
    trace = planted(public, ids, 50, mixed, [FIRST, (1, "qkv_proj"), (1, "down_proj")])
    found = scores_of(SubspaceMembership(), view_of(public, trace), [truth_of(ids, 50)])
    assert found["layer 0 qkv_proj"].answer.hits == 4
    assert (found["layer 1 down_proj"].top1.hits, found["layer 1 down_proj"].top1.n) == (54, 54)


@pytest.mark.parametrize(
    ("policy", "read"),
    [
        (load_policy("row-rotation"), True),
        (load_policy("row-mix"), True),
        (with_shield(30), True),
        (with_shield(HIDDEN), False),
    ],
    ids=["row-rotation", "row-mix", "30", "48"],
)
def test_masks_are_read_while_they_leave_room(
    saved_model: Models, tmp_path: Path, policy: Policy, read: bool
) -> None:
    """Decoded tokens in the first layer, and 48 shield rows against 48 dimensions."""
    directory = tiny(saved_model).directory
    prompts = [text(PublicModel(directory), PROMPT, seed) for seed in range(2)]
    recording = play(policy, prompts, PlaySettings(directory, tmp_path, 5))
    found = recorded_scores(SubspaceMembership(), PublicModel(directory), recording)
    if read:
        first, deep = found["layer 0 qkv_proj"].answer, found["layer 1 gate_up_proj"].top1
        assert (first.hits, first.n) == (8, 8)
        assert (deep.hits, deep.n) == (24, 24)
    else:
        assert sum(one.top1.hits for where, one in found.items() if SIZES[where[8:]] == HIDDEN) == 0


def test_nothing_that_crossed_is_refused(public: PublicModel) -> None:
    assert SubspaceMembership().refuses(view_of(public, Trace(()))) == "no activations crossed"
    some = Trace((linear((1, "o_proj"), torch.ones(1, 96)),))
    assert SubspaceMembership().refuses(view_of(public, some)) is None
