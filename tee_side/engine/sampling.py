"""Tokens that are not simply the likeliest: bias, penalties, and random draws.

Order and meaning of the steps are those of `transformers.generate`. Frequency and presence
penalties, which it has not, come after its repetition penalty. A run that samples greedily does not
import it.
"""

import secrets
from collections.abc import Sequence

import numpy as np
import torch

from tee_side.engine.request import SEEDS, SamplingSettings

# Below it float32 would overflow; long before, sampling is greedy.
MIN_TEMPERATURE = 1e-6


class AskedSampling:
    """What a request's settings make of the scores of one sequence, with a generator of its own.

    `prompt_tokens`, `sample`: see `Sampler`.
    """

    def __init__(self, settings: SamplingSettings, prompt_tokens: int, sample: int) -> None:
        self._settings, self._prompt_tokens = settings, prompt_tokens
        self._bias = (
            torch.tensor(list(settings.logit_bias), dtype=torch.int64),
            torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32),
        )
        factor, frequency = settings.repetition_penalty, settings.frequency_penalty
        self._penalized = (factor, frequency, settings.presence_penalty) != (1.0, 0.0, 0.0)
        # Which tokens the sequence has, of how many that were read.
        self._read = 0
        self._any_V, self._generated_V = torch.empty(0, dtype=torch.bool), torch.empty(0)
        self._generator = torch.Generator()
        seed = secrets.randbits(63) if settings.seed is None else (settings.seed + sample) % SEEDS
        self._generator.manual_seed(seed)

    def choose(self, scores_V: torch.Tensor, previous_ids: Sequence[int]) -> int:
        """Return the next token id, of float32 scores; `previous_ids`: see `Sampler.sample`."""
        if self._settings.logit_bias:
            scores_V = scores_V.index_add(0, *self._bias)
        if self._penalized:
            self._count(previous_ids, len(scores_V))
            scores_V = penalize(scores_V, self._any_V, self._generated_V, self._settings)
        greedy = self._settings.temperature == 0
        return int(scores_V.numpy().argmax()) if greedy else self._draw(scores_V)

    def _count(self, ids: Sequence[int], vocab_size: int) -> None:
        """Count the tokens that are new: read once each, a long text costs no more a token."""
        if not self._read:
            self._any_V = torch.zeros(vocab_size, dtype=torch.bool)
            self._generated_V = torch.zeros(vocab_size)
        new = torch.tensor(ids[self._read :], dtype=torch.int64)
        generated = new[max(self._prompt_tokens - self._read, 0) :]
        self._any_V[new] = True
        self._generated_V.index_add_(0, generated, torch.ones(len(generated)))
        self._read = len(ids)

    def _draw(self, scores_V: torch.Tensor) -> int:
        """Invert the cumulative distribution at one uniform number, in float64.

        `multinomial` takes ten times as long. The first token whose sum is above the number never
        has probability 0, and there is one: the number is below the last sum.
        """
        sums_V = warp(scores_V, self._settings).softmax(-1).cumsum(-1, dtype=torch.float64)
        uniform = torch.rand((), dtype=torch.float64, generator=self._generator)
        return int(torch.searchsorted(sums_V, uniform * sums_V[-1], right=True))


def penalize(
    scores_V: torch.Tensor,
    any_V: torch.Tensor,
    generated_V: torch.Tensor,
    settings: SamplingSettings,
) -> torch.Tensor:
    """Lower the scores of tokens seen before.

    `any_V` bool: in prompt or answer; their positive scores are divided, negative ones multiplied
    (arXiv 1909.05858). `generated_V`: how often in the answer; subtracted as OpenAI says.
    """
    factor = settings.repetition_penalty
    frequency, presence = settings.frequency_penalty, settings.presence_penalty
    if factor != 1.0:
        lower_V = torch.where(scores_V < 0, scores_V * factor, scores_V / factor)
        scores_V = torch.where(any_V, lower_V, scores_V)
    if frequency or presence:
        scores_V = scores_V - (generated_V * frequency + (generated_V > 0) * presence)
    return scores_V


def warp(scores_V: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply temperature, then top-k, top-p and min-p; what they cut off gets -inf."""
    scores_V = scores_V / max(settings.temperature, MIN_TEMPERATURE)
    cut = float("-inf")
    if 0 < settings.top_k < (size := scores_V.numel()):
        kth = float(np.partition(scores_V.numpy(), size - settings.top_k)[size - settings.top_k])
        scores_V = scores_V.masked_fill(scores_V < kth, cut)
    if settings.top_p < 1.0:
        scores_V = scores_V.masked_fill(_outside(scores_V, settings.top_p), cut)
    if settings.min_p > 0:
        probs_V = scores_V.softmax(-1)
        scores_V = scores_V.masked_fill(probs_V < settings.min_p * probs_V.max(), cut)
    return scores_V


def _outside(scores_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Say which tokens the likeliest ones with `top_p` together leave out.

    As after a stable sort: of equals, the first leave first. numpy sorts values alone with vector
    instructions, in a thirtieth of the time of a sort that says where each came from.
    """
    ascending_V = torch.from_numpy(np.sort(scores_V.numpy()))
    sums_V = ascending_V.softmax(-1).cumsum(-1)
    count = int(torch.searchsorted(sums_V, torch.tensor(1 - top_p), right=True))
    count = min(count, scores_V.numel() - 1)  # the most likely token always stays
    edge = ascending_V[count]
    outside_V = scores_V < edge
    if equal := count - int(torch.searchsorted(ascending_V, edge)):
        outside_V[(scores_V == edge).nonzero()[:equal, 0]] = True
    return outside_V
