"""A service that lies about one tensor, and what the tests of that have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from protocol.channel import Exchange
from protocol.errors import TsqpError
from protocol.messages import (
    LinearRequest,
    Request,
    Response,
    RingLinearRequest,
    RingLMHeadRequest,
    SeededRingLinearRequest,
    TensorReply,
)
from protocol.tensors import from_torch, to_torch
from tee_side.policy.placement import Policy
from tests.support import LoopbackChannel, SavedModel, Tee, expanded, token_ids, with_results

Models = Callable[..., SavedModel]
Change = Callable[[torch.Tensor], torch.Tensor]
PROMPT = token_ids(7)


def everything_verified(name: str) -> Policy:
    """Return a built-in policy with all that leaves verified."""
    return with_results(name, "freivalds")


class Lying(LoopbackChannel):
    """A service that changes the tensor of one request: the `at`-th that `picks` chooses.

    `distrusted`: what it is told, which it takes as if somebody else answered from then on.
    """

    def __init__(
        self,
        directory: Path,
        change: Change,
        picks: Callable[[Request], bool] = lambda _request: True,
        *,
        at: int = 0,
        others: bool = False,
        dtype: str = "float32",
    ) -> None:
        super().__init__(directory, dtype)
        self._change, self._picks, self._at, self._others = change, picks, at, others
        self._seen = 0
        self.lied: list[int] = []
        self.distrusted: list[tuple[Exchange, TsqpError]] = []

    def answer(self, request: Request) -> Response:
        """Compute the true reply, and change it where that is due."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply) or not self._picks(request) or self.distrusted:
            return reply
        self._seen += 1
        if self._seen - 1 != self._at:
            return reply
        self.lied.append(len(self.requests) - 1)
        wrong = self._change(to_torch(reply.output).clone())
        return TensorReply(output=from_torch(wrong.contiguous()))

    def distrust(self, exchange: Exchange, error: TsqpError) -> None:
        """Note it; raise it unless there are others."""
        self.distrusted.append((exchange, error))
        if not self._others:
            raise error


def one_more(y: torch.Tensor) -> torch.Tensor:
    y[(-1,) * y.dim()] += 1
    return y


def site_of(request: Request) -> tuple[int, str] | None:
    if isinstance(request, RingLinearRequest | SeededRingLinearRequest | LinearRequest):
        return request.layer_idx, request.module_names[0]
    if isinstance(request, RingLMHeadRequest):
        return -1, "lm_head"
    return None


def generate(tee: Tee, new_tokens: int = 3) -> list[int]:
    return tee.greedy(PROMPT, new_tokens)


def bytes_of(request: Request) -> bytes:
    return bytes(expanded(request).elements.data)
