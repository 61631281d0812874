"""What the owner of a GPU sees of requests, and reads from them with the public weights.

Their tensors, how even their bytes are, which tokens vocabulary matching recovers, and whether
chance recovers as many.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt
import torch

from protocol.messages import LinearRequest, Request, RingLinearRequest, SeededRingLinearRequest
from protocol.model.checkpoint import EMBEDDING, Checkpoint, norm_name
from protocol.tensors import WireTensor, to_torch
from tee_side.engine.tokenizer import Tokenizer

_CONTROL_ROWS = 512
_TRIES = 199
_SHOWN_CHARACTERS = 1200


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
class ReceivedTensors:
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


@dataclass(frozen=True)
class VocabularyReading:
    """What vocabulary matching made of `rows` inputs of the first layer: `text`, cut if long.

    `right`: how many of its tokens are among those that went in, wherever they stood. `chance`: the
    same of as many rows of random numbers, on average of 199 tries; more than `limit`, six standard
    deviations above, they give less than once in ten thousand answers. `better`: whether it
    recovers more than chance does.
    """

    rows: int
    text: str
    right: int
    chance: float
    limit: int
    better: bool


class VocabularyMatcher:
    """Vocabulary matching: reads tokens of the model in a directory. Raises ModelError.

    The input of the first layer is a token's embedding after a norm, so the nearest of all
    normalised embeddings is the token (arXiv 2505.18332 does this in every layer). It needs what
    the owner of the GPU has: the wire, and the model. `width`: of a row. `tokenizer`: the model's,
    which raises PromptError for a conversation that its template refuses.
    """

    def __init__(self, directory: Path) -> None:
        config, self._checkpoint = Checkpoint.open(directory)
        self.tokenizer = Tokenizer(directory)
        self._tokens, self.width = config.vocab_size, config.hidden_size
        self._gain_D = torch.ones(self.width)
        if "input_layernorm" in config.table.norms:
            self._checkpoint.copy_into(f"{norm_name(0, 'input_layernorm')}.weight", self._gain_D)

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

    @cached_property
    def _control(self) -> list[int]:
        """What the attack reads in uniform 32-bit words."""
        generator = torch.Generator().manual_seed(0)
        shape = (_CONTROL_ROWS, self.width)
        return self.nearest([torch.randint(-(2**31), 2**31, shape, generator=generator)])

    def read(
        self, inputs: Sequence[torch.Tensor], prompt_ids: Sequence[int], answer: str
    ) -> VocabularyReading | None:
        """Match rows [.., D] with the vocabulary; None where none crossed."""
        if not inputs:
            return None
        truth = Counter([*prompt_ids, *self.tokenizer.encode(answer, add_special_tokens=False)])
        ids = self.nearest(inputs)
        right = (Counter(ids) & truth).total()
        draw = random.Random(0)
        tries = [
            (Counter(draw.choices(self._control, k=len(ids))) & truth).total()
            for _ in range(_TRIES)
        ]
        chance = fmean(tries)
        # Of a large vocabulary chance finds almost nothing, and then one token is no finding.
        limit = int(chance + 6 * max(1.0, stdev(tries)))
        text = self.tokenizer.decode(ids)
        shown = text[:_SHOWN_CHARACTERS] + ("..." if len(text) > _SHOWN_CHARACTERS else "")
        return VocabularyReading(len(ids), shown, right, round(chance, 1), limit, right > limit)
