"""What the owner of a GPU reads from what crossed, and whether chance reads as much."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

import torch

from protocol.model.checkpoint import EMBEDDING, Checkpoint, norm_names
from protocol.model.config import read_config
from tee_side.engine.tokenizer import Tokenizer

_CONTROL_ROWS = 512
_TRIES = 199
_SHOWN_CHARACTERS = 1200


@dataclass(frozen=True)
class Reading:
    """What vocabulary matching made of `rows` inputs of the first layer: `text`, cut if long.

    `right`: how many of its tokens are among those that went in, wherever they stood. `chance`: the
    same of as many rows of random numbers, on average of 199 tries; more than `limit`, six standard
    deviations above, they give less than once in ten thousand answers.
    """

    rows: int
    text: str
    right: int
    chance: float
    limit: int

    @property
    def better(self) -> bool:
        """Whether it recovers more than chance does."""
        return self.right > self.limit


class Matcher:
    """Vocabulary matching: reads tokens of the model in a directory. Raises ModelError.

    The input of the first layer is a token's embedding after a norm, so the nearest of all
    normalised embeddings is the token (arXiv 2505.18332 does this in every layer). It needs what
    the owner of the GPU has: the wire, and the model. `width`: of a row. `tokenizer`: the model's.
    """

    def __init__(self, directory: Path) -> None:
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


class Reader:
    """Attacks with the public weights in a model directory. Raises ModelError, PromptError."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher(self._model)

    @cached_property
    def _control(self) -> list[int]:
        """What the attack reads in uniform 32-bit words."""
        generator = torch.Generator().manual_seed(0)
        shape = (_CONTROL_ROWS, self._matcher.width)
        return self._matcher.nearest([torch.randint(-(2**31), 2**31, shape, generator=generator)])

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return what the template makes of a conversation, as tokens."""
        return self._matcher.tokenizer.apply_chat_template(messages)

    def read(
        self, inputs: Sequence[torch.Tensor], prompt_ids: Sequence[int], answer: str
    ) -> Reading | None:
        """Match rows [.., D] with the vocabulary; None where none crossed."""
        if not inputs:
            return None
        tokenizer = self._matcher.tokenizer
        truth = Counter([*prompt_ids, *tokenizer.encode(answer, add_special_tokens=False)])
        ids = self._matcher.nearest(inputs)
        right = (Counter(ids) & truth).total()
        draw = random.Random(0)
        tries = [
            (Counter(draw.choices(self._control, k=len(ids))) & truth).total()
            for _ in range(_TRIES)
        ]
        chance = fmean(tries)
        # Of a large vocabulary chance finds almost nothing, and then one token is no finding.
        limit = int(chance + 6 * max(1.0, stdev(tries)))
        text = tokenizer.decode(ids)
        shown = text[:_SHOWN_CHARACTERS] + ("..." if len(text) > _SHOWN_CHARACTERS else "")
        return Reading(len(ids), shown, right, round(chance, 1), limit)
