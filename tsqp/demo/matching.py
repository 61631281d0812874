"""Vocabulary matching: reads tokens out of hidden states, with the public weights alone.

The input of the first layer is a token's embedding after a norm, so the nearest of all normalised
embeddings is the token (arXiv 2505.18332 does this in every layer). It needs nothing but what
the owner of the GPU has: the wire, and the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protocol.model.checkpoint import EMBEDDING, Checkpoint, norm_names
from protocol.model.config import read_config
from tee_side.engine.tokenizer import Tokenizer
from tsqp.cli.program import model_directory


@dataclass(frozen=True)
class Reading:
    """What matching found. `right`: how many tokens are; None where rows are not one a token."""

    text: str
    tokens: int
    right: int | None


class Matcher:
    """Reads the demo model's tokens. Raises ModelError."""

    def __init__(self) -> None:
        directory = model_directory("demo")
        config, checkpoint = read_config(directory), Checkpoint(directory)
        self._tokenizer = Tokenizer(directory)
        gain = torch.empty(config.hidden_size)
        checkpoint.copy_into(norm_names(config, 0)["input_layernorm"], gain)
        table_VD = checkpoint.rows(EMBEDDING, 0, config.vocab_size).float() * gain
        self._directions_VD = torch.nn.functional.normalize(table_VD, dim=-1)

    def read(self, inputs: Sequence[torch.Tensor], truth: Sequence[int]) -> Reading | None:
        """Match rows [.., D] of the first layer's inputs, of whatever dtype.

        `truth`: ids of all tokens that went through the model; where less was sent, the last ones.
        None if there were no such rows.
        """
        if not inputs:
            return None
        width = self._directions_VD.shape[1]
        rows_TD = torch.cat([tensor.reshape(-1, width).float() for tensor in inputs])
        ids: list[int] = (rows_TD @ self._directions_VD.T).argmax(-1).tolist()
        expected = list(truth)[-len(ids) :]
        right = None
        if len(expected) == len(ids):
            right = sum(a == b for a, b in zip(ids, expected, strict=True))
        return Reading(self._tokenizer.decode(ids), len(ids), right)
