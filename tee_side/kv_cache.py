"""Keys and values of one sequence, preallocated for as long as the sequence may become.

Shape suffixes as in `tee_side.forward`: K key/value heads, S context length, C head dim. A layer's
keys are [K, S, C], so that the part in use is a view that a batched product reads in place.
"""

from __future__ import annotations

import torch

from protocol.errors import PromptError
from protocol.model.config import ModelConfig


class KVCache:
    """KV cache of one sequence.

    `length` tokens are valid in every layer. A step writes behind them, layer by layer, and only
    `commit` makes them count: a step that fails half-way leaves nothing to undo, and can be run
    again. Raises PromptError if the machine has not the memory.
    """

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype) -> None:
        shape = (
            config.num_hidden_layers,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
        )
        self.length = 0
        self.capacity = capacity
        try:
            self._keys = torch.empty(shape, dtype=dtype)
            self._values = torch.empty(shape, dtype=dtype)
        except RuntimeError:  # torch has no more specific error for exhausted CPU memory
            raise PromptError(
                "KV cache",
                got=f"no memory for {capacity} tokens",
                expected="fewer tokens (lower --max-new-tokens)",
            ) from None

    def append(
        self, layer: int, k_TKC: torch.Tensor, v_TKC: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new rows behind `length`; return all keys and values [K, S, C]."""
        end = self.length + k_TKC.shape[0]
        if end > self.capacity:
            # torch would drop a single row silently: it broadcasts to an empty slice.
            raise IndexError(f"KV cache: got {end} tokens, expected at most {self.capacity}")
        self._keys[layer, :, self.length : end] = k_TKC.transpose(0, 1)
        self._values[layer, :, self.length : end] = v_TKC.transpose(0, 1)
        return self._keys[layer, :, :end], self._values[layer, :, :end]

    def commit(self, tokens: int) -> None:
        """Count the rows that every layer has written."""
        self.length += tokens
