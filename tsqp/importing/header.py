"""The header of a safetensors file that is written a tensor at a time."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from protocol.model.checkpoint import TORCH_DTYPES

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[bytes, int]:
    """Return how a file of these tensors begins, and how many bytes are to follow."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places = [start, end]
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": places}
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end
