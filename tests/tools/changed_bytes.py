"""Changes of bytes that are the same in every run."""

from __future__ import annotations

import random


def changed(data: bytes, seed: int) -> bytes:
    """Return other bytes than `data`: mostly a bit is flipped, else some are cut off or doubled."""
    draw = random.Random(seed)
    at, size = draw.randrange(len(data)), draw.randrange(1, 60)
    kind = draw.randrange(8)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[: at + size] + data[at:]
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
