"""What stands in the clear, or but for its order: ids, logits, and rows that candidates are near.

Token after token, the public model is run on what was read so far and each candidate, the most
likely first; the candidate whose hidden state is nearest to the observed one is taken
(arXiv 2505.18332). There the distance is L1; here it is Euclidean, which is one product for all
candidates. Whatever mixes the rows of a call leaves the space that they span: there a candidate is
compared with that space.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from gpu_side.weights import load_weights
from protocol.messages import SegmentRequest, TensorReply
from protocol.model.weights import CPU
from protocol.tensors import to_torch
from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Where, Work, read_frames
from tsqp.lab.leak.matching import (
    FIRST_PLACES,
    FeatureMatcher,
    Matching,
    Observed,
    squares,
)
from tsqp.lab.leak.public import PublicModel
from tsqp.lab.leak.recording import RecordingChannel
from tsqp.lab.research.row_masks import RowPermutation


class TokenIds(Attack):
    """Reads the ids that are sent to be looked up.

    Among others and in random order, as under `row-permutation`, they are a set: then the guesses
    for a token are those of its step, which name a decoded one among the dummies.
    """

    name: ClassVar[str] = "token-ids"
    control: ClassVar[str] = "published"
    published: ClassVar[float] = 1.0
    needs: ClassVar[tuple[str, ...]] = ("embedding stays",)

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
    control: ClassVar[str] = "published"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = ("lm_head stays",)

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Apply the public LM head, or run the service's layers again."""
        found = _answered(view, work) if view.has_head else _computed(view, work)
        for reading in view.readings("lm_head", found):
            sampled = range(min(reading.guesses), reading.tokens.stop + 1)
            yield replace(reading, tokens=sampled)


class _Direction(FeatureMatcher):
    """Rows without their length and sign."""

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows of length 1."""
        return normalize(states_NI, dim=-1)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: the sine of the angle."""
        return (1 - (rows_RX @ table_NX.T).square()).clamp(min=0).sqrt()


class NearestEmbedding(Matching):
    """Compares each input of the first layer with the normalised embedding of every token.

    As arXiv 2505.18332, in layer 0, where no search is needed. By direction: a row that was only
    scaled, of either sign, is read as well.
    """

    name: ClassVar[str] = "nearest-embedding"
    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.99
    needs: ClassVar[tuple[str, ...]] = ("layer 0 stays",)
    compares = _Direction

    def places(self, view: View) -> list[Where]:
        """Return where the first layer's rows crossed, each of which is looked up."""
        return [where for where in view.row_places() if where in FIRST_PLACES]


Found = Iterator[tuple[int, int, tuple[int, ...]]]


def _ids(view: View) -> Found:
    """Yield what `View.readings` takes, of token ids: of those in no order all for each token."""
    for session, step, call in view.calls_at((None, "embedding")):
        ids = call.rows.flatten().tolist()
        for token in range(step.tokens):
            own = ids[token : token + 1] if len(ids) == step.tokens else ids
            yield session, step.first + token, tuple(own[:TOP])


def _computed(view: View, work: Work) -> Found:
    """Apply the public LM head to what a service was sent."""
    head_VD = view.public.lm_head_VD
    masks = [one.mask for one in view.policy.operators["lm_head"]]
    flips = any(not isinstance(mask, RowPermutation) for mask in masks if mask is not None)
    for session, step, call in view.calls_at((None, "lm_head")):
        logits_RV = call.rows.float() @ head_VD.T
        work.compared += logits_RV.numel()
        if flips:
            logits_RV = torch.cat([logits_RV, -logits_RV])
        # Of the row whose largest logit stands out most.
        above_RV = logits_RV - logits_RV.mean(-1, keepdim=True)
        row = int((above_RV / logits_RV.std(-1, keepdim=True)).amax(-1).argmax())
        yield session, step.first + step.tokens, tuple(logits_RV[row].topk(TOP).indices.tolist())


def _answered(view: View, work: Work) -> Found:
    """Read the service's own answers to segments, by running its weights again."""
    ids_V = vocabulary(view)
    for session, trace in enumerate(view.traces):
        dtype = trace.calls[-1].rows.dtype
        weights = load_weights(view.served, device=CPU, dtype=dtype, arithmetic=["float"])
        service, tokens = RecordingChannel(weights), 0
        for frames in trace.messages:
            request = read_frames(frames)
            if not isinstance(request, SegmentRequest):
                continue
            reply = service.answer(request)
            if request.lm_head and isinstance(reply, TensorReply):
                tokens += request.hidden_states.shape[0]
                # Behind the last of them, in the service's order.
                logits_V = to_torch(reply.output)[-1].float()
                work.compared += len(logits_V)
                top = ids_V[logits_V.topk(TOP).indices].tolist()
                yield session, tokens, tuple(token_id for token_id in top if token_id >= 0)


def vocabulary(view: View) -> torch.Tensor:
    """Return which token each of the service's logits is of: [V], -1 where nothing tells.

    A row of a transformed LM head has the numbers of the public one's row, in whatever order.
    """
    if view.policy.feature_mask is None:
        return torch.arange(view.public.config.vocab_size)
    # The service's model is a public one to the service itself.
    served_VD = PublicModel(view.served).lm_head_VD
    ids = {row: token for token, row in enumerate(_numbers(view.public.lm_head_VD))}
    return torch.tensor([ids.get(row, -1) for row in _numbers(served_VD)])


def _numbers(head_VD: torch.Tensor) -> list[int]:
    """Return what is the same for rows of the same numbers, and hardly ever for others."""
    return [hash(row_D.numpy().tobytes()) for row_D in head_VD.sort(dim=-1).values]


# ------------------------------------------------------------------------------------------- rows


class Sorted(FeatureMatcher):
    """Rows but for the order of their features."""

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return rows with their features sorted."""
        return states_NI.sort(dim=-1).values


class _VocabularyMatching(Matching):
    """Vocabulary matching, arXiv 2505.18332."""

    control: ClassVar[str] = "attention-in-tee"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.976
    needs: ClassVar[tuple[str, ...]] = ("no activations crossed",)
    compares = FeatureMatcher


class PlainMatching(_VocabularyMatching):
    """Rows as they are, in their order."""

    name: ClassVar[str] = "vocabulary"


class RowMatching(_VocabularyMatching):
    """Rows as they are, each compared with all that are left: against permuted rows."""

    name: ClassVar[str] = "vocabulary-rows"
    ordered = False


class FeatureMatching(_VocabularyMatching):
    """Sorted rows in their order: against a permuted hidden axis."""

    name: ClassVar[str] = "vocabulary-features"
    compares = Sorted


class BothMatching(_VocabularyMatching):
    """Sorted rows, each compared with all that are left: against both permutations."""

    name: ClassVar[str] = "vocabulary-both"
    ordered = False
    compares = Sorted


# --------------------------------------------------------------------------------------- row space

# Of the largest singular value: what is below is rounding, of float32 or of bfloat16.
_RANK_TOLERANCE = 1e-5
_NEAR = 0.05


class RowSpace(FeatureMatcher):
    """How far a candidate is from the space that the rows span, relative to its length."""

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.distances`. Rows that span everything say nothing: all are far."""
        basis_BI = _basis(observed.rows_RI)
        if len(basis_BI) >= observed.rows_RI.shape[1]:
            return torch.full((len(states_NI),), float("inf"))
        squares_N = self._squares.of(states_NI, squares)
        inside_N = (states_NI @ basis_BI.T).square().sum(-1) / squares_N
        distances_N = (1 - inside_N).clamp(min=0).sqrt()
        # Near 0 most digits have cancelled: what is left over tells more, and takes more memory.
        near = distances_N < _NEAR
        near_MI = states_NI[near]
        outside_MI = near_MI - (near_MI @ basis_BI.T) @ basis_BI
        distances_N[near] = torch.linalg.vector_norm(outside_MI, dim=-1) / squares_N[near].sqrt()
        return distances_N


@lru_cache(maxsize=1)
def _basis(rows_RI: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows that span what some rows do: [B, I]."""
    _, sizes_B, basis_BI = torch.linalg.svd(rows_RI.double(), full_matrices=False)
    kept_BI: torch.Tensor = basis_BI[sizes_B > _RANK_TOLERANCE * sizes_B[:1]]
    return kept_BI.float()


class SubspaceMembership(Matching):
    """Candidates that lie in the space of a call's rows were in the call: any mixing leaves it.

    In layer 0 that is a set, and at decode the token itself. Deeper, where a row depends on the
    tokens before it, candidates are run behind what was read so far, and their places follow. Blind
    where a call has as many rows as there are hidden dimensions, and of a segment whose hidden axis
    is permuted or rotated: candidates would have to be, too.
    """

    name: ClassVar[str] = "subspace"
    control: ClassVar[str] = "row-rotation"
    integer_control: ClassVar[str | None] = "quantized-clear"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = ("no activations crossed", "the hidden axis is transformed")
    compares = RowSpace
    ordered = False

    def places(self, view: View) -> list[Where]:
        """Return where rows crossed, without segments under a mask."""
        return list(view.linear_places()) if view.masked_segments else view.row_places()
