"""The attack on noise reads as far as the noise is small, and as its size is known."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from protocol.messages import FUSED_MODULES, LinearOperator
from tee_side.policy.placement import Policy
from tests.kit.leaks import FIRST_PLACE, planted, policy_with, scores_of, truth_of, view_of
from tests.kit.rows import each_row
from tsqp.lab.leak.attack import Work
from tsqp.lab.leak.attacks import noise
from tsqp.lab.leak.attacks.noise import NoiseAveraging
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.trace import Trace, Where

TOKENS, PROMPT = 16, 8
ALL = "all places"
Sigmas = Mapping[LinearOperator, float]


def everywhere(sigma: float) -> dict[LinearOperator, float]:
    return dict.fromkeys(FUSED_MODULES, sigma)


def policy(sigmas: Sigmas) -> Policy:
    """Return a policy with noise of a size for each operator; the others stay."""
    masks = {name: {"name": "float-noise", "sigma": sigma} for name, sigma in sigmas.items()}
    sent = {"place": "gpu", "verify": "none"}
    return policy_with(**{name: {**sent, "mask": mask} for name, mask in masks.items()})


def said(public: PublicModel) -> list[int]:
    """Return tokens that the model says by itself, behind the one in front of every text."""
    prefix = public.extend(public.nothing(), 0)
    while prefix.tokens < TOKENS:
        assert prefix.logits_V is not None
        prefix = public.extend(prefix, int(prefix.logits_V.softmax(-1).multinomial(1)))
    return list(prefix.token_ids)


def session(public: PublicModel, ids: list[int], sigmas: Sigmas) -> Trace:
    """Return what a service gets: what the model computes, and noise on it."""

    def noisy(rows_RI: torch.Tensor, where: Where) -> torch.Tensor:
        sigma = next(size for name, size in sigmas.items() if name == where[1])
        return rows_RI + sigma * torch.randn_like(rows_RI)

    places: list[Where] = [(layer, operator) for layer in (0, 1) for operator in sigmas]
    return planted(public, ids, PROMPT, places, noisy)


def shares(public: PublicModel, sigmas: Sigmas, known: Sigmas | None = None) -> dict[str, float]:
    """Plant noise under a policy that says so (or something else: `known`); return what is read."""
    texts = [said(public) for _ in range(2)]
    traces = [session(public, ids, sigmas) for ids in texts]
    view = view_of(public, *traces, policy=policy(sigmas if known is None else known))
    found = scores_of(NoiseAveraging(), view, [truth_of(ids, PROMPT) for ids in texts])
    return {where: one.top1.hits / one.top1.n for where, one in found.items()}


@each_row(
    ("sigma", "first", "everything"),
    [(0.3, (1, 1), (1, 1)), (3.0, (0, 0.5), (0.97, 1)), (1000.0, (0, 0.07), (0, 0.15))],
)
def test_what_one_row_does_not_tell_all_places_together_do(
    public: PublicModel,
    sigma: float,
    first: tuple[float, float],
    everything: tuple[float, float],
) -> None:
    """Under noise that drowns everything the token in front alone is known."""
    found = shares(public, everywhere(sigma))
    assert first[0] <= found[FIRST_PLACE] <= first[1]
    assert everything[0] <= found[ALL] <= everything[1]


def test_places_count_by_how_little_noise_they_have(public: PublicModel) -> None:
    sigmas: Sigmas = {**everywhere(40.0), "gate_up_proj": 0.8}
    assert shares(public, sigmas)[ALL] >= 0.97
    # As if they all had the same.
    assert shares(public, sigmas, known=everywhere(40.0))[ALL] < 0.5


def test_a_path_that_was_misread_is_left_again(
    public: PublicModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = shares(public, everywhere(8.0))[ALL]
    monkeypatch.setattr(noise, "_KEPT", 1)
    torch.manual_seed(0)
    assert several > shares(public, everywhere(8.0))[ALL]


def test_a_search_goes_as_far_as_it_is_told(public: PublicModel) -> None:
    """Four times as far as one at a single place, since it goes through all places at once."""
    sigmas = everywhere(1.0)
    traces = [session(public, said(public), sigmas) for _ in range(6)]
    view = view_of(public, *traces, policy=policy(sigmas), sessions=1, tokens=11)
    found = list(NoiseAveraging().read(view, Work()))
    assert [(one.where, one.session, len(one.tokens)) for one in found] == [
        *((FIRST_PLACE, number, TOKENS) for number in range(6)),
        *((ALL, number, 11) for number in range(4)),
    ]
