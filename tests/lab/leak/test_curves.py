"""Noise of other strengths: the same policy otherwise, its harm, and the best that is read."""

from __future__ import annotations

import pytest
import torch

from tsqp.lab.leak.curves import harm


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
