"""Compares what crossed with what the public model computes for candidates.

A mask changes rows, but something of them stays: their features but for the order, their norm, the
space that they span. A matcher is such an invariant, as a distance between candidates and what
was observed. In the first layer a token's row does not depend on the tokens before it, so a look-up
among all tokens suffices; deeper, a search runs candidates behind what it has read already
(vocabulary matching: arXiv 2505.18332).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import ClassVar, TypeAlias

import torch
from torch.nn.functional import normalize

from tsqp.lab.leak.attack import (
    TOP,
    Attack,
    Reading,
    TraceStep,
    View,
    Where,
    Work,
    best,
    far_if_nan,
    place_name,
)
from tsqp.lab.leak.public import Prefix

# Candidates that are run side by side. Most tokens are among the first of those that the public
# model expects, so most searches end with the first block.
_FIRST_BLOCK, _BLOCK = 32, 256
# What only the right candidate comes below: by the digits of float32, and of anything shorter.
_CERTAIN = {torch.float32: 1e-3}
_CERTAIN_ROUNDED = 2e-2
# Of a row's length: distances below are mostly rounding where they come from products.
_NEAR = 0.02
# So many tokens in a row whose guess is not to be believed: the prefix is wrong, or this is not the
# scheme. One is believed that is much nearer than the next candidate, or nearer and among the first
# that the model expects. Of rows that are nothing but noise all are as far.
_LOST, _MUCH_NEARER, _NEARER, _EXPECTED = 3, 0.7, 0.98, 10


@dataclass
class Observed:
    """One request of a trace as a matcher needs it.

    `rows_RI`: what crossed, as floats; with more rows than tokens a mask has added some among them,
    and no row says which token's it is. `tokens`: of its step. `certain`: a relative distance that
    only the right candidate comes below, by the digits that crossed. `left`: rows that belong to
    no token that was read. `integers`: whether rows crossed as such, so that only their directions
    are known; see `View.rows`.
    """

    where: Where
    rows_RI: torch.Tensor
    tokens: int
    certain: float
    left: list[int]
    integers: bool = False

    def as_crossed(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return candidates as comparable with the rows: beside integers at length 1 as well."""
        return normalize(states_NI, dim=-1) if self.integers else states_NI


class LastMade:
    """What was made of the last tensor, such as a dictionary, that is asked about for every row."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what `make` makes of a tensor; it is called once for the same one."""
        if self._last is None or self._last[0] is not x:
            self._last = (x, make(x))
        return self._last[1]


def squares(states_NX: torch.Tensor) -> torch.Tensor:
    """Return |x|^2 of each candidate: [N], above 0."""
    lengths_N: torch.Tensor = torch.linalg.vector_norm(states_NX, dim=-1)
    return lengths_N.square().clamp(min=1e-30)


def apart(rows_RX: torch.Tensor, table_NX: torch.Tensor, squares_N: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean distance of every candidate from every row: [R, N].

    By one product, and near 0, where its digits cancel, by subtraction. `torch.cdist` copies the
    dictionary each time that it is asked.
    """
    squares_R1 = rows_RX.square().sum(-1, keepdim=True)
    apart_RN = torch.addmm(squares_N, rows_RX, table_NX.T, alpha=-2.0)
    apart_RN = apart_RN.add_(squares_R1).clamp_(min=0).sqrt_()
    row_M, near_M = (apart_RN < _NEAR * squares_R1.sqrt()).nonzero(as_tuple=True)
    apart_RN[row_M, near_M] = torch.linalg.vector_norm(rows_RX[row_M] - table_NX[near_M], dim=-1)
    return apart_RN


class FeatureMatcher:
    """An invariant of a mask, at one place: features of rows that the mask leaves alone.

    Rows are compared by them one with one; a subclass that compares otherwise has `distances` of
    its own, and passes candidates through `Observed.as_crossed` unless it is blind to lengths.
    `ordered`: whether rows stand in the order of tokens, so that the first layer names each by
    itself; otherwise any row that is left may be a token's.
    """

    def __init__(self, *, ordered: bool = True) -> None:
        self.ordered = ordered
        self._features, self._squares = LastMade(), LastMade()

    def of_candidates(self, states_NI: torch.Tensor) -> torch.Tensor:
        """Return what is compared of candidates: [N, ...]."""
        return states_NI

    def of_observed(self, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return the same of what was observed."""
        return self.of_candidates(rows_RI)

    def distances(self, observed: Observed, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        """Return how far each candidate's input [N, I] is from what was observed: [N].

        Relative to the observed row. `token`: which of the request's tokens is looked for, 0 for
        the first.
        """
        rows = slice(token, token + 1) if self.tells(observed) else observed.left
        rows_RI = observed.rows_RI[rows]
        if not len(rows_RI):
            return torch.full((len(states_NI),), float("inf"))
        table_NX = self._table(observed, states_NI)
        return self.pairwise(self.of_observed(rows_RI), table_NX).amin(0)

    def look_up(self, observed: Observed, table_VI: torch.Tensor) -> torch.Tensor:
        """Return the distances of all tokens of a request from all of a dictionary: [T, V].

        By one product for all rows, where each is a token's.
        """
        if self.tells(observed):
            table_VX = self._table(observed, table_VI)
            return self.pairwise(self.of_observed(observed.rows_RI), table_VX)
        return torch.stack(
            [self.distances(observed, token, table_VI) for token in range(observed.tokens)]
        )

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """Return how far every candidate is from every row: [R, N], Euclidean, relative to it."""
        sizes_R1 = torch.linalg.vector_norm(rows_RX, dim=-1, keepdim=True).clamp(min=1e-30)
        return apart(rows_RX, table_NX, self._squares.of(table_NX, squares)).div_(sizes_R1)

    def _table(self, observed: Observed, states_NI: torch.Tensor) -> torch.Tensor:
        return self._features.of(
            states_NI, lambda given_NI: self.of_candidates(observed.as_crossed(given_NI))
        )

    def tells(self, observed: Observed) -> bool:
        """Whether rows say whose they are."""
        return self.ordered and len(observed.rows_RI) == observed.tokens

    def found(self, observed: Observed, state_I: torch.Tensor) -> None:
        """Use up the row that is nearest to what was taken, where any may be a token's."""
        if observed.left and not self.ordered:
            rows = self.of_observed(observed.rows_RI[observed.left])
            taken = self.of_candidates(observed.as_crossed(state_I[None]))
            del observed.left[int(torch.cdist(taken, rows).argmin())]


def observe(view: View, step: TraceStep, where: Where) -> Observed | None:
    """Return what crossed at a place in a step; None if nothing did."""
    call = step.at(where)
    if call is None:
        return None
    certain, rows_RI = _CERTAIN.get(call.rows.dtype, _CERTAIN_ROUNDED), view.rows(call)
    integers, left = call.rows.dtype == torch.int32, list(range(len(rows_RI)))
    return Observed(where, rows_RI, step.tokens, certain, left, integers)


# ------------------------------------------------------------------------------- the first layer

FIRST: Where = (0, "qkv_proj")
FIRST_SEGMENT: Where = (0, "segment")
FIRST_PLACES = (FIRST, FIRST_SEGMENT)


def dictionary(view: View, where: Where) -> torch.Tensor:
    """Return what crosses at one of `FIRST_PLACES` for each token in the clear: [V, D]."""
    return view.public.embedding_VD if where == FIRST_SEGMENT else view.public.dictionary_VD


def look_up(
    view: View, matcher: FeatureMatcher, work: Work, where: Where = FIRST
) -> Iterator[Reading]:
    """Look every token up in the first layer's dictionary, where rows say whose they are.

    A row that crosses alone is its token's in any order: at decode there is one. Tokens whose rows
    cross among others, in no order, are for a search, and are not tried here.
    """
    table_VD = dictionary(view, where)
    for session, trace in enumerate(view.traces):
        guesses: dict[int, tuple[int, ...]] = {}
        first: int | None = None
        for step in trace.steps:
            observed = observe(view, step, where)
            if observed is not None and (step.tokens == 1 or matcher.tells(observed)):
                first = step.first if first is None else first
                distances_TV = matcher.look_up(observed, table_VD)
                work.compared += distances_TV.numel()
                for token, distances_V in enumerate(distances_TV):
                    if guess := best(distances_V):
                        guesses[step.first + token] = guess
        if first is not None:
            yield Reading(place_name(where), session, range(first, trace.tokens), guesses)


# Of a step, the ids of its tokens, nearest first; None if layer 0 says nothing.
Among: TypeAlias = Callable[[TraceStep], torch.Tensor | None]


def present(
    view: View, matcher: FeatureMatcher, work: Work, step: TraceStep
) -> torch.Tensor | None:
    """Return which tokens may be among the rows of a step that stand in no order.

    What the first layer tells of a set: a token is in it or is not.
    """
    observed = observe(view, step, FIRST)
    if observed is None:
        return None
    table_VD = view.public.dictionary_VD
    distances_V = far_if_nan(matcher.distances(observed, 0, table_VD))
    work.compared += len(table_VD)
    if distances_V.isinf().all():  # says nothing: anything may be there
        return None
    order_V = distances_V.argsort()
    inside = int((distances_V <= observed.certain).sum())
    # Rounding can leave one that is there outside: as many as there are rows in any case.
    return order_V[: max(inside, step.tokens)]


# ---------------------------------------------------------------------------------------- deeper


class Matching(Attack):
    """A family of attacks: what an invariant tells of the rows at every place.

    A subclass names its matcher, and whether rows stand in order: see `FeatureMatcher`.
    """

    compares: ClassVar[type[FeatureMatcher]]
    ordered: ClassVar[bool] = True

    def matcher(self, view: View, where: Where) -> FeatureMatcher:
        """Return what rows are compared by at a place."""
        return self.compares(ordered=self.ordered)

    def places(self, view: View) -> list[Where]:
        """Return where to compare."""
        return view.row_places()

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look up in the first layer; search at every other place, where there are weights."""
        among: Among | None = None
        if not self.ordered:
            # Looked up once, for searches at all places.
            among = cache(partial(present, view, self.matcher(view, FIRST), work))
        for where in self.places(view):
            matcher = self.matcher(view, where)
            if where in FIRST_PLACES:
                yield from look_up(view, matcher, work, where)
            elif view.public.has_layers:
                yield from search(view, matcher, where, work, among)


def search(
    view: View, matcher: FeatureMatcher, where: Where, work: Work, among: Among | None = None
) -> Iterator[Reading]:
    """Read token after token at one place, by running candidates behind what was read already.

    `among`: candidates are the tokens that the first layer says are there. A session whose prompt
    did not cross has no beginning, and is not searched. Where nothing stands out among some tokens
    in a row, and what is nearest is nothing that the model expects, the attack gives up: it has no
    guess for the session's rest.
    """
    for session, trace in enumerate(view.traces[: view.search_sessions]):
        if trace.steps and trace.steps[0].tokens > 1 and trace.steps[0].at(where) is not None:
            limit = min(view.search_tokens, trace.tokens)
            guesses = dict(_read_on(view, session, matcher, where, limit, among, work))
            yield Reading(place_name(where), session, range(limit), guesses)


def _read_on(
    view: View,
    session: int,
    matcher: FeatureMatcher,
    where: Where,
    limit: int,
    among: Among | None,
    work: Work,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    public, prefix, lost = view.public, view.public.nothing(), 0
    for step in view.traces[session].steps:
        observed = observe(view, step, where)
        if observed is None or step.first >= limit:
            return
        there = None if among is None else among(step)
        for token in range(min(step.tokens, limit - step.first)):
            ids_N = public.likely(prefix)
            # Of a beginning one alone is expected.
            expected = ids_N[: _EXPECTED if prefix.token_ids else 1].tolist()
            if there is not None:
                ids_N = ids_N[torch.isin(ids_N, there)]
            ids_N = ids_N[: view.search_candidates]
            guess, ratio = nearest(view, matcher, prefix, observed, token, ids_N, work)
            if not guess:
                return
            yield step.first + token, guess
            believed = ratio < _MUCH_NEARER or (ratio < _NEARER and guess[0] in expected)
            lost = 0 if believed else lost + 1
            if lost >= _LOST:
                return
            prefix = public.extend(prefix, guess[0])


def nearest(
    view: View,
    matcher: FeatureMatcher,
    prefix: Prefix,
    observed: Observed,
    token: int,
    ids_N: torch.Tensor,
    work: Work,
) -> tuple[tuple[int, ...], float]:
    """Return the candidates that come nearest, best first, and how near the first one is.

    Its distance over that of the next one: 0 for one that is certain, 1 for none.

    `ids_N`: those that are expected first. Ends with the first block that has one which is certain.
    Of several that are certain the one that is expected most is first: a token that repeats the one
    before it has a state that crossed already.
    """
    distances: list[torch.Tensor] = []
    # Of each block one state alone: all of them are as large as the vocabulary.
    chosen: list[tuple[int, torch.Tensor]] = []
    edges = [0, *range(_FIRST_BLOCK, len(ids_N), _BLOCK), len(ids_N)]
    for start, end in pairwise(edges):
        block_N = ids_N[start:end]
        # What stands at the beginning is asked for at every place.
        keep = start == 0 or not prefix.token_ids
        computed = view.public.states(prefix, block_N.tolist(), keep=keep)
        states_NI = computed.inputs[observed.where]
        found_N = far_if_nan(matcher.distances(observed, token, states_NI))
        one = _choose(found_N, block_N, prefix, observed.certain)
        distances.append(found_N)
        chosen.append((start + one, states_NI[one].clone()))
        work.modelled += len(block_N)
        work.compared += len(block_N)
        if float(found_N.amin()) <= observed.certain:
            break
    seen_N = torch.cat(distances)
    if seen_N.isinf().all():
        return (), 1.0
    certain = float(seen_N.amin()) <= observed.certain
    first, state_I = chosen[-1] if certain else min(chosen, key=lambda one: float(seen_N[one[0]]))
    matcher.found(observed, state_I)
    others = [int(ids_N[place]) for place in best(seen_N) if place != first]
    # Beyond a single candidate there is none.
    two = seen_N.topk(min(2, len(seen_N)), largest=False).values.tolist()
    closest, beyond = [*two, torch.inf][:2]
    ratio = closest / beyond if 0 < beyond < torch.inf else 1.0
    return (int(ids_N[first]), *others[: TOP - 1]), 0.0 if certain else ratio


def _choose(found_N: torch.Tensor, ids_N: torch.Tensor, prefix: Prefix, certain: float) -> int:
    """Return the first candidate that is certain, the nearest one if none is."""
    sure = (found_N <= certain).nonzero()[:, 0]
    if len(sure) > 1 and prefix.token_ids:
        # Behind a token the same one again has a state that crossed already.
        sure = sure[ids_N[sure] != prefix.token_ids[-1]]
    return int(sure[0]) if len(sure) else int(found_N.argmin())
