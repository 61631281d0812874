"""Noise of a known size: everything that crossed for a token is read together.

Shape suffixes: N candidates, I in_features, V vocabulary size, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from tee_side.policy.placement import Policy
from tee_side.protect.masks.mask import AdditiveMask
from tee_side.words import Phase, is_linear
from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Work
from tsqp.lab.leak.matching import FIRST, FeatureMatcher, look_up
from tsqp.lab.leak.public import Prefix
from tsqp.lab.leak.trace import Trace, TraceStep, Where

# Candidates that are run through the model: those that layer 0 and the model's own expectation
# leave within a factor of e^10 of the likeliest, but so many at least, and at most.
_UNLIKELY = 10.0
_FEWEST, _MOST = 16, 256
# Readings of a session that are carried on side by side: a token that was misread makes everything
# behind it less likely, and so is found out. One that is e^25 times less likely is not carried on.
_KEPT = 4
_GIVEN_UP = 25.0
# A search through all places together is one, where others search at each of them.
_SEARCHES = 4
# What the first token is expected to be, if a tokenizer puts one in front.
_FIRST_IS_KNOWN = 0.9
# Rounding, where there is no noise: relative to activations of unit RMS, more than float32 makes.
_LEAST_SIGMA = 1e-3


@dataclass(frozen=True, eq=False)
class _Path:
    """Tokens that may have been said, how likely they are, and which others were likely at each."""

    prefix: Prefix
    score: float
    guesses: tuple[tuple[int, ...], ...]


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
    reads: ClassVar[str] = "rows under noise of known size, those of all layers together"
    source: ClassVar[str] = "maximum likelihood; Gaussian noise as in docs/masks.md, float-noise"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.97

    def refuses(self, view: View) -> str | None:
        """No floats crossed that are in the clear or under noise."""
        if not view.linear_places():
            return "no linear operator crossed" if view.row_places() else "no activations crossed"
        calls = (c for trace in view.traces for c in trace.calls if is_linear(c.operator))
        if not any(call.rows.is_floating_point() for call in calls):
            return "integers"
        return None if _places(view) else "neither clear nor under noise"

    def read(self, view: View, work: Work) -> Iterator[Reading]:
        """Look rows of layer 0 up one by one, then read through all places."""
        places = _places(view)
        if FIRST in places:
            yield from look_up(view, FeatureMatcher(), work)
        # Without prompts there is no beginning to read on from.
        begins = any(view.policy.at(op, layer or 0, "prefill").leaves for layer, op in places)
        if not view.public.has_layers or not begins:
            return
        for session, trace in enumerate(view.traces[: _SEARCHES * view.search_sessions]):
            if not trace.steps:
                continue
            limit = min(view.search_tokens, trace.tokens)
            guesses = dict(enumerate(_most_likely(view, trace, places, limit, work)))
            yield Reading("all places", session, range(limit), guesses)


@dataclass(frozen=True, eq=False)
class _Evidence:
    """Rows [T, I] that crossed at a place in a step, and the size of the noise on them."""

    where: Where
    rows_TI: torch.Tensor
    sigma: float

    def log_likelihood(self, token: int, states_NI: torch.Tensor) -> torch.Tensor:
        """Return that of each candidate's input, up to a constant: [N], float64."""
        # The slower way of two: the other one loses the digits that near candidates differ in.
        away_1N = torch.cdist(
            self.rows_TI[token, None], states_NI, compute_mode="donot_use_mm_for_euclid_dist"
        )
        return away_1N[0].double().square() / (-2 * self.sigma**2)


def _places(view: View) -> list[Where]:
    """Return where floats crossed under noise of a known size, or under nothing."""
    return [
        where
        for where in view.linear_places()
        if all(_sigma(view.policy, where, phase) is not None for phase in ("prefill", "decode"))
    ]


def _sigma(policy: Policy, where: Where, phase: Phase) -> float | None:
    """Return the standard deviation of what is added at a place; None under any other mask."""
    layer, operator = where
    mask = policy.at(operator, layer or 0, phase).mask
    if mask is None:
        return _LEAST_SIGMA
    if not isinstance(mask, AdditiveMask) or mask.arithmetic != "float":
        return None
    sigma = mask.model_dump().get("sigma")
    return max(float(sigma), _LEAST_SIGMA) if isinstance(sigma, int | float) else None


def _evidence(view: View, step: TraceStep, places: list[Where]) -> list[_Evidence]:
    phase: Phase = "decode" if step.first and step.tokens == 1 else "prefill"
    found = []
    # A place that is asked more than once, as for q, k and v by themselves, counts as often.
    for call in step.calls:
        sigma = _sigma(view.policy, call.where, phase) if call.where in places else None
        if sigma is not None and call.rows.is_floating_point() and len(call.rows) == step.tokens:
            found.append(_Evidence(call.where, call.rows.float(), sigma))
    return found


def _most_likely(
    view: View, trace: Trace, places: list[Where], limit: int, work: Work
) -> tuple[tuple[int, ...], ...]:
    """Return guesses for the first tokens of a trace, those of the most likely path first."""
    paths = [_Path(view.public.nothing(), 0.0, ())]
    for step in trace.steps:
        evidence = _evidence(view, step, places)
        if not evidence:
            break
        for token in range(min(step.tokens, limit - step.first)):
            work.tick()
            paths = _carried_on(view, paths, evidence, token, work)
    best = paths[0]
    return tuple(
        (token_id, *(other for other in guess if other != token_id))[:TOP]
        for token_id, guess in zip(best.prefix.token_ids, best.guesses, strict=True)
    )


def _carried_on(
    view: View, paths: list[_Path], evidence: list[_Evidence], token: int, work: Work
) -> list[_Path]:
    """Return the most likely paths that are one token longer, best first."""
    found: list[tuple[float, int, _Path, tuple[int, ...]]] = []
    for path in paths:
        ids_N, scores_N = _scored(view, path.prefix, evidence, token, work)
        order_N = scores_N.argsort(descending=True)[:TOP]
        guess = tuple(ids_N[order_N].tolist())
        for token_id, score in zip(guess, scores_N[order_N].tolist(), strict=True):
            found.append((path.score + score, token_id, path, guess))
    found.sort(key=lambda one: -one[0])
    return [
        _Path(view.public.extend(path.prefix, token_id), score, (*path.guesses, guess))
        for score, token_id, path, guess in found[:_KEPT]
        if score >= found[0][0] - _GIVEN_UP
    ]


def _scored(
    view: View, prefix: Prefix, evidence: list[_Evidence], token: int, work: Work
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest candidates behind a prefix and their log probabilities, unnormalised."""
    public = view.public
    prior_V = _prior(view, prefix)
    rough_V = prior_V.clone()
    for one in evidence:
        if one.where == FIRST:
            rough_V += one.log_likelihood(token, public.dictionary_VD)
            work.compared += len(rough_V)
    most = rough_V.topk(min(_MOST, len(rough_V)))
    likely = int((most.values >= most.values[0] - _UNLIKELY).sum())
    ids_N = most.indices[: max(_FEWEST, likely)]
    states = public.states(prefix, ids_N.tolist())
    work.modelled += len(ids_N)
    scores_N = prior_V[ids_N]
    for one in evidence:
        scores_N = scores_N + one.log_likelihood(token, states.inputs[one.where])
        work.compared += len(ids_N)
    return ids_N, scores_N


def _prior(view: View, prefix: Prefix) -> torch.Tensor:
    """Return what the public model expects next: log probabilities [V], float64."""
    if prefix.logits_V is not None:
        return prefix.logits_V.double().log_softmax(-1)
    p_V = torch.full((view.public.vocab_size,), 1 / view.public.vocab_size, dtype=torch.float64)
    if (first := view.public.first_id) is not None:
        p_V *= 1 - _FIRST_IS_KNOWN
        p_V[first] += _FIRST_IS_KNOWN
    return p_V.log()
