"""What went over the wire in one act: the first and last requests, and counts over all bytes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tsqp.demo.intercepting_proxy import Seen


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


class Feed:
    """Collects what a tap sees.

    `first`, `last`: up to `kept` requests each. `dtypes`: names, of all tensors. `inputs`: what the
    first layer was given, [.., D] each: a token's embedding after a norm, unless masked.
    """

    def __init__(self, kept: int) -> None:
        self.count = 0
        self.first: list[Seen] = []
        self.last: deque[Seen] = deque(maxlen=kept)
        self.dtypes: list[str] = []
        self.inputs: list[torch.Tensor] = []
        self._kept = kept
        self._bytes = np.zeros(256, dtype=np.int64)

    def add(self, seen: Seen) -> None:
        """Take note of a request; called from the tap's thread."""
        self.count += 1
        if len(self.first) < self._kept:
            self.first.append(seen)
        self.last.append(seen)
        for tensor in seen.tensors:
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            self._bytes += np.bincount(raw, minlength=256)
            if (name := str(tensor.dtype).removeprefix("torch.")) not in self.dtypes:
                self.dtypes.append(name)
        # A seed has no rows.
        if seen.layer == 0 and seen.what.startswith("q_proj") and seen.first.dim() > 1:
            self.inputs.append(seen.first)

    def histogram(self, buckets: int) -> list[int]:
        """Count bytes in `buckets` ranges of equal size; `buckets` divides 256."""
        counts: list[int] = self._bytes.reshape(buckets, -1).sum(axis=1).tolist()
        return counts

    def bytes(self) -> ByteSummary | None:
        """Sum up all bytes seen so far; None if there were none."""
        return summarise(self._bytes)


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
