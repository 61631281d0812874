"""Services in this process that hold a part of every weight's columns."""

from __future__ import annotations

from pathlib import Path

import torch

from protocol.messages import (
    EmbeddingRequest,
    MatmulRequest,
    Request,
    Response,
    TensorReply,
)
from protocol.model.columns import part_of
from protocol.model.config import read_config
from protocol.tensors import from_torch, to_torch
from tee_side.remote.services.columns import ColumnParts
from tests.kit.lie import Change, Lying


class PartOf(Lying):
    """A service that holds part `part` of `parts`: it cuts what one that has all would answer.

    `at`: which of its replies `change` changes; -1: none.
    """

    def __init__(
        self,
        directory: Path,
        part: int,
        parts: int,
        change: Change = lambda y: y,
        *,
        at: int = -1,
        others: bool = False,
        dtype: str = "float32",
    ) -> None:
        super().__init__(directory, lambda y: y, dtype=dtype, others=others)
        self.endpoint = f"part-{part}"
        self._part, self._wrong, self._wrong_at = (part, parts), change, at
        self._sizes = read_config(directory)
        self.replies = 0

    def answer(self, request: Request) -> Response:
        """Compute the true reply, cut it, and change it where that is due."""
        reply = super().answer(request)
        if not isinstance(reply, TensorReply) or isinstance(request, MatmulRequest):
            return reply
        y = to_torch(reply.output)
        if isinstance(request, EmbeddingRequest):
            mine = part_of(self._sizes.vocab_size, *self._part)
            ids = to_torch(request.input_ids)
            y = torch.where(((ids >= mine.start) & (ids < mine.stop))[..., None], y, 0)
        else:
            names = getattr(request, "module_names", ())
            sizes = [self._sizes.module_shape(name)[0] for name in names]
            modules = y.split(sizes or [self._sizes.vocab_size], -1)
            y = torch.cat([one[..., part_of(one.shape[-1], *self._part)] for one in modules], -1)
        self.replies += 1
        if self.replies - 1 == self._wrong_at and not self.distrusted:
            y = self._wrong(y.clone())
        return TensorReply(output=from_torch(y.contiguous()))


def over(*parts: PartOf) -> ColumnParts:
    """Return the channel over parts of one model."""
    return ColumnParts(parts, parts[0]._sizes)
