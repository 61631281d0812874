"""Choosing the next token. Order and meaning of the steps are those of `transformers.generate`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

# Below it float32 would overflow; long before, sampling is greedy.
MIN_TEMPERATURE = 1e-6


class SamplingSettings(BaseModel):
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are off.

    `seed` None draws one from the operating system; a fixed seed repeats the same text on the same
    torch version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class Sampler:
    """Draws tokens for one sequence, with a generator of its own."""

    def __init__(self, settings: SamplingSettings) -> None:
        self._settings = settings
        self._generator = torch.Generator()
        seed = settings.seed if settings.seed is not None else secrets.randbits(63)
        self._generator.manual_seed(seed)

    def sample(self, logits_V: torch.Tensor, previous_ids: Sequence[int]) -> int:
        """Return the next token id. `previous_ids`: prompt and what was generated so far."""
        scores_V = penalize_repetition(
            logits_V.to(torch.float32), previous_ids, self._settings.repetition_penalty
        )
        if self._settings.temperature == 0:
            # numpy's takes a tenth of the time of torch's; the first of equals, as there.
            return int(scores_V.numpy().argmax())
        probs_V = warp(scores_V, self._settings).softmax(-1)
        return int(torch.multinomial(probs_V, 1, generator=self._generator))


def penalize_repetition(
    scores_V: torch.Tensor, previous_ids: Sequence[int], penalty: float
) -> torch.Tensor:
    """Divide positive and multiply negative scores of tokens seen before (arXiv 1909.05858)."""
    if penalty == 1.0:
        return scores_V
    ids = torch.tensor(sorted(set(previous_ids)), dtype=torch.int64)
    seen = scores_V[ids]
    return scores_V.index_copy(0, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


def warp(scores_V: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply temperature, then top-k, top-p and min-p; what they cut off gets -inf."""
    scores_V = scores_V / max(settings.temperature, MIN_TEMPERATURE)
    cut = float("-inf")
    if 0 < settings.top_k < scores_V.numel():
        kth = scores_V.topk(settings.top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < kth, cut)
    if settings.top_p < 1.0:
        ascending, order = scores_V.sort()
        outside = ascending.softmax(-1).cumsum(-1) <= 1 - settings.top_p
        outside[-1] = False  # the most likely token always stays
        scores_V = scores_V.masked_fill(torch.zeros_like(outside).scatter(0, order, outside), cut)
    if settings.min_p > 0:
        probs_V = scores_V.softmax(-1)
        scores_V = scores_V.masked_fill(probs_V < settings.min_p * probs_V.max(), cut)
    return scores_V
