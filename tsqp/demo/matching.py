"""Vocabulary matching: reads tokens out of hidden states, with the public weights alone.

The input of the first layer is a token's embedding after a norm, so the nearest of all normalised
embeddings is the token (arXiv 2505.18332 does this in every layer). It needs nothing but what
the owner of the GPU has: the wire, and the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """Reads tokens of the model in a directory; None: of the demo model. Raises ModelError.

    `width`: of a row. `tokenizer`: the model's.
    """

    def __init__(self, directory: Path | None = None) -> None:
        directory = model_directory("demo") if directory is None else directory
        config, self._checkpoint = read_config(directory), Checkpoint(directory)
        self.tokenizer = Tokenizer(directory)
        self._tokens, self.width = config.vocab_size, config.hidden_size
        self._gain_D = torch.empty(self.width)
        self._checkpoint.copy_into(norm_names(config, 0)["input_layernorm"], self._gain_D)

    def nearest(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        """Return the token whose direction is nearest to each row of inputs [.., D], any dtype."""
        rows_TD = torch.cat([tensor.reshape(-1, self.width).float() for tensor in inputs])
        best_T = torch.full((len(rows_TD),), -torch.inf)
        ids_T = torch.zeros(len(rows_TD), dtype=torch.long)
        # Some of the table after the other: in float32, of a large model, all of it is a gigabyte.
        for tokens, block in self._checkpoint.blocks(EMBEDDING, (self._tokens, self.width)):
            directions_ND = torch.nn.functional.normalize(block.float() * self._gain_D, dim=-1)
            found_T, at_T = (rows_TD @ directions_ND.T).max(-1)
            ids_T = torch.where(found_T > best_T, at_T + tokens.start, ids_T)
            best_T = torch.maximum(best_T, found_T)
        ids: list[int] = ids_T.tolist()
        return ids

    def read(self, inputs: Sequence[torch.Tensor], truth: Sequence[int]) -> Reading | None:
        """Match rows [.., D] of the first layer's inputs, of whatever dtype.

        `truth`: ids of all tokens that went through the model; where less was sent, the last ones.
        None if there were no such rows.
        """
        if not inputs:
            return None
        ids = self.nearest(inputs)
        expected = list(truth)[-len(ids) :]
        right = None
        if len(expected) == len(ids):
            right = sum(a == b for a, b in zip(ids, expected, strict=True))
        return Reading(self.tokenizer.decode(ids), len(ids), right)
