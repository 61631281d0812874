"""Noise of other strengths: the same policy otherwise, its harm, and the best that is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.errors import SettingsError
from tee_side.policy.placement import load_policy
from tests.kit.rows import each_row
from tsqp.lab.leak.curves import (
    harm,
    is_noisy,
    noisy_mask,
    parameter,
    strength,
    with_sigma,
)
from tsqp.lab.research.feature_rotation import FeatureRotation
from tsqp.lab.research.segment_rotation import SegmentRotation

# The longest of its embedding's rows is 5 long.
PUBLIC: Any = SimpleNamespace(
    config=SimpleNamespace(hidden_size=48), embedding_VD=torch.tensor([[3.0, 4.0], [4.0, 0.0]])
)
NOISY = {
    "float-noise": ("sigma", 4.0),
    "cloak": ("epsilon", FeatureRotation(sigma=4.0).epsilon(48)),
    "cloak-segment": ("epsilon", SegmentRotation(sigma=4.0).epsilon(5.0)),
}


@each_row(("name", "called", "expected"), [(name, *found) for name, found in NOISY.items()])
def test_only_the_strength_changes(name: str, called: str, expected: float) -> None:
    """It is epsilon where the mask states that."""
    policy = load_policy(name)
    before = policy.model_dump()
    assert (noisy_mask(policy) is not None, is_noisy(policy)) == (True, name == "float-noise")
    changed = with_sigma(policy, 4.0)
    assert is_noisy(changed)
    assert (parameter(changed), strength(changed, 4.0, PUBLIC)) == (called, expected)
    assert policy.model_dump() == before
    sigma = next(mask.sigma for mask in policy.masks if hasattr(mask, "sigma"))
    assert with_sigma(changed, sigma).model_dump() == before
    with pytest.raises(SettingsError, match=rf"^sigma of a curve, policy {name}: sigma: got "):
        with_sigma(policy, -1.0)


def test_perplexity_is_that_of_the_tokens_that_follow() -> None:
    """Uniform logits say as much as the vocabulary is large; the last row says nothing."""
    flat, sure = torch.zeros(3, 8), torch.full((3, 8), -50.0)
    sure[0, 1] = sure[1, 2] = 50.0
    half, short = sure.clone(), torch.full((2, 8), -50.0)
    half[0, 3] = short[0, 1] = 50.0
    for noisy, perplexity in ((flat, 8.0), (sure, 1.0), (half, 2**0.5)):
        assert harm([[0, 1, 2]], [flat + 1], [noisy]).perplexity == pytest.approx(perplexity)
    # A mean over all tokens, not over texts.
    found = harm([[0, 1, 2], [0, 1]], [flat + 1, short], [flat, short])
    assert found.perplexity == pytest.approx(8 ** (2 / 3))
    # The error is relative to the logits.
    plain = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    noisy = plain + torch.tensor([[0.0, 0.0], [0.6, 0.8]])
    assert harm([[0, 1]], [plain], [noisy]).output_error == pytest.approx(0.2)
