"""What is wanted besides a continuation: log-probabilities, or the embedding of a prompt."""

from collections.abc import Sequence

import numpy as np
import torch

from tee_side.engine.request import Logprob, PromptRead, Request
from tee_side.model.operators import Operators, TeeModel, logits
from tee_side.remote.call import run

MAX_TOP = 20
# Rows whose logits are held at a time: 16 MiB with a vocabulary of 128,000.
_HEAD_ROWS = 32


class PromptReader:
    """Reads the hidden states of one prompt, a chunk at a time, in order.

    Row p of the prompt says how likely token p + 1 is. The LM head is the TEE's own: how many rows
    are read is not the GPU side's to know. However the prompt is cut, each row is computed alone
    and added in order, so what is found has the same bits.
    """

    def __init__(self, request: Request) -> None:
        self._count, self._pooling = request.prompt_logprobs, request.pooling
        self._ids = request.prompt_ids
        self._logprobs: list[Logprob] = []
        self._sum_D: torch.Tensor | None = None
        last = len(self._ids) - 1
        self._end = last if self._count is not None else last + 1
        # The next position whose row is wanted: a prompt whose keys were lost is computed again.
        self._next = last if self._count is None and self._pooling != "mean" else 0

    def rows(self, start: int, count: int) -> range:
        """Return which of `count` rows from position `start` on are wanted, from the first of them.

        Those of log-probabilities have a next token in the prompt.
        """
        first, end = max(self._next, start), min(self._end, start + count)
        return range(first - start, max(first, end) - start)

    @torch.inference_mode()
    def read(
        self, hidden_RD: torch.Tensor, start: int, model: TeeModel, ops: Operators
    ) -> list[Logprob]:
        """Return the log-probabilities that rows from position `start` on give; none for pooling.

        Changes nothing: the step may still fail. Raises as `logits`.
        """
        found: list[Logprob] = []
        if self._count is None:
            return found
        for first in range(0, len(hidden_RD), _HEAD_ROWS):
            logits_NV = run(logits(hidden_RD[first : first + _HEAD_ROWS], model, ops))
            at = start + len(found) + 1
            ids = self._ids[at : at + len(logits_NV)]
            # Row by row: whatever rows are beside it, a row's numbers are those of its token alone.
            pairs = zip(logits_NV, ids, strict=True)
            found += [logprobs_of(logits_V, token_id, self._count) for logits_V, token_id in pairs]
        return found

    @torch.inference_mode()
    def keep(self, found: Sequence[Logprob], hidden_RD: torch.Tensor, model: TeeModel) -> None:
        """Take what `read` returned, once the step has come to its end."""
        self._logprobs += found
        self._next += len(hidden_RD)
        if self._pooling is None:
            return
        for row_D in model.norm(hidden_RD).double():
            self._sum_D = row_D.clone() if self._sum_D is None else self._sum_D.add_(row_D)

    def result(self) -> PromptRead:
        """Return what was read, once the prompt has been."""
        pooled_D = self._sum_D
        if pooled_D is not None and self._pooling == "mean":
            pooled_D = pooled_D / len(self._ids)
        return PromptRead(tuple(self._logprobs), pooled_D)


def logprobs_of(logits_V: torch.Tensor, token_id: int, count: int) -> Logprob:
    """Return the log-probability of a token and of the `count` likeliest; of equals the lower id.

    All come from one log-softmax in float32, so a token among the likeliest has one number.
    `count`: 0 to MAX_TOP; the vocabulary, where that is smaller.
    """
    logprobs_V = logits_V.to(torch.float32).log_softmax(-1).numpy()
    top = [(int(i), float(logprobs_V[i])) for i in _likeliest(logprobs_V, count)]
    return Logprob(token_id, float(logprobs_V[token_id]), tuple(top))


def _likeliest(logprobs_V: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the largest values, largest first, of equals the lower id first."""
    count = min(count, len(logprobs_V))
    if not count:
        return np.empty(0, dtype=np.int64)
    last = np.partition(logprobs_V, -count)[-count]
    above = np.flatnonzero(logprobs_V > last)
    equal = np.flatnonzero(logprobs_V == last)[: count - len(above)]
    return np.concatenate([above[np.argsort(-logprobs_V[above], kind="stable")], equal])
