"""Reads sessions from their beginning on, several readings of each carried on side by side.

A token that was misread makes everything behind it fit less well, and so is found out. By inner
products of rows, which a rotation leaves; and under noise of a known size, where everything that
crossed for a token is read together.

Shape suffixes: R rows, N candidates, I in_features, V vocabulary size, S tokens before, T tokens of
a step, or that were not read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from tee_side.words import Phase
from tsqp.lab.leak.attack import (
    LEAST_SIGMA,
    TOP,
    Attack,
    Reading,
    Trace,
    View,
    Where,
    Work,
    place_name,
)
from tsqp.lab.leak.attacks.static_cloak import beside
from tsqp.lab.leak.matching import FIRST, FIRST_PLACES, FeatureMatcher, dictionary, look_up
from tsqp.lab.leak.public import Prefix

# By inner products: beginnings of a session that are followed up, and rows that the next is
# compared with. With so many tokens read there are enough of these to tell beginnings apart.
_BEAM = 16
_BEGUN, _KEPT = 12, 2
_REFERENCES = 256
# Under noise: candidates that are run through the model are those that layer 0 and the model's own
# expectation leave within a factor of e^10 of the likeliest, but so many at least, and at most.
_UNLIKELY = 10.0
_FEWEST, _MOST = 16, 256
# Beginnings that are followed up; one that is e^25 times less likely is not.
_LIKELIEST = 4
_GIVEN_UP = 25.0
# A search through all places together is one, where others search at each of them.
_SEARCHES = 4
# What the first token is expected to be, if a tokenizer puts one in front.
_FIRST_IS_KNOWN = 0.9


@dataclass(frozen=True, eq=False)
class Beginning:
    """Tokens that a session may begin with. `guesses`: of each, the best first; `error`: of all."""

    token_ids: tuple[int, ...] = ()
    guesses: tuple[tuple[int, ...], ...] = ()
    error: float = 0.0

    def grown(self, errors_N: torch.Tensor, ids_N: torch.Tensor, width: int) -> Iterator[Beginning]:
        """Yield this with each of the candidates that fit best behind it, so many of them."""
        errors_W, best_W = errors_N.topk(min(width, len(errors_N)), largest=False)
        ids: Sequence[int] = ids_N[best_W].tolist()
        for error, token_id in zip(errors_W.tolist(), ids, strict=True):
            guesses = (token_id, *(other for other in ids if other != token_id))[:TOP]
            token_ids = (*self.token_ids, token_id)
            yield Beginning(token_ids, (*self.guesses, guesses), self.error + error)


# ---------------------------------------------------------------------------------- inner products


class GramDictionary(Attack):
    """Compares inner products of each row with the rows before it, in layer 0.

    An orthogonal map leaves X X^T. The first token is BOS. Each next one is the candidate whose
    inner products with what was read are those of the row; a few beginnings are followed up, since
    the second token has only one.
    """

    name: ClassVar[str] = "gram"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "integers",
        "layer 0 stays",
        "no session's beginning crossed",
        "no public weights to compare with",
        "no token that every prompt begins with",
    )

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Read each session from its beginning on."""
        where = next((where for where in view.row_places() if where in FIRST_PLACES), None)
        begins = view.public.first_id
        if where is None or begins is None:  # which it refuses
            return
        table_VI = dictionary(view, where)
        if where == FIRST:
            _, _, fold_I = beside(view, FIRST)
            table_VI = table_VI / fold_I.float()
        rows: dict[int, dict[int, torch.Tensor]] = {}
        for session, step, call in view.calls_at(where):
            # What a mask has added stands anywhere among them: then these are not the tokens' rows.
            first = view.rows(call)[: step.tokens]
            rows.setdefault(session, {}).update(enumerate(first, start=step.first))
        found = (
            (session, token, guess)
            for session, own in rows.items()
            for token, guess in zip(
                own,
                follow(torch.stack([*own.values()]), table_VI, begins, work).guesses,
                strict=True,
            )
        )
        yield from view.readings(place_name(where), found)


def follow(rows_RI: torch.Tensor, table_VI: torch.Tensor, first: int, work: Work) -> Beginning:
    """Return the tokens whose inner products are those of the rows, as far as the beam finds."""
    scale = 1 / rows_RI.shape[1]
    gram_RR = rows_RI @ rows_RI.t() * scale
    lengths_V = table_VI.square().sum(1) * scale
    # Of a token the inner products [V] with all tokens.
    known: dict[int, torch.Tensor] = {}
    ids_V = torch.arange(len(table_VI))
    beam = [Beginning((first,), ((first,),))]
    for row in range(1, len(rows_RI)):
        references = range(max(0, row - _REFERENCES), row)
        own_V = (lengths_V - gram_RR[row, row]).square()
        grown: list[Beginning] = []
        read = [before.token_ids[references.start :] for before in beam]
        # A beginning shares all but its last token with the one that it grew from.
        wanted = set[int]().union(*read)
        known = {token_id: known[token_id] for token_id in wanted.intersection(known)}
        if new := sorted(wanted.difference(known)):
            # Together, since most of it is reading the table. Then apart, or one that is kept would
            # hold the others' memory.
            products_TV = table_VI[new] @ table_VI.t()
            known |= {one: new_V.clone() for one, new_V in zip(new, products_TV, strict=True)}
        for before, ids_S in zip(beam, read, strict=True):
            # In place: of a large vocabulary this is the largest that there is, next to the table.
            products_SV = torch.stack([known[token_id] for token_id in ids_S])
            errors_SV = products_SV.mul_(scale).sub_(gram_RR[row, references, None])
            errors_V = own_V + errors_SV.square_().sum(0)
            work.compared += len(table_VI)
            grown += before.grown(errors_V, ids_V, _BEAM)
        kept = _BEAM if row < _BEGUN else _KEPT
        beam = sorted(grown, key=lambda beginning: beginning.error)[:kept]
    return beam[0]


# ------------------------------------------------------------------------------------------- noise


class NoiseAveraging(Attack):
    """The most likely tokens, given everything that crossed and how large its noise is.

    For each token a policy sends one noisy row per linear operator and layer. Behind what was read
    so far a candidate explains all of them; its score is log p(candidate | read so far) of the
    public model less ||observed - predicted||^2 / (2 sigma^2), summed over all of them. Noise is
    independent from place to place, so what one row does not tell, twenty may.

    A session is read from its beginning, so only where prompts cross. The other reading is of each
    row of layer 0 by itself, as the mask's own known break has it.
    """

    name: ClassVar[str] = "noise-averaging"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.97
    needs: ClassVar[tuple[str, ...]] = (
        "no activations crossed",
        "no linear operator crossed",
        "integers",
        "neither clear nor under noise",
    )

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look rows of layer 0 up one by one, then read through all places."""
        places = view.noisy_places()
        if FIRST in places:
            yield from look_up(view, FeatureMatcher(), work)
        # Without prompts there is no beginning to read on from.
        begins = any(view.policy.at(op, layer or 0, "prefill").leaves for layer, op in places)
        if not view.public.has_layers or not begins:
            return
        for session, trace in enumerate(view.traces[: _SEARCHES * view.search_sessions]):
            if trace.steps:
                limit = min(view.search_tokens, trace.tokens)
                guesses = dict(enumerate(_most_likely(view, trace, places, limit, work)))
                yield Reading("all places", session, range(limit), guesses)


# Rows [T, I] that crossed at a place in a step, and the size of the noise on them.
_Evidence: TypeAlias = tuple[Where, torch.Tensor, float]


def _log_likelihood(row_I: torch.Tensor, sigma: float, states_NI: torch.Tensor) -> torch.Tensor:
    """Return that of each candidate's input, up to a constant: [N], float64."""
    # The slower way of two: the other one loses the digits that near candidates differ in.
    away_1N = torch.cdist(row_I[None], states_NI, compute_mode="donot_use_mm_for_euclid_dist")
    return away_1N[0].double().square() / (-2 * sigma**2)


def _most_likely(
    view: View, trace: Trace, places: list[Where], limit: int, work: Work
) -> tuple[tuple[int, ...], ...]:
    """Return guesses for the first tokens of a trace, those of the most likely beginning first."""
    beam, nothing = [Beginning()], view.public.nothing()
    prefixes = {nothing.token_ids: nothing}
    for step in trace.steps:
        phase: Phase = "decode" if step.first and step.tokens == 1 else "prefill"
        # A place that is asked more than once, as for q, k and v by themselves, counts as often.
        evidence = [
            (
                call.where,
                call.rows.float(),
                view.sigma(call.where, phase) or LEAST_SIGMA,
            )
            for call in step.calls
            if call.where in places
            and call.rows.is_floating_point()
            and len(call.rows) == step.tokens
        ]
        if not evidence:
            break
        for token in range(min(step.tokens, limit - step.first)):
            grown: list[Beginning] = []
            for before in beam:
                ids_N, scores_N = _scored(view, prefixes[before.token_ids], evidence, token, work)
                grown += before.grown(-scores_N, ids_N, TOP)
            grown.sort(key=lambda beginning: beginning.error)
            most = grown[0].error + _GIVEN_UP
            beam = [one for one in grown[:_LIKELIEST] if one.error <= most]
            prefixes = {
                one.token_ids: view.public.extend(prefixes[one.token_ids[:-1]], one.token_ids[-1])
                for one in beam
            }
    return beam[0].guesses


def _scored(
    view: View, prefix: Prefix, evidence: list[_Evidence], token: int, work: Work
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest candidates behind a prefix and their log probabilities, unnormalised."""
    public = view.public
    if prefix.logits_V is not None:
        prior_V = prefix.logits_V.double().log_softmax(-1)
    else:
        vocabulary, first = public.config.vocab_size, public.first_id
        known = 0.0 if first is None else _FIRST_IS_KNOWN
        p_V = torch.full((vocabulary,), (1 - known) / vocabulary, dtype=torch.float64)
        p_V[first or 0] += known
        prior_V = p_V.log()
    rough_V = prior_V.clone()
    for where, rows_TI, sigma in evidence:
        if where == FIRST:
            rough_V += _log_likelihood(rows_TI[token], sigma, public.dictionary_VD)
            work.compared += len(rough_V)
    most = rough_V.topk(min(_MOST, len(rough_V)))
    likely = int((most.values >= most.values[0] - _UNLIKELY).sum())
    ids_N = most.indices[: max(_FEWEST, likely)]
    states = public.states(prefix, ids_N.tolist())
    work.modelled += len(ids_N)
    scores_N = prior_V[ids_N]
    for where, rows_TI, sigma in evidence:
        scores_N = scores_N + _log_likelihood(rows_TI[token], sigma, states.inputs[where])
        work.compared += len(ids_N)
    return ids_N, scores_N
