"""Noise of other strengths: the same policy otherwise, its harm, and the best that is read."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError
from tee_side.policy.placement import Policy, builtin_policies, load_policy
from tests.unit.tsqp.leak.leaks import Models, tiny
from tsqp.lab.leak.curves import (
    Harm,
    curve,
    harm,
    is_noisy,
    noisy_mask,
    parameter,
    point_of,
    strength,
    with_sigma,
)
from tsqp.lab.leak.model import AttackRun, Control, Point, Rate, Score
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.record_session import PlaySettings, logits_of
from tsqp.lab.research.feature_rotation import FeatureRotation
from tsqp.lab.research.segment_rotation import SegmentRotation

# The longest of its embedding's rows is 5 long.
PUBLIC: Any = SimpleNamespace(
    config=SimpleNamespace(hidden_size=48), embedding_VD=torch.tensor([[3.0, 4.0], [4.0, 0.0]])
)
HARM = Harm(perplexity=12.5, output_error=0.25)


def run(name: str, *rates: tuple[int, int], worked: bool = True, chance: float = 0.01) -> AttackRun:
    """Return what an attack read at places 0, 1, ..."""
    scores = tuple(
        Score(
            where=f"place {number}",
            top1=Rate(hits=hits, n=n),
            top5=Rate(hits=hits, n=n),
            prompt=Rate(hits=0, n=0),
            answer=Rate(hits=hits, n=n),
            whole=Rate(hits=0, n=1),
            chance=chance,
            guessed=n,
            kinds=hits,
        )
        for number, (hits, n) in enumerate(rates)
    )
    control = Control(
        attack=name,
        policy="tsqp",
        where="place 0",
        rate=Rate(hits=100 if worked else 10, n=100),
        published=0.9,
    )
    return AttackRun(
        attack=name,
        service=1,
        refused=None,
        control=control,
        scores=scores,
        compared=0,
        modelled=0,
        cpu_s=0.0,
    )


def sigmas(policy: Policy) -> set[float]:
    return {mask.sigma for mask in policy.masks if hasattr(mask, "sigma")}


def test_which_policies_have_noise() -> None:
    noisy = {name for name in builtin_policies() if noisy_mask(load_policy(name)) is not None}
    assert noisy == {"float-noise", "cloak", "cloak-segment"}
    # A cloak could have some, and has none until it is told to.
    assert {name for name in builtin_policies() if is_noisy(load_policy(name))} == {"float-noise"}
    assert is_noisy(with_sigma(load_policy("cloak"), 0.5))


@pytest.mark.parametrize(
    ("sigmas", "noisy"),
    [((0.0, 2.0), True), ((0.0, 0.0), False), ((None, "2"), False), ((), False)],
)
def test_any_mask_with_noise_makes_a_policy_noisy(sigmas: tuple[object, ...], noisy: bool) -> None:
    """Whatever the masks of others mean by sigma."""
    masks = [SimpleNamespace(sigma=sigma) for sigma in sigmas]
    policy: Any = SimpleNamespace(masks=[SimpleNamespace(), *masks])
    assert is_noisy(policy) is noisy


@pytest.mark.parametrize("name", ["float-noise", "cloak", "cloak-segment"])
def test_only_the_strength_changes(name: str) -> None:
    policy = load_policy(name)
    before = policy.model_dump()
    changed = with_sigma(policy, 3.5)
    assert sigmas(changed) == {3.5}
    assert policy.model_dump() == before
    back = with_sigma(changed, next(iter(sigmas(policy))))
    assert back.model_dump() == before
    assert [one for one, _ in changed.leaving()] == [one for one, _ in policy.leaving()]


def test_other_options_of_the_mask_stay() -> None:
    policy, mask = load_policy("cloak"), FeatureRotation(block=16, delta=1e-3)
    operators = {
        operator: tuple(p.model_copy(update={"mask": mask if p.mask else None}) for p in placements)
        for operator, placements in policy.operators.items()
    }
    changed = noisy_mask(with_sigma(policy.model_copy(update={"operators": operators}), 2.0))
    assert changed == FeatureRotation(block=16, delta=1e-3, sigma=2.0)


def test_masks_without_noise_stay() -> None:
    for name in ("row-rotation", "tsqp"):
        policy = load_policy(name)
        assert with_sigma(policy, 3.5) == policy
        assert noisy_mask(policy) is None


@pytest.mark.parametrize("sigma", [0.0, -1.0, 1e5])
def test_a_strength_that_the_mask_does_not_take_is_refused(sigma: float) -> None:
    with pytest.raises(SettingsError, match=r"^sigma of a curve, policy float-noise: sigma: got "):
        with_sigma(load_policy("float-noise"), sigma)


def test_a_strength_is_epsilon_where_the_mask_states_it() -> None:
    cloak, noise = (
        with_sigma(load_policy("cloak"), 4.0),
        with_sigma(load_policy("float-noise"), 4.0),
    )
    assert (parameter(cloak), parameter(noise)) == ("epsilon", "sigma")
    assert strength(noise, 4.0, PUBLIC) == 4.0
    assert strength(cloak, 4.0, PUBLIC) == FeatureRotation(sigma=4.0).epsilon(48)
    segment = with_sigma(load_policy("cloak-segment"), 4.0)
    assert parameter(segment) == "epsilon"
    assert strength(segment, 4.0, PUBLIC) == SegmentRotation(sigma=4.0).epsilon(5.0)
    # More noise is a larger sigma, and a smaller epsilon; none an infinite one.
    assert strength(with_sigma(cloak, 8.0), 8.0, PUBLIC) < strength(cloak, 4.0, PUBLIC)
    assert strength(load_policy("cloak"), 0.0, PUBLIC) == math.inf


# ----------------------------------------------------------------------------------------- harm


def test_perplexity_is_that_of_the_tokens_that_follow() -> None:
    """Uniform logits say as much as the vocabulary is large; the last row says nothing."""
    ids = [0, 1, 2]
    flat = torch.zeros(3, 8)
    assert harm([ids], [flat + 1], [flat]).perplexity == pytest.approx(8)
    sure = torch.full((3, 8), -50.0)
    sure[0, 1] = sure[1, 2] = 50.0
    assert harm([ids], [sure], [sure]).perplexity == pytest.approx(1)
    sure[2] = torch.randn(8)
    assert harm([ids], [sure], [sure]).perplexity == pytest.approx(1)
    # Half a chance for one of two tokens.
    half = sure.clone()
    half[0, 3] = 50.0
    assert harm([ids], [sure], [half]).perplexity == pytest.approx(2**0.5)


def test_texts_count_by_their_tokens() -> None:
    """A mean over all tokens, not over texts."""
    long, short = torch.zeros(4, 8), torch.full((2, 8), -50.0)
    short[0, 1] = 50.0
    found = harm([[0, 1, 2, 3], [0, 1]], [long + 1, short], [long, short])
    assert found.perplexity == pytest.approx(8 ** (3 / 4))


def test_the_error_is_relative_to_the_logits() -> None:
    plain = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    noisy = plain + torch.tensor([[0.0, 0.0], [0.6, 0.8]])
    assert harm([[0, 1]], [plain], [noisy]).output_error == pytest.approx(0.2)
    assert harm([[0, 1]], [plain], [plain]).output_error == 0


def test_logits_that_say_nothing_at_all_are_a_large_number() -> None:
    awful = torch.tensor([[1e6, 0.0], [0.0, 0.0]])
    assert math.isfinite(harm([[0, 1]], [awful], [awful]).perplexity)


def test_more_noise_does_more_harm(saved_model: Models, tmp_path: Path) -> None:
    model = tiny(saved_model)
    texts = [list(range(8)), list(range(20, 26))]
    cloak = load_policy("cloak")
    plain = logits_of(load_policy("tee-only"), texts, PlaySettings(model.directory, tmp_path, 1))
    errors = []
    for sigma in (0.001, 0.02, 0.4):
        folder = tmp_path / str(sigma)
        folder.mkdir()
        noisy = logits_of(with_sigma(cloak, sigma), texts, PlaySettings(model.directory, folder, 1))
        errors.append(harm(texts, plain, noisy).output_error)
    assert 0 < 2 * errors[0] < errors[1] < errors[2] / 2


# --------------------------------------------------------------------------------------- points


def point(*runs: AttackRun, sigma: float = 2.0) -> Point:
    return point_of(with_sigma(load_policy("float-noise"), sigma), sigma, runs, HARM, PUBLIC)


def test_a_point_is_the_best_place_of_the_best_attack() -> None:
    found = point(run("a", (10, 100), (60, 100)), run("b", (50, 100)))
    assert (found.attack, found.where, found.rate) == ("a", "place 1", Rate(hits=60, n=100))
    assert (found.sigma, found.strength, found.chance) == (2.0, 2.0, 0.01)
    assert (found.perplexity, found.output_error) == (12.5, 0.25)


def test_the_best_is_the_surest() -> None:
    """Three of three are less than ninety of a hundred."""
    assert point(run("few", (3, 3)), run("many", (90, 100))).attack == "many"


def test_an_attack_that_did_not_work_makes_no_point() -> None:
    """Unless it reads here, which is evidence by itself."""
    found = point(run("failed", (1, 100), worked=False))
    assert (found.attack, found.where, found.rate) == ("none", "none", Rate(hits=0, n=0))
    assert point(run("failed", (1, 100), worked=False), run("b", (0, 100))).attack == "b"
    assert point(run("reads", (70, 100), worked=False), run("b", (0, 100))).attack == "reads"
    assert point().attack == "none"


def test_points_are_sorted_by_strength() -> None:
    points = [point(run("a", (1, 100)), sigma=sigma) for sigma in (4.0, 0.5, 2.0)]
    found = curve(load_policy("float-noise"), 3.5, points, search_sessions=2, search_candidates=64)
    assert [one.sigma for one in found.points] == [0.5, 2.0, 4.0]
    assert (found.policy, found.parameter, found.plain_perplexity) == ("float-noise", "sigma", 3.5)


def test_the_size_that_epsilon_is_about_is_the_hidden_one(saved_model: Models) -> None:
    public = PublicModel(tiny(saved_model).directory)
    cloak = with_sigma(load_policy("cloak"), 4.0)
    found = point_of(cloak, 4.0, [run("a", (1, 100))], HARM, public)
    assert found.strength == FeatureRotation(sigma=4.0).epsilon(public.config.hidden_size)
    made = curve(cloak, HARM.perplexity, [found], search_sessions=1, search_candidates=9)
    assert (made.parameter, made.search_sessions, made.search_candidates) == ("epsilon", 1, 9)
