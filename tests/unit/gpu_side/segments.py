"""Requests for whole layers, as tests of a service ask them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpu_side.handler import RequestHandler
from gpu_side.transport.listener import Incoming
from protocol.messages import SegmentRequest, TensorReply
from protocol.tensors import from_torch, to_torch


def part(
    session: int, start: int, rows: int, *, length: int | None = None, parent: int = 0
) -> list[int]:
    """Return the numbers of one part; sessions are small numbers here."""
    length = start + rows if length is None else length
    return [7 * bool(session), session, start, rows, length, 7 * bool(parent), parent]


def segment(
    hidden: torch.Tensor, parts: Sequence[Sequence[int]], layers: tuple[int, int], **fields: Any
) -> SegmentRequest:
    """Return a request that wants all rows, unless `outputs` are among `fields`."""
    outputs = fields.pop("outputs", torch.arange(len(hidden)))
    return SegmentRequest(
        first_layer=layers[0],
        last_layer=layers[1],
        hidden_states=from_torch(hidden),
        parts=from_torch(torch.tensor(parts)),
        outputs=from_torch(outputs),
        **fields,
    )


@dataclass
class Client:
    """One client of a service in this process."""

    handler: RequestHandler
    name: bytes = b"client"

    def ask(self, request: SegmentRequest) -> torch.Tensor:
        """Return what the service computes."""
        incoming = Incoming((self.name,), [], 0)
        reply, work = self.handler.prepare(request)(request, incoming)
        assert work is None
        assert isinstance(reply, TensorReply)
        return to_torch(reply.output)
