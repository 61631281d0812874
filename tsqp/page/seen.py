"""What the owner of a GPU sees of requests: their tensors, and how even their bytes are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from protocol.messages import LinearRequest, Request, RingLinearRequest, SeededRingLinearRequest
from protocol.tensors import WireTensor, to_torch


@dataclass(frozen=True, eq=False)
class Seen:
    """One request as the GPU side receives it; `tensors`: all that it carries, in their order."""

    what: str
    layer: int | None
    tensors: tuple[torch.Tensor, ...]

    @property
    def first(self) -> torch.Tensor:
        """The first tensor, which every request but Init has."""
        return self.tensors[0]

    def numbers(self, count: int) -> list[float]:
        """Return the first few numbers of the first tensor."""
        shown: list[float] = self.first.flatten()[:count].tolist()
        return shown


def describe_request(request: Request) -> Seen | None:
    """Say what a request shows to its receiver; None for Init, which carries no tensor."""
    tensors = tuple(to_torch(value) for _, value in request if isinstance(value, WireTensor))
    if not tensors:
        return None
    what, layer = request.method, None
    if isinstance(request, LinearRequest | RingLinearRequest | SeededRingLinearRequest):
        what, layer = " ".join(request.module_names), request.layer_idx
    return Seen(what, layer, tensors)


@dataclass(frozen=True)
class ByteSummary:
    """How often each of the 256 byte values was sent.

    `rarest`, `commonest`: shares of all bytes, 0 to 1; `entropy_bits`: 8 if all are equally often;
    `even`: whether they are, as far as chance allows (a G-test, which uniform bytes fail once in a
    million runs; too few bytes fail it, too).
    """

    total: int
    values: int
    rarest: float
    commonest: float
    entropy_bits: float
    even: bool


# 255 degrees of freedom: from here on, chi-square's survival function is below 1e-6.
_G_LIMIT = 377.1
# Expected of each value, at least, for the test to say anything.
_EXPECTED = 16


def summarise(counts: npt.NDArray[np.int64]) -> ByteSummary | None:
    """Sum up how often each of the 256 byte values was sent; None if none was."""
    total = int(counts.sum())
    if total == 0:
        return None
    shares = [count / total for count in counts.tolist()]
    entropy = -sum(share * math.log2(share) for share in shares if share)
    g = 2 * total * math.log(2) * (8 - entropy)
    return ByteSummary(
        total=total,
        values=sum(share > 0 for share in shares),
        rarest=min(shares),
        commonest=max(shares),
        entropy_bits=entropy,
        even=total >= 256 * _EXPECTED and g < _G_LIMIT,
    )


@dataclass(slots=True, eq=False)
class Received:
    """What came with some requests. `counts`: of each byte value, over all tensors.

    `inputs`: what the first layer was given, [.., D] each, up to `most_rows` rows; `rows`: how many
    there were. A row is a token's embedding after a norm, unless it is masked.
    """

    most_rows: int | None = None
    requests: int = 0
    rows: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, dtype=np.int64))
    inputs: list[torch.Tensor] = field(default_factory=list)

    def add(self, seen: Seen) -> None:
        """Take note of a request, of whose tensors only copies are kept."""
        self.requests += 1
        for tensor in seen.tensors:
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            self.counts += np.bincount(raw, minlength=256)
        # A seed has no rows.
        if seen.layer == 0 and seen.what.startswith("q_proj") and seen.first.dim() > 1:
            rows_TD = seen.first.reshape(-1, seen.first.shape[-1])
            room = len(rows_TD) if self.most_rows is None else self.most_rows - self.rows
            if room > 0:
                self.inputs.append(rows_TD[:room].clone())
            self.rows += len(rows_TD)
