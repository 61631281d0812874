"""What the engine is asked for, how tokens are drawn, and what comes back, token by token.

A `Request` may have several samples; each is a sequence of the engine.

Order and meaning of a `Sampler`'s steps are those of `transformers.generate`. Frequency and
presence penalties, which it has not, come after its repetition penalty.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field

if TYPE_CHECKING:
    from tee_side.engine.grammar import GrammarMatcher

# How many seeds there are: torch takes a signed integer of 64 bits.
SEEDS = 2**63

FinishReason = Literal["stop", "length"]
Pooling = Literal["last", "mean"]


class SamplingSettings(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 are off.

    `repetition_penalty`: of all tokens so far. `frequency_penalty`, `presence_penalty`: OpenAI's,
    of the generated ones. `logit_bias`: token id to what is added to its score. `seed` None draws
    one from the operating system; a fixed seed repeats the same text on the same torch version.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A prompt and what is wanted of it.

    `max_new_tokens`: 0 for what reads a prompt only. `samples`: how many sequences, each with a
    generator of its own: of `sampling.seed` + its index. `stop`: strings that end a text;
    `stop_ids`: tokens that do, None for the model's own. `logprobs`: of each new token, with so
    many of the likeliest; `prompt_logprobs`: of each token of the prompt, None for none. `pooling`:
    the hidden state behind the last layer and its norm, of the last token or the mean of all.
    `grammar`: what a text must follow, at its beginning.
    `owner`: whose it is, for fairness; with `salt`, whose earlier keys and values may be reused.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    samples: int = 1
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarMatcher | None = None
    pooling: Pooling | None = None
    owner: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, before any sampling setting changes it.

    `top`: (token id, logprob) of the likeliest, likeliest first; the token's own number is the same
    float where it is among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token of a sample; `finish_reason` with its last one."""

    sample: int
    token_id: int
    logprob: Logprob | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What reading the prompt gave. `logprobs`: of its tokens from the second on."""

    logprobs: tuple[Logprob, ...] = ()
    pooled_D: torch.Tensor | None = None
    reused_tokens: int = 0


# Below it float32 would overflow; long before, sampling is greedy.
MIN_TEMPERATURE = 1e-6


class Sampler:
    """Draws tokens for one sequence, with a generator of its own.

    `prompt_tokens`: how many of the sequence's tokens are not counted as generated. `sample`: its
    index among several of a request, which is added to the seed.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_tokens: int,
        matcher: GrammarMatcher | None = None,
        sample: int = 0,
    ) -> None:
        self._settings = settings
        self._matcher = matcher
        self._bias = (
            torch.tensor(list(settings.logit_bias), dtype=torch.int64),
            torch.tensor(list(settings.logit_bias.values()), dtype=torch.float32),
        )
        factor, frequency = settings.repetition_penalty, settings.frequency_penalty
        penalized = (factor, frequency, settings.presence_penalty) != (1.0, 0.0, 0.0)
        self._seen = _Seen(prompt_tokens) if penalized else None
        self._words_V = np.empty(0, dtype=np.uint32)
        self._generator = torch.Generator()
        seed = secrets.randbits(63) if settings.seed is None else (settings.seed + sample) % SEEDS
        self._generator.manual_seed(seed)

    def sample(self, logits_V: torch.Tensor, previous_ids: Sequence[int]) -> int:
        """Return the next token id.

        `previous_ids`: prompt and what was generated so far; it begins with that of the last call.
        Raises what the matcher raises.
        """
        scores_V = self._in_float32(logits_V)
        if self._matcher is not None:
            scores_V = self._matcher.hide(scores_V)
        if self._settings.logit_bias:
            scores_V = scores_V.index_add(0, *self._bias)
        if self._seen is not None:
            self._seen.read(previous_ids, len(scores_V))
            scores_V = penalize(scores_V, self._seen.any_V, self._seen.generated_V, self._settings)
        # numpy's argmax takes a tenth of the time of torch's; the first of equals, as there.
        greedy = self._settings.temperature == 0
        token_id = int(scores_V.numpy().argmax()) if greedy else self._draw(scores_V)
        if self._matcher is not None:
            self._matcher.advance(token_id)
        return token_id

    def _in_float32(self, logits_V: torch.Tensor) -> torch.Tensor:
        if logits_V.dtype != torch.bfloat16:
            return logits_V.to(torch.float32)
        # In memory of its own, as half a megabyte of fresh pages costs more than the sampling; by
        # numpy, whose one thread never waits for another that has no core.
        if len(self._words_V) != len(logits_V):
            self._words_V = np.empty(len(logits_V), dtype=np.uint32)
        halves_V = logits_V.view(torch.int16).numpy().view(np.uint16)
        np.left_shift(halves_V, 16, out=self._words_V, dtype=np.uint32)
        return torch.from_numpy(self._words_V.view(np.float32))

    def _draw(self, scores_V: torch.Tensor) -> int:
        """Invert the cumulative distribution at one uniform number, in float64.

        `multinomial` takes ten times as long. The first token whose sum is above the number never
        has probability 0, and there is one: the number is below the last sum.
        """
        sums_V = warp(scores_V, self._settings).softmax(-1).cumsum(-1, dtype=torch.float64)
        uniform = torch.rand((), dtype=torch.float64, generator=self._generator)
        return int(torch.searchsorted(sums_V, uniform * sums_V[-1], right=True))


class _Seen:
    """Which tokens a sequence has: read once each, so that a long text costs no more a token."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._read = 0
        self.any_V = torch.empty(0, dtype=torch.bool)
        self.generated_V = torch.empty(0)

    def read(self, ids: Sequence[int], vocab_size: int) -> None:
        """Count those that are new."""
        if not self._read:
            self.any_V = torch.zeros(vocab_size, dtype=torch.bool)
            self.generated_V = torch.zeros(vocab_size)
        new = torch.tensor(ids[self._read :], dtype=torch.int64)
        generated = new[max(self._prompt_tokens - self._read, 0) :]
        self.any_V[new] = True
        self.generated_V.index_add_(0, generated, torch.ones(len(generated)))
        self._read = len(ids)


def penalize(
    scores_V: torch.Tensor,
    any_V: torch.Tensor,
    generated_V: torch.Tensor,
    settings: SamplingSettings,
) -> torch.Tensor:
    """Lower the scores of tokens seen before.

    `any_V` bool: in prompt or answer; their positive scores are divided, negative ones multiplied
    (arXiv 1909.05858). `generated_V`: how often in the answer; subtracted as OpenAI says.
    """
    factor = settings.repetition_penalty
    frequency, presence = settings.frequency_penalty, settings.presence_penalty
    if factor != 1.0:
        lower_V = torch.where(scores_V < 0, scores_V * factor, scores_V / factor)
        scores_V = torch.where(any_V, lower_V, scores_V)
    if frequency or presence:
        scores_V = scores_V - (generated_V * frequency + (generated_V > 0) * presence)
    return scores_V


def warp(scores_V: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Apply temperature, then top-k, top-p and min-p; what they cut off gets -inf."""
    scores_V = scores_V / max(settings.temperature, MIN_TEMPERATURE)
    cut = float("-inf")
    if 0 < settings.top_k < (size := scores_V.numel()):
        kth = float(np.partition(scores_V.numpy(), size - settings.top_k)[size - settings.top_k])
        scores_V = scores_V.masked_fill(scores_V < kth, cut)
    if settings.top_p < 1.0:
        scores_V = scores_V.masked_fill(_outside(scores_V, settings.top_p), cut)
    if settings.min_p > 0:
        probs_V = scores_V.softmax(-1)
        scores_V = scores_V.masked_fill(probs_V < settings.min_p * probs_V.max(), cut)
    return scores_V


def _outside(scores_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Say which tokens the likeliest ones with `top_p` together leave out.

    As after a stable sort: of equals, the first leave first. numpy sorts values alone with vector
    instructions, in a thirtieth of the time of a sort that says where each came from.
    """
    ascending_V = torch.from_numpy(np.sort(scores_V.numpy()))
    sums_V = ascending_V.softmax(-1).cumsum(-1)
    count = int(torch.searchsorted(sums_V, torch.tensor(1 - top_p), right=True))
    count = min(count, scores_V.numel() - 1)  # the most likely token always stays
    edge = ascending_V[count]
    outside_V = scores_V < edge
    if equal := count - int(torch.searchsorted(ascending_V, edge)):
        outside_V[(scores_V == edge).nonzero()[:equal, 0]] = True
    return outside_V
