"""What needs no computing to speak of: token ids, logits, and the nearest embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from gpu_side.encoding import open_request, read_request
from gpu_side.weights import load_weights
from protocol.encoding import DEFAULT_MAX_MESSAGE_BYTES
from protocol.messages import SegmentRequest, TensorReply
from protocol.model.checkpoint import Checkpoint, lm_head_name
from protocol.model.config import read_config
from protocol.model.weights import CPU, load_tensor
from protocol.tensors import to_torch
from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Work
from tsqp.lab.leak.matching import FIRST_PLACES, FeatureMatcher, Matcher, Matching
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.leak.trace import Trace, Where
from tsqp.lab.research.row_masks import RowPermutation

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
        return view.readings("embedding", _ids(view))


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
        found = _answered(view, work) if has_head(view) else _computed(view, work)
        for reading in view.readings("lm_head", found):
            sampled = range(min(reading.guesses), reading.tokens.stop + 1)
            yield replace(reading, tokens=sampled)


class NearestEmbedding(Matching):
    """Compares each input of the first layer with the normalised embedding of every token.

    By direction: a row that was only scaled, of either sign, is read as well.
    """

    name: ClassVar[str] = "nearest-embedding"
    reads: ClassVar[str] = "rows of the first layer, by the nearest normalised embedding"
    source: ClassVar[str] = "arXiv 2505.18332, in layer 0, where no search is needed"
    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.99
    needs: ClassVar[tuple[str, ...]] = ("layer 0 stays",)

    def matcher(self, view: View) -> Matcher:
        """Return what compares directions."""
        return _Direction()

    def places(self, view: View) -> list[Where]:
        """Return where the first layer's rows crossed, each of which is looked up."""
        return [where for where in view.row_places() if where in FIRST_PLACES]


class _Direction(FeatureMatcher):
    """Rows without their length and sign."""

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows of length 1."""
        return normalize(states_NI, dim=-1)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: the sine of the angle."""
        return (1 - (rows_RX @ table_NX.T).square()).clamp(min=0).sqrt()


Found = Iterator[tuple[int, int, tuple[int, ...]]]


def _ids(view: View) -> Found:
    """Yield what `View.readings` takes, of token ids: of those in no order all for each token."""
    for session, step, call in view.calls_at(_IDS):
        ids = call.rows.flatten().tolist()
        for token in range(step.tokens):
            own = ids[token : token + 1] if len(ids) == step.tokens else ids
            yield session, step.first + token, tuple(own[:TOP])


def _computed(view: View, work: Work) -> Found:
    """Apply the public LM head to what a service was sent."""
    head_VD = view.public.lm_head_VD
    masks = [one.mask for one in view.policy.operators["lm_head"]]
    flips = any(not isinstance(mask, RowPermutation) for mask in masks if mask is not None)
    for session, step, call in view.calls_at(_HEAD):
        work.tick()
        logits_RV = call.rows.float() @ head_VD.T
        work.compared += logits_RV.numel()
        if flips:
            logits_RV = torch.cat([logits_RV, -logits_RV])
        yield session, step.first + step.tokens, _surest(logits_RV)


def _answered(view: View, work: Work) -> Found:
    """Read the service's own answers to segments."""
    ids_V = vocabulary(view)
    for session, trace in enumerate(view.traces):
        work.tick()
        for tokens, logits_V in answers(view, trace):
            work.compared += len(logits_V)
            top = ids_V[logits_V.topk(TOP).indices].tolist()
            yield session, tokens, tuple(token_id for token_id in top if token_id >= 0)


def _absent(view: View, operator: str) -> str | None:
    sent = any(call.operator == operator for trace in view.traces for call in trace.calls)
    return None if sent else f"{operator} stays"


def _surest(logits_RV: torch.Tensor) -> tuple[int, ...]:
    """Return the top tokens of the row whose largest logit stands out most."""
    top = (logits_RV - logits_RV.mean(-1, keepdim=True)) / logits_RV.std(-1, keepdim=True)
    row = int(top.amax(-1).argmax())
    return tuple(logits_RV[row].topk(TOP).indices.tolist())


# ---------------------------------------------------------------------------------------- segments


def has_head(view: View) -> bool:
    """Whether the LM head is within a segment that crossed."""
    crossed = any(call.operator == "segment" for trace in view.traces for call in trace.calls)
    return crossed and any(segment.head for segment in view.segments)


def answers(view: View, trace: Trace) -> Iterator[tuple[int, torch.Tensor]]:
    """Compute the logits that the service answered in a session, by running its weights again.

    Yields how many tokens went by, and the logits [V] behind the last of them, in the service's
    order. Raises ModelError.
    """
    dtype = trace.calls[-1].rows.dtype
    weights = load_weights(view.served, device=CPU, dtype=dtype, arithmetic=["float"])
    service, tokens = RecordingChannel(weights), 0
    for frames in trace.messages:
        request = read_request(open_request(list(frames), DEFAULT_MAX_MESSAGE_BYTES))
        if not isinstance(request, SegmentRequest):
            continue
        reply = service.answer(request)
        if request.lm_head and isinstance(reply, TensorReply):
            tokens += request.hidden_states.shape[0]
            yield tokens, to_torch(reply.output)[-1].float()


def vocabulary(view: View) -> torch.Tensor:
    """Return which token each of the service's logits is of: [V], -1 where nothing tells.

    A row of a transformed LM head has the numbers of the public one's row, in whatever order.
    """
    if view.policy.feature_mask is None:
        return torch.arange(view.public.vocab_size)
    served = Checkpoint(view.served)
    name = lm_head_name(read_config(view.served))
    shape = (view.public.vocab_size, view.public.config.hidden_size)
    served_VD = load_tensor(served, name, shape, dtype=torch.float32)
    ids = {row: token for token, row in enumerate(_numbers(view.public.lm_head_VD))}
    return torch.tensor([ids.get(row, -1) for row in _numbers(served_VD)])


def _numbers(head_VD: torch.Tensor) -> Iterator[int]:
    """Yield what is the same for rows of the same numbers, and hardly ever for others."""
    for row_D in head_VD.sort(dim=-1).values:
        yield hash(row_D.numpy().tobytes())
