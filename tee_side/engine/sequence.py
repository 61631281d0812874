"""One sequence under way: its tokens, its cache, and when it ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tee_side.engine.request import FinishReason, Logprob, Request
from tee_side.engine.sampling import Sampler
from tee_side.engine.text_stream import TextStream
from tee_side.model.kv_cache import KVCache
from tee_side.words import Phase

if TYPE_CHECKING:
    from tee_side.engine.drafts import Drafts
    from tee_side.engine.reading import PromptReader


@dataclass(eq=False)
class Sequence:
    """One sample of a request, and what has been generated of it; made by the engine.

    `ids`: of prompt and answer; `prompt_tokens`: how many are the prompt's. `followers`: other
    samples of the request, which get its keys and values of the prompt and `follow` until then.
    `reader`: reads the prompt. `reused_tokens`: of the prompt, whose keys and values were there.
    `arrived`: tokens that `Runner.step` has put here for the `Generation` of this sequence.
    """

    request: Request
    sample: int
    ids: list[int]
    prompt_tokens: int
    cache: KVCache
    sampler: Sampler
    max_new_tokens: int
    stop_ids: frozenset[int]
    watch: TextStream | None = None
    drafts: Drafts | None = None
    reader: PromptReader | None = None
    finish_reason: FinishReason | None = None
    reused_tokens: int = 0
    follows: bool = False
    followers: list[Sequence] = field(default_factory=list)
    arrived: deque[Sampled] = field(default_factory=deque)

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.ids[: self.prompt_tokens]

    @property
    def token_ids(self) -> list[int]:
        """Token ids generated so far, EOS included."""
        return self.ids[self.prompt_tokens :]

    @property
    def phase(self) -> Phase:
        """Prefill while tokens of the prompt, or several lost ones, are pending; then decode."""
        behind = self.cache.length < self.prompt_tokens or self.pending > 1
        return "prefill" if behind else "decode"

    @property
    def pending(self) -> int:
        """How many of its tokens the cache does not hold yet."""
        return len(self.ids) - self.cache.length

    @property
    def new_tokens_left(self) -> int:
        """How many tokens it may still generate."""
        return self.max_new_tokens - (len(self.ids) - self.prompt_tokens)

    def append(self, token_id: int) -> None:
        """Take a token, and finish on EOS, at a stop string or at the length limit."""
        self.ids.append(token_id)
        if self.drafts is not None:
            self.drafts.append(token_id)
        if self.watch is not None:
            self.watch.feed(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif self.new_tokens_left <= 0:
            self.finish_reason = "length"
        if self.watch is not None:
            if self.finish_reason is not None:
                self.watch.flush()
            if self.watch.found:
                self.finish_reason = "stop"

    def stop(self) -> None:
        """Finish now."""
        self.finish_reason = "stop"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step produced, and the logits [V] that it was sampled from.

    `finish_reason`: the sequence's, with its last token.
    """

    sequence: Sequence
    token_id: int
    logits_V: torch.Tensor
    logprob: Logprob | None = None
    finish_reason: FinishReason | None = None
