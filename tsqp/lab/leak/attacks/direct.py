"""What needs no computing to speak of: token ids, logits, and the nearest embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Work
from tsqp.lab.leak.matching import FeatureMatcher, first_place, look_up
from tsqp.lab.leak.replay import answers, has_head, vocabulary
from tsqp.lab.leak.trace import Step, Where
from tsqp.lab.research.row_permutation import RowPermutation

_IDS: Where = (None, "embedding")
_HEAD: Where = (None, "lm_head")


class TokenIds(Attack):
    """Reads the ids that are sent to be looked up.

    Among others and in random order, as under `row-permutation`, they are a set: then the guesses
    for a token are those of its step, which name a decoded one among the dummies.
    """

    name: ClassVar[str] = "token-ids"
    reads: ClassVar[str] = "token ids sent to an Embedding"
    source: ClassVar[str] = "what an Embedding is asked for"
    control: ClassVar[str] = "published"
    published: ClassVar[float] = 1.0

    def refuses(self, view: View) -> str | None:
        """No token ids crossed."""
        return _absent(view, _IDS[1])

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Take them as they are."""
        for session, trace in enumerate(view.traces):
            guesses: dict[int, tuple[int, ...]] = {}
            for step in trace.steps:
                call = step.at(_IDS)
                if call is None:
                    continue
                ids = call.rows.flatten().tolist()
                for token in range(step.tokens):
                    own = ids[token : token + 1] if len(ids) == step.tokens else ids
                    guesses[step.first + token] = tuple(own[:TOP])
            yield Reading("embedding", session, range(trace.tokens), guesses)


class Logits(Attack):
    """Computes the logits from what an LM head was sent: the next token, as far as it is the top.

    A mask that scales rows, by either sign, leaves the order of logits or reverses it; of several
    rows, the one with the surest token counts. Where the head is within a segment the service has
    computed them itself; the rows of its head tell which token each is of.
    """

    name: ClassVar[str] = "logits"
    reads: ClassVar[str] = "the next token, from the logits that an LM head makes of what it gets"
    source: ClassVar[str] = "what an LM head is asked for"
    control: ClassVar[str] = "published"
    published: ClassVar[float] = 0.95

    def refuses(self, view: View) -> str | None:
        """No final hidden states crossed, and no segment with an LM head."""
        return None if has_head(view) else _absent(view, _HEAD[1])

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Apply the public LM head, or run the service's layers again."""
        if has_head(view):
            yield from _answered(view, work)
            return
        head_VD = view.public.lm_head_VD
        masks = [one.mask for one in view.policy.operators["lm_head"]]
        flips = any(not isinstance(mask, RowPermutation) for mask in masks if mask is not None)
        for session, trace in enumerate(view.traces):
            work.tick()
            guesses: dict[int, tuple[int, ...]] = {}
            for step in trace.steps:
                call = step.at(_HEAD)
                if call is None:
                    continue
                logits_RV = call.rows.float() @ head_VD.T
                work.compared += logits_RV.numel()
                if flips:
                    logits_RV = torch.cat([logits_RV, -logits_RV])
                guesses[step.first + step.tokens] = _surest(logits_RV)
            sampled = range(_first_sampled(trace.steps), trace.tokens + 1)
            yield Reading("lm_head", session, sampled, guesses)


class NearestEmbedding(Attack):
    """Compares each input of the first layer with the normalised embedding of every token.

    By direction: a row that was only scaled, of either sign, is read as well.
    """

    name: ClassVar[str] = "nearest-embedding"
    reads: ClassVar[str] = "rows of the first layer, by the nearest normalised embedding"
    source: ClassVar[str] = "arXiv 2505.18332, in layer 0, where no search is needed"
    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.99

    def refuses(self, view: View) -> str | None:
        """No inputs of the first layer crossed."""
        return "layer 0 stays" if first_place(view) is None else None

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look every row up."""
        if (where := first_place(view)) is not None:
            yield from look_up(view, _Direction(), work, where)


class _Direction(FeatureMatcher):
    """Rows without their length and sign."""

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows of length 1."""
        return normalize(states_NI, dim=-1)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: the sine of the angle."""
        return (1 - (rows_RX @ table_NX.T).square()).clamp(min=0).sqrt()


def _answered(view: View, work: Work) -> Iterator[Reading]:
    """Read the service's own answers to segments."""
    ids_V = vocabulary(view)
    for session, trace in enumerate(view.traces):
        work.tick()
        guesses: dict[int, tuple[int, ...]] = {}
        for tokens, logits_V in answers(view, trace):
            work.compared += len(logits_V)
            top = ids_V[logits_V.topk(TOP).indices].tolist()
            guesses[tokens] = tuple(token_id for token_id in top if token_id >= 0)
        if guesses:
            yield Reading("lm_head", session, range(min(guesses), trace.tokens + 1), guesses)


def _absent(view: View, operator: str) -> str | None:
    sent = any(call.operator == operator for trace in view.traces for call in trace.calls)
    return None if sent else f"{operator} stays"


def _surest(logits_RV: torch.Tensor) -> tuple[int, ...]:
    """Return the top tokens of the row whose largest logit stands out most."""
    top = (logits_RV - logits_RV.mean(-1, keepdim=True)) / logits_RV.std(-1, keepdim=True)
    row = int(top.amax(-1).argmax())
    return tuple(logits_RV[row].topk(TOP).indices.tolist())


def _first_sampled(steps: tuple[Step, ...]) -> int:
    """Return the index of the first token that was sampled behind a step, if any was."""
    return next((step.first + step.tokens for step in steps if step.at(_HEAD)), 0)
