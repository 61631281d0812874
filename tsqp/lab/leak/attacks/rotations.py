"""What a rotation of rows leaves: norms, of rows and of what comes out of each module, and angles.

The rotation is not undone here, and its weights are not taken apart: the service computes what it
was asked for, and looks at how long the results are.

Shape suffixes: R rows, N candidates, I in_features, M what is measured of a row, V vocabulary size,
S tokens before, T tokens that were not read before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch

from tsqp.lab.leak.attack import TOP, Attack, Reading, View, Work
from tsqp.lab.leak.attacks.static_cloak import PublicAndServed, linear_site, site_beside
from tsqp.lab.leak.matching import (
    FIRST,
    FeatureMatcher,
    Matcher,
    Matching,
    dictionary,
    first_place,
)
from tsqp.lab.leak.trace import Trace, Where, place_name

# Rows of these operators come from no RMSNorm, which would have made all of them equally long.
_FREE_LENGTH = ("o_proj", "down_proj", "segment")
# A few norms of many candidates lie closer together than whole rows do.
_STRICTER = 50.0
# Beginnings of a session that are followed up, and rows that the next is compared with.
_BEAM = 16
# With so many tokens read there are enough inner products to tell beginnings apart.
_BEGUN, _KEPT = 12, 2
_REFERENCES = 256


class ModuleNorms(FeatureMatcher):
    """Logarithms of norms: of each module's output, and of the row where they differ.

    Outputs are without biases: a provisioned service has none.
    """

    def __init__(self, weights: PublicAndServed) -> None:
        super().__init__()
        self._weights = weights
        self._modules: dict[tuple[Where, bool], list[torch.Tensor]] = {}

    def of_candidates(self, where: Where, states_NI: torch.Tensor) -> torch.Tensor:
        """Return norms under the public weights: [N, M]."""
        return self._norms(where, states_NI, served=False)

    def of_observed(self, where: Where, rows_RI: torch.Tensor) -> torch.Tensor:
        """Return norms under the weights that the service was given: [R, M]."""
        return self._norms(where, rows_RI, served=True)

    def pairwise(self, rows_RX: torch.Tensor, table_NX: torch.Tensor) -> torch.Tensor:
        """See `FeatureMatcher.pairwise`: of logarithms, so relative as they are.

        Without `cdist`, whose rounding is larger than what tells candidates apart.
        """
        each_RN = [torch.linalg.vector_norm(table_NX - row_X, dim=1) for row_X in rows_RX]
        return _STRICTER * torch.stack(each_RN)

    def _norms(self, where: Where, rows_RI: torch.Tensor, *, served: bool) -> torch.Tensor:
        if (where, served) not in self._modules:
            site, weights = site_beside(where), self._weights
            # What the service's rows are not divided by, its weights are multiplied with.
            segment = where[1] == "segment" and not served
            fold_I = weights.fold(site) if segment else 1.0
            modules = weights.served(site) if served else weights.public(site)
            self._modules[where, served] = [(weight * fold_I).float() for weight in modules]
        parts = [rows_RI @ weight_OI.t() for weight_OI in self._modules[where, served]]
        if where[1] in _FREE_LENGTH:
            parts.append(rows_RI)
        norms_RM = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], dim=1)
        return norms_RM.double().clamp(min=1e-30).log()


class NormDictionary(Matching):
    """Compares the norms of what each module answers with those of the public model's.

    A norm for each of q, k and v names a token in layer 0 already. Deeper, candidates are run
    behind what was read.
    """

    name: ClassVar[str] = "norms"
    reads: ClassVar[str] = "norms of each module's output, computed with the service's own weights"
    source: ClassVar[str] = "norms under an orthogonal map; in layer 0 every token of a 4B model"
    control: ClassVar[str] = "attention-in-tee"
    published: ClassVar[float] = 0.95
    needs: ClassVar[tuple[str, ...]] = (
        "integers",
        "no public weights to compare with",
        "no activations crossed",
    )

    def matcher(self, view: View) -> Matcher:
        """Return what measures the modules of each place."""
        return ModuleNorms(PublicAndServed(view))


# --------------------------------------------------------------------------------------- angles


@dataclass(frozen=True, eq=False)
class Beginning:
    """Tokens that a session may begin with. `guesses`: of each, the best first; `error`: of all."""

    token_ids: tuple[int, ...]
    guesses: tuple[tuple[int, ...], ...]
    error: float


class GramDictionary(Attack):
    """Compares inner products of each row with the rows before it, in layer 0.

    The first token is BOS. Each next one is the candidate whose inner products with what was read
    are those of the row; a few beginnings are followed up, since the second token has only one.
    """

    name: ClassVar[str] = "gram"
    reads: ClassVar[str] = "inner products between the rows of a session, from the first layer"
    source: ClassVar[str] = "X X^T under an orthogonal map"
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
        where = first_place(view)
        first = view.public.first_id
        if where is None or first is None:  # which it refuses
            return
        table_VI = dictionary(view, where)
        if where == FIRST:
            table_VI = table_VI / PublicAndServed(view).fold(linear_site(FIRST)).float()
        for session, trace in enumerate(view.traces):
            if not any(step.at(where) for step in trace.steps):
                continue
            rows_RI, tokens = _rows(view, trace, where)
            best = follow(rows_RI, table_VI, first, work)
            guesses = dict(zip(tokens, best.guesses, strict=True))
            yield Reading(place_name(where), session, range(trace.tokens), guesses)


def _rows(view: View, trace: Trace, where: Where) -> tuple[torch.Tensor, list[int]]:
    """Return all rows of the first layer that stand in order, and which token each belongs to."""
    rows: list[torch.Tensor] = []
    tokens: list[int] = []
    for step in trace.steps:
        call = step.at(where)
        if call is None:
            continue
        # What a mask has added stands anywhere among them: then these are not the tokens' rows.
        rows.append(view.rows(call)[: step.tokens])
        tokens += range(step.first, step.first + len(rows[-1]))
    return torch.cat(rows), tokens


class InnerProducts:
    """Inner products of tokens that were read with all tokens: `known`, a [V] for each.

    A beginning shares all but its last token with the one that it grew from.
    """

    def __init__(self, table_VI: torch.Tensor) -> None:
        self._table_VI = table_VI
        self.known: dict[int, torch.Tensor] = {}

    def need(self, ids: Iterable[int]) -> None:
        """Have those of these tokens, and forget all others."""
        wanted = set(ids)
        self.known = {one: known_V for one, known_V in self.known.items() if one in wanted}
        if new := sorted(wanted.difference(self.known)):
            # Together, since most of it is reading the table. Then apart, or one that is kept
            # would hold the others' memory.
            products_TV = self._table_VI[new] @ self._table_VI.t()
            self.known |= {one: new_V.clone() for one, new_V in zip(new, products_TV, strict=True)}

    def of(self, ids_S: Sequence[int]) -> torch.Tensor:
        """Return those of some tokens: [S, V], a copy."""
        return torch.stack([self.known[one] for one in ids_S])


def follow(rows_RI: torch.Tensor, table_VI: torch.Tensor, first: int, work: Work) -> Beginning:
    """Return the tokens whose inner products are those of the rows, as far as the beam finds."""
    scale = 1 / rows_RI.shape[1]
    gram_RR = rows_RI @ rows_RI.t() * scale
    lengths_V = table_VI.square().sum(1) * scale
    products = InnerProducts(table_VI)
    beam = [Beginning((first,), ((first,),), 0.0)]
    for row in range(1, len(rows_RI)):
        work.tick()
        references = range(max(0, row - _REFERENCES), row)
        own_V = (lengths_V - gram_RR[row, row]).square()
        grown: list[Beginning] = []
        read = [before.token_ids[references.start :] for before in beam]
        products.need(chain.from_iterable(read))
        for before, ids_S in zip(beam, read, strict=True):
            # In place: of a large vocabulary this is the largest that there is, next to the table.
            errors_SV = products.of(ids_S).mul_(scale).sub_(gram_RR[row, references, None])
            errors_V = own_V + errors_SV.square_().sum(0)
            work.compared += len(table_VI)
            grown += _grown(before, errors_V)
        kept = _BEAM if row < _BEGUN else _KEPT
        beam = sorted(grown, key=lambda beginning: beginning.error)[:kept]
    return beam[0]


def _grown(before: Beginning, errors_V: torch.Tensor) -> Iterator[Beginning]:
    """Yield a beginning with each of the candidates that fit best behind it."""
    errors_N, ids_N = errors_V.topk(min(_BEAM, len(errors_V)), largest=False)
    ids: Sequence[int] = ids_N.tolist()
    for error, token_id in zip(errors_N.tolist(), ids, strict=True):
        guesses = (token_id, *(other for other in ids if other != token_id))[:TOP]
        yield Beginning(
            (*before.token_ids, token_id), (*before.guesses, guesses), before.error + error
        )
