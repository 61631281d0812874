"""Log-probabilities of tokens, from the raw logits: no sampling setting changes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tee_side.engine.request import Logprob

MAX_TOP = 20


def logprobs_of(logits_V: torch.Tensor, token_id: int, count: int) -> Logprob:
    """Return the log-probability of a token and of the `count` likeliest; of equals the lower id.

    All come from one log-softmax in float32, so a token among the likeliest has one number.
    `count`: 0 to MAX_TOP; the vocabulary, where that is smaller.
    """
    logprobs_V = logits_V.to(torch.float32).log_softmax(-1).numpy()
    top = [(int(i), float(logprobs_V[i])) for i in _likeliest(logprobs_V, count)]
    return Logprob(token_id, float(logprobs_V[token_id]), tuple(top))


def prompt_logprobs(
    logits_NV: torch.Tensor, token_ids: Sequence[int], count: int
) -> tuple[Logprob, ...]:
    """Return `logprobs_of` of each row and its token.

    Row by row: whatever rows are beside it, a row's numbers are those of its token alone.
    """
    pairs = zip(logits_NV, token_ids, strict=True)
    return tuple(logprobs_of(logits_V, token_id, count) for logits_V, token_id in pairs)


def _likeliest(logprobs_V: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the largest values, largest first, of equals the lower id first."""
    count = min(count, len(logprobs_V))
    if not count:
        return np.empty(0, dtype=np.int64)
    last = np.partition(logprobs_V, -count)[-count]
    above = np.flatnonzero(logprobs_V > last)
    equal = np.flatnonzero(logprobs_V == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-logprobs_V[above], kind="stable")], equal])
