"""What the engine is asked for, and what comes back, token by token.

A `Request` may have several samples; each is a sequence of the engine.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, Self

import torch
from pydantic import BaseModel, Field

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


class Grammar(Protocol):
    """Where a text is in what it must follow: see `tee_side.serve.grammar.GrammarMatcher`."""

    def copy(self) -> Self:
        """Return another one at the same place."""

    def hide(self, scores_V: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for every token that is not allowed next."""

    def advance(self, token_id: int) -> None:
        """Take a token that `hide` allowed."""


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
    grammar: Grammar | None = None
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
